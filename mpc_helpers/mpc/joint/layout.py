"""The layout of one session: the streams that two parties share, rows of gates, and message sizes.

The layout follows from the circuit and the number of buckets, so a peer's message of another size is refused unread.

Two parties derive common randomness from the pair key that the third lacks: one AES-256-CTR stream per purpose. Every
stream is bound to session and parameters, and is read once, from its start. No joint nonce is needed, unlike in
`pairwise`: every secret here has a component from each of the three pairs, and the component that a party lacks comes
from a key that an honest party drew afresh for this session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mpc_helpers.mpc.joint.circuit import WORD_BITS, Circuit, Words, words_for
from mpc_helpers.mpc.session import DIGEST_SIZE, MpcSession
from protocol.field import ELEMENT_SIZE, P, Vector
from protocol.shares import PARTIES
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
    """A keystream as words or field elements, determined by a 32-byte key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def take(self, size: int) -> bytes:
        return self._cipher.update(bytes(size))

    def words(self, rows: int, columns: int) -> Words:
        """Return the next little-endian words, row by row."""
        return words_from(self.take(ELEMENT_SIZE * rows * columns), rows)

    def elements(self, count: int) -> Vector:
        """Return uniform field elements: each is the top 61 bits of a word; p itself (once in 2^61) is rejected."""
        drawn: Vector = self.words(1, count)[0] >> _DROPPED_BITS
        if count and int(drawn.max()) == P:
            drawn = drawn[drawn != P]
            return np.concatenate([drawn, self.elements(count - drawn.size)])
        return drawn

    def nonzero(self) -> int:
        """Return the next element that is not zero."""
        while True:
            value = int(self.elements(1)[0])
            if value:
                return value


def words_from(data: bytes, rows: int) -> Words:
    """Decode little-endian words into `rows` rows of equal length."""
    words: Words = np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
    return words.reshape(rows, -1)


class PairStreams:
    """The streams of the pair that lacks party `lacking`."""

    def __init__(self, pair_key: bytes, session: MpcSession, lacking: int) -> None:
        self._bound = (pair_key, session.attempt_id, session.parameter_digest, bytes([lacking]))

    def open(self, purpose: Purpose) -> Stream:
        """Return the stream from its start. Open each once per value: two values must not share randomness."""
        return Stream(tagged_hash(f"joint noise: {purpose.value}", *self._bound))


# A gate is a signed unit vector of four numbers (`proof`).
LIFTED = 4
FIELD_ROWS = 8
# The party that deals o₀ ⊕ o₁ as numbers (`noise`); the other two apply the third component's bit.
DEALER = 2
# More rows M make the folded vector shorter, but the prover slower and the soundness error 2M/(p − 1) larger.
_FEW_ROWS, _MANY_ROWS = 64, 256
_MANY_WORDS = 2**17


def following(party: int) -> int:
    """Return the next party in the ring, which receives a prover's messages: its right verifier."""
    return (party + 1) % PARTIES


def preceding(party: int) -> int:
    """Return the previous party in the ring: a prover's left verifier, and the party whose messages we check."""
    return (party + 2) % PARTIES


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and step numbers for `buckets` buckets of one circuit; letters as in SPEC §11."""

    circuit: Circuit
    buckets: int

    @property
    def words(self) -> int:
        """W: words per wire, 64 buckets each."""
        return words_for(self.buckets)

    @property
    def gate_words(self) -> int:
        """Words of all gates together, without padding."""
        return self.circuit.gates * self.words

    @property
    def rows(self) -> int:
        """M: rows into which the words of all gates are cut."""
        return _FEW_ROWS if self.gate_words <= _MANY_WORDS else _MANY_ROWS

    @property
    def columns(self) -> int:
        """C: words in a row. Word n = gate·W + w is in row ⌊n/C⌋; what is missing in the last rows is zero."""
        return -(-self.gate_words // self.rows)

    @property
    def lanes(self) -> int:
        """Gates in a row."""
        return WORD_BITS * self.columns

    @property
    def lifted_gates(self) -> int:
        """N: gates in a claim, padding included: a gate of zeros is correct."""
        return self.rows * self.lanes

    @property
    def bits(self) -> int:
        """L + 1: output bits of a bucket."""
        return self.circuit.digits + 1

    @property
    def numbers(self) -> int:
        """Output bits of all buckets; bit j of bucket k is number k·(L + 1) + j."""
        return self.buckets * self.bits

    @property
    def field_columns(self) -> int:
        """C₂: numbers in each of the eight rows of the conversion's part."""
        return -(-self.numbers // FIELD_ROWS)

    @property
    def folded(self) -> int:
        """n': numbers in a folded row: the gates', then the conversion's."""
        return LIFTED * self.lanes + self.field_columns

    @property
    def coefficients(self) -> int:
        """2M: coefficients that a prover sends, of the exponents −(M − 1) to M + 1 without 0."""
        return 2 * self.rows

    @property
    def dealing(self) -> int:
        """The step in which parties 2 and 1 send their parts of the conversion."""
        return self.circuit.depth + 1

    @property
    def turning(self) -> int:
        """The step in which party 0 sends its part, which depends on what party 2 sent it."""
        return self.circuit.depth + 2

    @property
    def opening(self) -> int:
        """The step in which verifiers open the weights that they committed to."""
        return self.circuit.depth + 3

    @property
    def proving(self) -> int:
        """The last step: coefficients go to the next party, folded vectors to the previous one."""
        return self.circuit.depth + 4

    @property
    def allowance(self) -> float:
        """Upper bound in seconds on drawing, several times what it takes. It never depends on what is drawn."""
        return self.gate_words * 16e-6

    def message_sizes(self, party: int) -> dict[int, Mapping[int, int]]:
        """Return what party `party` receives: for each peer, the size of each step's message."""
        return {
            preceding(party): self._to_following(preceding(party)),
            following(party): {0: DIGEST_SIZE, self.opening: SEED_SIZE, self.proving: ELEMENT_SIZE * (self.folded + 1)},
        }

    def _to_following(self, sender: int) -> dict[int, int]:
        sizes = {0: DIGEST_SIZE}
        for step, layer in enumerate(self.circuit.layers, start=1):
            sizes[step] = ELEMENT_SIZE * layer.left.size * self.words
        converting = self.turning if sender == following(DEALER) else self.dealing
        sizes[converting] = ELEMENT_SIZE * (self.numbers if sender == DEALER else self.buckets)
        sizes[self.proving] = ELEMENT_SIZE * self.coefficients
        return sizes
