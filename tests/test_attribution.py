"""Attribution: who gets what, what is lost, and that no function gives more than there is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device import attribution
from device.attribution import (
    BUILT_IN,
    AttributionFunction,
    Award,
    EqualCredit,
    FirstTouch,
    LastNSlots,
    LastNTouch,
    LastTouch,
    Need,
    Order,
    attribute,
    clip,
    fair_allocation,
    is_ours,
    most_buckets,
    needs,
)
from device.errors import RangeError
from device.impression import Impression
from protocol.shape import MAX_SPREAD


def seen(time: int, bucket: int, priority: int = 0) -> Impression:
    return Impression(time, "news.example", "news.example", bucket, 0, priority)


def test_the_first_bucket_outside_the_histogram_takes_nothing_from_the_others() -> None:
    relevant = {0: [seen(1, 0), seen(2, 2)]}
    assert attribute(EqualCredit(), relevant, Award(4, 2)) == (2, 0)
    assert attribute(EqualCredit(), relevant, Award(4, 3)) == (2, 0, 2)


# Two epochs; the last touch in time is in bucket 2, the first in bucket 0.
TWO_EPOCHS = {0: [seen(1, 0), seen(5, 1)], 1: [seen(9, 2)]}


@pytest.mark.parametrize(
    ("function", "histogram"),
    [
        (LastTouch(), (0, 0, 7)),
        (FirstTouch(), (7, 0, 0)),
        (EqualCredit(), (2, 2, 3)),
        (LastNTouch(), (0, 0, 7)),
        (LastNTouch((5, 1, 1)), (1, 1, 5)),
        (LastNTouch((5, 2)), (0, 2, 5)),
        (LastNTouch((1, 1, 1, 1)), (2, 2, 3)),
        (LastNSlots(), (3, 2, 2)),
    ],
)
def test_built_in_functions(function: Any, histogram: tuple[int, ...]) -> None:
    assert attribute(function, TWO_EPOCHS, Award(7, 3, [0.5] * 3)) == histogram


def test_slots_without_an_impression_are_null() -> None:
    assert attribute(LastNSlots(), {1: [seen(9, 5)]}, Award(70, 2)) == (70, 0)


def test_priority_comes_before_time_in_the_standards_last_touch_only() -> None:
    relevant = {0: [seen(1, 0, priority=3), seen(5, 1)]}
    assert attribute(LastNTouch(), relevant, Award(1, 2)) == (1, 0)
    assert attribute(LastTouch(), relevant, Award(1, 2)) == (0, 1)


def test_credit_outside_the_histogram_is_lost() -> None:
    relevant = {0: [seen(1, 0), seen(2, 9)]}
    assert attribute(LastTouch(), relevant, Award(4, 2)) == (0, 0)
    assert attribute(LastNTouch((1, 1)), relevant, Award(4, 2, [0.5])) == (2, 0)
    assert attribute(EqualCredit(), relevant, Award(5, 2)) == (2, 0)


@pytest.mark.parametrize("credit", [(), (0.0,), (1.0, -1.0), (math.nan,), (math.inf,)])
def test_credit_must_be_positive_numbers(credit: tuple[float, ...]) -> None:
    with pytest.raises(RangeError):
        LastNTouch(credit)


def test_a_function_is_never_shown_an_empty_set() -> None:
    def tells(relevant: object, award: Award) -> Sequence[float]:
        raise AssertionError("called")

    assert attribute(tells, {}, Award(3, 2)) == (0, 0)
    assert attribute(tells, {4: []}, Award(3, 2)) == (0, 0)


def test_a_function_that_fails_says_nothing() -> None:
    def fails(relevant: object, award: Award) -> Sequence[float]:
        raise ValueError("I saw an impression")

    assert attribute(fails, TWO_EPOCHS, Award(3, 2)) == (0, 0)


def test_a_function_cannot_change_what_it_sees() -> None:
    def hides(relevant: Any, award: Award) -> Sequence[float]:
        relevant[0].clear()
        return [award.value]

    relevant = {0: [seen(1, 0)]}
    assert attribute(hides, relevant, Award(3, 2)) == (0, 0)
    assert relevant == {0: [seen(1, 0)]}


@pytest.mark.parametrize(
    ("answer", "clipped"),
    [
        ([-5, 3, 0], (0, 3, 0)),
        ([9, 9, 9], (9, 1, 0)),
        ([4, 9, 9], (4, 6, 0)),
        ([2.9, 0.2], (2, 0, 0)),
        ([1, 1, 1, 5], (1, 1, 1)),
        ([], (0, 0, 0)),
        ([math.nan, math.inf, 3], (0, 10, 0)),
        ([-math.inf, 1e300, 1], (0, 10, 0)),
    ],
)
def test_clipping(answer: list[float], clipped: tuple[int, ...]) -> None:
    assert clip(answer, Award(10, 3)) == clipped


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6), st.integers(1, 50), st.integers(1, 5))
def test_whatever_a_function_answers_fits(answer: list[float], value: int, buckets: int) -> None:
    clipped = clip(answer, Award(value, buckets))
    assert len(clipped) == buckets
    assert all(isinstance(number, int) and number >= 0 for number in clipped)
    assert sum(clipped) <= value


coins = st.floats(min_value=0, max_value=1, exclude_max=True)
credits_ = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=10)


@given(st.integers(1, 2**32 - 1), credits_, st.lists(coins, min_size=9, max_size=9))
def test_fair_allocation_is_exact_and_never_off_by_one(value: int, credit: list[float], draws: list[float]) -> None:
    parts = fair_allocation(value, credit, draws)
    total = sum(map(Fraction, credit))
    assert sum(parts) == value
    for part, share in zip(parts, credit, strict=True):
        # The doubles themselves are off by about value·2^-50.
        assert abs(part - value * Fraction(share) / total) < 1 + Fraction(value, 2**45)


def test_fair_allocation_is_fair() -> None:
    """7 over (1, 2, 3): the mean of 50,000 draws is within 5.2 standard errors (false failure below 10^-6)."""
    generator = np.random.default_rng(3)
    count, credit = 50_000, (1.0, 2.0, 3.0)
    totals: Counter[int] = Counter()
    for draws in generator.random((count, 2)).tolist():
        for place, part in enumerate(fair_allocation(7, credit, draws)):
            totals[place] += part
    for place, share in enumerate(credit):
        # A part takes two neighbouring values, so its standard deviation is at most one half.
        assert abs(totals[place] / count - 7 * share / 6) < 5.2 * 0.5 / count**0.5


@pytest.mark.parametrize(
    ("value", "credit", "coin", "parts"),
    [
        (10, (1, 1, 1), 0.5, [4, 3, 3]),
        (1, (1, 1), 0.5, [1, 0]),
        (1, (1, 1), 0.49, [0, 1]),
        (8, (2, 1, 1), 0.5, [4, 2, 2]),
        (12, (8, 3, 1), 0.5, [8, 3, 1]),
        (1, (1e308, 1e308), 0.9, [1, 0]),
        (2**32 - 1, (1e308, 1e-308), 0.5, [2**32 - 1, 0]),
        (3, (5e-324, 5e-324, 5e-324), 0.5, [1, 1, 1]),
    ],
)
def test_allocations_worked_by_hand(value: int, credit: tuple[float, ...], coin: float, parts: list[int]) -> None:
    assert fair_allocation(value, credit, [coin] * (len(credit) - 1)) == parts


impressions = st.lists(
    st.builds(seen, st.integers(0, 100), st.integers(0, 5), st.integers(-2, 2)), min_size=1, max_size=8
)


@given(impressions, impressions, st.integers(1, 100), st.integers(1, 4), st.lists(coins, min_size=4, max_size=4))
def test_removing_an_epoch_moves_a_report_by_at_most_twice_its_value(
    first: list[Impression], second: list[Impression], value: int, buckets: int, draws: list[float]
) -> None:
    """Theorem 18 for every built-in function, with the coins held fixed; the value itself where there is one bucket."""
    award = Award(value, buckets, draws)
    for function in (LastTouch(), FirstTouch(), EqualCredit(), LastNSlots(), LastNTouch((3.0, 2.0, 1.0))):
        both = attribute(function, {0: first, 1: second}, award)
        one = attribute(function, {0: first}, award)
        change = sum(abs(before - after) for before, after in zip(both, one, strict=True))
        assert change <= (value if buckets == 1 else 2 * value)
        assert sum(one) <= value


def test_in_how_many_buckets_a_function_can_put_something() -> None:
    """Exactly our own classes: a subclass may give anything."""

    class Liberal(LastTouch):
        pass

    assert [most_buckets(one) for one in (LastTouch(), FirstTouch())] == [1, 1]
    assert most_buckets(LastNTouch((1.0, 2.0, 3.0))) == 3
    assert [most_buckets(one) for one in (Liberal(), EqualCredit(), LastNSlots())] == [2**16 - 1] * 3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (LastTouch(), Need(Order.LATEST, 1)),
        (FirstTouch(), Need(Order.EARLIEST, 1)),
        (LastNSlots(), Need(Order.LATEST, 4)),
        (LastNTouch((1.0, 0.5, 0.25)), Need(Order.PRECEDENCE, 3)),
        (EqualCredit(), Need()),
        (lambda relevant, award: [0] * 4, Need()),
    ],
)
def test_no_more_is_read_than_a_function_looks_at(function: AttributionFunction, expected: Need) -> None:
    """The work of a call is bounded by that, not by what the device holds. Of a stranger's nothing is known."""
    assert needs(function, 4) == expected


