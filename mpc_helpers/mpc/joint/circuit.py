"""The coins of one bucket as a public circuit of AND and XOR gates over uniform bits, the same for every bucket.

A coin of probability c/2^k takes uniform bits f_1 … f_k. With c_1 the top bit of c, c_(k+1) = 0 and P_i = f_1·…·f_i,

    coin = c_1 ⊕ (⊕ of P_i over all i with c_i ≠ c_(i+1))

because the first i with f_i = 0 has probability 2^−i, and the coin is c_i there. A run of bits is the map z ↦ G ⊕ P·z.
Two neighbouring runs compose with at most two ANDs, so a coin has depth ⌈log2 k⌉ (SPEC §11, "The circuit").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import ErrorKind, TrefoilError
from protocol.joint_scale import Coin, JointScale

Words = npt.NDArray[np.uint64]
Wires = npt.NDArray[np.intp]

WORD_BITS = 64
# Gates times words of 64 buckets: about four seconds of a processor, and messages of some megabytes.
MAX_GATE_WORDS = 2**20


@dataclass(frozen=True, slots=True)
class Layer:
    """Gates that can be computed at the same time: one round. XORs cost nothing and follow the ANDs of their layer."""

    left: Wires
    right: Wires
    xor_left: Wires
    xor_right: Wires


@dataclass(frozen=True, slots=True)
class Circuit:
    """A layered circuit. Wires are numbered: inputs, then the AND gates in order, then the XORs.

    `roots` are the wires of the coins, digits first and the sign last, without their constants c_1.
    """

    inputs: int
    gates: int
    wires: int
    layers: tuple[Layer, ...]
    roots: Wires
    constants: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of layers: one round of messages each."""
        return len(self.layers)

    @property
    def digits(self) -> int:
        """L: the number of binary digits of the noise, not counting its sign."""
        return len(self.constants) - 1

    def outputs(self, wires: Words, *, constants: bool) -> Words:
        """Return the output bits o_j = d_j ⊕ s and o_L = s, (L + 1) × words, from the values of all wires.

        Set `constants` for exactly one of the three XOR components: c_1 is public and must be added once.
        """
        result = wires[self.roots]
        if constants:
            result ^= -np.array(self.constants, dtype=np.int64).astype(np.uint64)[:, None]
        result[:-1] ^= result[-1]
        return result


def words_for(buckets: int) -> int:
    """Return W, the words per wire: bucket 64w + i is bit i of word w. Unused bits are computed and proven too."""
    return -(-buckets // WORD_BITS)


@lru_cache(maxsize=64)
def build(scale: JointScale) -> Circuit:
    """Build the circuit of a scale. Gates are numbered layer by layer, coin by coin, pair by pair, P before G."""
    return _Builder(scale.coins).circuit()


def check_size(scale: JointScale, buckets: int) -> None:
    """Refuse what would take many seconds to draw. Run before anything is spent."""
    words = build(scale).gates * words_for(buckets)
    if words > MAX_GATE_WORDS:
        raise TrefoilError(
            f"{buckets} buckets of joint noise of scale {float(1 / scale.rate):.3g} take {words} words of gates; "
            f"{MAX_GATE_WORDS} is the most",
            "Use fewer buckets or a coarser unit, or ask with --noise local.",
            kind=ErrorKind.TOO_LARGE,
        )


class _Run(NamedTuple):
    """A run of bits as z ↦ G ⊕ P·z: the wires of G (None: zero) and P. The last run of a coin needs no P."""

    g: int | None
    p: int | None


class _Builder:
    """Builds a circuit layer by layer. XORs are numbered −1, −2, … until the number of gates is known."""

    def __init__(self, coins: tuple[Coin, ...]) -> None:
        self._inputs = sum(coin.bits for coin in coins)
        self._constants = tuple(coin.numerator >> (coin.bits - 1) for coin in coins)
        self._coins: list[list[_Run]] = []
        self._gates = 0
        self._xors = 0
        first = 0
        for coin in coins:
            self._coins.append(_leaves(coin, first))
            first += coin.bits

    def circuit(self) -> Circuit:
        layers = []
        while any(len(runs) > 1 for runs in self._coins):
            layers.append(self._layer())
        roots = [runs[0].g for runs in self._coins]
        return Circuit(
            inputs=self._inputs,
            gates=self._gates,
            wires=self._inputs + self._gates + self._xors,
            layers=tuple(Layer(*(self._numbered(wires) for wires in layer)) for layer in layers),
            roots=self._numbered([root for root in roots if root is not None]),
            constants=self._constants,
        )

    def _layer(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Compose neighbouring runs in pairs, from the first bit on; an odd last run moves up unchanged."""
        ands: dict[tuple[int, int], int] = {}
        xors: list[tuple[int, int]] = []
        self._coins = [
            [self._joined(runs[at : at + 2], ands, xors) for at in range(0, len(runs), 2)] for runs in self._coins
        ]
        return [a for a, _ in ands], [b for _, b in ands], [a for a, _ in xors], [b for _, b in xors]

    def _joined(self, runs: list[_Run], ands: dict[tuple[int, int], int], xors: list[tuple[int, int]]) -> _Run:
        """Compose two runs: (G_h, P_h)∘(G_l, P_l) = (G_h ⊕ P_h·G_l, P_h·P_l)."""
        if len(runs) == 1:
            return runs[0]
        high, low = runs
        p = None if low.p is None else self._and(high.p, low.p, ands)
        if low.g is None:
            return _Run(high.g, p)
        product = self._and(high.p, low.g, ands)
        if high.g is None:
            return _Run(product, p)
        xors.append((high.g, product))
        self._xors += 1
        return _Run(-self._xors, p)

    def _and(self, left: int | None, right: int, ands: dict[tuple[int, int], int]) -> int:
        """Return the wire of the product. Equal operands in one layer share a gate: a leaf may have G = P."""
        if left is None:
            raise AssertionError("only the last run of a coin has no P, and nothing follows it")
        if (left, right) not in ands:
            ands[left, right] = self._inputs + self._gates
            self._gates += 1
        return ands[left, right]

    def _numbered(self, wires: list[int]) -> Wires:
        return np.array([wire if wire >= 0 else self._inputs + self._gates - 1 - wire for wire in wires], dtype=np.intp)


def _leaves(coin: Coin, first: int) -> list[_Run]:
    """Return one run for each bit f of a coin: (f, f) where c changes after it, else (0, f)."""
    bits = [coin.numerator >> place & 1 for place in reversed(range(coin.bits))] + [0]
    changes = [bits[at] != bits[at + 1] for at in range(coin.bits)]
    last = coin.bits - 1
    return [_Run(first + at if changes[at] else None, None if at == last else first + at) for at in range(coin.bits)]
