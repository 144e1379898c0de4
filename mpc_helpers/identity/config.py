"""A helper's configuration: one JSON file, checked in full before anything is opened or listened on.

Nothing in it can reach a failpoint, a noise record or a seed: those exist only as constructor arguments, for tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from mpc_helpers.identity.tls import TlsIdentity
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet, KeyState
from protocol.hpke import PrivateKey
from protocol.keys import IDENTITY_KEY_SIZE, IdentityKey, load_hpke_key, load_identity
from protocol.report import check_site

FORMAT = 1
DAY = 86400
_HINT = "See mpc_helpers/DEPLOY.md, or let trefoil launch or trefoil keygen helper write one."

T = TypeVar("T")


class ConfigError(TrefoilError):
    """The configuration cannot be used as it is."""


@dataclass(frozen=True, slots=True)
class Site:
    """A querier this helper answers: the key that signs its queries, and who may ask on its behalf."""

    key: bytes
    callers: frozenset[str]

    def __post_init__(self) -> None:
        if len(self.key) != IDENTITY_KEY_SIZE:
            raise ConfigError(f"a site's key has {IDENTITY_KEY_SIZE} bytes in hexadecimal, not {len(self.key)}", _HINT)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this helper is willing to do. `seconds` bounds a query from its arrival, whatever deadline it names;
    `running` is how many batches are admitted, and how many workers kept ready, at the same time.
    """

    minimum_reports: int = 1
    maximum_reports: int = 10_000_000
    queries_per_site: int = 64
    running: int = 4
    waiting: int = 256
    seconds: int = 3600
    mpc_seconds: int = 60
    peer_seconds: int = 10

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or not (0 < value < 2**32):
                raise ConfigError(f"the limit {limit.name} is a positive whole number, not {value!r}", _HINT)


@dataclass(frozen=True, slots=True)
class HelperConfig:
    """Everything an installed helper can be told. Paths are absolute once loaded."""

    name: str
    identity_key: Path
    hpke_keys: Path
    tls_certificate: Path
    tls_key: Path
    host: str
    port: int
    helper_set: Path
    ledger: Path
    data: Path
    sites: Mapping[str, Site]
    previous_helper_sets: tuple[Path, ...] = ()
    mpc_host: str = ""
    mpc_ports: tuple[int, ...] = (0,)
    report_lifetime_days: int = 30
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not (0 <= self.port < 65536 and self.mpc_ports and all(0 <= port < 65536 for port in self.mpc_ports)):
            raise ConfigError("a port is 0 to 65535, and mpc_ports names at least one", _HINT)
        if not (0 < self.report_lifetime_days <= 365):
            raise ConfigError(f"reports live 1 to 365 days, not {self.report_lifetime_days}", _HINT)
        if not (0 <= self.processes <= 1024):
            raise ConfigError(f"processes is 0 (none of their own) to 1024, not {self.processes}", _HINT)

    @property
    def tls(self) -> TlsIdentity:
        """The certificate this helper shows, and its key."""
        return TlsIdentity(self.tls_certificate, self.tls_key)

    @property
    def report_lifetime(self) -> int:
        """Seconds for which a report may be counted."""
        return self.report_lifetime_days * DAY


def load_config(path: Path) -> HelperConfig:
    """Read and check a configuration file. Relative paths in it are relative to the file."""
    try:
        stored = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}", _HINT) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", _HINT) from None
    if not isinstance(stored, dict) or stored.pop("trefoil_helper", None) != FORMAT:
        raise ConfigError(f"{path} is not a helper's configuration of format {FORMAT}", _HINT)
    try:
        return _from_json(stored, path.absolute().parent)
    except TrefoilError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from None


def _from_json(stored: dict[str, Any], folder: Path) -> HelperConfig:
    known = {item.name for item in fields(HelperConfig)}
    unknown = sorted(set(stored) - known)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}", f"Known are: {', '.join(sorted(known))}.")
    values: dict[str, Any] = dict(stored)
    for name in ("identity_key", "hpke_keys", "tls_certificate", "tls_key", "helper_set", "ledger", "data"):
        values[name] = folder / _typed(values, name, str)
    values["previous_helper_sets"] = tuple(folder / entry for entry in _list_of(values, "previous_helper_sets", str))
    values["mpc_ports"] = tuple(_list_of(values, "mpc_ports", int)) or (0,)
    values["sites"] = {site: _site(site, entry) for site, entry in _typed(values, "sites", dict).items()}
    values["limits"] = _limits(values.get("limits", {}))
    for name, kind in (("name", str), ("host", str), ("port", int)):
        _typed(values, name, kind)
    for name, kind in (("mpc_host", str), ("report_lifetime_days", int), ("processes", int)):
        if name in values:
            _typed(values, name, kind)
    return HelperConfig(**values)


