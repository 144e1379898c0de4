"""Theorem 1 end to end on small worlds: whatever a querier asks, in whatever order, it learns at most the budget.

For every pair of databases that differ in one device-epoch, over every adaptive sequence of queries from a menu that
exhausts the budget, the answers' distributions differ by at most e^budget. Exact: see `small_worlds.worst_loss`; that
its steps are the max-divergences of the noise is checked here too, on the distributions themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial

import pytest

from device.attribution import Award, EqualCredit, FirstTouch, LastNTouch, LastTouch
from device.checked_request import CheckedRequest
from device.conversion import AttributionRequest
from device.device import Device
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind
from device.privacy_loss import EpochLoss, LossTerms, epoch_loss
from device.settlement import Found, Settled
from protocol.epsilon import MICROS
from tests.support.small_worlds import (
    UNBOUNDED,
    Event,
    Events,
    PlainDevice,
    SmallWorld,
    Spending,
    WorldQuery,
    query,
    subsets,
    w3c,
    without_epoch,
    worst_loss,
)

BUDGET = MICROS
LIMITS = DeviceLimits(site_budget=BUDGET, global_budget=8 * BUDGET, impression_site_quota=8 * BUDGET)
# Both buckets, in both epochs.
POSSIBLE = [Event(epoch, bucket, day=2 + bucket) for epoch in (0, 1) for bucket in (0, 1)]


def neighbours() -> Iterator[tuple[Events, Events]]:
    """Every database over POSSIBLE, beside it without one of its epochs."""
    for events in subsets(POSSIBLE):
        for epoch in (0, 1):
            if len(fewer := without_epoch(events, epoch)) < len(events):
                yield events, fewer


def ask(epochs: Sequence[int], **changes: object) -> AttributionRequest:
    """The paper's request for half of the budget, unless told otherwise."""
    asked = AttributionRequest(
        epochs=epochs, epsilon=0.5, buckets=2, value=2, query_sensitivity=4, function=LastTouch()
    )
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields of AttributionRequest, checked when it is used


# One epoch and both, each attribution, values below the maximum, one bucket and two, a batch of two reports, and the
# standard's own call.
MENU = [
    query(ask((0, 1))),
    query(ask((0,), epsilon=0.5, function=EqualCredit())),
    query(ask((1,), value=1)),
    query(ask((0, 1), buckets=1, function=FirstTouch(), query_sensitivity=2)),
    query(ask((0, 1), function=LastNTouch((2.0, 1.0)), value=1), ask((0,))),
    query(w3c(2, epsilon=0.5, value=1, max_value=2, lookback_days=6)),
]


def worst_of(
    menu: Sequence[WorldQuery],
    limits: DeviceLimits = LIMITS,
    make: Callable[..., PlainDevice] = Device,
    watched: Sequence[FilterKind] = (FilterKind.SITE,),
) -> Fraction:
    """The largest loss over all pairs of neighbours."""
    pairs = ([SmallWorld(events, limits, make, watched) for events in pair] for pair in neighbours())
    return max(worst_loss(world, neighbour, menu) for world, neighbour in pairs)


def test_no_adaptive_querier_learns_more_than_the_budget() -> None:
    """Theorem 1, case 1, over all neighbours and all adaptive sequences; and one of them learns nearly all of it."""
    worst = worst_of(MENU)
    assert worst <= BUDGET
    assert worst > BUDGET * 9 // 10


