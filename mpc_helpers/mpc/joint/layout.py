"""How one session's gates and numbers are laid out for its proofs, and how many bytes each message has.

All of it follows from the circuit and the number of buckets, so a peer's message of another size is refused unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpc_helpers.mpc.joint.circuit import WORD_BITS, Circuit, words_for
from mpc_helpers.mpc.joint.streams import SEED_SIZE
from mpc_helpers.mpc.session import DIGEST_SIZE
from protocol.field import ELEMENT_SIZE
from protocol.shares import PARTIES

# A gate is a signed unit vector of four numbers (`proof`).
LIFTED = 4
FIELD_ROWS = 8
# Party 2 deals the bits as numbers, to 0; party 0 turns its half by the third component's bit, then 1 has the other.
DEALER = 2
# More rows make the folded vector shorter and the prover's work longer, and a cheater's chance 2M/(p − 1) larger.
_FEW_ROWS, _MANY_ROWS = 64, 256
_MANY_WORDS = 2**17


def following(party: int) -> int:
    """The party that a prover's messages go to: its right verifier."""
    return (party + 1) % PARTIES


def preceding(party: int) -> int:
    """A prover's left verifier, and the party whose messages we check."""
    return (party + 2) % PARTIES


@dataclass(frozen=True, slots=True)
class Layout:
    """For `buckets` buckets of one circuit."""

    circuit: Circuit
    buckets: int

    @property
    def words(self) -> int:
        """W: words of 64 buckets."""
        return words_for(self.buckets)

    @property
    def gate_words(self) -> int:
        """All gates' words, without padding."""
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
        """N: gates that a claim counts, padding included; a gate of zeros is right."""
        return self.rows * self.lanes

    @property
    def bits(self) -> int:
        """L + 1: output bits of a bucket."""
        return self.circuit.digits + 1

    @property
    def numbers(self) -> int:
        """Output bits in all; bit j of bucket k is number k·(L + 1) + j."""
        return self.buckets * self.bits

    @property
    def field_columns(self) -> int:
        """C₂: numbers in each of the eight rows of the conversion's part."""
        return -(-self.numbers // FIELD_ROWS)

    @property
    def folded(self) -> int:
        """n': numbers in a folded row, the gates' first."""
        return LIFTED * self.lanes + self.field_columns

    @property
    def coefficients(self) -> int:
        """2M: exponents −(M − 1) to M + 1, without 0."""
        return 2 * self.rows

    @property
    def dealing(self) -> int:
        """The step in which parties 2 and 1 convert; the two after it follow from it."""
        return self.circuit.depth + 1

    @property
    def turning(self) -> int:
        """The step in which party 0 converts."""
        return self.circuit.depth + 2

    @property
    def opening(self) -> int:
        """The step in which weights are released."""
        return self.circuit.depth + 3

    @property
    def proving(self) -> int:
        """The last step: coefficients one way round, folded vectors the other."""
        return self.circuit.depth + 4

    @property
    def allowance(self) -> float:
        """Seconds that drawing is given, several times what it takes. It never depends on what is drawn."""
        return self.gate_words * 16e-6

    def steps(self, party: int) -> dict[int, Mapping[int, int]]:
        """What party `party` receives: for each peer, the size of each step's message."""
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
