"""The helper set: which three helpers a report is for, in one numbered file that all three have signed.

Devices take it from their vendor, never from a site or a single helper. Its digest goes into every report and covers
names, identity keys and HPKE keys; it leaves out addresses and TLS pins, so that renewing a certificate voids no
report, and nobody can tag a device by serving it a file of its own. The last section is the operators' procedure: one
assembles the file, each signs it, and all compare its fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import ErrorKind, Inconsistent, InvalidValue, OutOfRange, ProtocolError, TrefoilError
from protocol.files import write_atomically
from protocol.hpke import PublicKey, Suite
from protocol.keys import IDENTITY_KEY_SIZE, SIGNATURE_SIZE, IdentityKey, load_identity, verify_signature
from protocol.net.json_message import JsonObject, decode_json
from protocol.shares import PARTIES
from protocol.wire import Writer, tagged_hash

FORMAT = 1
PIN_SIZE = 32
HTTPS_PORT = 443
_SIGNATURE_LABEL = "helper set"


class KeyState(Enum):
    """Where a key is in its life. Reports are sealed to active keys only."""

    PENDING = "pending"
    ACTIVE = "active"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class HpkeKeyConfig:
    """One of a helper's HPKE keys, and when devices may seal to it."""

    key: PublicKey
    not_before: int
    not_after: int

    def __post_init__(self) -> None:
        self.key.check_usable()
        if not (0 <= self.not_before < self.not_after < 2**63):
            raise OutOfRange(f"a key's validity must be a span of time, not {self.not_before} to {self.not_after}")

    def state(self, now: int) -> KeyState:
        if now < self.not_before:
            return KeyState.PENDING
        return KeyState.ACTIVE if now < self.not_after else KeyState.EXPIRED


@dataclass(frozen=True, slots=True)
class HelperEntry:
    """One helper: who it is (in the digest), and where it is reached (not in it)."""

    name: str
    identity_key: bytes
    hpke_keys: tuple[HpkeKeyConfig, ...]
    address: str
    tls_pin: bytes

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= 100) or not self.name.isprintable():
            raise InvalidValue("a helper's name is 1 to 100 printable characters")
        if len(self.identity_key) != IDENTITY_KEY_SIZE or len(self.tls_pin) != PIN_SIZE:
            raise ProtocolError(
                f"helper {self.name}: an identity key and a TLS pin have 32 bytes each", kind=ErrorKind.WRONG_KEY
            )
        if not self.hpke_keys:
            raise ProtocolError(f"helper {self.name} has no HPKE key", kind=ErrorKind.TOO_FEW)
        if not self.address.startswith("https://") or not self.address.isascii() or not self.address.isprintable():
            raise InvalidValue(f"helper {self.name}: the address must be an ASCII https:// URL, not {self.address!r}")
        _host_and_port(self.address)

    @property
    def endpoint(self) -> tuple[str, int]:
        return _host_and_port(self.address)

    def active_key(self, now: int, suite: Suite) -> PublicKey | None:
        """Return the key of a suite to seal to now; of several, the one that expires last."""
        active = [config for config in self.hpke_keys if config.state(now) is KeyState.ACTIVE]
        of_suite = [config for config in active if config.key.suite is suite]
        if not of_suite:
            return None
        return max(of_suite, key=lambda config: (config.not_after, config.key.key_id)).key


