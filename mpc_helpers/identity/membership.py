"""This helper's membership in the helper set: its position among the three, and its private keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpc_helpers.identity.config import ConfigError, HelperConfig
from protocol.errors import ErrorKind
from protocol.helper_set import HelperEntry, HelperSet, KeyState, check_key_ids
from protocol.hpke import PrivateKey, PublicKey
from protocol.keys import IdentityKey, load_hpke_key, load_identity


@dataclass(frozen=True, slots=True)
class Membership:
    """This helper's position in the helper set, and the keys that prove it and open reports."""

    party: int
    helper_set: HelperSet
    known_sets: tuple[HelperSet, ...]
    identity: IdentityKey
    # By the whole public key: collisions of 64-bit ids can be constructed.
    hpke: dict[PublicKey, PrivateKey] = field(repr=False)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(party for party in range(len(self.helper_set.helpers)) if party != self.party)

    def name(self, party: int) -> str:
        return self.helper_set.helpers[party].name


def load_membership(config: HelperConfig, now: int) -> Membership:
    """Load sets and keys, and check them against each other and the clock. Writes nothing."""
    identity = load_identity(config.identity_key)
    current = HelperSet.load(config.helper_set)
    party = _party_of(identity, current, config)
    previous = tuple(HelperSet.load(path) for path in config.previous_helper_sets)
    for older in previous:
        # Payloads of a report are indexed by party; a helper with another index could not open older reports.
        if older.helpers[party].identity_key != identity.public:
            message = f"helper set {older.number} has {config.name} in another position, or not at all"
            raise ConfigError(message, kind=ErrorKind.WRONG_HELPER_SET)
    if config.tls.pin != current.helpers[party].tls_pin:
        raise ConfigError(
            f"{config.tls_certificate} is not the certificate that the helper set pins for {config.name}",
            "Renew the set with trefoil helper-set new after renewing a certificate.",
            kind=ErrorKind.WRONG_KEY,
        )
    sets = (current, *previous)
    check_key_ids(sets)
    stored = _stored_keys(config, sets, party)
    keys = {one.key.public: one.key for one in stored if now <= one.last_use}
    _check_complete(config, current.helpers[party], keys, now)
    return Membership(party, current, sets, identity, keys)


def destroy_expired_keys(config: HelperConfig, membership: Membership, now: int) -> None:
    """Run by housekeeping: destroy each private key that no countable report is sealed to."""
    for stored in _stored_keys(config, membership.known_sets, membership.party):
        if stored.last_use < now:
            membership.hpke.pop(stored.key.public, None)
            _destroy(stored.path)


def _party_of(identity: IdentityKey, helper_set: HelperSet, config: HelperConfig) -> int:
    for party, helper in enumerate(helper_set.helpers):
        if helper.identity_key == identity.public:
            if helper.name != config.name:
                message = f"the helper set calls this helper {helper.name}, its configuration {config.name}"
                raise ConfigError(message, "Correct name in config.json.", kind=ErrorKind.INCONSISTENT)
            return party
    raise ConfigError(
        f"the identity key {config.identity_key} belongs to none of the three helpers in {config.helper_set}",
        "Use the key that the set was made from, or have all three operators sign a new set.",
        kind=ErrorKind.WRONG_HELPER_SET,
    )


@dataclass(frozen=True, slots=True)
class _StoredKey:
    """A private key in this helper's folder that one of its sets names."""

    path: Path
    key: PrivateKey = field(repr=False)
    # The last moment at which a report sealed to it may be admitted.
    last_use: int


def _stored_keys(config: HelperConfig, sets: tuple[HelperSet, ...], party: int) -> list[_StoredKey]:
    """Return the stored keys that some set names. Others are for the next set, and stay untouched."""
    ends: dict[PublicKey, int] = {}
    for entry in (entry for each in sets for entry in each.helpers[party].hpke_keys):
        # A later set may extend a key's validity; devices with the older set still seal to it.
        ends[entry.key] = max(entry.not_after, ends.get(entry.key, 0))
    loaded = [(path, load_hpke_key(path)) for path in sorted(config.hpke_keys.glob("*.key"))]
    return [
        _StoredKey(path, key, ends[key.public] + config.report_lifetime) for path, key in loaded if key.public in ends
    ]


def _check_complete(config: HelperConfig, helper: HelperEntry, keys: Mapping[PublicKey, PrivateKey], now: int) -> None:
    """Require all unexpired keys of the current set, one of them active."""
    for entry in helper.hpke_keys:
        if entry.state(now) is not KeyState.EXPIRED and entry.key not in keys:
            raise ConfigError(
                f"{config.hpke_keys} lacks the private key {entry.key.key_id.hex()} that the helper set names",
                "Restore the key file from its backup; keys are backed up, ledgers never.",
                kind=ErrorKind.FILE_MISSING,
            )
    if not any(entry.state(now) is KeyState.ACTIVE for entry in helper.hpke_keys):
        raise ConfigError(
            f"no HPKE key of {config.name} is valid now",
            "Check this machine's clock, then make a new helper set.",
            kind=ErrorKind.EXPIRED,
        )


def _destroy(path: Path) -> None:
    """Overwrite and remove a key file, so that old reports can never be opened again."""
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
