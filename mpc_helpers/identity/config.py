"""A helper's configuration: one JSON file, checked in full before anything is opened or listened on.

Nothing in it can reach a failpoint, a noise record or a seed: those exist only as constructor arguments, for tests. The
commands that add and remove sites rewrite the same file, and check all of it before and after.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from mpc_helpers.identity.tls import TlsIdentity
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.header import check_site
from protocol.keys import IDENTITY_KEY_SIZE
from protocol.noise import NoiseMode
from protocol.units import DAY

FORMAT = 1
# Options of libpq that are a password, or open a key.
_SECRETS = {"password", "sslpassword", "oauth_client_secret"}
_HINT = "See mpc_helpers/DEPLOY.md, or let trefoil launch or trefoil keygen helper write one."

_RANGE = ErrorKind.OUT_OF_RANGE

T = TypeVar("T")


class ConfigError(TrefoilError):
    """The configuration cannot be used as it is."""

    kind = ErrorKind.INVALID_VALUE


@dataclass(frozen=True, slots=True)
class Site:
    """A registered site: the key that signs its queries, and the callers that may query on its behalf."""

    key: bytes
    callers: frozenset[str]

    def __post_init__(self) -> None:
        if len(self.key) != IDENTITY_KEY_SIZE:
            raise ConfigError(f"a site's key has {IDENTITY_KEY_SIZE} bytes in hexadecimal, not {len(self.key)}", _HINT)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what this helper does.

    `seconds` bounds a query, counted from its arrival and from the helper's last start, even if its deadline is later.
    `running` is the number of batches admitted concurrently, and of workers started early.
    """

    # ε holds for one report as for a million; DAP often wants 20. A policy, and no part of the guarantee.
    minimum_reports: int = 1
    maximum_reports: int = 10_000_000
    queries_per_site: int = 64
    # Capped at a quarter of all connections (`service.storage.Uploads`).
    uploads_per_site: int = 64
    running: int = 4
    waiting: int = 256
    seconds: int = 3600
    mpc_seconds: int = 60
    peer_seconds: int = 10
    # Disk space for the columns of one site's queries, and space that is reserved for the ledger.
    site_megabytes: int = 65_536
    spare_megabytes: int = 256

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or not (0 < value < 2**32):
                raise ConfigError(f"the limit {limit.name} is a positive whole number, not {value!r}", _HINT)


@dataclass(frozen=True, slots=True)
class PostgresLocation:
    """A ledger in PostgreSQL: `postgresql://user@host/database?schema=…`. It holds no password, so it may be logged.

    The password comes from a file (`passfile=…`, `PGPASSFILE`), a service (`service=…`) or a client certificate.
    """

    url: str
    schema: str

    @classmethod
    def parse(cls, url: str) -> PostgresLocation:
        """Check a URL. Another host is reached only over TLS with a verified certificate."""
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError as error:
            raise ConfigError(f"the ledger's URL is malformed: {error}", _HINT, kind=ErrorKind.MALFORMED) from None
        given = parse_qsl(parts.query, keep_blank_values=True)
        options = dict(given)
        if len(options) != len(given):
            message = "the ledger's URL names an option twice"
            raise ConfigError(message, _HINT, kind=ErrorKind.DUPLICATE)
        schema = options.pop("schema", "trefoil")
        if parts.password is not None or not _SECRETS.isdisjoint(options):
            message = "the ledger's URL has a password, which would be in logs and process lists"
            raise ConfigError(message, "Put it in a file that only the helper reads, and name it: passfile=/path")
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,50}", schema):
            raise ConfigError(f"a ledger's schema is a short name in lower case, not {schema!r}", _HINT)
        if options.get("sslmode", "verify-full") != "verify-full" and not options.get("host", host).startswith("/"):
            message = f"the ledger's URL has sslmode={options['sslmode']} for another host"
            raise ConfigError(message, "Use sslmode=verify-full, with sslrootcert=/path; or a socket on this host.")
        # Also for a socket, where libpq ignores it: a second host of a list, or a `hostaddr` in the URL, in a service
        # or in the environment, is reached over TCP. Encryption by Kerberos would take the place of TLS.
        options |= {"sslmode": "verify-full", "gssencmode": "disable"}
        return cls(f"{parts.scheme}://{parts.netloc}{parts.path}?{urlencode(options)}", schema)

    def with_schema(self, schema: str) -> PostgresLocation:
        return PostgresLocation(self.url, schema)

    def conninfo(self) -> str:
        return self.url

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}?schema={self.schema}"


# Where a helper's ledger is: a file, or a database.
LedgerLocation = Path | PostgresLocation


