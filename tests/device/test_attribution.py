"""Attribution: how credit is divided, what is lost, and that no function can exceed the value.

Custom functions: three rules of the engine keep any of them within the budget. A function is not run on an empty set;
its output is clipped to non-negative integers with a sum of at most the value; it never sees events of the querier's
own site. For each rule there is a function that needs it and an engine without it, which leaks; all exactly, over every
adaptive sequence of queries (see small_worlds).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import (
    PUBLISHER,
    QUERIER,
    UNBOUNDED,
    Event,
    PlainDevice,
    SmallWorld,
    query,
    worst_loss,
)
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
from device.budget import FilterKind
from device.conversion import AttributionRequest, Conversion
from device.device import Device, DeviceCall, Payment
from device.errors import DatabaseUnavailable, RangeError
from device.events import Impression
from device.limits import DeviceLimits
from device.overview import lacked_budget
from device.request import CheckedRequest, Match, SideQuery
from device.stores.storage import EpochOutcome, Store
from protocol.errors import TrefoilError
from protocol.shape import MAX_SPREAD
from protocol.units import MICROS
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.small_worlds import paid_by


def seen(time: int, bucket: int, priority: int = 0) -> Impression:
    return Impression(time, "news.example", "news.example", bucket, 0, priority)


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
    relevant = {0: [seen(1, 0), seen(2, 2)]}
    assert attribute(LastTouch(), relevant, Award(4, 2)) == (0, 0)
    assert attribute(LastTouch(), relevant, Award(4, 3)) == (0, 0, 4)
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


# Custom functions

BUDGET = MICROS
LIMITS = DeviceLimits(site_budget=BUDGET, global_budget=8 * BUDGET, impression_site_quota=8 * BUDGET)
Relevant = Mapping[int, Sequence[Impression]]


def ask(function: AttributionFunction, epochs: Sequence[int] = (0,), epsilon: float = 0.5) -> AttributionRequest:
    return AttributionRequest(
        epochs=epochs, epsilon=epsilon, buckets=2, value=2, query_sensitivity=4, function=function
    )


def loss(
    function: AttributionFunction,
    having: Sequence[Event],
    lacking: Sequence[Event] = (),
    make: Callable[..., PlainDevice] = Device,
) -> Fraction:
    """What the best querier learns by asking with `function`, over one epoch or both."""
    menu = [query(ask(function)), query(ask(function, (0, 1))), query(ask(function, epsilon=0.25))]
    return worst_loss(SmallWorld(having, LIMITS, make), SmallWorld(lacking, LIMITS, make), menu)


def nothing_is_something(relevant: Relevant, award: Award, /) -> Sequence[int]:
    """Says the most when there is nothing, and nothing when there is something."""
    return [0, 0] if any(relevant.values()) else [award.value, 0]


class AsksAboutNothing(Device[tuple[int, ...]]):
    """Broken: calls the function on an empty set too."""

    def _attribute(self, conversion: CheckedRequest, found: Match, settled: Payment, award: Award) -> tuple[int, ...]:
        kept = {epoch: seen for epoch, seen in found.relevant.items() if epoch in settled.paid}
        return clip(conversion.function(kept, award), award)


def test_a_function_that_answers_on_an_empty_set_learns_nothing_more() -> None:
    """Case 2 charges the report's sum, which is the change from A(∅) only while A(∅) is zero."""
    events = (Event(0, 0),)
    assert loss(nothing_is_something, events) <= BUDGET
    assert loss(nothing_is_something, events, make=AsksAboutNothing) == UNBOUNDED


def negative(relevant: Relevant, award: Award, /) -> Sequence[int]:
    """Adds up to zero, and says a lot."""
    return [award.value, -award.value]


def unclipped(function: AttributionFunction, relevant: Relevant, award: Award) -> tuple[int, ...]:
    """Broken: takes the function at its word."""
    return tuple(int(part) for part in function(relevant, award)) if relevant else (0,) * award.buckets


class ChargesTheSum(Device[tuple[int, ...]]):
    """Broken: charges what the report adds up to, which is its norm only while nothing is below zero."""

    def _charge(self, request: CheckedRequest, found: Match, award: Award) -> Payment:
        output = unclipped(request.function, found.relevant, award)
        return Payment(self._pay(request, self._owed(request, found, sum(output))), output)


