"""Joint noise without secrets, once, in the process that workers are forked from.

The first time that AES or a numpy function is used takes longer than all later ones. A worker draws once and ends, so
without this it would pay for every first time. Nothing is kept: zeros in, and what comes out is thrown away.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from mpc_helpers.mpc.joint import circuit, conversion, proof
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.streams import Stream
from protocol.joint_scale import JointScale

_RATE, _CHANGE, _BUCKETS = Fraction(1, 100), 100, 64
_POINT = 2


def rehearse() -> None:
    """Every kind of step that `noise` takes, on zeros."""
    layout = Layout(circuit.build(JointScale.of(_RATE, _CHANGE)), _BUCKETS)
    planes = circuit.evaluate(layout.circuit, Stream(bytes(32)).words(layout.circuit.inputs, layout.words))
    bits = conversion.unpacked(layout, planes)
    mask = Stream(bytes(32)).elements(layout.folded)
    numbers = conversion.signed_places(bits, conversion.deal(bits, bits, np.zeros_like(bits)))
    words = np.zeros((layout.circuit.gates, layout.words), dtype=np.uint64)
    half = proof.Half.of(layout, words, words, words, numbers)
    sent = proof.coefficients(half, half, mask, mask)
    proof.fold_left(half, mask, _POINT)
    proof.fold_right(half, mask, _POINT)
    proof.evaluate(sent, layout.rows, _POINT)
    conversion.own_value(bits)
