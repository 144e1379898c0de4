"""HPKE (RFC 9180), single-shot: the only module that imports it, so that the cipher suite is chosen in one place.

The library's single-shot interface takes no associated data; `info` is what RFC 9180 §8.1 names for authenticating
context, so every caller puts there all that the ciphertext must be bound to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM
from cryptography.hazmat.primitives.hpke import Suite as HpkeSuite

from protocol.errors import ProtocolError
from protocol.wire import Writer, tagged_hash

KEY_ID_SIZE = 8
PUBLIC_KEY_SIZE = 32
# Encapsulated key and authentication tag: what sealing adds to a plaintext.
OVERHEAD = 32 + 16


class Suite(Enum):
    """Cipher suites by their number on the wire. A hybrid post-quantum KEM would be the next number."""

    X25519_HKDF_SHA256_AES_128_GCM = 1


# Any scalar shows a point of small order, for X25519 makes all of them multiples of eight.
_PROBE = X25519PrivateKey.from_private_bytes(bytes(32))
_HPKE = HpkeSuite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Whom to seal to."""

    suite: Suite
    raw: bytes
    # Derived from the key, so that an id can never point at two keys; once, because every seal names it.
    key_id: bytes = field(init=False, compare=False)
    _key: X25519PublicKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != PUBLIC_KEY_SIZE:
            raise ProtocolError(f"an HPKE public key has {PUBLIC_KEY_SIZE} bytes, not {len(self.raw)}")
        named = tagged_hash("hpke key id", Writer().uint(self.suite.value, 2).done(), self.raw)
        object.__setattr__(self, "key_id", named[:KEY_ID_SIZE])
        object.__setattr__(self, "_key", X25519PublicKey.from_public_bytes(self.raw))

    def check_usable(self) -> None:
        """Refuse a point of small order, to which nothing can be sealed: better now than when the work is done."""
        try:
            _PROBE.exchange(self._key)
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point") from None

    def seal(self, plaintext: bytes, info: bytes) -> bytes:
        """Encrypt to this key, bound to `info`."""
        try:
            return _HPKE.encrypt(plaintext, self._key, info=info)
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point") from None


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Opens what was sealed to its public half."""

    suite: Suite
    _key: X25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> PrivateKey:
        """A fresh key from the operating system's randomness."""
        return cls(Suite.X25519_HKDF_SHA256_AES_128_GCM, X25519PrivateKey.generate())

    @classmethod
    def from_raw(cls, suite: Suite, raw: bytes) -> PrivateKey:
        """The key whose `raw` bytes were stored."""
        if len(raw) != PUBLIC_KEY_SIZE:
            raise ProtocolError(f"an HPKE private key has {PUBLIC_KEY_SIZE} bytes, not {len(raw)}")
        return cls(suite, X25519PrivateKey.from_private_bytes(raw))

    @property
    def raw(self) -> bytes:
        """For storing in a private file; never for showing."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> PublicKey:
        """The half to hand out."""
        return PublicKey(self.suite, self._key.public_key().public_bytes_raw())

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """Decrypt; anything other than what was sealed under exactly this `info` is a `ProtocolError`."""
        try:
            return _HPKE.decrypt(sealed, self._key, info=info)
        except (InvalidTag, ValueError):
            raise ProtocolError("the sealed message does not open under this key and context") from None