def test_a_function_that_answers_below_zero_learns_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped to zero; and taken at its word it would still pay for its norm, as the charge is of the change."""
    events = (Event(0, 0),)
    assert loss(negative, events) <= BUDGET
    monkeypatch.setattr("device.device.attribute", unclipped)
    assert loss(negative, events) <= BUDGET
    assert loss(negative, events, make=ChargesTheSum) == UNBOUNDED


def greedy(relevant: Relevant, award: Award, /) -> Sequence[float]:
    """Wants ten times what there is, by way of an infinity and a NaN."""
    return [10.0 * award.value, math.inf] if len(relevant) > 1 else [math.nan, 10.0 * award.value]


def test_a_function_that_wants_more_than_the_value_learns_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    events = (Event(0, 0), Event(1, 1))
    assert loss(greedy, events, (Event(1, 1),)) <= BUDGET
    monkeypatch.setattr("device.device.attribute", lambda function, relevant, award: (20, 0) if relevant else (0, 0))
    # Over two epochs the charge is the sensitivity of a clipped report, whatever this one says.
    menu = [query(ask(greedy, (0, 1)))]
    assert worst_loss(SmallWorld((Event(0, 0),), LIMITS), SmallWorld((), LIMITS), menu) > BUDGET


# An impression that the querier itself showed on its own site: an event it knows of.
OWN = Event(0, 1, day=3, site=QUERIER)


def compares_with_own(relevant: Relevant, award: Award, /) -> Sequence[int]:
    """Says something only where the querier's own event is, and nothing else: silence is then what others did."""
    seen = [impression for impressions in relevant.values() for impression in impressions]
    own = any(impression.site == QUERIER for impression in seen)
    others = any(impression.site != QUERIER for impression in seen)
    return [award.value, 0] if own and not others else [0, 0]


class ShowsOwnEventsForFree(Device[tuple[int, ...]]):
    """Broken: public events cost nothing, and the function may read them all the same."""

    def _match(self, conversion: CheckedRequest, call: DeviceCall) -> Match:
        assert isinstance(conversion, Conversion)
        return super()._match(replace(conversion, hides_own=False), call)

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        others = {epoch: set(sites) - {conversion.site} for epoch, sites in found.sites.items()}
        private = {epoch: sites for epoch, sites in others.items() if sites}
        settled = super()._charge(conversion, replace(found, sites=private), award)
        shown = {epoch: 0 for epoch in found.sites if epoch not in private}
        return replace(
            settled, paid={**shown, **settled.paid}, output=attribute(conversion.function, found.relevant, award)
        )


def test_a_function_that_reads_the_queriers_own_events_learns_nothing_more() -> None:
    """Neighbours agree on public events: here one that the querier itself has saved, on this device."""
    both, public = (OWN, Event(0, 0)), (OWN,)
    assert loss(compares_with_own, both, public) <= BUDGET
    assert loss(compares_with_own, both, public, ShowsOwnEventsForFree) == UNBOUNDED


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, SystemExit, GeneratorExit])
def test_a_custom_function_that_fails_says_nothing(error: type[BaseException]) -> None:
    """An error that reached the querier would tell it what its function had seen, and cost nothing."""

    def fails(relevant: Relevant, award: Award, /) -> Sequence[int]:
        raise error

    def never(impression: Impression) -> bool:
        raise error

    world = SmallWorld((Event(0, 0),), LIMITS)
    assert world.ask(query(ask(fails))) == (0, 0)
    assert world.ask(query(ask(fails, (0, 1)))) == (0, 0)
    assert world.ask(query(replace(ask(nothing_is_something), relevant=never))) == (0, 0)


class Odd:
    """A number that compares as it likes and rounds to what it likes."""

    def __init__(self, rounded: object) -> None:
        self.rounded = rounded

    def __gt__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return False

    def __floor__(self) -> object:
        return self.rounded


@pytest.mark.parametrize("rounded", [10**6, -5, 2.5, "7", None])
def test_a_number_that_lies_about_itself_is_clipped_too(rounded: object) -> None:
    """Clipping must not trust the comparisons of what it clips."""

    def lies(relevant: Relevant, award: Award, /) -> Sequence[float]:
        return [Odd(rounded), Odd(rounded)]  # type: ignore[list-item]  # the point of the test

    report = attribute(lies, {0: [Impression(0, "a.example", "a.example", 0, 0, 0)]}, Award(3, 2))
    assert all(type(part) is int and part >= 0 for part in report)
    assert sum(report) <= 3


anything = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.just(10**400))


answers = st.lists(st.floats(), max_size=6) | st.lists(anything, max_size=5)


