"""Arithmetic over p = 2^61 − 1 against Python's integers, and shares: any two helpers reconstruct, one sees noise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from protocol import field
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import MAX_INNER, P, Vector, multiply_matrices
from protocol.shares import LACKING, PARTIES, SEEDS_OF, component, open_shamir, reconstruct, share, to_shamir
from tests.support import protocol_samples as samples
from tests.support.raising import raises

ELEMENTS = st.one_of(st.integers(0, P - 1), st.sampled_from([0, 1, P // 2, P // 2 + 1, P - 2, P - 1]))
WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, P - 1, P, P + 1, 2 * P, 2**61, 2**64 - 1]))


def vector(values: list[int]) -> field.Vector:
    return np.array(values, dtype=np.uint64)


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_reduce_is_the_remainder_of_any_word(words: list[int]) -> None:
    assert field.reduce(vector(words)).tolist() == [word % P for word in words]


@given(st.lists(st.tuples(ELEMENTS, ELEMENTS), min_size=1, max_size=20))
def test_add_and_subtract_agree_with_integers(pairs: list[tuple[int, int]]) -> None:
    left, right = vector([a for a, _ in pairs]), vector([b for _, b in pairs])
    assert field.add(left, right).tolist() == [(a + b) % P for a, b in pairs]
    assert field.subtract(left, right).tolist() == [(a - b) % P for a, b in pairs]


@given(st.lists(ELEMENTS, min_size=1, max_size=10), st.integers(0, P - 1))
def test_multiplying_by_a_constant_agrees_with_integers(values: list[int], constant: int) -> None:
    assert field.multiply_constant(vector(values), constant).tolist() == [v * constant % P for v in values]


@given(st.lists(st.tuples(ELEMENTS, ELEMENTS, ELEMENTS), min_size=1))
def test_sum_of_rows_agrees_with_integers(rows: list[tuple[int, int, int]]) -> None:
    expected = [sum(column) % P for column in zip(*rows, strict=True)]
    assert field.sum_rows(np.array(rows, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 2**15 - 1, 2**15, 2**15 + 1, 100_000])
def test_sum_of_many_rows_of_the_largest_element(count: int) -> None:
    """Eight rows of p − 1 pass 2^64, and 2^15 words fill a block."""
    rows = np.full((count, 1), P - 1, dtype=np.uint64)
    assert field.sum_rows(rows).tolist() == [count * (P - 1) % P]


def test_sum_of_rows_over_several_blocks_and_columns() -> None:
    rows = np.random.default_rng(5).integers(0, P, size=(700, 129), dtype=np.uint64)
    expected = [sum(column) % P for column in rows.T.tolist()]
    assert field.sum_rows(rows).tolist() == expected
    assert field.sum_rows(rows[:, :0]).tolist() == []


@given(st.lists(st.tuples(ELEMENTS, ELEMENTS, ELEMENTS), min_size=1))
def test_totals_and_inner_products_agree_with_integers(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, dtype=np.uint64).T
    assert field.total(columns).tolist() == [sum(column) % P for column in columns.tolist()]
    first, second = columns[0].tolist(), columns[1].tolist()
    assert int(field.dot(columns[0], columns[1])) == sum(a * b for a, b in zip(first, second, strict=True)) % P


def test_totals_of_the_largest_element_and_of_nothing() -> None:
    assert int(field.total(np.full(10**6, P - 1, dtype=np.uint64))) == (P - 1) * 10**6 % P
    assert field.total(np.zeros((2, 0), dtype=np.uint64)).tolist() == [0, 0]


def test_lift_turns_sign_just_above_half_of_p() -> None:
    assert field.lift(vector([0, 1, P // 2, P // 2 + 1, P - 1])) == [0, 1, P // 2, -(P // 2), -1]


@given(st.lists(st.integers(-(P // 2), P // 2)))
def test_lift_reverses_from_integers(values: list[int]) -> None:
    assert field.lift(field.from_integers(values)) == values


@given(st.lists(ELEMENTS))
def test_decode_reverses_encode(values: list[int]) -> None:
    assert field.decode(field.encode(vector(values)), len(values)).tolist() == values


@given(st.binary(max_size=64), st.integers(0, 9))
def test_what_decodes_encodes_to_the_same_bytes(data: bytes, count: int) -> None:
    try:
        decoded = field.decode(data, count)
    except ProtocolError:
        return
    assert field.encode(decoded) == data


@pytest.mark.parametrize("element", [P, P + 1, 2**64 - 1])
def test_decode_refuses_elements_outside_the_field(element: int) -> None:
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        field.decode(bytes(8) + element.to_bytes(8, "little"), 2)


def test_decode_refuses_another_length() -> None:
    for size in (0, 7, 9, 15, 17):
        with raises(ErrorKind.MALFORMED, ProtocolError):
            field.decode(bytes(size), 1)


def keystream(seed: bytes, words: int) -> list[int]:
    """The same stream by another interface: AES-128-CTR from counter block nonce ‖ 2."""
    encryptor = Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:28] + (2).to_bytes(4, "big"))).encryptor()
    data = encryptor.update(bytes(8 * words))
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


@given(st.binary(min_size=32, max_size=32), st.integers(0, 70))
def test_expansion_is_the_top_61_bits_of_aes_ctr(seed: bytes, count: int) -> None:
    assert field.expand(seed, count).tolist() == [word >> 3 for word in keystream(seed, count)]


def test_expanding_many_is_expanding_each() -> None:
    seeds = [bytes([index]) * 32 for index in range(5)]
    rows = field.expand_many(seeds, 33)
    assert [row.tolist() for row in rows] == [field.expand(seed, 33).tolist() for seed in seeds]
    assert field.expand_many([], 33).shape == (0, 33)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_sum_of_expansions_is_the_sum_of_each(count: int) -> None:
    """256 rows of 128 elements fill a block, whose memory is then used again."""
    seeds = [index.to_bytes(32, "big") for index in range(count)]
    total = field.RowSum(128)
    for rows in field.expansions(seeds, 128):
        total.add(rows)
    assert total.reduced().tolist() == field.sum_rows(field.expand_many(seeds, 128)).tolist()


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_seed_of_another_size_is_refused(size: int) -> None:
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        field.expand(bytes(size), 4)


def test_words_that_give_p_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path taken once in 2^61 words: the words after a rejected one move up, in one row and not its neighbour."""
    unlucky, lucky = b"u" * 32, b"l" * 32

    def planted(seed: bytes, zeros: bytes, out: memoryview | bytearray) -> None:
        words = [index << 3 for index in range(len(zeros) // 8)]
        if seed == unlucky:
            for at in (0, 3, 4, 7, 9):
                words[at : at + 1] = [2**64 - 8] if at < len(words) else []
        out[:] = b"".join(word.to_bytes(8, "little") for word in words) + bytes(16)

    monkeypatch.setattr(field, "_keystream", planted)
    rows = field.expand_many([lucky, unlucky, lucky], 8)
    assert rows[0].tolist() == rows[2].tolist() == list(range(8))
    assert rows[1].tolist() == [1, 2, 5, 6, 8, 10, 11, 12]
    assert int(rows.max()) < P
    (both,) = field.expansions([lucky, unlucky], 8)
    assert both.tolist() == rows[:2].tolist()


def test_rejection_goes_on_until_enough_words_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(_: bytes, zeros: bytes, out: memoryview | bytearray) -> None:
        words = [2**64 - 1] * min(40, len(zeros) // 8) + [index << 3 for index in range(40, len(zeros) // 8)]
        out[:] = b"".join(word.to_bytes(8, "little") for word in words) + bytes(16)

    monkeypatch.setattr(field, "_keystream", planted)
    assert field.expand(bytes(32), 3).tolist() == [40, 41, 42]


def test_expansion_is_uniform() -> None:
    """Chi-square over 256 equal ranges of the field, 2^18 elements from a fixed seed, both of the top and low bits.

    The seed is fixed, so it passes or fails for good; for a fresh one the false-failure probability is below 1e-6:
    chi-square with 255 degrees of freedom is above 390 with probability 1.1e-7, and there are two.
    """
    elements = field.expand(b"uniformity".ljust(32), 2**18)
    for cells in (elements >> np.uint64(53), elements & np.uint64(255)):
        counts = np.bincount(cells.astype(np.int64), minlength=256)
        expected = elements.size / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < 390


@given(st.lists(st.tuples(ELEMENTS, ELEMENTS), min_size=1, max_size=20))
def test_products_agree_with_integers(pairs: list[tuple[int, int]]) -> None:
    left, right = vector([a for a, _ in pairs]), vector([b for _, b in pairs])
    assert field.multiply(left, right).tolist() == [a * b % P for a, b in pairs]


@pytest.mark.parametrize("size", [0, 1, 2**13 - 1, 2**13, 2**13 + 1, 20_000])
def test_products_of_the_largest_elements_in_every_block(size: int) -> None:
    largest = np.full(size, P - 1, dtype=np.uint64)
    assert field.multiply(largest, largest).tolist() == [1] * size


def test_products_broadcast() -> None:
    rows = np.random.default_rng(7).integers(0, P, size=(3, 5, 4), dtype=np.uint64)
    factors = np.random.default_rng(8).integers(0, P, size=(5, 1), dtype=np.uint64)
    product = field.multiply(rows, factors)
    assert product.shape == rows.shape
    assert product[2, 4, 3] == int(rows[2, 4, 3]) * int(factors[4, 0]) % P
    assert field.multiply(rows[:, ::2], rows[:, ::2]).tolist() == field.multiply(rows, rows)[:, ::2].tolist()


def test_products_broadcast_alike_whether_they_are_few_or_many() -> None:
    """Few are computed at once and without copies, many block by block."""
    column = np.random.default_rng(9).integers(0, P, size=(2**14 + 1, 1), dtype=np.uint64)
    row = np.random.default_rng(10).integers(0, P, size=3, dtype=np.uint64)
    many = field.multiply(column, row)
    assert many[:100].tolist() == field.multiply(column[:100], row).tolist()
    assert [int(many[-1, at]) for at in range(3)] == [int(column[-1, 0]) * int(row[at]) % P for at in range(3)]
    assert int(field.multiply(column[0, 0], row[1])) == int(many[0, 1])
    assert field.multiply(column[:0], row).shape == (0, 3)


@given(st.lists(st.integers(1, P - 1), max_size=40))
def test_inverses_agree_with_integers(values: list[int]) -> None:
    assert field.inverse(vector(values)).tolist() == [pow(value, -1, P) for value in values]


@pytest.mark.parametrize("size", [255, 256, 257, 1000, 1025])
def test_inverses_of_many(size: int) -> None:
    values = np.random.default_rng(size).integers(1, P, size=size, dtype=np.uint64)
    assert (field.multiply(values, field.inverse(values)) == 1).all()


def test_inverses_keep_the_shape_and_zero_has_none() -> None:
    values = np.arange(1, 31, dtype=np.uint64).reshape(2, 3, 5)
    assert (field.multiply(values, field.inverse(values)) == 1).all()
    values[1, 2, 3] = 0
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        field.inverse(values)


def by_integers(left: Vector, right: Vector) -> list[list[int]]:
    columns = list(zip(*right.tolist(), strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) % P for column in columns] for row in left.tolist()]


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32))
def test_matrix_products_agree_with_integers(rows: int, inner: int, columns: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    left = draw.integers(0, P, size=(rows, inner), dtype=np.uint64)
    right = draw.integers(0, P, size=(inner, columns), dtype=np.uint64)
    assert multiply_matrices(left, right).tolist() == by_integers(left, right)


@pytest.mark.parametrize("element", [P - 1, 2**42 - 1, 2**61 - 2**42 - 1, 2**21 - 1])
@pytest.mark.parametrize("inner", [1, MAX_INNER - 1, MAX_INNER, MAX_INNER + 1, 3 * MAX_INNER])
@pytest.mark.parametrize("left_word", [None, 2**64 - 1])
def test_the_largest_limbs_add_up_exactly(element: int, inner: int, left_word: int | None) -> None:
    """Limbs of all ones, as many of them as may meet; one unit lost anywhere would show."""
    left = np.full((2, inner), element if left_word is None else left_word, dtype=np.uint64)
    right = np.full((inner, 3), element, dtype=np.uint64)
    right[0, 0] -= np.uint64(1)
    assert multiply_matrices(left, right).tolist() == by_integers(left, right)


def test_stacks_are_multiplied_one_by_one() -> None:
    draw = np.random.default_rng(11)
    left = draw.integers(0, P, size=(4, 2, 33), dtype=np.uint64)
    right = draw.integers(0, P, size=(4, 33, 2), dtype=np.uint64)
    product = multiply_matrices(left, right)
    assert [matrix.tolist() for matrix in product] == [by_integers(a, b) for a, b in zip(left, right, strict=True)]
    shared = multiply_matrices(left, right[0])
    assert shared[3].tolist() == by_integers(left[3], right[0])


VALUES = st.lists(st.integers(-(P // 2), P // 2), min_size=1, max_size=12)
LABELS = st.text(max_size=8)
# P(chi-square with 15 degrees of freedom > 70) is below 5e-9; the tests below look at 37 of them.
UNIFORM_LIMIT = 70.0


def shamir_shares(values: list[int], label: str) -> list[field.Vector]:
    shared = share(values, entropy=samples.entropy(label))
    return [to_shamir(party, shared.components(party)) for party in range(PARTIES)]


def test_every_component_is_lacking_at_exactly_one_helper() -> None:
    for party in range(PARTIES):
        assert {*SEEDS_OF[party], LACKING[party]} == {0, 1, 2}
    assert sorted(LACKING) == [0, 1, 2]


@given(VALUES, LABELS, st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_any_two_helpers_reconstruct(values: list[int], label: str, pair: tuple[int, int]) -> None:
    shared = share(values, entropy=samples.entropy(label))
    known = {**shared.components(pair[0]), **shared.components(pair[1])}
    assert reconstruct([known[index] for index in range(PARTIES)]) == values


@pytest.mark.parametrize("secret", [0, 1, P // 2, -1])
def test_one_helpers_view_is_uniform_whatever_the_secret(secret: int) -> None:
    """Chi-square over 2,048 fresh sharings of the same secret: each component a helper knows over 16 ranges, and the
    two together over 4 by 4, for two components that are alike would each look uniform alone.

    False-failure probability: 36 statistics, each above its limit with probability below 5e-9, together below 1e-6.
    """
    shared = [share([secret], entropy=samples.entropy(f"view {index}")) for index in range(2048)]
    for party in range(PARTIES):
        views = [one.components(party) for one in shared]
        first, second = ([int(view[index][0]) for view in views] for index in SEEDS_OF[party])
        together = [4 * (one * 4 // P) + two * 4 // P for one, two in zip(first, second, strict=True)]
        assert unevenness([one * 16 // P for one in first]) < UNIFORM_LIMIT
        assert unevenness([two * 16 // P for two in second]) < UNIFORM_LIMIT
        assert unevenness(together) < UNIFORM_LIMIT


def unevenness(cells: list[int]) -> float:
    """The chi-square statistic of counts in 16 cells that should be equal: 15 degrees of freedom."""
    expected = len(cells) / 16
    counts = np.bincount(cells, minlength=16)
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_body_alone_is_uniform() -> None:
    """Same limit: the body is seen by everyone, the querier included. One statistic, below 5e-9."""
    bodies = [int(share([7], entropy=samples.entropy(f"body {index}")).body[0]) for index in range(2048)]
    assert unevenness([body * 16 // P for body in bodies]) < UNIFORM_LIMIT


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)), min_size=1, max_size=5))
def test_sum_of_shares_is_share_of_sum(histograms: list[tuple[int, int]]) -> None:
    shared = [share(values, entropy=samples.entropy(f"sum {index}")) for index, values in enumerate(histograms)]
    expected = [sum(column) for column in zip(*histograms, strict=True)]
    shares = []
    for party in range(PARTIES):
        views = [one.components(party) for one in shared]
        sums = {index: field.sum_rows(np.stack([view[index] for view in views])) for index in SEEDS_OF[party]}
        shares.append(to_shamir(party, sums))
        added_late = field.sum_rows(np.stack([to_shamir(party, view) for view in views]))
        assert shares[party].tolist() == added_late.tolist()
    assert open_shamir(shares) == expected


@pytest.fixture(scope="module")
def mpyc_recombine() -> Callable[[list[tuple[int, list[int]]]], list[int]]:
    """MPyC's own interpolation at zero. Importing it reads the command line, so that is blanked."""
    with patch.object(sys, "argv", [""]):
        from mpyc import finfields, thresha

    gf: Any = finfields.GF(P)

    def recombine(points: list[tuple[int, list[int]]]) -> list[int]:
        return [int(value) for value in thresha.recombine(gf, points)]

    return recombine


@given(values=VALUES, label=LABELS)
def test_shamir_conversion_agrees_with_mpyc(
    mpyc_recombine: Callable[[list[tuple[int, list[int]]]], list[int]], values: list[int], label: str
) -> None:
    points = [(party + 1, vector.tolist()) for party, vector in enumerate(shamir_shares(values, label))]
    expected = [value % P for value in values]
    for chosen in (points, points[:2], points[1:], [points[0], points[2]]):
        assert [value % P for value in mpyc_recombine(chosen)] == expected


@given(VALUES, LABELS)
def test_conversion_is_the_formula_of_the_design(values: list[int], label: str) -> None:
    """Σ_{k≠i} x_k·(1 − (i+1)/(k+1)), where x_k is the component that party k lacks."""
    shared = share(values, entropy=samples.entropy(label))
    for party in range(PARTIES):
        view = shared.components(party)
        expected = [0] * len(values)
        for other in range(PARTIES):
            if other != party:
                weight = 1 - (party + 1) * pow(other + 1, -1, P)
                lacked = view[LACKING[other]].tolist()
                expected = [(total + x * weight) % P for total, x in zip(expected, lacked, strict=True)]
        assert to_shamir(party, view).tolist() == expected


@given(VALUES, LABELS, st.integers(0, 2), st.integers(1, P - 1), st.data())
def test_any_single_changed_share_is_caught(
    values: list[int], label: str, party: int, change: int, data: st.DataObject
) -> None:
    shares = shamir_shares(values, label)
    assert open_shamir(shares) == values
    bucket = data.draw(st.integers(0, len(values) - 1))
    shares[party][bucket] = (int(shares[party][bucket]) + change) % P
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        open_shamir(shares)


def test_opening_needs_three_shares_of_one_length() -> None:
    shares = shamir_shares([1, 2], "lengths")
    for wrong in (shares[:2], [*shares, shares[0]], [shares[0], shares[1], shares[2][:1]], []):
        with raises(ErrorKind.INVALID_VALUE, ProtocolError):
            open_shamir(wrong)


def test_the_third_component_needs_the_body() -> None:
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        component(2, bytes(32), 4, None)


def test_seeds_do_not_show_in_the_representation() -> None:
    shared = share([1], entropy=lambda size: b"\xab" * size)
    assert "ab" not in repr(shared).replace("array", "").replace("SharedVector", "")
