"""What joint noise is built from: circuit, streams, proof, and the stored vectors of SPEC §11. Nothing fails by chance.

The circuit is run on every tape where it is small; streams are compared with the specification written out; the algebra
of the proof with polynomials of Python integers; vectors with what the code makes now and what follows without it.
"""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mpc_helpers.mpc.joint import circuit, noise, proof
from mpc_helpers.mpc.joint.circuit import Words
from mpc_helpers.mpc.joint.layout import FIELD_ROWS, Layout, PairStreams, Purpose, Stream
from mpc_helpers.mpc.joint.proof import Half
from mpc_helpers.mpc.session import MpcSession
from protocol.errors import ErrorKind, TrefoilError
from protocol.field import P, Vector, dot
from protocol.joint_scale import Coin, JointScale
from tests.support import make_vectors
from tests.support.joint_trio import evaluate, layout_of
from tests.support.raising import raises

# The circuit of a bucket's coins.


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
        outputs = evaluate(built(Coin(bits, numerator)), inputs)
        values = np.unpackbits(outputs[0].view(np.uint8), bitorder="little")[: 1 << bits]
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
    built_circuit = circuit.build(JointScale.of(rate, change))
    assert (built_circuit.inputs, built_circuit.gates, built_circuit.depth) == (inputs, gates, depth)
    assert sum(layer.left.size for layer in built_circuit.layers) == gates