@dataclass(frozen=True, slots=True)
class HelperConfig:
    """All settings of an installed helper. Paths are absolute once loaded."""

    name: str
    identity_key: Path
    hpke_keys: Path
    tls_certificate: Path
    tls_key: Path
    host: str
    port: int
    helper_set: Path
    ledger: LedgerLocation
    data: Path
    sites: Mapping[str, Site]
    previous_helper_sets: tuple[Path, ...] = ()
    mpc_host: str = ""
    mpc_ports: tuple[int, ...] = (0,)
    report_lifetime_days: int = 30
    answer_days: int = 90
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    noise_modes: tuple[NoiseMode, ...] = tuple(mode for mode in NoiseMode if mode.facts.by_default)
    # The file of the token that /metrics asks for. Without one, only this machine may read them.
    metrics_token: Path | None = None
    # Whether to accept reports whose values cannot be checked: one malicious device ruins an answer over them.
    unchecked_histograms: bool = False
    # Whether to answer queries that keep the rest: then a report may be in several answers, within what it paid.
    spend_in_parts: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not (0 < self.port < 65536):
            raise ConfigError(f"port is 1 to 65535, as in the helper's address, not {self.port}", _HINT, kind=_RANGE)
        if self.mpc_ports != (0,) and not all(0 < port < 65536 for port in self.mpc_ports):
            raise ConfigError("each of mpc_ports is 1 to 65535; [0] alone lets the system choose", _HINT, kind=_RANGE)
        if self.port in self.mpc_ports:
            message = f"mpc_ports lists {self.port}, on which the helper itself listens"
            raise ConfigError(message, "Choose ports of their own for the MPC.", kind=ErrorKind.DUPLICATE)
        if not (0 < self.report_lifetime_days <= 365):
            raise ConfigError(f"reports live 1 to 365 days, not {self.report_lifetime_days}", _HINT, kind=_RANGE)
        if not (0 < self.answer_days <= 3650):
            raise ConfigError(f"answers are kept for 1 to 3650 days, not {self.answer_days}", _HINT, kind=_RANGE)
        if not (0 <= self.processes <= 1024):
            raise ConfigError(f"processes is 0 (none of their own) to 1024, not {self.processes}", _HINT, kind=_RANGE)
        if not self.noise_modes or len(set(self.noise_modes)) != len(self.noise_modes):
            raise ConfigError("noise_modes names at least one mode, and none twice", _HINT, kind=ErrorKind.DUPLICATE)

    @property
    def tls(self) -> TlsIdentity:
        return TlsIdentity(self.tls_certificate, self.tls_key)

    @property
    def ledger_file(self) -> Path:
        """The ledger's file, for what a database has no counterpart of."""
        if not isinstance(self.ledger, Path):
            raise ConfigError(f"the ledger {self.ledger} is not a file", _HINT, kind=ErrorKind.WRONG_FILE)
        return self.ledger

    @property
    def failed_proofs(self) -> Path:
        return self.data / "failed-proofs"

    @property
    def answer_lifetime(self) -> int:
        """Seconds for which an answer can be fetched after its release."""
        return self.answer_days * DAY

    @property
    def report_lifetime(self) -> int:
        """Seconds for which a report may be counted."""
        return self.report_lifetime_days * DAY


def load_config(path: Path) -> HelperConfig:
    """Read and check a configuration file. Relative paths in it are relative to the file."""
    return check_config(read_config(path), path)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a configuration file, checked only for its format."""
    try:
        stored = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint, kind=error.kind) from None
    except OSError as error:
        message = f"cannot read the configuration {path}: {error.strerror}"
        raise ConfigError(message, _HINT, kind=ErrorKind.FILE_UNREADABLE) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", _HINT, kind=ErrorKind.MALFORMED) from None
    if not isinstance(stored, dict) or stored.get("trefoil_helper") != FORMAT:
        message = f"{path} is not a helper's configuration of format {FORMAT}"
        raise ConfigError(message, _HINT, kind=ErrorKind.WRONG_FILE)
    return stored


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which Python would silently keep the last value of a name that is there twice."""
    stored = dict(pairs)
    if len(stored) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        message = f"the field {twice!r} is there twice in one object of the configuration"
        raise ConfigError(message, "Keep one of the two.", kind=ErrorKind.DUPLICATE)
    return stored


def check_config(stored: Mapping[str, Any], path: Path) -> HelperConfig:
    """Check the content of the file `path`, or its next content."""
    try:
        return _from_json({name: stored[name] for name in stored if name != "trefoil_helper"}, path.absolute().parent)
    except TrefoilError as error:
        raise ConfigError(f"{path}: {error}", error.hint, kind=error.kind) from None


