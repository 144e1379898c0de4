"""HPKE (RFC 9180), single-shot: the only module that imports it, so that the cipher suite is chosen in one place.

The library's single-shot interface takes no associated data; `info` is what RFC 9180 §8.1 names for authenticating
context, so every caller puts there all that the ciphertext must be bound to.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey
from cryptography.hazmat.primitives.hpke import Suite as HpkeSuite

from protocol.errors import ProtocolError
from protocol.wire import Writer, tagged_hash

KEY_ID_SIZE = 8
_TAG_SIZE = 16
_X25519_SIZE = 32
_MLKEM_PUBLIC_SIZE = 1184
_MLKEM_SEED_SIZE = 64
_MLKEM_CIPHERTEXT_SIZE = 1088
_X25519_PRIME = 2**255 - 19


class Suite(Enum):
    """Cipher suites by their number on the wire; a higher number is preferred.

    The second is hybrid: to read what was sealed in it, both X25519 and ML-KEM-768 must be broken.
    """

    X25519_HKDF_SHA256_AES_128_GCM = 1
    MLKEM768_X25519_HKDF_SHA256_AES_256_GCM = 2

    @property
    def public_size(self) -> int:
        """Bytes of a public key."""
        return _X25519_SIZE + (_MLKEM_PUBLIC_SIZE if self.is_hybrid else 0)

    @property
    def private_size(self) -> int:
        """Bytes of a private key as it is stored."""
        return _X25519_SIZE + (_MLKEM_SEED_SIZE if self.is_hybrid else 0)

    @property
    def overhead(self) -> int:
        """Encapsulated key and authentication tag: what sealing adds to a plaintext."""
        return _X25519_SIZE + (_MLKEM_CIPHERTEXT_SIZE if self.is_hybrid else 0) + _TAG_SIZE

    @property
    def is_hybrid(self) -> bool:
        """Whether ML-KEM stands beside X25519."""
        return self is Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM


CLASSICAL = Suite.X25519_HKDF_SHA256_AES_128_GCM
POST_QUANTUM = Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM

_PublicHalf = X25519PublicKey | MLKEM768X25519PublicKey
_PrivateHalf = X25519PrivateKey | MLKEM768X25519PrivateKey

# Any scalar shows a point of small order, for X25519 makes all of them multiples of eight.
_PROBE = X25519PrivateKey.from_private_bytes(bytes(_X25519_SIZE))
_HPKE = {
    CLASSICAL: HpkeSuite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM),
    POST_QUANTUM: HpkeSuite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM),
}


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Whom to seal to. In the hybrid suite, the ML-KEM key stands before the X25519 key."""

    suite: Suite
    raw: bytes
    # Derived from the key, and once, because every seal names it.
    key_id: bytes = field(init=False, compare=False)
    _key: _PublicHalf = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != self.suite.public_size:
            raise ProtocolError(f"an HPKE public key has {self.suite.public_size} bytes, not {len(self.raw)}")
        # X25519 ignores the top bit and reduces the rest: two encodings of one point would be one key with two names.
        if int.from_bytes(self.raw[-_X25519_SIZE:], "little") >= _X25519_PRIME:
            raise ProtocolError("the HPKE public key is not in its only encoding", "Make keys with: trefoil keygen")
        named = tagged_hash("hpke key id", Writer().uint(self.suite.value, 2).done(), self.raw)
        object.__setattr__(self, "key_id", named[:KEY_ID_SIZE])
        object.__setattr__(self, "_key", _public_half(self.suite, self.raw))

    @property
    def halves(self) -> set[bytes]:
        """The keys it is made of, one or two. Whoever knows one of them in private knows that much of this key."""
        return {part for part in (self.raw[:-_X25519_SIZE], self.raw[-_X25519_SIZE:]) if part}

    def check_usable(self) -> None:
        """Refuse a point of small order, to which nothing can be sealed: better now than when the work is done."""
        try:
            _PROBE.exchange(X25519PublicKey.from_public_bytes(self.raw[-_X25519_SIZE:]))
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point") from None

    def seal(self, plaintext: bytes, info: bytes) -> bytes:
        """Encrypt to this key, bound to `info`."""
        try:
            return _HPKE[self.suite].encrypt(plaintext, self._key, info=info)
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point") from None


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Opens what was sealed to its public half. Stored as the ML-KEM seed, where there is one, and the X25519 key."""

    suite: Suite
    raw: bytes = field(repr=False)
    _key: _PrivateHalf = field(init=False, repr=False, compare=False)
    public: PublicKey = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != self.suite.private_size:
            raise ProtocolError(f"an HPKE private key has {self.suite.private_size} bytes, not {len(self.raw)}")
        x25519 = X25519PrivateKey.from_private_bytes(self.raw[-_X25519_SIZE:])
        public = x25519.public_key().public_bytes_raw()
        key: _PrivateHalf = x25519
        if self.suite.is_hybrid:
            mlkem = MLKEM768PrivateKey.from_seed_bytes(self.raw[:_MLKEM_SEED_SIZE])
            key, public = MLKEM768X25519PrivateKey(mlkem, x25519), mlkem.public_key().public_bytes_raw() + public
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "public", PublicKey(self.suite, public))

    @classmethod
    def generate(cls, suite: Suite = CLASSICAL) -> PrivateKey:
        """A fresh key from the operating system's randomness."""
        x25519 = X25519PrivateKey.generate().private_bytes_raw()
        match suite:
            case Suite.X25519_HKDF_SHA256_AES_128_GCM:
                return cls(suite, x25519)
            case Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM:
                return cls(suite, MLKEM768PrivateKey.generate().private_bytes_raw() + x25519)
            case _:
                assert_never(suite)

    @classmethod
    def from_raw(cls, suite: Suite, raw: bytes) -> PrivateKey:
        """The key whose `raw` bytes were stored."""
        return cls(suite, raw)

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """Decrypt; anything other than what was sealed under exactly this `info` is a `ProtocolError`."""
        try:
            return self._decrypt(sealed, info)
        except (InvalidTag, ValueError):
            if _may_be_interrupted() and self._opens(sealed, info):
                raise KeyboardInterrupt from None
            raise ProtocolError("the sealed message does not open under this key and context") from None

    def _opens(self, sealed: bytes, info: bytes) -> bool:
        """Whether what did not open a moment ago does now: then it was an interruption.

        The library makes `InvalidTag` of every error in the decapsulation, so that no error tells anything of the key.
        Among them is the exception that a signal's handler raises while it runs there (7 of 10 do).
        """
        try:
            self._decrypt(sealed, info)
        except (InvalidTag, ValueError):
            return False
        return True

    def _decrypt(self, sealed: bytes, info: bytes) -> bytes:
        return _HPKE[self.suite].decrypt(sealed, self._key, info=info)


def _may_be_interrupted() -> bool:
    """Whether a signal's handler may raise something here. Not in the processes and threads that open a helper's
    reports, so a report that does not open costs one try there.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and any(callable(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM))


def _public_half(suite: Suite, raw: bytes) -> _PublicHalf:
    x25519 = X25519PublicKey.from_public_bytes(raw[-_X25519_SIZE:])
    if not suite.is_hybrid:
        return x25519
    try:
        return MLKEM768X25519PublicKey(MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC_SIZE]), x25519)
    except ValueError:
        raise ProtocolError("the HPKE public key holds no ML-KEM key") from None
