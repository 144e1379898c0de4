"""Creation of a helper: its keys, its entry for the helper set and its configuration.

Run once per helper, by its operator (`trefoil keygen helper`) or by the launcher for three at once. Nothing is
overwritten: a key that is replaced is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import FORMAT
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import remove_on_failure, write_atomically
from protocol.helper_set import PIN_SIZE, HelperEntry, HpkeKeyConfig, entry_to_json, read_entry
from protocol.hpke import CLASSICAL, PrivateKey, Suite
from protocol.keys import IdentityKey, save_hpke_key, save_identity
from protocol.units import DAY

KEY_DAYS = 90
# Twice the queries that a helper runs at a time by default: each has a worker, and half of them are started early.
MPC_PORTS = 8
CONFIG_NAME = "config.json"
ENTRY_NAME = "entry.json"
KEY_NAMES = ("identity.key", "tls.key", "tls.crt", "hpke")


def make_keys(
    folder: Path, name: str, address: str, now: int, *, days: int = KEY_DAYS, suite: Suite = CLASSICAL
) -> HelperEntry:
    """Create the keys and certificate of a new helper, and return its public entry for the helper set."""
    identity, sealed_to = IdentityKey.generate(), PrivateKey.generate(suite)
    validity = _validity(sealed_to, now, days)
    # Raises before anything is written if no helper set would accept the name or the address.
    draft = HelperEntry(name, identity.public, (validity,), address, bytes(PIN_SIZE))
    if not (name.isascii() and len(name) <= tls.LONGEST_NAME):
        message = f"a new helper's name is ASCII, at most {tls.LONGEST_NAME} characters, not {name!r}"
        raise TrefoilError(message, kind=ErrorKind.INVALID_VALUE)
    with remove_on_failure(*(folder / name for name in KEY_NAMES)):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_identity(folder / "identity.key", identity)
        certificate = tls.make_identity(folder, name, now)
        _save(folder, sealed_to)
    return replace(draft, tls_pin=certificate.pin)


def _validity(key: PrivateKey, now: int, days: int) -> HpkeKeyConfig:
    if not (0 < days <= 3650):
        raise TrefoilError(f"a key is valid for 1 to 3650 days, not {days}", kind=ErrorKind.OUT_OF_RANGE)
    # From yesterday: reports carry the hour they were made in, which began before this key was made.
    return HpkeKeyConfig(key.public, max(0, now - DAY), now + days * DAY)


def _save(folder: Path, key: PrivateKey) -> None:
    keys = folder / "hpke"
    keys.mkdir(exist_ok=True, mode=0o700)
    save_hpke_key(keys / f"{key.public.key_id.hex()}.key", key)


def add_hpke_key(folder: Path, now: int, days: int, suite: Suite = CLASSICAL) -> HpkeKeyConfig:
    key = PrivateKey.generate(suite)
    validity = _validity(key, now, days)
    _save(folder, key)
    return validity


def write_config(folder: Path, name: str, fields: Mapping[str, object]) -> Path:
    """Write the configuration of the helper whose keys are in `folder`, with all other `fields`."""
    stored = {
        "trefoil_helper": FORMAT,
        "name": name,
        "identity_key": "identity.key",
        "hpke_keys": "hpke",
        "tls_certificate": "tls.crt",
        "tls_key": "tls.key",
        "ledger": "ledger.sqlite",
        "data": "data",
        **fields,
    }
    path = folder / CONFIG_NAME
    write_atomically(path, (json.dumps(stored, indent=2) + "\n").encode(), 0o600)
    return path


def make_helper(
    folder: Path, name: str, address: str, now: int, *, days: int = KEY_DAYS, suite: Suite = CLASSICAL
) -> Path:
    """Create all that one operator creates alone: keys, the public entry, and a configuration to fill in."""
    path = folder / ENTRY_NAME
    with remove_on_failure(*(folder / made for made in (*KEY_NAMES, ENTRY_NAME, CONFIG_NAME))):
        entry = make_keys(folder, name, address, now, days=days, suite=suite)
        _write_entry(path, entry)
        everywhere = "0.0.0.0"  # noqa: S104 - others must reach it
        port = entry.endpoint[1]
        fields = {"host": everywhere, "port": port, "mpc_ports": mpc_ports(port)}
        write_config(folder, name, {**fields, "helper_set": "helpers.json", "sites": {}})
    return path


def mpc_ports(port: int) -> list[int]:
    """Return the MPC ports of a new helper: fixed, so that a firewall can open them, and beside its own."""
    first = port + 1 if port + MPC_PORTS < 65536 else port - MPC_PORTS
    return list(range(first, first + MPC_PORTS))


def renew_certificate(path: Path, identity: tls.TlsIdentity) -> None:
    """Replace the certificate's pin in the public entry, for the next helper set."""
    _write_entry(path, replace(read_entry(path), tls_pin=identity.pin))


def renew_entry(folder: Path, now: int, days: int, suite: Suite = CLASSICAL) -> Path:
    """Add an HPKE key to the folder and to the public entry, for the next helper set."""
    path = folder / ENTRY_NAME
    old = read_entry(path)
    _write_entry(path, replace(old, hpke_keys=(*old.hpke_keys, add_hpke_key(folder, now, days, suite))))
    return path


def _write_entry(path: Path, entry: HelperEntry) -> None:
    write_atomically(path, (json.dumps(entry_to_json(entry), indent=2) + "\n").encode())
