"""HPKE (RFC 9180), single-shot: the only module that imports it, so that the cipher suite is chosen in one place.

The library's single-shot interface takes no associated data; `info` is what RFC 9180 §8.1 names for authenticating
context, so every caller puts there all that the ciphertext must be bound to.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey
from cryptography.hazmat.primitives.hpke import Suite as HpkeSuite

from protocol import hpke_batch
from protocol.errors import ErrorKind, ProtocolError
from protocol.lanes import distrust_lanes
from protocol.wire import Writer, tagged_hash

KEY_ID_SIZE = 8
_TAG_SIZE = 16
_X25519_SIZE = 32
_MLKEM_PUBLIC_SIZE = 1184
_MLKEM_SEED_SIZE = 64
_MLKEM_CIPHERTEXT_SIZE = 1088
_X25519_PRIME = 2**255 - 19
# The size from which a batch is faster than as many single calls.
_SMALLEST_BATCH = 16


class Suite(Enum):
    """Cipher suites by their number on the wire; a higher number is preferred.

    The second is hybrid: to read what was sealed in it, both X25519 and ML-KEM-768 must be broken.
    """

    X25519_HKDF_SHA256_AES_128_GCM = 1
    MLKEM768_X25519_HKDF_SHA256_AES_256_GCM = 2

    @property
    def public_size(self) -> int:
        return _X25519_SIZE + (_MLKEM_PUBLIC_SIZE if self.is_hybrid else 0)

    @property
    def private_size(self) -> int:
        return _X25519_SIZE + (_MLKEM_SEED_SIZE if self.is_hybrid else 0)

    @property
    def overhead(self) -> int:
        """Return how many bytes sealing adds to a plaintext: the encapsulated key and the authentication tag."""
        return _X25519_SIZE + (_MLKEM_CIPHERTEXT_SIZE if self.is_hybrid else 0) + _TAG_SIZE

    @property
    def is_hybrid(self) -> bool:
        return self is Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM


CLASSICAL = Suite.X25519_HKDF_SHA256_AES_128_GCM
POST_QUANTUM = Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM

_LibraryPublicKey = X25519PublicKey | MLKEM768X25519PublicKey
_LibraryPrivateKey = X25519PrivateKey | MLKEM768X25519PrivateKey

# Any scalar detects a point of small order: X25519 clamps all of them to multiples of eight.
_PROBE = X25519PrivateKey.from_private_bytes(bytes(_X25519_SIZE))
_HPKE = {
    CLASSICAL: HpkeSuite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM),
    POST_QUANTUM: HpkeSuite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM),
}


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The recipient of a seal. In the hybrid suite, the ML-KEM key stands before the X25519 key."""

    suite: Suite
    raw: bytes
    # Derived from the key once, because every report names it.
    key_id: bytes = field(init=False, compare=False)
    _key: _LibraryPublicKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != self.suite.public_size:
            raise ProtocolError(
                f"an HPKE public key has {self.suite.public_size} bytes, not {len(self.raw)}", kind=ErrorKind.WRONG_KEY
            )
        # X25519 ignores the top bit and reduces the rest: two encodings of one point would be one key with two names.
        if int.from_bytes(self.raw[-_X25519_SIZE:], "little") >= _X25519_PRIME:
            raise ProtocolError(
                "the HPKE public key is not in its canonical encoding",
                "Make keys with: trefoil keygen",
                kind=ErrorKind.WRONG_KEY,
            )
        named = tagged_hash("hpke key id", Writer().uint(self.suite.value, 2).done(), self.raw)
        object.__setattr__(self, "key_id", named[:KEY_ID_SIZE])
        object.__setattr__(self, "_key", _library_public_key(self.suite, self.raw))

    @property
    def halves(self) -> set[bytes]:
        """Return the component keys, one or two. No two helpers may have one in common (`helper_set`)."""
        return {part for part in (self.raw[:-_X25519_SIZE], self.raw[-_X25519_SIZE:]) if part}

    def check_usable(self) -> None:
        """Reject a point of small order, to which nothing can be sealed, before any work is done."""
        try:
            _PROBE.exchange(X25519PublicKey.from_public_bytes(self.raw[-_X25519_SIZE:]))
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point", kind=ErrorKind.WRONG_KEY) from None

    def seal(self, plaintext: bytes, info: bytes) -> bytes:
        try:
            return _HPKE[self.suite].encrypt(plaintext, self._key, info=info)
        except ValueError:
            raise ProtocolError("the HPKE public key is not a usable point", kind=ErrorKind.WRONG_KEY) from None

    def seal_many(self, plaintexts: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes]:
        """Encrypt each to this key, bound to its own info: for simulated crowds, in one batch where this is faster."""
        sealed = None
        if self.suite is CLASSICAL and len(plaintexts) >= _SMALLEST_BATCH:
            sealed = hpke_batch.seal_many(self.raw, plaintexts, infos)
        if sealed is not None:
            return sealed
        return [self.seal(text, info) for text, info in zip(plaintexts, infos, strict=True)]


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Opens what was sealed to its public key. Stored as the ML-KEM seed, where there is one, and the X25519 key."""

    suite: Suite
    raw: bytes = field(repr=False)
    _key: _LibraryPrivateKey = field(init=False, repr=False, compare=False)
    public: PublicKey = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.raw) != self.suite.private_size:
            raise ProtocolError(
                f"an HPKE private key has {self.suite.private_size} bytes, not {len(self.raw)}",
                kind=ErrorKind.WRONG_KEY,
            )
        x25519 = X25519PrivateKey.from_private_bytes(self.raw[-_X25519_SIZE:])
        public = x25519.public_key().public_bytes_raw()
        key: _LibraryPrivateKey = x25519
        if self.suite.is_hybrid:
            mlkem = MLKEM768PrivateKey.from_seed_bytes(self.raw[:_MLKEM_SEED_SIZE])
            key, public = MLKEM768X25519PrivateKey(mlkem, x25519), mlkem.public_key().public_bytes_raw() + public
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "public", PublicKey(self.suite, public))

    @classmethod
    def generate(cls, suite: Suite = CLASSICAL) -> PrivateKey:
        x25519 = X25519PrivateKey.generate().private_bytes_raw()
        match suite:
            case Suite.X25519_HKDF_SHA256_AES_128_GCM:
                return cls(suite, x25519)
            case Suite.MLKEM768_X25519_HKDF_SHA256_AES_256_GCM:
                return cls(suite, MLKEM768PrivateKey.generate().private_bytes_raw() + x25519)
            case _:
                assert_never(suite)

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """Return the plaintext. Raise `ProtocolError` for anything not sealed to this key under exactly this `info`."""
        try:
            return self._decrypt(sealed, info)
        except (InvalidTag, ValueError):
            if _may_be_interrupted() and self._opens(sealed, info):
                raise KeyboardInterrupt from None
            raise ProtocolError(
                "the sealed message does not open under this key and context", kind=ErrorKind.NOT_OPENED
            ) from None

    def open_many(self, sealed: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes | None]:
        """Return what `open` would for each message and its info, None where it would raise.

        The batch never rejects a message: the library decides every one that does not open in it.
        """
        if len(sealed) < _SMALLEST_BATCH or not hpke_batch.are_of_one_size(sealed, infos):
            return [self._open_or_none(message, info) for message, info in zip(sealed, infos, strict=True)]
        opened = self._open_batch(sealed, infos)
        undecided = [at for at, plaintext in enumerate(opened) if plaintext is None]
        for at in undecided:
            opened[at] = self._open_or_none(sealed[at], infos[at])
        if any(opened[at] is not None for at in undecided):
            distrust_lanes()
        return opened

    def _open_batch(self, sealed: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes | None]:
        x25519, public = self.raw[-_X25519_SIZE:], self.public.raw[-_X25519_SIZE:]
        if not self.suite.is_hybrid:
            return hpke_batch.open_many(x25519, public, sealed, infos)
        mlkem = MLKEM768PrivateKey.from_seed_bytes(self.raw[:_MLKEM_SEED_SIZE])
        return hpke_batch.open_many_hybrid(mlkem, x25519, public, sealed, infos)

    def _open_or_none(self, sealed: bytes, info: bytes) -> bytes | None:
        try:
            return self.open(sealed, info)
        except ProtocolError:
            return None

    def _opens(self, sealed: bytes, info: bytes) -> bool:
        """Return whether a second attempt opens it: then the first was interrupted by a signal.

        The library makes `InvalidTag` of every error in the decapsulation, so that no error leaks the key. Among
        them is the exception that a signal handler raises while it runs there (7 of 10 do).
        """
        try:
            self._decrypt(sealed, info)
        except (InvalidTag, ValueError):
            return False
        return True

    def _decrypt(self, sealed: bytes, info: bytes) -> bytes:
        return _HPKE[self.suite].decrypt(sealed, self._key, info=info)


def _may_be_interrupted() -> bool:
    """Return whether a signal handler may raise here.

    Never in the processes and threads that open a helper's reports, so a report that does not open costs them one try.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and any(callable(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM))


def _library_public_key(suite: Suite, raw: bytes) -> _LibraryPublicKey:
    x25519 = X25519PublicKey.from_public_bytes(raw[-_X25519_SIZE:])
    if not suite.is_hybrid:
        return x25519
    try:
        return MLKEM768X25519PublicKey(MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC_SIZE]), x25519)
    except ValueError:
        raise ProtocolError("the HPKE public key holds no ML-KEM key", kind=ErrorKind.WRONG_KEY) from None
