"""Who this helper is in the helper set: its place among the three, and the keys that prove it and open reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpc_helpers.identity.config import ConfigError, HelperConfig
from protocol.helper_set import HelperEntry, HelperSet, KeyState, check_key_ids
from protocol.hpke import PrivateKey, PublicKey
from protocol.keys import IdentityKey, load_hpke_key, load_identity


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this helper is: its place in the helper set, and the keys that prove it."""

    party: int
    helper_set: HelperSet
    known_sets: tuple[HelperSet, ...]
    identity: IdentityKey
    # By the whole public key: an id of 64 bits can be made twice by whoever tries hard enough.
    hpke: dict[PublicKey, PrivateKey] = field(repr=False)

    @property
    def peers(self) -> tuple[int, ...]:
        """The two other parties."""
        return tuple(party for party in range(len(self.helper_set.helpers)) if party != self.party)

    def name(self, party: int) -> str:
        """What people call a helper."""
        return self.helper_set.helpers[party].name


def load_membership(config: HelperConfig, now: int) -> Membership:
    """Load sets and keys, and check them against each other and the clock. Reads only."""
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
    known = (current, *previous)
    check_key_ids(known)
    stored = _stored_keys(config, known, party)
    keys = {one.key.public: one.key for one in stored if now <= one.last_use}
    _check_complete(config, current.helpers[party], keys, now)
    return Membership(party, current, known, identity, keys)


def destroy_expired_keys(config: HelperConfig, membership: Membership, now: int) -> None:
    """Run by housekeeping: forget and destroy each private key that no report still to be counted is sealed to."""
    for stored in _stored_keys(config, membership.known_sets, membership.party):
        if stored.last_use < now:
            membership.hpke.pop(stored.key.public, None)
            _destroy(stored.path)


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


@dataclass(frozen=True, slots=True)
class _StoredKey:
    """A private key in this helper's folder that some known set names."""

    path: Path
    key: PrivateKey = field(repr=False)
    # The last moment at which a report sealed to it may be admitted.
    last_use: int


def _stored_keys(config: HelperConfig, sets: tuple[HelperSet, ...], party: int) -> list[_StoredKey]:
    """A key in the folder that no set names yet is one for the next set: it is neither used nor touched."""
    ends: dict[PublicKey, int] = {}
    for entry in (entry for known in sets for entry in known.helpers[party].hpke_keys):
        # A later set may prolong a key; devices with an older one go on sealing to it all the same.
        ends[entry.key] = max(entry.not_after, ends.get(entry.key, 0))
    loaded = [(path, load_hpke_key(path)) for path in sorted(config.hpke_keys.glob("*.key"))]
    return [
        _StoredKey(path, key, ends[key.public] + config.report_lifetime) for path, key in loaded if key.public in ends
    ]


def _check_complete(config: HelperConfig, helper: HelperEntry, keys: Mapping[PublicKey, PrivateKey], now: int) -> None:
    """The current set's keys must all be there, and devices must be able to seal to one of them."""
    for entry in helper.hpke_keys:
        if entry.state(now) is not KeyState.EXPIRED and entry.key not in keys:
            raise ConfigError(
                f"{config.hpke_keys} lacks the private key {entry.key.key_id.hex()} that the helper set names",
                "Restore the key file from its backup; keys are backed up, ledgers never.",
            )
    if not any(entry.state(now) is KeyState.ACTIVE for entry in helper.hpke_keys):
        raise ConfigError(
            f"no HPKE key of {config.name} is valid now", "Check this machine's clock, then make a new helper set."
        )


def _destroy(path: Path) -> None:
    """An expired private key is overwritten and removed, so that old reports stay closed for good."""
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