def test_colluding_queriers_learn_no_more_than_the_global_budget() -> None:
    """Three sites that put their answers together, each with a budget of its own, on one global budget."""
    limits = replace(LIMITS, global_budget=BUDGET * 3 // 2)
    sites = ("shop.example", "store.example", "market.example")
    menu = [query(ask((0, 1)), site=site) for site in sites] + [query(ask((1,)), site=sites[0])]
    worst = worst_of(menu, limits, watched=(FilterKind.SITE, FilterKind.GLOBAL))
    assert BUDGET < worst <= BUDGET * 3 // 2


def test_a_quota_that_runs_out_tells_nothing() -> None:
    """Impressions of two publishers, one of whose quota is the first filter to refuse."""
    limits = replace(LIMITS, impression_site_quota=BUDGET // 2)
    events = (Event(0, 0), Event(0, 1, site="blog.example"), Event(1, 1, site="blog.example"))
    menu = [query(ask((0, 1))), query(ask((1,), value=1)), query(ask((0, 1)), site="store.example")]
    for epoch in (0, 1):
        watched = (FilterKind.SITE, FilterKind.IMPRESSION_SITE)
        pair = [SmallWorld(seen, limits, watched=watched) for seen in (events, without_epoch(events, epoch))]
        # Two sites ask here, each within its own budget.
        assert worst_loss(pair[0], pair[1], menu) <= 2 * BUDGET
        assert worst_loss(pair[0], pair[1], menu[:2]) <= BUDGET


class KeepsDroppedEpochs(Device[tuple[int, ...]]):
    """Broken: an epoch that cannot pay is used all the same."""

    def _attribute(self, conversion: CheckedRequest, found: Found, settled: Settled, award: Award) -> tuple[int, ...]:
        return super()._attribute(conversion, found, replace(settled, paid=dict.fromkeys(found.reach.window, 0)), award)


class AllOrNothing(Device[tuple[int, ...]]):
    """Broken: one epoch that cannot pay takes the whole report with it, which costs the others nothing."""

    def _charge(self, conversion: CheckedRequest, found: Found, award: Award) -> Settled:
        before = {owner: tuple(ledger.entries()) for owner, ledger in self._store.filters().items()}
        settled = super()._charge(conversion, found, award)
        if found.sites.keys() <= settled.paid.keys():
            return settled
        for owner, ledger in self._store.filters().items():
            for epoch, spent in tuple(ledger.entries()):
                ledger.consume(epoch, dict(before.get(owner, ())).get(epoch, 0) - spent)
        return Settled({}, None if settled.output is None else (0,) * conversion.buckets)


@pytest.mark.parametrize(("broken", "leak"), [(KeepsDroppedEpochs, UNBOUNDED), (AllOrNothing, 2 * BUDGET)])
def test_broken_engines_leak(broken: type[Device[tuple[int, ...]]], leak: Fraction) -> None:
    """What stands between these and the budget is one rule each; without it the loss is at least this."""
    menu = [query(ask((0, 1))), query(ask((0,))), query(ask((1,)))]
    assert worst_of(menu) <= BUDGET
    assert worst_of(menu, make=broken) >= leak


def test_an_engine_without_the_factor_two_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 18 forgotten: the budget lasts twice as long as it may."""

    def half(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
        return epoch_loss(terms, relevant=relevant, sensitivity=sensitivity // 2, output=output)

    monkeypatch.setattr("device.device.epoch_loss", half)
    assert worst_of([query(ask((0, 1), epsilon=0.5))]) > BUDGET


def cells(report: int, other: int, rate: Fraction) -> list[tuple[int, Decimal, Decimal]]:
    """One bucket's answer under both databases, as (outcome, probability, probability'), exact up to 50 digits.

    Outcomes beyond both sums are put together: all of them have the same likelihood ratio, so no truncation is needed.
    """
    low, high = min(report, other), max(report, other)
    q = (-(Decimal(rate.numerator) / rate.denominator / MICROS)).exp()
    middle = (1 - q) / (1 + q)

    def probability(outcome: int, centre: int) -> Decimal:
        tail = 1 if low < outcome < high else 1 / (1 - q)
        return middle * q ** abs(outcome - centre) * tail

    if low == high:
        # One cell would hide that the answer can be above or below; two halves and the middle keep it.
        return [(low - 1, q / (1 + q), q / (1 + q)), (low, middle, middle), (low + 1, q / (1 + q), q / (1 + q))]
    return [(outcome, probability(outcome, report), probability(outcome, other)) for outcome in range(low, high + 1)]


def test_one_answer_differs_by_exactly_its_rate_times_its_change() -> None:
    """The step of the induction: max-divergence of discrete Laplace noise, from its distribution."""
    with localcontext() as context:
        context.prec = 60
        for report, other, rate in itertools.product(range(4), range(4), (Fraction(1, 3), Fraction(MICROS, 2))):
            outcomes = cells(report, other, rate)
            assert abs(sum((p for _, p, _ in outcomes), Decimal(-1))) < Decimal(10) ** -50
            assert abs(sum((p for _, _, p in outcomes), Decimal(-1))) < Decimal(10) ** -50
            divergence = max((p / other_p).ln() for _, p, other_p in outcomes)
            expected = rate * abs(report - other) / MICROS
            assert abs(divergence - Decimal(expected.numerator) / expected.denominator) < Decimal(10) ** -45


Answers = tuple[tuple[int, ...], ...]
Strategy = Callable[[Answers], WorldQuery]


def transcripts(
    world: SmallWorld, other: SmallWorld, strategy: Strategy, rounds: int
) -> Iterator[tuple[Decimal, Decimal, Answers]]:
    """Every sequence of noisy answers that `strategy` can see, with its exact probability under both databases."""
    start: tuple[Spending, Spending] = ((), ())
    pending: list[tuple[Answers, Decimal, Decimal, tuple[Spending, Spending]]] = [((), Decimal(1), Decimal(1), start)]
    while pending:
        seen, p, other_p, (mine, theirs) = pending.pop()
        if len(seen) == rounds:
            yield p, other_p, seen
            continue
        asked = strategy(seen)
        report, mine_next = world.step(mine, asked)
        other_report, theirs_next = other.step(theirs, asked)
        buckets = [cells(one, two, asked.rate) for one, two in zip(report, other_report, strict=True)]
        for combined in itertools.product(*buckets):
            answer = tuple(outcome for outcome, _, _ in combined)
            factor, other_factor = Decimal(1), Decimal(1)
            for _, one, two in combined:
                factor, other_factor = factor * one, other_factor * two
            pending.append(((*seen, answer), p * factor, other_p * other_factor, (mine_next, theirs_next)))


def strategies(menu: Sequence[WorldQuery]) -> Iterator[Strategy]:
    """Every way to choose three queries, each next one by whether the answer before was above one in bucket 0."""
    for choices in itertools.product(menu, repeat=7):
        yield partial(_choose, choices)


def _choose(choices: Sequence[WorldQuery], seen: Answers) -> WorldQuery:
    """A binary tree in an array: the root, then a branch for each answer seen."""
    place = 0
    for answer in seen:
        place = 2 * place + (2 if answer[0] > 1 else 1)
    return choices[place]


def test_adaptive_transcripts_differ_by_at_most_the_budget() -> None:
    """All 128 adaptive strategies over two queries and three rounds, on the joint distributions of their answers.

    For every set S of transcripts P(S) ≤ e^budget·P'(S), and the other way round, because it holds for each of them.
    """
    menu = [query(ask((0, 1), buckets=1, query_sensitivity=2)), query(ask((0,), epsilon=0.5, buckets=1))]
    world, other = SmallWorld((Event(0, 0), Event(1, 0)), LIMITS), SmallWorld((Event(1, 0),), LIMITS)
    with localcontext() as context:
        context.prec = 60
        limit = (Decimal(BUDGET) / MICROS).exp() * (1 + Decimal(10) ** -40)
        for strategy in strategies(menu):
            total = other_total = Decimal(0)
            for p, other_p, _ in transcripts(world, other, strategy, 3):
                assert p <= limit * other_p and other_p <= limit * p
                total, other_total = total + p, other_total + other_p
            assert abs(total - 1) < Decimal(10) ** -40 and abs(other_total - 1) < Decimal(10) ** -40


def test_the_game_finds_what_the_transcripts_show() -> None:
    """The largest ratio over all transcripts of a querier who asks the same thing until the budget is gone."""
    asked = query(ask((0, 1), buckets=1, query_sensitivity=2))
    world, other = SmallWorld((Event(0, 0),), LIMITS), SmallWorld((), LIMITS)
    with localcontext() as context:
        context.prec = 60
        seen = max((p / other_p).ln() for p, other_p, _ in transcripts(world, other, lambda _: asked, 4))
    expected = worst_loss(world, other, [asked])
    assert abs(seen - Decimal(expected.numerator) / expected.denominator / MICROS) < Decimal(10) ** -40