@pytest.mark.parametrize(("rate", "change"), [(Fraction(16), 1), (Fraction(3, 2), 4), (Fraction(1, 100), 100)])
def test_a_bucket_is_its_digits_turned_by_its_sign(rate: Fraction, change: int) -> None:
    """Against the coins read off the same tapes one by one, without a circuit."""
    scale = JointScale.of(rate, change)
    layout = Layout(circuit.build(scale), 130)
    bits = np.random.default_rng(9).integers(0, 2**64, size=(layout.circuit.inputs, layout.words), dtype=np.uint64)
    planes = evaluate(layout.circuit, bits)
    numbers = noise.own_value(noise.unpacked(layout, planes))
    for bucket in range(layout.buckets):
        tape = [int(word) >> (bucket % 64) & 1 for word in bits[:, bucket // 64]]
        values = []
        for coin in scale.coins:
            own, tape = tape[: coin.bits], tape[coin.bits :]
            values.append(_comparison(int("".join(map(str, own)), 2), coin.bits, coin.numerator))
        magnitude = sum(1 << place for place, digit in enumerate(values[:-1]) if digit)
        assert int(numbers[bucket]) == (-1 - magnitude if values[-1] else magnitude) % (2**61 - 1)


def test_too_many_gates_are_refused_with_what_to_do() -> None:
    scale = JointScale.of(Fraction(1, 100), 100)
    # 308 gates: 3,404 words of 64 buckets are the most.
    most = circuit.MAX_GATE_WORDS // 308
    assert most * 308 <= 2**20 < (most + 1) * 308
    circuit.check_size(scale, 64 * most)
    with raises(ErrorKind.TOO_LARGE, TrefoilError) as caught:
        circuit.check_size(scale, 64 * most + 1)
    assert all(number in str(caught.value) for number in ("217857", "1048740", "1048576"))


def test_equal_scales_are_built_once() -> None:
    assert circuit.build(JointScale.of(Fraction(1, 9), 1)) is circuit.build(JointScale.of(Fraction(1, 9), 1))


# What two parties draw in common: apart for every purpose, pair, session and parameter.


KEY = bytes(range(16))


def session(digest: bytes = b"s" * 32, parameters: bytes = b"p") -> MpcSession:
    return MpcSession(0, digest, parameters, 9, 20.0)


def specified(purpose: str, key: bytes, of: MpcSession, lacking: int, size: int) -> bytes:
    """SPEC §11, written out."""
    label = f"trefoil/1 joint noise: {purpose}".encode()
    data = len(label).to_bytes(2, "big") + label
    for part in (key, of.attempt_id, of.parameter_digest, bytes([lacking])):
        data += len(part).to_bytes(8, "big") + part
    return Cipher(algorithms.AES(sha256(data).digest()), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def test_a_stream_is_the_keystream_of_the_specification() -> None:
    for purpose in Purpose:
        stream = PairStreams(KEY, session(), 2).open(purpose)
        raw = specified(purpose.value, KEY, session(), 2, 64)
        assert stream.take(8) == raw[:8]
        assert stream.words(2, 2).tolist() == [
            [int.from_bytes(raw[at : at + 8], "little") for at in (8, 16)],
            [int.from_bytes(raw[at : at + 8], "little") for at in (24, 32)],
        ]
        assert stream.elements(3).tolist() == [int.from_bytes(raw[at : at + 8], "little") >> 3 for at in (40, 48, 56)]


def test_no_two_streams_are_the_same() -> None:
    seen = set()
    for key, purpose, lacking in itertools.product((KEY, bytes(16)), Purpose, range(3)):
        for of in (session(), session(b"t" * 32), session(parameters=b"q")):
            seen.add(PairStreams(key, of, lacking).open(purpose).take(16))
    assert len(seen) == 2 * len(Purpose) * 3 * 3


class Fixed(Stream):
    """A keystream that is given."""

    def __init__(self, words: list[int]) -> None:
        self.data = b"".join(word.to_bytes(8, "little") for word in words)

    def take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        assert len(taken) == size
        return taken


def test_a_word_that_gives_p_is_left_out() -> None:
    """Never met in practice: once in 2^61 words."""
    p = P << 3
    assert Fixed([8, p | 7, 16, p, p, 24]).elements(3).tolist() == [1, 2, 3]
    assert Fixed([p, 0, 7, 8]).nonzero() == 1
    assert Fixed([8]).elements(0).size == 0


def test_elements_are_below_p() -> None:
    drawn = Stream(bytes(32)).elements(1000)
    assert drawn.dtype == np.uint64 and int(drawn.max()) < P


# The proof.


HADAMARD = [[(-1) ** (k & j).bit_count() for j in range(4)] for k in range(4)]


def unit(code: int) -> list[int]:
    vector = [0, 0, 0, 0]
    vector[code & 3] = -1 if code & 4 else 1
    return vector


def test_a_lifted_gate_is_one_if_it_is_right_and_minus_one_if_it_is_wrong() -> None:
    for a, b, c, d, s_left, s_right in itertools.product((0, 1), repeat=6):
        u, w = unit(a + 2 * c + 4 * s_left), unit(b + 2 * d + 4 * s_right)
        v = [sum(x * y for x, y in zip(row, w, strict=True)) for row in HADAMARD]
        right = (s_left ^ s_right ^ a & b ^ c & d) == 0
        assert sum(x * y for x, y in zip(u, v, strict=True)) == (1 if right else -1)


class Example:
    """Random halves: nothing in the algebra needs the gates to be right."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self._pick = np.random.default_rng(seed)
        self.left = Half.of(layout, self.words(), self.words(), self.words(), self.elements(layout.numbers))
        self.right = Half.of(layout, self.words(), self.words(), self.words(), self.elements(layout.numbers))
        self.left_mask, self.right_mask = self.elements(layout.folded), self.elements(layout.folded)
        self.point = int(self.elements(1)[0])

    def words(self) -> Words:
        shape = (self.layout.circuit.gates, self.layout.words)
        return self._pick.integers(0, 2**64, size=shape, dtype=np.uint64)

    def elements(self, count: int) -> Vector:
        return self._pick.integers(0, P, size=count, dtype=np.uint64)

    def rows(self, half: Half, *, hadamard: bool) -> list[list[int]]:
        """Every row as a vector of the folded length, lane by lane."""
        vectors_of_rows = []
        for row, codes in enumerate(half.codes(slice(None)).tolist()):
            vectors = [unit(code) for code in codes]
            if hadamard:
                vectors = [[sum(h * x for h, x in zip(line, w, strict=True)) for line in HADAMARD] for w in vectors]
            numbers = half.numbers[row].tolist() if row < FIELD_ROWS else [0] * self.layout.field_columns
            vectors_of_rows.append([x for vector in vectors for x in vector] + numbers)
        return vectors_of_rows


TINY = layout_of(Fraction(16), 1, 3)


@pytest.fixture(scope="module")
def example() -> Example:
    return Example(TINY, 5)


def test_the_layout_of_words_in_rows() -> None:
    layout = layout_of(Fraction(16), 1, 70)
    words = np.arange(1, layout.gate_words + 1, dtype=np.uint64)
    half = Half.of(layout, words, words, words, np.arange(1, layout.numbers + 1, dtype=np.uint64))
    for n in range(layout.rows * layout.columns):
        assert int(half.first[n // layout.columns, n % layout.columns]) == (n + 1 if n < layout.gate_words else 0)
    for n in range(FIELD_ROWS * layout.field_columns):
        expected = n + 1 if n < layout.numbers else 0
        assert int(half.numbers[n // layout.field_columns, n % layout.field_columns]) == expected


def test_codes_are_lane_by_lane(example: Example) -> None:
    codes = example.left.codes(slice(1, 3))
    for row, lane in ((0, 0), (0, 63), (1, 7), (1, example.layout.lanes - 1)):
        planes = (example.left.first, example.left.second, example.left.sign)
        bits = [int(plane[1 + row, lane // 64]) >> (lane % 64) & 1 for plane in planes]
        assert int(codes[row, lane]) == bits[0] + 2 * bits[1] + 4 * bits[2]


def test_coefficients_are_those_of_the_product_of_both_polynomials(example: Example) -> None:
    rows = example.layout.rows
    u = [*example.rows(example.left, hadamard=False), example.left_mask.tolist()]
    v = [example.right_mask.tolist(), *example.rows(example.right, hadamard=True)]
    expected = dict.fromkeys(range(1 - rows, rows + 2), 0)
    for (i, left), (j, right) in itertools.product(enumerate(u), enumerate(v)):
        # u_r stands at X^r and μ at X^M; ν at X and v_r at X^−r.
        expected[i + 1 - j] += sum(x * y for x, y in zip(left, right, strict=True))
    computed = proof.coefficients(example.left, example.right, example.left_mask, example.right_mask)
    assert computed.tolist() == [expected[e] % P for e in range(1 - rows, rows + 2) if e]


def test_folding_is_evaluating_both_polynomials(example: Example) -> None:
    rows, t = example.layout.rows, example.point
    u, v = example.rows(example.left, hadamard=False), example.rows(example.right, hadamard=True)
    left = [
        (sum(row[n] * pow(t, r, P) for r, row in enumerate(u)) + int(example.left_mask[n]) * pow(t, rows, P)) % P
        for n in range(example.layout.folded)
    ]
    right = [
        (sum(row[n] * pow(t, -r, P) for r, row in enumerate(v)) + int(example.right_mask[n]) * t) % P
        for n in range(example.layout.folded)
    ]
    assert proof.fold_left(example.left, example.left_mask, t).tolist() == left
    assert proof.fold_right(example.right, example.right_mask, t).tolist() == right


@pytest.mark.parametrize(
    ("rate", "buckets"),
    [(Fraction(16), 3), (Fraction(1, 100), 129), (Fraction(1, 100), 6000), (Fraction(1, 100), 28_000)],
)
def test_values_at_the_point_agree_with_the_coefficients(rate: Fraction, buckets: int) -> None:
    """In every size for which the work is cut differently, and with 64 and 256 rows."""
    example = Example(layout_of(rate, 1, buckets), buckets)
    sent = proof.coefficients(example.left, example.right, example.left_mask, example.right_mask)
    folded = proof.fold_left(example.left, example.left_mask, example.point)
    own = proof.fold_right(example.right, example.right_mask, example.point)
    planes = zip(
        (example.left.first, example.left.second, example.left.sign),
        (example.right.first, example.right.second, example.right.sign),
        strict=True,
    )
    (a, b), (c, d), (s_left, s_right) = planes
    wrong = int(np.bitwise_count(a & b ^ c & d ^ s_left ^ s_right).sum())
    numbers = sum(int(dot(x, y)) for x, y in zip(example.left.numbers, example.right.numbers, strict=True))
    constant = example.layout.lifted_gates - 2 * wrong + numbers
    at_point = proof.evaluate(sent, example.layout.rows, example.point)
    assert int(dot(folded, own)) == (at_point + constant) % P


def test_rows_by_size() -> None:
    assert layout_of(Fraction(1, 100), 100, 128).rows == 64
    # 2^17 words are 425 words of 308 gates.
    assert layout_of(Fraction(1, 100), 100, 64 * 425).rows == 64
    assert layout_of(Fraction(1, 100), 100, 64 * 426).rows == 256


# The stored vectors.


STORED: dict[str, Any] = json.loads((make_vectors.FOLDER / "joint.json").read_text())


@pytest.mark.parametrize("part", ["parameters", "circuit", "streams", "session"])
def test_the_code_makes_what_is_stored(part: str) -> None:
    made = json.loads(json.dumps(make_vectors.joint_file()))
    assert made[part] == STORED[part]


def test_every_stored_delta_is_that_of_its_own_coins() -> None:
    for vector in STORED["parameters"]:
        *digits, (bits, numerator) = vector["coins"]
        bound, above, equal = 2 ** len(digits) - vector["covered"], Fraction(0), Fraction(1)
        for place in reversed(range(len(digits))):
            chance = Fraction(digits[place][1], 2 ** digits[place][0])
            above += 0 if bound >> place & 1 else equal * chance
            equal *= chance if bound >> place & 1 else 1 - chance
        assert (1 - Fraction(numerator, 2**bits)) * (above + equal) == Fraction(vector["delta"]) < Fraction(1, 2**52)


def test_the_stored_components_add_up_to_the_stored_noise() -> None:
    session = STORED["session"]
    held: dict[str, list[int]] = {}
    for party, components in enumerate(session["components"]):
        assert str(party) not in components
        for lacking, component in components.items():
            assert held.setdefault(lacking, component) == component
    sums = [sum(column) % P for column in zip(*held.values(), strict=True)]
    assert [value - P if value > P // 2 else value for value in sums] == session["noise"]
    assert len(session["messages"]) == 3 * (6 + len(STORED["circuit"]["gates"]))
