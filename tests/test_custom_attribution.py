"""Custom attribution functions: whatever a querier writes, three rules of the engine keep it within the budget.

A function is not called on an empty set; what it answers is cut to non-negative integers with a sum of at most the
value; it never sees events of the querier's own site. For each rule there is a function that needs it and an engine
without it, which leaks; all exactly, over every adaptive sequence of queries (see small_worlds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.attribution import AttributionFunction, Award, LastNTouch, LastTouch, attribute, clip
from device.call import DeviceCall
from device.checked_request import CheckedRequest
from device.conversion import AttributionRequest, Conversion
from device.device import Device
from device.impression import Impression
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind
from device.settlement import Found, Settled
from protocol.epsilon import MICROS
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.small_worlds import (
    PUBLISHER,
    QUERIER,
    UNBOUNDED,
    Event,
    PlainDevice,
    SmallWorld,
    paid_by,
    query,
    worst_loss,
)

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

    def _attribute(self, conversion: CheckedRequest, found: Found, settled: Settled, award: Award) -> tuple[int, ...]:
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

    def _charge(self, request: CheckedRequest, found: Found, award: Award) -> Settled:
        output = unclipped(request.function, found.relevant, award)
        return Settled(self._pay(request, self._owed(request, found, sum(output))), output, free=(0,) * award.buckets)


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

    def _match(self, conversion: CheckedRequest, call: DeviceCall) -> Found:
        assert isinstance(conversion, Conversion)
        return super()._match(replace(conversion, hides_own_site=False), call)

    def _charge(self, conversion: CheckedRequest, found: Found, award: Award) -> Settled:
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


def test_own_events_cost_nothing_and_are_not_seen() -> None:
    """Public events cost nothing: they are no part of the report."""
    world = SmallWorld((OWN,), LIMITS)
    assert world.ask(query(ask(lambda relevant, award: [award.value, 0]))) == (0, 0)
    assert paid_by(world.store, 0) == 0


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, SystemExit, GeneratorExit])
def test_a_function_that_fails_says_nothing(error: type[BaseException]) -> None:
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


@given(st.lists(anything, max_size=5), st.integers(0, 9), st.integers(1, 4))
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