@given(answers, st.integers(0, 50), st.integers(1, 5))
def test_clipping_gives_a_report_whatever_it_is_given(answer: list[object], value: int, buckets: int) -> None:
    """Non-negative integers, as many as there are buckets, with a sum of at most the value."""

    def says(relevant: Relevant, award: Award, /) -> Sequence[float]:
        return answer  # type: ignore[return-value]  # the point of the test

    report = attribute(says, {0: [Impression(0, "a.example", "a.example", 0, 0, 0)]}, Award(value, buckets))
    assert len(report) == buckets
    assert all(type(part) is int and part >= 0 for part in report)
    assert sum(report) <= value


def test_a_function_that_ends_the_program_has_paid_first() -> None:
    """An interruption is the person's to see; what the function saw before it is paid for."""

    def interrupts(relevant: Relevant, award: Award, /) -> Sequence[int]:
        raise KeyboardInterrupt

    def interrupting(impression: Impression) -> bool:
        raise KeyboardInterrupt

    # For the worst that a report could say: one week can move it by its value of 2, of two weeks each by twice that.
    alone, both = 250_000, 500_000
    for asked, charge in (
        (ask(interrupts), alone),
        (ask(interrupts, (0, 1)), both),
        (replace(ask(negative), relevant=interrupting), alone),
    ):
        world = SmallWorld((Event(0, 0),), LIMITS)
        with pytest.raises(KeyboardInterrupt):
            world.ask(query(asked))
        assert paid_by(world.store, 0) == charge


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("code", ["function", "relevant"])
def test_functions_that_end_the_program_take_no_more_than_quotas_of_everyones_budget(kind: Kind, code: str) -> None:
    """Eight sites, one publisher's ad: its quota where the ad was shown, and that of side queries where none was."""

    def raises(*_: object) -> Any:
        raise KeyboardInterrupt

    with fresh_store(kind) as store:
        ann = Ann(store).see(0.1, site="bad.example").at(1.5)
        for number in range(8):
            with suppress(KeyboardInterrupt):
                assert ann.ask(0, 1, site=f"drain{number}.example", **{code: raises}) == (0, 0)
        assert ann.spent(FilterKind.GLOBAL) == {0: 4 * MICROS, 1: MICROS}
        assert ann.spent(FilterKind.IMPRESSION_SITE, "bad.example") == {0: 4 * MICROS}
        assert ann.see(1.6, 1, "news.example").convert() == (0, 1)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_function_that_raises_what_a_busy_store_raises_has_paid(kind: Kind) -> None:
    """Only a transaction that could not begin is free, whatever exception ends one that did."""
    with fresh_store(kind, wait=0.01) as store:
        with store.transaction(), pytest.raises(TrefoilError) as busy, store.transaction():
            raise AssertionError("a transaction inside a transaction")

        class Disguised(KeyboardInterrupt, type(busy.value)):  # type: ignore[misc]  # a class found at run time
            """What a function may raise to look like a store that was never read."""

        def raises(relevant: Relevant, award: Award, /) -> Sequence[int]:
            raise Disguised("busy")

        def tests(impression: Impression) -> bool:
            raise Disguised("busy")

        ann = Ann(store)
        requests: list[dict[str, Any]] = [{"function": raises}, {"relevant": tests}]
        for week, asked in enumerate(requests):
            assert ann.see(week + 0.1).at(week + 0.5).ask(week, **asked) == (0, 0)
            assert ann.spent()[week] == 500_000
        assert [entry.outcome for record in ann.device.reports() for entry in record.epochs] == [EpochOutcome.FAULT] * 2