def test_what_derives_from_one_of_ours_may_look_at_everything() -> None:
    class Curious(LastTouch):
        pass

    assert needs(Curious(), 4) == Need()


def test_every_function_of_ours_is_in_the_one_place_for_them() -> None:
    """A class that is not there would be shown everything and proved for every bucket; `Features` is a publisher's."""
    classes = {
        kind
        for kind in vars(attribution).values()
        if isinstance(kind, type) and kind.__module__ == attribution.__name__ and "__call__" in vars(kind)
    }
    assert classes - {attribution.AttributionFunction, attribution.Features} == {each.kind for each in BUILT_IN}
    assert len({each.name for each in BUILT_IN}) == len(BUILT_IN)
    for each in BUILT_IN:
        made = each.make((0.5, 0.5))
        assert type(made) is each.kind and is_ours(made)
        assert 1 <= each.most_buckets(made) <= MAX_SPREAD and each.least_buckets >= 1


def test_a_class_that_says_it_equals_ours_is_none_of_ours() -> None:
    class Liar(type):
        def __eq__(cls, other: object) -> bool:
            return True

        def __hash__(cls) -> int:
            return hash(LastTouch)

    class Sly(metaclass=Liar):
        def __call__(self, *_: Any) -> Sequence[int]:
            return [1]

    assert not is_ours(Sly())
    assert most_buckets(Sly()) == MAX_SPREAD
