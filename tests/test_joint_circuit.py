"""The circuit of a bucket's coins, exhaustively where it is small, and what it refuses. No test can fail by chance."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mpc_helpers.mpc.joint import circuit, conversion
from mpc_helpers.mpc.joint.layout import Layout
from protocol.errors import TrefoilError
from protocol.joint_scale import Coin, JointScale


def built(*coins: Coin) -> circuit.Circuit:
    return circuit._Builder(coins).circuit()


def tapes(bits: int) -> circuit.Words:
    """All 2^bits inputs, one in each lane."""
    lanes = np.arange(1 << bits)
    columns = [np.packbits(lanes >> (bits - 1 - place) & 1, bitorder="little") for place in range(bits)]
    padded = [np.concatenate([column, np.zeros(-column.size % 8, dtype=np.uint8)]) for column in columns]
    return np.array([column.view("<u8") for column in padded], dtype=np.uint64)


@pytest.mark.parametrize("bits", range(1, 11))
def test_every_coin_on_every_tape(bits: int) -> None:
    """True on exactly `numerator` of 2^bits tapes, and on those that the definition says."""
    inputs = tapes(bits)
    for numerator in range(1, 1 << bits, 2):
        # Only the sign: its output is the coin itself.
        found = circuit.evaluate(built(Coin(bits, numerator)), inputs)
        values = np.unpackbits(found[0].view(np.uint8), bitorder="little")[: 1 << bits]
        assert values.sum() == numerator
        assert values.tolist() == [int(_comparison(tape, bits, numerator)) for tape in range(1 << bits)]


def _comparison(tape: int, bits: int, numerator: int) -> bool:
    """The definition: at the first f_i = 0 the coin is c_i; if there is none it is 0."""
    for place in reversed(range(bits)):
        if not tape >> place & 1:
            return bool(numerator >> place & 1)
    return False


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 79])
def test_depth_is_the_logarithm_of_the_bits(bits: int) -> None:
    assert built(Coin(bits, 1)).depth == (bits - 1).bit_length()


# Bits, gates and depth of the scales that documents name.
SIZES = [
    (Fraction(16), 1, 111, 116, 6),
    (Fraction(1), 1, 155, 166, 6),
    (Fraction(1, 10), 10, 263, 273, 7),
    (Fraction(1, 100), 100, 285, 308, 6),
    (Fraction(1, 1000), 1000, 345, 367, 6),
    (Fraction(1, 65536), 65536, 556, 591, 6),
    (Fraction(1, 2**40), 2**40, 2019, 2196, 7),
]


@pytest.mark.parametrize(("rate", "change", "inputs", "gates", "depth"), SIZES)
def test_sizes(rate: Fraction, change: int, inputs: int, gates: int, depth: int) -> None:
    found = circuit.build(JointScale.of(rate, change))
    assert (found.inputs, found.gates, found.depth) == (inputs, gates, depth)
    assert sum(layer.left.size for layer in found.layers) == gates


@pytest.mark.parametrize(("rate", "change"), [(Fraction(16), 1), (Fraction(3, 2), 4), (Fraction(1, 100), 100)])
def test_a_bucket_is_its_digits_turned_by_its_sign(rate: Fraction, change: int) -> None:
    """Against the coins read off the same tapes one by one, without a circuit."""
    scale = JointScale.of(rate, change)
    layout = Layout(circuit.build(scale), 130)
    bits = np.random.default_rng(9).integers(0, 2**64, size=(layout.circuit.inputs, layout.words), dtype=np.uint64)
    planes = circuit.evaluate(layout.circuit, bits)
    found = conversion.own_value(conversion.unpacked(layout, planes))
    for bucket in range(layout.buckets):
        tape = [int(word) >> (bucket % 64) & 1 for word in bits[:, bucket // 64]]
        values = []
        for coin in scale.coins:
            own, tape = tape[: coin.bits], tape[coin.bits :]
            values.append(_comparison(int("".join(map(str, own)), 2), coin.bits, coin.numerator))
        magnitude = sum(1 << place for place, digit in enumerate(values[:-1]) if digit)
        assert int(found[bucket]) == (-1 - magnitude if values[-1] else magnitude) % (2**61 - 1)


def test_too_many_gates_are_refused_with_what_to_do() -> None:
    scale = JointScale.of(Fraction(1, 100), 100)
    # 308 gates: 3,404 words of 64 buckets are the most.
    most = circuit.MAX_GATE_WORDS // 308
    assert most * 308 <= 2**20 < (most + 1) * 308
    circuit.check_size(scale, 64 * most)
    with pytest.raises(
        TrefoilError, match=r"217857 buckets .* take 1048740 words of gates; 1048576 is the most"
    ) as caught:
        circuit.check_size(scale, 64 * most + 1)
    assert "fewer buckets" in caught.value.hint


def test_equal_scales_are_built_once() -> None:
    assert circuit.build(JointScale.of(Fraction(1, 9), 1)) is circuit.build(JointScale.of(Fraction(1, 9), 1))
