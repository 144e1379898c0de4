"""What two parties draw in common, out of the pair key that the third lacks: one AES-256-CTR stream per purpose.

Every stream is bound to session and parameters, and is read once, from its start. No joint nonce is needed, unlike in
`pairwise`: every secret here has a component from each of the three pairs, and the component that a party lacks comes
from a key that an honest party drew afresh for this session.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.session import MpcSession
from protocol.field import ELEMENT_SIZE, P, Vector
from protocol.wire import tagged_hash

SEED_SIZE = 32
_DROPPED_BITS = np.uint64(64 - 61)


class Purpose(Enum):
    """The streams of a pair. Those of a proof belong to the pair that verifies, or to prover and one verifier."""

    BITS = "bits"
    AND = "and"
    DEALT = "dealt"
    TURNED = "turned"
    WEIGHTS = "weights"
    POINT = "point"
    COEFFICIENTS = "coefficients"
    LEFT_MASK = "left mask"
    RIGHT_MASK = "right mask"


class Stream:
    """A keystream as words or field elements. Whoever holds the same 32-byte key reads the same."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def take(self, size: int) -> bytes:
        """The next bytes."""
        return self._cipher.update(bytes(size))

    def words(self, rows: int, columns: int) -> Words:
        """Little-endian words, row by row."""
        return words_from(self.take(ELEMENT_SIZE * rows * columns), rows)

    def elements(self, count: int) -> Vector:
        """Uniform field elements: each word without its lowest three bits, and p itself, once in 2^61, left out."""
        found: Vector = self.words(1, count)[0] >> _DROPPED_BITS
        if count and int(found.max()) == P:
            found = found[found != P]
            return np.concatenate([found, self.elements(count - found.size)])
        return found

    def nonzero(self) -> int:
        """The first element that is not zero."""
        while True:
            value = int(self.elements(1)[0])
            if value:
                return value


def words_from(data: bytes, rows: int) -> Words:
    """Little-endian words in rows of equal length."""
    words: Words = np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
    return words.reshape(rows, -1)


class PairStreams:
    """The streams of the pair that lacks party `lacking`."""

    def __init__(self, pair_key: bytes, session: MpcSession, lacking: int) -> None:
        self._bound = (pair_key, session.attempt_id, session.parameter_digest, bytes([lacking]))

    def open(self, purpose: Purpose) -> Stream:
        """The stream from its start. A caller opens each once, or two values would share their randomness."""
        return Stream(tagged_hash(f"joint noise: {purpose.value}", *self._bound))