def _from_json(stored: dict[str, Any], folder: Path) -> HelperConfig:
    settings = {item.name: item for item in fields(HelperConfig)}
    if unknown := sorted(set(stored) - set(settings)):
        hint = f"Known are: {', '.join(sorted(settings))}."
        raise ConfigError(f"unknown field {unknown[0]!r}", hint, kind=ErrorKind.UNKNOWN_FIELD)
    for name, item in settings.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if name in stored or required:
            _typed(stored, name, _TYPES.get(name, str))
    values: dict[str, Any] = dict(stored)
    for name in _PATHS & set(stored):
        values[name] = folder / stored[name]
    if stored["ledger"].startswith(("postgresql://", "postgres://")):
        values["ledger"] = PostgresLocation.parse(stored["ledger"])
    elif re.search("://|dbname=", stored["ledger"]):
        raise ConfigError("the ledger is a path, or begins with postgresql://", _HINT)
    values["previous_helper_sets"] = tuple(folder / entry for entry in _list_of(values, "previous_helper_sets", str))
    values["mpc_ports"] = tuple(_list_of(values, "mpc_ports", int)) or (0,)
    values["sites"] = {site: _site(site, entry) for site, entry in stored["sites"].items()}
    values["limits"] = _limits(values.get("limits", {}))
    if "noise_modes" in values:
        values["noise_modes"] = tuple(_noise_mode(name) for name in _list_of(values, "noise_modes", str))
    return HelperConfig(**values)


_PATHS = {"identity_key", "hpke_keys", "tls_certificate", "tls_key", "helper_set", "ledger", "data", "metrics_token"}
# The types of the fields in JSON; the others are texts.
_TYPES: dict[str, type] = {
    **dict.fromkeys(("port", "report_lifetime_days", "answer_days", "processes"), int),
    **dict.fromkeys(("previous_helper_sets", "mpc_ports", "noise_modes"), list),
    **dict.fromkeys(("unchecked_histograms", "spend_in_parts"), bool),
    **dict.fromkeys(("sites", "limits"), dict),
}
_KINDS = {str: "a text", int: "a whole number", dict: "an object", list: "a list", bool: "true or false"}


def _typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    if name not in values:
        raise ConfigError(f"the field {name!r} is missing", _HINT, kind=ErrorKind.MISSING_FIELD)
    value = values[name]
    if not _is(value, kind):
        message = f"the field {name!r} must be {_KINDS[kind]}, not {value!r}"
        raise ConfigError(message, _HINT, kind=ErrorKind.WRONG_TYPE)
    return value


def _is(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return whether a value in JSON is of a kind. No path, host or name contains a zero byte."""
    if isinstance(value, str) and "\0" in value:
        return False
    # JSON's true is an int in Python, but not a number to a person.
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _list_of(values: Mapping[str, Any], name: str, kind: type[T]) -> list[T]:
    entries = _typed(values, name, list) if name in values else []
    if not all(_is(entry, kind) for entry in entries):
        raise ConfigError(f"every entry of {name!r} must be {_KINDS[kind]}", _HINT, kind=ErrorKind.WRONG_TYPE)
    return entries


def _site(site: str, entry: object) -> Site:
    check_site(site)
    if not isinstance(entry, dict) or set(entry) - {"key", "callers"}:
        message = f"site {site}: expected an object with key and callers"
        raise ConfigError(message, _HINT, kind=ErrorKind.UNKNOWN_FIELD)
    callers = _list_of(entry, "callers", str) or [site]
    for caller in callers:
        check_site(caller)
    try:
        return Site(bytes.fromhex(_typed(entry, "key", str)), frozenset(callers))
    except ValueError:
        raise ConfigError(f"site {site}: its key is not hexadecimal", _HINT, kind=ErrorKind.MALFORMED) from None


def _noise_mode(name: str) -> NoiseMode:
    try:
        return NoiseMode(name)
    except ValueError:
        hint = f"Known are {', '.join(mode.value for mode in NoiseMode)}."
        message = f"unknown noise mode {name!r} in noise_modes"
        raise ConfigError(message, hint, kind=ErrorKind.UNKNOWN_NAME) from None


def _limits(entry: Mapping[str, Any]) -> Limits:
    names = {item.name for item in fields(Limits)}
    if unknown := sorted(set(entry) - names):
        hint = f"Known limits are: {', '.join(sorted(names))}."
        raise ConfigError(f"unknown limit {unknown[0]!r}", hint, kind=ErrorKind.UNKNOWN_FIELD)
    return Limits(**entry)


def add_site(path: Path, site: str, key: str, callers: Sequence[str], *, replace: bool = False) -> None:
    """Register a site's key. A registered key is replaced only on request: queries signed with it would fail."""

    def add(sites: dict[str, Any]) -> None:  # Any: JSON, checked before it is written
        if site in sites and not replace:
            hint = "Use --replace to give it this key."
            raise ConfigError(f"{site} is registered already", hint, kind=ErrorKind.DUPLICATE)
        sites[site] = {"key": key, "callers": list(callers) or [site]}

    _change(path, add)


def remove_site(path: Path, site: str) -> None:
    """Remove a site, whose queries are refused from now on."""

    def remove(sites: dict[str, Any]) -> None:  # Any: as above
        if sites.pop(site, None) is None:
            raise ConfigError(f"{site} is not registered", "See: trefoil site list", kind=ErrorKind.NOT_REGISTERED)

    _change(path, remove)


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    stored = read_config(path)
    check_config(stored, path)
    change(stored["sites"])
    check_config(stored, path)
    write_atomically(path, (json.dumps(stored, indent=2) + "\n").encode(), path.stat().st_mode & 0o777)