def _typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    if name not in values:
        raise ConfigError(f"the field {name!r} is missing", _HINT)
    value = values[name]
    # JSON's true is an int to Python, and is no number to a person.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"the field {name!r} must be {_KINDS[kind]}, not {value!r}", _HINT)
    return value


_KINDS: dict[type, str] = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}


def _list_of(values: Mapping[str, Any], name: str, kind: type[T]) -> list[T]:
    entries = _typed(values, name, list) if name in values else []
    if not all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in entries):
        raise ConfigError(f"every entry of {name!r} must be {_KINDS[kind]}", _HINT)
    return entries


def _site(site: str, entry: object) -> Site:
    check_site(site)
    if not isinstance(entry, dict) or set(entry) - {"key", "callers"}:
        raise ConfigError(f"site {site}: expected an object with key and callers", _HINT)
    callers = _list_of(entry, "callers", str) or [site]
    for caller in callers:
        check_site(caller)
    try:
        return Site(bytes.fromhex(_typed(entry, "key", str)), frozenset(callers))
    except ValueError:
        raise ConfigError(f"site {site}: its key is not hexadecimal", _HINT) from None


def _limits(entry: object) -> Limits:
    known = {item.name for item in fields(Limits)}
    if not isinstance(entry, dict) or set(entry) - known:
        raise ConfigError("unknown limit", f"Known limits are: {', '.join(sorted(known))}.")
    return Limits(**entry)


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this helper is: its place in the helper set, and the keys that prove it."""

    party: int
    helper_set: HelperSet
    known_sets: tuple[HelperSet, ...]
    identity: IdentityKey
    hpke: dict[bytes, PrivateKey] = field(repr=False)

    @property
    def peers(self) -> tuple[int, ...]:
        """The two other parties."""
        return tuple(party for party in range(len(self.helper_set.helpers)) if party != self.party)

    def name(self, party: int) -> str:
        """What people call a helper."""
        return self.helper_set.helpers[party].name


def load_membership(config: HelperConfig, now: int) -> Membership:
    """Load sets and keys, and check them against each other and the clock. Destroys keys past their use."""
    identity = load_identity(config.identity_key)
    current = HelperSet.load(config.helper_set)
    party = _party_of(identity, current, config)
    previous = tuple(HelperSet.load(path) for path in config.previous_helper_sets)
    for older in previous:
        # A report's payloads are numbered by place; a helper that changed places could not open older reports.
        if older.helpers[party].identity_key != identity.public:
            raise ConfigError(f"helper set {older.number} has {config.name} in another place, or not at all")
    if config.tls.pin != current.helpers[party].tls_pin:
        raise ConfigError(
            f"{config.tls_certificate} is not the certificate that the helper set pins for {config.name}",
            "Renew the set with trefoil helper-set new after renewing a certificate.",
        )
    hpke = _hpke_keys(config, (current, *previous), party, now)
    return Membership(party, current, (current, *previous), identity, hpke)


def _party_of(identity: IdentityKey, helper_set: HelperSet, config: HelperConfig) -> int:
    for party, helper in enumerate(helper_set.helpers):
        if helper.identity_key == identity.public:
            if helper.name != config.name:
                raise ConfigError(f"the helper set calls this helper {helper.name}, its configuration {config.name}")
            return party
    raise ConfigError(
        f"the identity key {config.identity_key} belongs to none of the three helpers in {config.helper_set}",
        "Use the key that the set was made from, or have all three operators sign a new set.",
    )


def _hpke_keys(config: HelperConfig, sets: tuple[HelperSet, ...], party: int, now: int) -> dict[bytes, PrivateKey]:
    """Every private key in the folder that reports may still be sealed to; the current set's must all be there."""
    usable: dict[bytes, PrivateKey] = {}
    until = {entry.key.key_id: entry.not_after for known in sets for entry in known.helpers[party].hpke_keys}
    for path in sorted(config.hpke_keys.glob("*.key")):
        key = load_hpke_key(path)
        not_after = until.get(key.public.key_id)
        if not_after is not None and not_after + config.report_lifetime < now:
            destroy(path)
        elif not_after is not None:
            usable[key.public.key_id] = key
    entries = sets[0].helpers[party].hpke_keys
    for entry in entries:
        if entry.state(now) is not KeyState.EXPIRED and entry.key.key_id not in usable:
            raise ConfigError(
                f"{config.hpke_keys} lacks the private key {entry.key.key_id.hex()} that the helper set names",
                "Restore the key file from its backup; keys are backed up, ledgers never.",
            )
    if not any(entry.state(now) is KeyState.ACTIVE for entry in entries):
        raise ConfigError(
            f"no HPKE key of {config.name} is valid now", "Check this machine's clock, then make a new helper set."
        )
    return usable


def destroy(path: Path) -> None:
    """An expired private key is overwritten and removed, so that old reports stay closed for good."""
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