@dataclass(frozen=True, slots=True)
class HelperSet:
    """Three helpers, in the order that makes them party 1, 2 and 3.

    >>> trefoil.HelperSet.load("/tmp/trefoil/helpers.json")  # doctest: +SKIP
    """

    number: int
    helpers: tuple[HelperEntry, HelperEntry, HelperEntry]
    signatures: tuple[bytes, ...] = ()
    # Every report carries it. Over names, identity keys and HPKE keys with their validity; computed once.
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 < self.number < 2**32):
            raise OutOfRange("a helper set's number is a positive 32-bit integer")
        if len(self.helpers) != PARTIES:
            raise InvalidValue(f"a helper set names three helpers, not {len(self.helpers)}")
        if len(self.signatures) > PARTIES:
            raise InvalidValue(f"a helper set has at most three signatures, not {len(self.signatures)}")
        _check_distinct(self.helpers)
        object.__setattr__(self, "digest", _digest(self.helpers))

    def sealing_keys(self, now: int) -> tuple[PublicKey, PublicKey, PublicKey]:
        """Return the keys a device seals to now: the highest suite in which all three helpers have an active key."""
        for suite in sorted(Suite, key=lambda each: each.value, reverse=True):
            first, second, third = (helper.active_key(now, suite) for helper in self.helpers)
            if first and second and third:
                return first, second, third
        idle = [helper for helper in self.helpers if not any(helper.active_key(now, suite) for suite in Suite)]
        raise TrefoilError(
            f"helper {idle[0].name} has no active HPKE key" if idle else "the helpers have no HPKE suite in common",
            "Fetch a newer helper set from your device's vendor, if this machine's clock is right.",
            kind=ErrorKind.EXPIRED,
        )

    def signed_bytes(self) -> bytes:
        """Return what each helper signs: the digest, and also number, addresses and pins, which the digest omits."""
        writer = Writer().uint(FORMAT, 2).uint(self.number, 4).fixed(self.digest, 32)
        for helper in self.helpers:
            writer.text(helper.address).fixed(helper.tls_pin, PIN_SIZE)
        return writer.done()

    @property
    def fingerprint(self) -> str:
        """Return the hash that operators compare out of band. It covers all that they sign, also addresses and pins."""
        digest = tagged_hash("helper set fingerprint", self.signed_bytes()).hex()
        return " ".join(digest[at : at + 8] for at in range(0, len(digest), 8))

    def sign(self, key: IdentityKey) -> bytes:
        """Run by one helper's operator: return its signature. The operator has compared the file with the other two."""
        if key.public not in {helper.identity_key for helper in self.helpers}:
            raise TrefoilError(
                "this identity key belongs to none of the three helpers in the set", kind=ErrorKind.WRONG_KEY
            )
        return key.sign(_SIGNATURE_LABEL, self.signed_bytes())

    def signed_by(self, key: IdentityKey) -> HelperSet:
        """Return the same set with one more signature, in the place of the helper whose key it is."""
        signature = self.sign(key)
        signatures = list(self.padded_signatures)
        signatures[[helper.identity_key for helper in self.helpers].index(key.public)] = signature
        return HelperSet(self.number, self.helpers, tuple(signatures))

    @property
    def padded_signatures(self) -> tuple[bytes, ...]:
        """Return one signature for each helper, in order; empty where there is none yet."""
        return self.signatures + (b"",) * (PARTIES - len(self.signatures))

    def have_signed(self) -> list[bool]:
        """Return, for each of the three, whether it has signed exactly this set."""
        message = self.signed_bytes()
        return [
            verify_signature(helper.identity_key, _SIGNATURE_LABEL, message, signature)
            for helper, signature in zip(self.helpers, self.padded_signatures, strict=True)
        ]

    def verify(self) -> None:
        for helper, signed in zip(self.helpers, self.have_signed(), strict=True):
            if not signed:
                raise TrefoilError(
                    f"the helper set is not signed by {helper.name}",
                    "Each helper's operator signs it with: trefoil helper-set sign",
                    kind=ErrorKind.BAD_SIGNATURE,
                )

    def to_json(self) -> dict[str, object]:
        return {
            "trefoil_helper_set": FORMAT,
            "number": self.number,
            "helpers": [entry_to_json(helper) for helper in self.helpers],
            "signatures": [signature.hex() for signature in self.signatures],
        }

    @classmethod
    def from_json(cls, stored: object) -> HelperSet:
        """Read a file's content; signatures are checked by `load`."""
        fields = JsonObject(stored, "helper set")
        if fields.value("trefoil_helper_set") != FORMAT:
            raise ProtocolError(f"this is not a helper set of format {FORMAT}", kind=ErrorKind.UNKNOWN_VERSION)
        entries = [entry_from_json(entry) for entry in fields.items("helpers")]
        if len(entries) != PARTIES:
            raise InvalidValue(f"a helper set names three helpers, not {len(entries)}")
        signatures = fields.hexadecimals("signatures")
        if any(len(signature) not in (0, SIGNATURE_SIZE) for signature in signatures):
            raise ProtocolError("the helper set is malformed: a signature has 64 bytes")
        return cls(fields.whole("number"), (entries[0], entries[1], entries[2]), signatures)

    @classmethod
    def load(cls, path: Path | str) -> HelperSet:
        """Read `helpers.json` and check all three signatures."""
        helper_set = cls.load_unverified(Path(path))
        helper_set.verify()
        return helper_set

    @classmethod
    def load_unverified(cls, path: Path) -> HelperSet:
        """Read a set that is still collecting signatures."""
        try:
            return cls.from_json(decode_json(path.read_bytes()))
        except FileNotFoundError:
            raise TrefoilError(
                f"there is no helper set {path}", "Make one with: trefoil launch", kind=ErrorKind.FILE_MISSING
            ) from None
        except IsADirectoryError:
            hint = f"Name the file: {path / 'helpers.json'}"
            raise TrefoilError(f"{path} is a folder, not a helper set", hint, kind=ErrorKind.WRONG_FILE) from None
        except OSError as error:
            raise TrefoilError(f"cannot read {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None
        except ProtocolError as error:
            raise ProtocolError(f"{path} is not a helper set: {error}", error.hint, kind=error.kind) from None


def message_realm(helper_set_digest: bytes) -> bytes:
    """Return the domain that helpers sign their messages in: one per helper set."""
    return tagged_hash("helper messages", helper_set_digest)


def entry_to_json(helper: HelperEntry) -> dict[str, object]:
    """Return one helper as it stands in the file: an operator's public entry."""
    return {
        "name": helper.name,
        "identity_key": helper.identity_key.hex(),
        "hpke_keys": [
            {
                "key_id": config.key.key_id.hex(),
                "suite": config.key.suite.value,
                "public_key": config.key.raw.hex(),
                "not_before": config.not_before,
                "not_after": config.not_after,
            }
            for config in helper.hpke_keys
        ],
        "address": helper.address,
        "tls_pin": helper.tls_pin.hex(),
    }


def entry_from_json(stored: object) -> HelperEntry:
    fields = JsonObject(stored, "helper's entry")
    return HelperEntry(
        name=fields.text("name"),
        identity_key=fields.hexadecimal("identity_key"),
        hpke_keys=tuple(_key_from_json(key) for key in fields.items("hpke_keys")),
        address=fields.text("address"),
        tls_pin=fields.hexadecimal("tls_pin"),
    )


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidValue(f"{address!r} is not an address: {error}") from None
    if not host:
        raise InvalidValue(f"{address!r} is not an address: it names no host")
    return host, HTTPS_PORT if port is None else port


def _check_distinct(helpers: tuple[HelperEntry, ...]) -> None:
    """Reject helpers that share a key or a pin: two that do are one party, and privacy needs three."""
    for (first, one), (second, other) in combinations(enumerate(helpers, start=1), 2):
        if shared := _shared(one, other):
            raise ProtocolError(
                f"helper {first} ({one.name}) and helper {second} ({other.name}) share {shared}",
                "Each operator makes keys of its own with: trefoil keygen helper. Then assemble the set again.",
                kind=ErrorKind.DUPLICATE,
            )
    for helper in helpers:
        ids = [config.key.key_id for config in helper.hpke_keys]
        if len(set(ids)) != len(ids):
            raise ProtocolError(
                f"helper {helper.name} has two HPKE keys of one id",
                "A report names keys by their id. List every key once; make another with: trefoil keygen renew",
                kind=ErrorKind.DUPLICATE,
            )


def check_key_ids(sets: Sequence[HelperSet]) -> None:
    """Reject `sets` in which one key id means two keys, or one key of two helpers: lookups go by the id."""
    by_id: dict[bytes, tuple[int, PublicKey]] = {}
    for helper_set in sets:
        for party, helper in enumerate(helper_set.helpers):
            for key in (config.key for config in helper.hpke_keys):
                if by_id.setdefault(key.key_id, (party, key)) != (party, key):
                    raise ProtocolError(
                        f"helper set {helper_set.number} has a key of {helper.name} under the id of another key",
                        "Ask its operator for a new key, and the three for a new set.",
                        kind=ErrorKind.DUPLICATE,
                    )


def _shared(one: HelperEntry, other: HelperEntry) -> str | None:
    """Return what two helpers have in common that only one may have, or None."""
    if one.identity_key == other.identity_key:
        return "an identity key"
    # In any validity: the holder of a key can open everything ever sealed to it.
    if not _held(one).isdisjoint(_held(other)):
        return "an HPKE key"
    if not {config.key.key_id for config in one.hpke_keys}.isdisjoint(config.key.key_id for config in other.hpke_keys):
        return "the id of an HPKE key"
    return "a TLS pin" if one.tls_pin == other.tls_pin else None


def _held(helper: HelperEntry) -> set[bytes]:
    """Return every component key of a helper, X25519 and ML-KEM."""
    return set().union(*(config.key.halves for config in helper.hpke_keys))


def _digest(helpers: tuple[HelperEntry, ...]) -> bytes:
    writer = Writer()
    for helper in helpers:
        writer.text(helper.name).fixed(helper.identity_key, IDENTITY_KEY_SIZE).uint(len(helper.hpke_keys), 2)
        for config in helper.hpke_keys:
            writer.uint(config.key.suite.value, 2).blob(config.key.raw, 2)
            writer.uint(config.not_before, 8).uint(config.not_after, 8)
    return tagged_hash("helper set", writer.done())


def _key_from_json(stored: object) -> HpkeKeyConfig:
    fields = JsonObject(stored, "HPKE key")
    number = fields.whole("suite", 2**16 - 1)
    if number not in {suite.value for suite in Suite}:
        raise ProtocolError(f"the HPKE key is for an unknown cipher suite: {number}", kind=ErrorKind.UNKNOWN_NAME)
    key = PublicKey(Suite(number), fields.hexadecimal("public_key"))
    if fields.hexadecimal("key_id") != key.key_id:
        raise Inconsistent("a key id does not belong to its public key")
    return HpkeKeyConfig(key, fields.whole("not_before"), fields.whole("not_after"))


def assemble_set(entries: list[Path], number: int, path: Path) -> HelperSet:
    """Write a set of three entries, in the order given, still without signatures."""
    if len(entries) != PARTIES:
        raise TrefoilError(
            f"a helper set has three entries, not {len(entries)}",
            "Name three entry files.",
            kind=ErrorKind.INVALID_VALUE,
        )
    if path.exists():
        raise TrefoilError(
            f"{path} exists already", "Choose another name, or move it away.", kind=ErrorKind.FILE_EXISTS
        )
    first, second, third = (read_entry(entry) for entry in entries)
    helper_set = HelperSet(number, (first, second, third))
    write_set(path, helper_set)
    return helper_set


def add_signature(path: Path, key: Path) -> HelperSet:
    """Sign a set file with one helper's identity. Its operator has compared the fingerprint with the other two."""
    helper_set = HelperSet.load_unverified(path).signed_by(load_identity(key))
    write_set(path, helper_set)
    return helper_set


def join(paths: list[Path], path: Path) -> HelperSet:
    """Merge copies of one set, each with some of the signatures, into one file with all of them."""
    # What has been signed in the target itself counts too, and would be overwritten otherwise.
    copies = [HelperSet.load_unverified(copy) for copy in [*paths, *([path] if path.exists() else [])]]
    joined = copies[0]
    if any(copy.signed_bytes() != joined.signed_bytes() for copy in copies):
        raise TrefoilError(
            "these are not copies of the same helper set, the file to write included",
            "Start again from one file.",
            kind=ErrorKind.INCONSISTENT,
        )
    signatures = [b""] * PARTIES
    for copy in copies:
        for position, signature in enumerate(copy.padded_signatures):
            signatures[position] = signature or signatures[position]
    joined = HelperSet(joined.number, joined.helpers, tuple(signatures))
    write_set(path, joined)
    return joined


def write_set(path: Path, helper_set: HelperSet) -> None:
    write_atomically(path, (json.dumps(helper_set.to_json(), indent=2) + "\n").encode())


def read_entry(path: Path) -> HelperEntry:
    try:
        return entry_from_json(decode_json(path.read_bytes()))
    except OSError as error:
        raise TrefoilError(
            f"cannot read {path}: {error.strerror}",
            "Make one with: trefoil keygen helper",
            kind=ErrorKind.FILE_UNREADABLE,
        ) from None
    except ProtocolError as error:
        raise TrefoilError(f"{path} is not a helper's public entry: {error}", kind=error.kind) from None
