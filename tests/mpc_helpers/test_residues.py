"""What helpers compute of checked reports: zero for every valid one, and not for any class of invalid one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.admission.column import NO_ROOT, Block, block_cache_path, block_hash, check_root, fit, preimages
from mpc_helpers.admission.executors import ReportExecutor
from mpc_helpers.admission.residues import points_of_all
from protocol import validity
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.field import P, expand_many
from protocol.header import Header
from protocol.shape import Shape, polynomial
from protocol.validity import deal_numbers, points_of, reconstruct
from tests.support import checked_reports as checked
from tests.support import protocol_samples as samples
from tests.support.checked_reports import check, histogram_of, honest, lying, planes_of, some_histogram
from tests.support.raising import raises

ONE, FEW, SIDE = Shape(16, 0, 100, 1), Shape(16, 0, 100, 4), Shape(16, 6, 100, 1)
MANY = Shape(2100, 0, 100, 1)  # three points
SHAPES = [
    Shape(1, 0, 1, 1),
    Shape(5, 0, 1, 1),
    FEW,
    Shape(9, 0, 7, 7),
    Shape(33, 0, 2**20, 10),
    Shape(16, 0, 2**40, 1),
    SIDE,
    Shape(20, 2**40, 12, 12),
    Shape(400, 0, 1000, 300),  # planes with more coefficients than one matrix product adds up
    MANY,
    Shape(2100, 2, 5, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_valid_reports_have_equal_roots_and_the_right_sum(tmp_path: Path, shape: Shape) -> None:
    histograms = [some_histogram(shape, seed) for seed in range(5)]
    histograms += [[0] * shape.length, [shape.cap] + [0] * (shape.length - 1)]
    made = check(tmp_path, [honest(histogram, shape) for histogram in histograms], shape)
    assert len({one.check_root for one in made.ingested}) == 1
    assert made.zero() == [True] * len(histograms)
    assert samples.opened_sum(made.ingested) == [sum(column) for column in zip(*histograms, strict=True)]


# (what is in the buckets, whose proof it carries)
BAD_NUMBERS: dict[str, tuple[Shape, list[int], list[int]]] = {
    "minus one": (ONE, histogram_of(ONE, b3=-1), histogram_of(ONE)),
    "minus the cap": (ONE, histogram_of(ONE, b3=-100), histogram_of(ONE, b3=100)),
    "one over the cap": (ONE, histogram_of(ONE, b3=101), histogram_of(ONE, b3=100)),
    "huge": (ONE, histogram_of(ONE, b3=2**59), histogram_of(ONE, b3=1)),
    "half of one": (ONE, histogram_of(ONE, b3=checked.half()), histogram_of(ONE, b3=1)),
    "sum over the cap": (FEW, histogram_of(FEW, b1=60, b2=60), histogram_of(FEW, b1=60, b2=40)),
    "plus and minus": (FEW, histogram_of(FEW, b1=150, b2=-50), histogram_of(FEW, b1=100)),
    "a cancelling pair of huge ones": (FEW, histogram_of(FEW, b1=2**59, b2=-(2**59)), histogram_of(FEW)),
    "proof for another bucket": (FEW, histogram_of(FEW, b4=7), histogram_of(FEW, b3=7)),
    "proof for another value": (ONE, histogram_of(ONE, b3=8), histogram_of(ONE, b3=7)),
    "all buckets at the cap": (ONE, [100] * 16, histogram_of(ONE, b0=100)),
    "two where one was paid": (ONE, histogram_of(ONE, b4=3, b5=4), histogram_of(ONE, b4=7)),
    "a rectangle of zero margins": (ONE, histogram_of(ONE, b0=9, b1=-9, b4=-9, b5=9), histogram_of(ONE)),
    "three points, huge": (MANY, histogram_of(MANY, b3=2**59), histogram_of(MANY, b3=1)),
    "three points, minus one": (MANY, histogram_of(MANY, b2099=-1), histogram_of(MANY)),
    "half a side query": (SIDE, histogram_of(SIDE, side=3), histogram_of(SIDE, side=6)),
    "twice the side query": (SIDE, histogram_of(SIDE, side=12), histogram_of(SIDE, side=6)),
    "minus the side query": (SIDE, histogram_of(SIDE, side=-6), histogram_of(SIDE, side=6)),
    "side query paid by buckets": (SIDE, histogram_of(SIDE, side=12), histogram_of(SIDE, b0=1)),
    "bucket and side query even out": (SIDE, histogram_of(SIDE, b0=101, side=-6), histogram_of(SIDE, b0=100)),
    "bucket paid by the side query": (SIDE, histogram_of(SIDE, b3=101), histogram_of(SIDE, b3=100)),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_bad_numbers_leave_residues_and_those_around_them_do_not(tmp_path: Path, name: str) -> None:
    shape, numbers, proven = BAD_NUMBERS[name]
    reports = [honest(some_histogram(shape, seed), shape) for seed in range(4)]
    reports.insert(2, lying(numbers, shape, planes_of(proven, shape)))
    assert check(tmp_path, reports, shape).zero() == [True, True, False, True, True]


def test_a_valid_histogram_that_was_not_foreseen_passes(tmp_path: Path) -> None:
    """Spread says what the coins can always pay. What is checked is sign and sum alone."""
    shape = Shape(16, 0, 7, 2)
    assert shape.planes == ((1, 3), (2, 2))
    report = lying([1, 1, 1, 2] + [0] * 12, shape, [polynomial([1, 2, 3]), polynomial([4, 0])])
    assert check(tmp_path, [report], shape).zero() == [True]


def irreducible(shape: Shape) -> list[list[int]]:
    """(X² − X + c)/c has no root in the field, with the rest of an honest proof."""
    planes = planes_of(histogram_of(shape, b3=7), shape)
    c = next(c for c in range(2, 50) if pow(1 - 4 * c, (P - 1) // 2, P) == P - 1)
    first = [1, -pow(c, -1, P) % P, pow(c, -1, P)]
    return [first + [0] * (len(planes[0]) - 3), *planes[1:]]


def with_root(shape: Shape, root: int) -> list[list[int]]:
    planes = planes_of(histogram_of(shape, b3=7), shape)
    return [polynomial([root] + [0] * (len(planes[0]) - 2)), *planes[1:]]


BAD_PROOFS: dict[str, Callable[[Shape], list[list[int]]]] = {
    "a root that is no bucket": lambda shape: with_root(shape, shape.buckets + 1),
    "a root that is a huge number": lambda shape: with_root(shape, 2**50),
    "roots outside the field": irreducible,
    "planes exchanged": lambda shape: [
        (plane + [0] * 99)[: place.degree + 1]
        for plane, place in zip(planes_of(histogram_of(shape, b3=7), shape)[::-1], shape.planes, strict=True)
    ],
}


@pytest.mark.parametrize("shape", [ONE, Shape(16, 0, 100, 2), MANY], ids=str)
@pytest.mark.parametrize("name", BAD_PROOFS)
def test_bad_proofs_leave_residues(tmp_path: Path, name: str, shape: Shape) -> None:
    right = histogram_of(shape, b3=7)
    reports = [lying(right, shape, BAD_PROOFS[name](shape)), honest(right, shape)]
    assert check(tmp_path, reports, shape).zero() == [False, True]


@pytest.mark.parametrize("shape", [ONE, SIDE], ids=str)
@pytest.mark.parametrize("name", ["random", "zeros", "the same at both points", "another report's"])
def test_coefficients_that_prove_nothing_leave_residues(tmp_path: Path, name: str, shape: Shape) -> None:
    right = histogram_of(shape, b3=7)
    numbers, planes = checked.numbers_of(right, shape), planes_of(right, shape)
    dealt = deal_numbers(numbers, planes, shape, checked.draw)
    coefficients, each = shape.explicit - shape.length, (shape.explicit - shape.length) // shape.points
    body = dealt.shared.body.copy()
    first, second, third = (expand_many([seed], shape.explicit)[0] for seed in dealt.shared.seeds)
    offset = (first + second - third) % np.uint64(P)  # body = secret − x₁ − x₂ + x₃
    secret = (body + offset) % np.uint64(P)
    wrong = {
        "random": np.random.default_rng(3).integers(0, P, size=coefficients, dtype=np.uint64),
        "zeros": np.zeros(coefficients, dtype=np.uint64),
        "the same at both points": np.tile(secret[shape.length : shape.length + each], shape.points),
        "another report's": deal_numbers(numbers, planes, shape, checked.draw).shared.body[shape.length :],
    }[name]
    dealt.shared.body[shape.length :] = (wrong + np.uint64(P) - offset[shape.length :]) % np.uint64(P)
    assert check(tmp_path, [checked.seal_lie(dealt), honest(right, shape)], shape).zero() == [False, True]


OPENINGS: dict[str, Callable[[Shape], checked.Openings]] = {
    "zero": lambda _: lambda right, _points: [0, *right[1:]],
    "one more": lambda _: lambda right, _points: [*right[:-1], (right[-1] + 1) % P],
    "of the other point": lambda shape: lambda right, _points: right[len(shape.planes) :] + right[: len(shape.planes)],
    "all zero": lambda _: lambda right, _points: [0] * len(right),
}


@pytest.mark.parametrize("shape", [ONE, SIDE], ids=str)
@pytest.mark.parametrize("name", OPENINGS)
def test_wrong_openings_leave_residues(tmp_path: Path, name: str, shape: Shape) -> None:
    null = histogram_of(shape)
    reports = [lying(null, shape, planes_of(null, shape), OPENINGS[name](shape)), honest(null, shape)]
    assert check(tmp_path, reports, shape).zero() == [False, True]


@pytest.mark.parametrize("shape", [ONE, SIDE], ids=str)
def test_an_opening_above_p_is_malformed_though_it_stands_for_the_right_number(tmp_path: Path, shape: Shape) -> None:
    """A number has one encoding. Around it are good reports, with which it is read in one go."""
    null = histogram_of(shape)
    second_form = lying(null, shape, planes_of(null, shape), lambda right, _: [*right[:-1], right[-1] + P])
    reports = [honest(null, shape), second_form, honest(null, shape)]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), checked.query_of(reports, shape))
    assert [one.rejections() for one in ingested] == [{Rejection.MALFORMED: 1}] * 3


@pytest.mark.parametrize("shape", [Shape(4, 0, 2, 2), MANY], ids=str)
def test_openings_chosen_after_the_points_leave_residues(tmp_path: Path, shape: Shape) -> None:
    """Why e·P(r) must be 1: a device knows r when it writes its openings, and the sum is one equation at each point."""
    lie = histogram_of(shape, b0=2**59)
    planes = planes_of(histogram_of(shape, b0=1), shape)
    dealt = deal_numbers(checked.numbers_of(lie, shape), planes, shape, checked.draw)

    def solve(right: list[int], points: list[int]) -> list[int]:
        masks, out, count = iter(dealt.masks), list(right), len(shape.planes)
        for number, point in enumerate(points):
            slopes = []
            for plane, (weight, _) in zip(planes, shape.planes, strict=True):
                mask = next(masks)
                terms = (power * c * pow(point, power - 1, P) for power, c in enumerate(plane) if power)
                slopes.append(weight * mask * sum(terms) % P)
            others = sum(s * e for s, e in zip(slopes[1:], out[number * count + 1 : (number + 1) * count], strict=True))
            rest = 2**59 * pow(point - 1, -1, P) - others
            out[number * count] = rest * pow(slopes[0], -1, P) % P
        return out

    bad = checked.seal_lie(dealt, solve)
    made = check(tmp_path, [bad, honest(histogram_of(shape), shape)], shape)
    assert made.zero() == [False, True]
    second, third = (checked.all_shares(one)[made.places[0]] for one in made.ingested[1:])
    per_point = shape.residues // shape.points
    assert (second[::per_point] == third[::per_point]).all(), "the lie works where only the sum is looked at"


def test_a_polynomial_that_vanishes_at_its_point_leaves_residues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0/0 must not pass. Made with the points known beforehand, which nobody can; then P(r) = 0 has no opening."""
    shape, points = Shape(4, 0, 2, 2), [2**40 + 1, 2**41 + 7]
    lie = [2**59, 0, 0, 0]
    dealt = deal_numbers(checked.numbers_of(lie, shape), [[1, 0, 0]], shape, checked.draw)
    slopes = []
    for mask, point in zip(dealt.masks, points, strict=True):
        slope = 2**59 * pow(point - 1, -1, P)  # P(r) = 0 and P′(r) = F(r): passes wherever 1/0 is taken for 1
        second = (mask + slope * point) * pow(point, -2, P)
        slopes += [(slope - 2 * second * point) % P, second % P]
    dealt.shared.body[4:] = (dealt.shared.body[4:] + np.array(slopes, dtype=np.uint64)) % np.uint64(P)
    monkeypatch.setattr(validity, "points_of", lambda *_: points)
    fixed = np.array([points], dtype=np.uint64)
    monkeypatch.setattr(
        "mpc_helpers.admission.residues.points_of_all", lambda headers, _: np.repeat(fixed, len(headers), axis=0)
    )
    for number, opening in enumerate((0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = checked.seal_lie(dealt, lambda right, _, e=opening: [e] * len(right))  # type: ignore[misc]  # a default binds e
        assert check(folder, [report], shape).zero() == [False]


def test_known_points_would_break_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why points come from a hash of everything dealt: c/(g + c·r) = h/(r − 1) has a solution for any h and known r."""
    shape, points = Shape(4, 0, 2, 2), [2**40 + 1, 2**41 + 7]
    value = 2**59

    def forged(at: list[int]) -> validity.Deal:
        dealt = deal_numbers(checked.numbers_of([value, 0, 0, 0], shape), [[1, 0, 0]], shape, checked.draw)
        extra = []
        for mask, point in zip(dealt.masks, at, strict=True):
            extra += [value * mask * pow(point - 1 - value * point, -1, P) % P, 0]
        dealt.shared.body[4:] = (dealt.shared.body[4:] + np.array(extra, dtype=np.uint64)) % np.uint64(P)
        return dealt

    def opened(dealt: validity.Deal) -> checked.Openings:
        """The true 1/P(r) of what was dealt, at whatever points the report has."""

        def open_truly(_: list[int], at: list[int]) -> list[int]:
            secret = reconstruct(dealt).tolist()
            values = [
                secret[8 + place] + secret[4 + 2 * place] * r + secret[5 + 2 * place] * r * r
                for place, r in enumerate(at)
            ]
            return [pow(value, -1, P) for value in values]

        return open_truly

    both, one = forged(points), forged([points[0], points[0]])
    hashed = [checked.seal_lie(dealt, opened(dealt)) for dealt in (both, one)]
    assert check(tmp_path, hashed, shape).zero() == [False, False]
    monkeypatch.setattr(validity, "points_of", lambda *_: points)
    fixed = np.array([points], dtype=np.uint64)
    monkeypatch.setattr(
        "mpc_helpers.admission.residues.points_of_all", lambda headers, _: np.repeat(fixed, len(headers), axis=0)
    )
    early = [checked.seal_lie(dealt, opened(dealt)) for dealt in (both, one)]
    folder = tmp_path / "early"
    folder.mkdir()
    assert check(folder, early, shape).zero() == [True, False], "and one point would not be enough"


def test_the_theorem_exhaustively_in_a_small_field() -> None:
    """p = 31, two buckets, cap 2, over all histograms and polynomials: the identity holds for the valid ones alone.

    And an invalid one meets it at no more than buckets + coins − 1 points, a number that is reached.
    """
    p, cap = 31, 2
    points = [r for r in range(p) if r not in (1, 2)]
    inverse = [0] + [pow(x, -1, p) for x in range(1, p)]
    sums = {
        (a, b): [(a * inverse[(r - 1) % p] + b * inverse[(r - 2) % p]) % p for r in points]
        for a, b in itertools.product(range(p), repeat=2)
    }
    by_values = {tuple(values): key for key, values in sums.items()}
    order = sorted(sums)
    table, valid = np.array([sums[key] for key in order]), np.array([sum(key) <= cap for key in order])
    proven, worst = set(), 0
    for c0, c1, c2 in itertools.product(range(p), repeat=3):
        if not (c0 or c1 or c2):
            continue
        under = [(c0 + c1 * r + c2 * r * r) % p for r in points]
        right = [(c1 + 2 * c2 * r) * inverse[u] % p if u else -1 for r, u in zip(points, under, strict=True)]
        if 0 not in under and tuple(right) in by_values:
            proven.add(by_values[tuple(right)])
        worst = max(worst, int((table == np.array(right)).sum(axis=1)[~valid].max()))
    assert proven == {key for key in order if sum(key) <= cap}
    assert worst == 2 + 2 - 1


def test_points_of_many_are_those_of_each() -> None:
    shape = Shape(4, 0, 2, 2)
    headers = [honest([0] * 4, shape).header for _ in range(8)]
    alone = [points_of(Header.decode(header).prefix(), shape.points) for header in headers]
    assert points_of_all(headers, shape).tolist() == alone


@pytest.mark.parametrize("unfit", [0, 1, 2**16, 2**17 - 1, P])
@pytest.mark.parametrize("at", [0, 1])
def test_points_of_many_skip_what_is_no_point(monkeypatch: pytest.MonkeyPatch, unfit: int, at: int) -> None:
    shape = Shape(4, 0, 2, 2)
    header = honest([0] * 4, shape).header
    words = [2**20, 2**21, 2**22, 2**23]
    words[at] = unfit

    class Forced:
        def __init__(self, data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return b"".join((word << 3).to_bytes(8, "little") for word in words)

    monkeypatch.setattr("hashlib.sha256", Forced)
    expected = [2**20, 2**22] if at else [2**21, 2**22]
    assert points_of_all([header] * 2, shape).tolist() == [expected, expected]


def test_helper_one_needs_no_body(tmp_path: Path) -> None:
    made = check(tmp_path, [honest(some_histogram(SIDE, seed), SIDE) for seed in range(3)], SIDE)
    assert made.ingested[0].column.layout.body == 0
    assert made.ingested[0].blocks == made.ingested[1].blocks == made.ingested[2].blocks


def test_blocks_of_a_batch_that_is_not_checked() -> None:
    assert bytes(32) == NO_ROOT


def test_a_block_names_its_place_and_the_reports_it_holds() -> None:
    shares = np.arange(6, dtype=np.uint64).reshape(2, 3)
    one = preimages(np.array([True, True, False]), shares)
    other = preimages(np.array([True, False, True]), shares)
    assert one != other and len({block_hash(0, one[0]), block_hash(0, other[0]), block_hash(1, one[0])}) == 3
    block = Block.parse(other[0], 3)
    assert np.flatnonzero(block.opened).tolist() == [0, 2]
    assert block.rows(np.array([2])).tolist() == [[3, 4, 5]]
    assert check_root([block_hash(0, one[0])]) != check_root([block_hash(0, other[0])])


def test_a_batch_is_cut_into_blocks_of_sixty_four() -> None:
    opened = np.ones(130, dtype=np.bool_)
    opened[[3, 64]] = False
    shares = np.arange(128, dtype=np.uint64).reshape(-1, 1)
    blocks = [Block.parse(data, 1) for data in preimages(opened, shares)]
    assert [int(block.opened.sum()) for block in blocks] == [63, 63, 2]
    assert np.concatenate([block.shares for block in blocks]).tolist() == shares.tolist()
    assert not blocks[2].opened[2:].any()


@pytest.mark.parametrize("data", [b"", bytes(7), bytes(9), b"\x80" + bytes(7), b"\x80" + bytes(7 + 23), bytes(8 + 24)])
def test_a_block_of_another_size_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Block.parse(data, 3)


def test_a_block_has_one_encoding() -> None:
    """x + p is x to arithmetic and another number to a hash."""
    data = b"\x80" + bytes(7) + P.to_bytes(8, "little")
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        Block.parse(data, 1)
    Block.parse(b"\x80" + bytes(7) + (P - 1).to_bytes(8, "little"), 1)


def test_check_shares_of_one_vector_fit_and_others_do_not() -> None:
    draw = np.random.default_rng(9)
    x1, x2, x3 = (int(value) for value in draw.integers(0, P, size=3))
    row = [np.array([[n % P]], dtype=np.uint64) for n in (2 * x1 + x2, -(x2 + 2 * x3), x1 - x3)]
    assert fit(*row).tolist() == [True]
    assert (int(row[2][0, 0]) - int(row[1][0, 0])) % P == (x1 + x2 + x3) % P
    for place in range(3):
        wrong = [one.copy() for one in row]
        wrong[place][0, 0] = (int(wrong[place][0, 0]) + 1) % P
        assert fit(*wrong).tolist() == [False]


def test_a_block_that_comes_out_otherwise_the_second_time_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = check(tmp_path, [honest(some_histogram(ONE, seed), ONE) for seed in range(3)], ONE)
    helper = made.ingested[1]
    points = points_of_all
    monkeypatch.setattr(
        "mpc_helpers.admission.residues.points_of_all", lambda headers, shape: points(headers, shape) ^ np.uint64(1)
    )
    assert helper.show([0]) is None
    monkeypatch.undo()
    first = helper.show([0])
    assert first is not None and block_hash(0, first[0]) == helper.blocks[0]
    monkeypatch.setattr("mpc_helpers.admission.chunk.open_reports", None)
    assert helper.show([0]) == first, "what was shown once is kept"


class Dying(Executor):
    """Its processes are killed under every second job."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs += 1
        if self.jobs % 2:
            future.set_exception(BrokenExecutor())
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("parallel", [1, 2, 3, 16])
def test_blocks_and_sums_are_the_same_wherever_reports_are_opened_again(tmp_path: Path, parallel: int) -> None:
    """On any number of processes, and when they die."""
    tiny = Shape(4, 0, 2, 1)
    reports = [honest(histogram_of(tiny, b1=1), tiny) for _ in range(3 * 64 + 5)]
    one = check(tmp_path, reports, tiny).ingested[1]
    accepted = one.summed.copy()
    accepted[::3] = False
    blocks, sums = one.show(range(4)), one.total(accepted)
    block_cache_path(one.column.path).unlink()
    one._executor = ReportExecutor(Dying(), parallel)
    assert one.show(range(4)) == blocks
    assert one.show([]) == []
    again = one.total(accepted)
    assert all((again[index] == sums[index]).all() for index in sums)


def test_a_report_found_invalid_after_ingest_leaves_the_sums(tmp_path: Path) -> None:
    """A verdict takes a report out of what is accepted. What was summed stays what it was, and is taken out there."""
    histograms = [histogram_of(ONE, b3=number) for number in range(4)]
    reports = [honest(histogram, ONE) for histogram in histograms]
    reports.append(lying(histogram_of(ONE, b3=2**50), ONE, planes_of(histogram_of(ONE, b3=1), ONE)))
    made = check(tmp_path, reports, ONE)
    assert samples.opened_sum(made.ingested)[3] == 2**50 + 6
    for one in made.ingested:
        one.check_results.invalid[made.places[4]] = True
        assert one.summed[made.places[4]] and not one.admitted[made.places[4]]
    assert samples.opened_sum(made.ingested)[3] == 6


def test_what_was_summed_cannot_be_written_over(tmp_path: Path) -> None:
    """Marked in `reasons`, a rejected 2^50 would stay in the sums for good."""
    made = check(tmp_path, [honest(histogram_of(ONE), ONE)], ONE).ingested[0]
    for array in (made.reasons, made.summed):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    unseen = made.summed.copy()
    made.reasons = np.ones(1, dtype=np.uint8)
    made.summed = np.zeros(1, dtype=np.bool_)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        made.total(unseen)
