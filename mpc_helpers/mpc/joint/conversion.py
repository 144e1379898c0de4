"""From shared bits to shared numbers, and what each party says and checks about it.

An output bit is o = o₀ ⊕ o₁ ⊕ o₂, component l known to all but party l. Party 2 deals (o₀ ⊕ o₁) as e0 + e1. With
w = (1, 2, …, 2^(L−1), −2^L) and φ_j = w_j·(1 − 2·o₂,j), a bucket's noise is

    X = Σ_j w_j·o_j = Σ_j w_j·o₂,j + Σ_j φ_j·e0_j + Σ_j φ_j·e1_j = Σ_j w_j·o₂,j + (b0 + b2) + (a1 + a2)

where party 1, who knows φ and e0, splits the second sum, and party 0, who knows φ and e1, the third. So component 0
of X is b0, component 1 is a1, and component 2 is Σ_j w_j·o₂,j + a2 + b2.

The proof needs of each prover one relation, weighed by ρ: an inner product of numbers known left and numbers known
right, equal to a total known left plus one known right.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import numpy as np

from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.layout import DEALER, Layout, following
from mpc_helpers.mpc.joint.streams import Stream
from protocol.field import P, Vector, add, dot, reduce, subtract, total

_P = np.uint64(P)
_FIELD_BITS = np.uint64(61)
_ONE = np.uint64(1)


class Value(Enum):
    """What a party may hold of a conversion. Bits, dealt and turned numbers are buckets × (L + 1) or one per bucket."""

    BITS_0 = auto()
    BITS_1 = auto()
    BITS_2 = auto()
    DEALT_0 = auto()  # e0, drawn by parties 1 and 2
    DEALT_1 = auto()  # e1, sent by 2 to 0
    TURNED_1 = auto()  # a1, drawn by parties 0 and 2
    TURNED_2 = auto()  # a2, sent by 0 to 1
    SPLIT_2 = auto()  # b2, drawn by parties 0 and 1
    SPLIT_0 = auto()  # b0, sent by 1 to 2


Held = Mapping[Value, Vector]


def unpacked(layout: Layout, planes: Words) -> Vector:
    """Output bits as numbers 0 and 1, buckets × (L + 1)."""
    raw = np.ascontiguousarray(planes.astype("<u8", copy=False)).view(np.uint8)
    bits = np.unpackbits(raw, axis=1, count=layout.buckets, bitorder="little")
    return bits.T.astype(np.uint64)


def deal(bits_0: Vector, bits_1: Vector, dealt_0: Vector) -> Vector:
    """Run by party 2: e1 = (o₀ ⊕ o₁) − e0."""
    return subtract(bits_0 ^ bits_1, dealt_0)


def turn(bits_2: Vector, dealt: Vector, drawn: Vector) -> Vector:
    """Run by parties 0 and 1: Σ_j φ_j·e_j, less what the other holder of it has drawn."""
    return subtract(total(signed_places(bits_2, dealt)), drawn)


def signed_places(bits_2: Vector, values: Vector) -> Vector:
    """φ_j·v_j. Multiplying by 2^j modulo 2^61 − 1 is a rotation, so nothing is multiplied."""
    places = np.arange(bits_2.shape[1], dtype=np.uint64)
    rotated = (values << places & _P) | values >> (_FIELD_BITS - places)
    # φ is negative for a set bit, and the other way round in the last place, whose weight is −2^L.
    negative = bits_2.astype(bool)
    negative[:, -1] ^= True
    return reduce(np.where(negative, _P - rotated, rotated))


def own_value(bits_2: Vector) -> Vector:
    """Σ_j w_j·o₂,j, below 2^53 in size."""
    weights = 1 << np.arange(bits_2.shape[1], dtype=np.int64)
    weights[-1] *= -1
    return np.mod(bits_2.astype(np.int64) @ weights, P).astype(np.uint64)


def components(party: int, held: Held) -> dict[int, Vector]:
    """The two components of the noise that a party ends with, by the party that lacks each."""
    known: dict[int, Vector] = {}
    if party != 0:
        known[0] = held[Value.SPLIT_0]
    if party != 1:
        known[1] = held[Value.TURNED_1]
    if party != DEALER:
        known[2] = add(add(own_value(held[Value.BITS_2]), held[Value.TURNED_2]), held[Value.SPLIT_2])
    return known


def weights_for(prover: int, layout: Layout, stream: Stream) -> Vector:
    """ρ: one for each of the dealer's numbers, or one for each bucket; as a column, to be spread over its bits."""
    if prover == DEALER:
        return stream.elements(layout.numbers).reshape(layout.buckets, layout.bits)
    return stream.elements(layout.buckets).reshape(layout.buckets, 1)


def left_numbers(prover: int, weights: Vector, held: Held) -> Vector:
    """Run by a prover and its left verifier.

    The relations are, for prover 2, e0 + e1 = o₀ + o₁ − 2·o₀·o₁ in every bit; for prover 0, a1 + a2 = Σ_j φ_j·e1_j in
    every bucket; for prover 1, b0 + b2 = Σ_j φ_j·e0_j in every bucket.
    """
    if prover == DEALER:
        return _selected(held[Value.BITS_0], _doubled(weights))
    if prover == following(DEALER):
        return held[Value.DEALT_1]
    return signed_places(held[Value.BITS_2], weights)


def right_numbers(prover: int, weights: Vector, held: Held) -> Vector:
    """Run by a prover and its right verifier."""
    if prover == DEALER:
        return held[Value.BITS_1]
    if prover == following(DEALER):
        return signed_places(held[Value.BITS_2], weights)
    return held[Value.DEALT_0]


def left_total(prover: int, weights: Vector, held: Held) -> int:
    """Run by the left verifier."""
    if prover == DEALER:
        return _weighed(weights, subtract(held[Value.BITS_0], held[Value.DEALT_0]))
    return _weighed(weights, held[Value.TURNED_1 if prover == following(DEALER) else Value.SPLIT_2])


def right_total(prover: int, weights: Vector, held: Held) -> int:
    """Run by the right verifier."""
    if prover == DEALER:
        return _weighed(weights, subtract(held[Value.BITS_1], held[Value.DEALT_1]))
    return _weighed(weights, held[Value.TURNED_2 if prover == following(DEALER) else Value.SPLIT_0])


def _selected(bits: Vector, values: Vector) -> Vector:
    return np.where(bits.astype(bool), values, np.uint64(0))


def _doubled(values: Vector) -> Vector:
    return reduce(values << _ONE)


def _weighed(weights: Vector, values: Vector) -> int:
    return int(dot(weights.reshape(-1), values.reshape(-1)))
