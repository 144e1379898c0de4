"""Ed25519 identities that sign, and private keys as files that only their owner can read.

A helper's identity signs helper sets, messages to its peers, votes and answer shares; a site's signs its queries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import read_private_file, write_private_file
from protocol.hpke import PrivateKey, Suite
from protocol.net.json_message import JsonObject, decode_json
from protocol.wire import Writer

SIGNATURE_SIZE = 64
IDENTITY_KEY_SIZE = 32


@dataclass(frozen=True, slots=True)
class IdentityKey:
    """An Ed25519 key pair. Signatures are bound to a label, so that one can never pass for another's purpose."""

    _key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> IdentityKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_raw(cls, raw: bytes) -> IdentityKey:
        if len(raw) != IDENTITY_KEY_SIZE:
            raise ProtocolError(
                f"an identity key has {IDENTITY_KEY_SIZE} bytes, not {len(raw)}", kind=ErrorKind.WRONG_KEY
            )
        return cls(Ed25519PrivateKey.from_private_bytes(raw))

    @property
    def raw(self) -> bytes:
        """Return the secret bytes, for a private file; never displayed."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, label: str, message: bytes) -> bytes:
        return self._key.sign(_signed_bytes(label, message))


def verify_signature(public: bytes, label: str, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed_bytes(label, message))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(label: str, message: bytes) -> bytes:
    return Writer().text(f"trefoil/1 signature: {label}").done() + message


def save_identity(path: Path, key: IdentityKey) -> None:
    write_private_file(path, _key_file("identity", {"private": key.raw.hex()}))


def load_identity(path: Path | str) -> IdentityKey:
    """Read an identity back: a helper's, or the key with which a site signs its queries.

    >>> trefoil.load_site_key("/tmp/trefoil/sites/shop.example.key")  # doctest: +SKIP
    """
    _, raw = _parse_key_file(Path(path), "identity")
    return IdentityKey.from_raw(raw)


def save_hpke_key(path: Path, key: PrivateKey) -> None:
    write_private_file(path, _key_file("hpke", {"suite": key.suite.value, "private": key.raw.hex()}))


def load_hpke_key(path: Path) -> PrivateKey:
    stored, raw = _parse_key_file(path, "hpke")
    number = stored.fields().get("suite")
    if number not in [suite.value for suite in Suite]:
        raise ProtocolError(f"{path} is for an unknown cipher suite: {number!r}", kind=ErrorKind.UNKNOWN_NAME)
    return PrivateKey(Suite(number), raw)


def _key_file(kind: str, fields: dict[str, object]) -> bytes:
    return (json.dumps({"trefoil_key": kind, **fields}) + "\n").encode()


def _parse_key_file(path: Path, kind: str) -> tuple[JsonObject, bytes]:
    """Return the fields of a key file, and the private key in it."""
    try:
        stored = JsonObject(decode_json(read_private_file(path)), "key file")
        right = stored.value("trefoil_key") == kind
    except ProtocolError:
        right = False
    if not right:
        hint = "Make one with: trefoil keygen"
        raise TrefoilError(f"{path} is not a Trefoil {kind} key file", hint, kind=ErrorKind.WRONG_FILE)
    try:
        return stored, stored.hexadecimal("private")
    except ProtocolError as error:
        raise TrefoilError(f"{path} is damaged: {error}", kind=ErrorKind.FILE_DAMAGED) from None