@pytest.mark.parametrize("kind", list(Kind))
def test_a_transaction_that_could_not_begin_costs_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read nothing: a null report without a charge or a record, though the next transaction would begin."""
    with fresh_store(kind) as store:
        ann, begin = Ann(store).see(0.1).at(0.5), type(store).transaction
        failures = [DatabaseUnavailable("busy")]

        def transaction(store: Store) -> AbstractContextManager[None]:
            if failures:
                raise failures.pop()
            return begin(store)

        monkeypatch.setattr(type(store), "transaction", transaction)
        assert ann.ask(0) == (0, 0)
        assert not failures and not ann.spent() and not ann.device.reports()
        assert ann.ask(0) == (1, 0)


def spy() -> tuple[list[object], AttributionFunction, Callable[[Impression], bool]]:
    """An attribution function and a relevance test, and all that they are shown."""
    shown: list[object] = []

    def function(relevant: Relevant, award: Award, /) -> Sequence[int]:
        shown.append(relevant)
        return [0, 0]

    def test(impression: Impression) -> bool:
        shown.append(impression)
        return False

    return shown, function, test


@pytest.mark.parametrize("epochs", [(0,), (0, 1)])
def test_functions_are_not_shown_an_epoch_that_could_not_pay_for_the_worst(epochs: Sequence[int]) -> None:
    """Nor the test of relevance: what they have seen cannot be taken back."""
    shown, spies, spying = spy()
    world = SmallWorld((Event(0, 0),), LIMITS)
    assert world.ask(query(ask(negative, epsilon=2.0))) == (2, 0)
    world.ask(query(ask(spies, epochs)))
    world.ask(query(replace(ask(spies, epochs), relevant=spying)))
    # Also where the function is one of ours.
    world.ask(query(replace(ask(LastTouch(), epochs), relevant=spying)))
    assert shown == []


def test_functions_are_not_shown_an_epoch_whose_publisher_has_no_quota_left() -> None:
    """It cannot pay either, however much its other filters hold."""
    shown, spies, spying = spy()
    world = SmallWorld((Event(0, 0),), replace(LIMITS, impression_site_quota=MICROS))
    assert world.ask(query(ask(negative, epsilon=2.0), site="another.example")) == (2, 0)
    assert paid_by(world.store, 0, FilterKind.IMPRESSION_SITE, PUBLISHER) == MICROS
    for asked in (ask(spies), ask(spies, (0, 1)), replace(ask(LastTouch()), relevant=spying)):
        assert world.ask(query(asked)) == (0, 0)
    assert (shown, paid_by(world.store, 0)) == ([], 0)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("side_query", [None, SideQuery(1)])
def test_an_epoch_that_functions_were_not_shown_pays_nothing_and_is_out_of_budget(
    kind: Kind, side_query: SideQuery | None
) -> None:
    """Not even κ, which it could pay: what functions were not shown must look like any epoch without budget."""

    def function(relevant: Relevant, award: Award, /) -> Sequence[int]:
        return [award.value, 0]

    with fresh_store(kind) as store:
        ann = Ann(store).see(0.1).see(1.1).at(1.5)
        ann.ask(0, epsilon=1.8)
        ann.ask(0, 1, epsilon=0.2, function=function, side_query=side_query)
        assert ann.spent() == {0: 900_000, 1: 300_000 if side_query else 200_000}
        record = ann.device.reports()[-1]
        assert [entry.outcome for entry in record.epochs] == [EpochOutcome.OUT_OF_BUDGET, EpochOutcome.PAID]
        assert not lacked_budget(record)


class CountsLooks(tuple[float, ...]):
    """Credit that remembers how it was looked at: by as many impressions as there were."""

    looks: ClassVar[list[object]] = []

    def __getitem__(self, place: Any) -> Any:
        self.looks.append(place)
        return tuple(self)[place]


class CountsUses(float):
    """A share that remembers how often it was taken for a number."""

    uses: ClassVar[list[object]] = []

    def __float__(self) -> float:
        self.uses.append(self)
        return 1.0


@pytest.mark.parametrize("credit", [CountsLooks((1.0, 1.0, 1.0)), (CountsUses(1), CountsUses(1), CountsUses(1))])
def test_credit_of_a_class_of_its_own_sees_nothing(credit: tuple[float, ...]) -> None:
    """It would be code of the querier's, run on epochs that cannot pay: what it has done is the same for any data."""
    done = []
    for events in ((), (Event(0, 0),), (Event(0, 0), Event(0, 1))):
        world = SmallWorld(events, LIMITS)
        world.ask(query(ask(negative, epsilon=2.0)))
        asked = ask(LastNTouch(credit))
        CountsLooks.looks.clear()
        CountsUses.uses.clear()
        world.ask(query(asked))
        done.append((len(CountsLooks.looks), len(CountsUses.uses)))
    assert done == [done[0]] * 3


@pytest.mark.parametrize("kind", list(Kind))
def test_a_function_that_asks_from_inside_gets_nothing(kind: Kind) -> None:
    """What it got would be undone with its own call, if that ends the program; the report would not."""
    inner: list[tuple[int, ...]] = []

    def asks(relevant: Relevant, award: Award, /) -> Sequence[int]:
        inner.append(ann.convert("other.example", lookback_days=6))
        raise KeyboardInterrupt

    with fresh_store(kind, wait=0.01) as store:
        ann = Ann(store).see(0.1).at(0.5)
        with pytest.raises(KeyboardInterrupt):
            ann.ask(0, function=asks)
        assert (inner, ann.spent(site="other.example")) == ([(0, 0)], {})
        assert ann.spent() == {0: 500_000}
        assert ann.convert("other.example", lookback_days=6) == (1, 0)
