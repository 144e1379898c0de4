"""Theorem 1 end to end on small worlds: whatever a querier asks, in whatever order, it learns at most the budget.

For every pair of databases that differ in one device-epoch, over every adaptive sequence of queries from a menu that
exhausts the budget, the answers' distributions differ by at most e^budget. Exact: see `small_worlds.worst_loss`; that
its steps are the max-divergences of the noise is checked here too, on the distributions themselves. With impressions on
the querier's own site it is 2ε where they count as others do, and ε where they are hidden.

Theorem 4 by brute force: no epoch pays less than its events can move the report. Every set of impressions over two
epochs, two buckets and one outside the histogram, at two times each, is compared with every other; nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import pytest

from benchmarks.experiments.small_worlds import (
    QUERIER,
    UNBOUNDED,
    Event,
    Events,
    Options,
    PlainDevice,
    SmallWorld,
    Spending,
    WorldQuery,
    fixed_coins,
    l1,
    noise_rate,
    query,
    w3c,
    worst_loss,
)
from device.attribution import AttributionFunction, Award, EqualCredit, FirstTouch, LastNSlots, LastNTouch, LastTouch
from device.budget import EpochLoss, FilterKind, LossTerms, epoch_loss
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device, Payment
from device.limits import TREFOIL_SERVICE, DeviceLimits, OwnSite
from device.request import CheckedRequest, Match
from device.stores.storage import Store
from protocol.errors import ErrorKind
from protocol.units import MICROS
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.raising import raises
from tests.support.small_worlds import paid_by, subsets, without_epoch

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

    def _attribute(self, conversion: CheckedRequest, found: Match, settled: Payment, award: Award) -> tuple[int, ...]:
        return super()._attribute(conversion, found, replace(settled, paid=dict.fromkeys(found.reach.window, 0)), award)


class AllOrNothing(Device[tuple[int, ...]]):
    """Broken: one epoch that cannot pay takes the whole report with it, which costs the others nothing."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        before = {owner: tuple(ledger.entries()) for owner, ledger in self._store.filters().items()}
        settled = super()._charge(conversion, found, award)
        if found.sites.keys() <= settled.paid.keys():
            return settled
        for owner, ledger in self._store.filters().items():
            for epoch, spent in tuple(ledger.entries()):
                ledger.consume(epoch, dict(before.get(owner, ())).get(epoch, 0) - spent)
        return Payment({}, None if settled.output is None else (0,) * conversion.buckets)


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


# Theorem 4 by brute force

# So much that everything is paid for: this is about what is charged.
UNLIMITED = DeviceLimits(site_budget=2**50, global_budget=2**50, impression_site_quota=2**50)
# Bucket 2 lies outside a histogram of two; the later impression of each epoch has the higher priority.
POSSIBLE_EVENTS = [Event(0, bucket, day, priority=day) for bucket in (0, 1, 2) for day in (2, 4)]
SETS = list(subsets(POSSIBLE_EVENTS))
VALUE = 3
FUNCTIONS: list[AttributionFunction] = [
    LastTouch(),
    FirstTouch(),
    EqualCredit(),
    LastNTouch(),
    LastNTouch((1.0, 2.0)),
    LastNSlots(),
]


class Outcome(NamedTuple):
    """A report, and what epochs 0 and 1 paid to the querier's filter and to the global one."""

    report: tuple[int, ...]
    site: tuple[int, int]
    everyone: tuple[int, int]


Outcomes = Mapping[tuple[Events, Events], Outcome]


def all_outcomes(
    options: Options, sets: list[Events] = SETS, make: Callable[..., PlainDevice] = Device, coin: float = 0.5
) -> Outcomes:
    """Every world's report and charges, by what is in its two epochs."""
    outcomes = {}
    for first in sets:
        for second in sets:
            later = tuple(event._replace(epoch=1) for event in second)
            world = SmallWorld(first + later, UNLIMITED, make)
            world.device._coins = fixed_coins(coin)
            report = world.ask(query(options))
            site = (paid_by(world.store, 0), paid_by(world.store, 1))
            everyone = (paid_by(world.store, 0, FilterKind.GLOBAL, ""), paid_by(world.store, 1, FilterKind.GLOBAL, ""))
            outcomes[first, second] = Outcome(report, site, everyone)
    return outcomes


def shortfall(options: Options, outcomes: Outcomes) -> int:
    """How far the worst charge is below γ·Δ_x, in units of micro-epsilons; zero or less is what Theorem 4 wants.

    Δ_x is the largest L1 change from removing the epoch's events, over everything that may be in the other epoch.
    """
    rate = noise_rate(options)
    sets = {first for first, _ in outcomes}
    worst = -(10**18)
    for events in sets:
        for epoch in (0, 1):
            pairs = [((events, other), ((), other)) if epoch == 0 else ((other, events), (other, ())) for other in sets]
            moved = max(l1(outcomes[having].report, outcomes[lacking].report) for having, lacking in pairs)
            for having, _ in pairs:
                charged = min(outcomes[having].site[epoch], outcomes[having].everyone[epoch])
                worst = max(worst, -(-(rate * moved - charged) // 1))
    return worst


def requests() -> list[Options]:
    """Each built-in function over one and two epochs, one and two buckets, and the standard's own call."""
    asked: list[Options] = [
        AttributionRequest(
            epochs=epochs, epsilon=0.3, buckets=buckets, value=VALUE, query_sensitivity=7, function=function
        )
        for function in FUNCTIONS
        for epochs in ((0,), (0, 1))
        for buckets in (1, 2)
    ]
    standard = [w3c(buckets, lookback_days=days, value=VALUE, max_value=4) for buckets in (1, 2) for days in (6, 13)]
    return asked + standard + [replace(one, credit=(2.0, 1.0)) for one in standard]


def named(options: Options) -> str:
    if isinstance(options, AttributionRequest):
        return f"{type(options.function).__name__}-{len(options.epochs)}-epochs-{options.buckets}-buckets"
    return f"standard-{options.lookback_days}-days-{options.histogram_size}-buckets-{len(options.credit)}"


# One time per epoch is enough for functions over time alone: two impressions of one epoch never swap places.
FEW = list(subsets([Event(0, bucket, day, priority=day) for bucket in (0, 1) for day in (2, 4)]))


@pytest.mark.parametrize("options", requests(), ids=named)
def test_no_epoch_pays_less_than_it_can_change(options: Options) -> None:
    """Theorem 4, all cases: the charge covers ε_r/Δ_r times the individual sensitivity, in every world."""
    outcomes = all_outcomes(options, FEW)
    assert shortfall(options, outcomes) <= 0


@pytest.mark.parametrize("coin", [0.0, 0.25, 0.75, 0.999])
def test_odd_units_are_charged_however_the_coins_fall(coin: float) -> None:
    """Sensitivity is for fixed coins, so every fixing of them must be covered."""
    options = replace(w3c(2, lookback_days=6, value=VALUE, max_value=4), credit=(2.0, 1.0))
    assert shortfall(options, all_outcomes(options, FEW, coin=coin)) <= 0


@pytest.mark.parametrize("days", [6, 13])
def test_credit_that_falls_outside_the_histogram_is_covered_too(days: int) -> None:
    """With a bucket that is lost: an impression that gets nothing itself can still take credit from another."""
    options = replace(w3c(2, lookback_days=days, value=VALUE, max_value=4), credit=(2.0, 1.0))
    few = list(subsets([event for event in POSSIBLE_EVENTS if event.day == 2]))
    assert shortfall(options, all_outcomes(options, few)) <= 0


def test_every_set_over_two_epochs_and_three_buckets_is_covered() -> None:
    """The full enumeration, 4,096 worlds, for the paper's and the standard's last touch."""
    options = w3c(2, value=VALUE, max_value=4)
    assert len(SETS) == 64
    assert shortfall(options, all_outcomes(options)) <= 0


def test_the_bound_is_tight() -> None:
    """Some world needs every bit of its charge: a check that nothing could fail would prove nothing."""
    multi = AttributionRequest(
        epochs=(0, 1), epsilon=0.7, buckets=2, value=VALUE, query_sensitivity=7, function=LastTouch()
    )
    single = replace(multi, epochs=(0,))
    assert shortfall(multi, all_outcomes(multi, FEW)) == 0
    assert shortfall(single, all_outcomes(single, FEW)) == 0


def test_an_epoch_without_impressions_pays_nothing() -> None:
    """Theorem 4, case 1, in every world."""
    for options in (w3c(2), w3c(2, lookback_days=6)):
        for (first, second), outcome in all_outcomes(options, FEW).items():
            for epoch, events in enumerate((first, second)):
                if not events:
                    assert outcome.site[epoch] == outcome.everyone[epoch] == 0


def test_theorem_18_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that charges the value where twice the value can move."""

    def half(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
        return epoch_loss(terms, relevant=relevant, sensitivity=sensitivity // 2, output=output)

    monkeypatch.setattr("device.device.epoch_loss", half)
    options = w3c(2, value=VALUE, max_value=4)
    assert shortfall(options, all_outcomes(options, FEW)) > 0


class CaseByData(Device[tuple[int, ...]]):
    """Broken: takes case 2 whenever the data happens to lie in one epoch."""

    def _charge(self, conversion: CheckedRequest, found: Match, award: Award) -> Payment:
        if len(found.sites) == 1:
            found = replace(found, reach=found.reach._replace(window=tuple(found.sites)))
        return super()._charge(conversion, found, award)


def test_case_2_decided_by_the_data_is_caught() -> None:
    """Credit lost outside the histogram costs such an engine nothing, yet takes all credit from the other epoch."""
    options = w3c(2, value=VALUE, max_value=4)
    few = list(subsets([Event(0, 0), Event(0, 2)]))
    assert shortfall(options, all_outcomes(options, few)) <= 0
    assert shortfall(options, all_outcomes(options, few, CaseByData)) > 0


def test_a_charge_rounded_down_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sevenths of 0.5 is no whole number of micro-epsilons, and the querier must not get the rest."""

    def floor(terms: LossTerms, individual_sensitivity: int) -> int:
        return terms.epsilon_micros * individual_sensitivity // terms.query_sensitivity

    monkeypatch.setattr(LossTerms, "loss", floor)
    options = AttributionRequest(epochs=(0,), epsilon=0.5, buckets=2, value=VALUE, query_sensitivity=7)
    assert shortfall(options, all_outcomes(options, FEW)) > 0


# Impressions on the querier's own site

OWN = [Event(0, 1, day=3, site=QUERIER), Event(1, 1, day=1, site=QUERIER)]
OTHERS = [Event(0, 0), Event(1, 0, day=5), Event(1, 2, day=0)]
OWN_SITE_MENU = [
    query(w3c(3, lookback_days=13, epsilon=0.5, value=2, max_value=2)),
    query(w3c(3, lookback_days=6, epsilon=0.5, value=2, max_value=2)),
    query(w3c(3, lookback_days=13, epsilon=1.0, value=1, max_value=2, credit=[1.0, 1.0])),
]


def worst(rule: OwnSite, private: Sequence[Event]) -> Fraction:
    """What the best querier learns about the private events of one epoch, whatever the other one holds."""
    limits = DeviceLimits(site_budget=BUDGET, global_budget=8 * BUDGET, impression_site_quota=8 * BUDGET, own_site=rule)
    losses = []
    for epoch in (0, 1):
        with_them = SmallWorld((*OWN, *private), limits)
        without = SmallWorld((*OWN, *(event for event in private if event.epoch != epoch)), limits)
        losses += [worst_loss(with_them, without, OWN_SITE_MENU), worst_loss(without, with_them, OWN_SITE_MENU)]
    return max(losses)


@pytest.mark.parametrize("private", [OTHERS[:1], OTHERS[1:2], OTHERS[:2], OTHERS])
def test_where_own_impressions_are_hidden_a_querier_learns_at_most_its_budget(private: Sequence[Event]) -> None:
    assert worst(OwnSite.HIDDEN, private) <= BUDGET


def test_where_they_count_as_others_do_it_learns_up_to_twice_that() -> None:
    """Theorem 1, case 2: what the two databases have paid differs."""
    seen = max(worst(OwnSite.COUNTED, private) for private in (OTHERS[:1], OTHERS[1:2], OTHERS[:2], OTHERS))
    assert BUDGET < seen <= 2 * BUDGET


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


# On the querier's own page, and by the querier's or the intermediary's frame on another's.
KNOWN: list[dict[str, Any]] = [{"site": QUERIER}, {"caller": QUERIER}, {"caller": "tech.example"}]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: "-".join(*known.items()))
def test_impressions_of_the_queriers_own_are_hidden_and_cost_nothing(store: Store, known: dict[str, Any]) -> None:
    """Otherwise what two conversions have left of them would link two devices, for no charge."""
    ann = Ann(store, own_site=OwnSite.HIDDEN).see(0.5, 1, **known).at(0.6)
    for _ in range(3):
        assert ann.convert(caller="tech.example") == ann.convert(lookback_days=1, caller="tech.example") == (0, 0)
    assert ann.spent() == ann.spent(FilterKind.GLOBAL) == {}
    # Others' are counted beside them, and charged as if they were alone.
    ann.see(0.55, 0).at(0.6)
    assert ann.convert(lookback_days=1, epsilon=0.4, caller="tech.example") == (1, 0)
    assert ann.spent() == {0: 200_000}


@pytest.mark.parametrize("known", KNOWN[:2], ids=lambda known: "-".join(*known.items()))
def test_the_papers_request_never_sees_what_the_querier_saved(store: Store, known: dict[str, Any]) -> None:
    ann = Ann(store).see(0.5, 1, **known).at(0.6)
    assert ann.ask(0) == (0, 0)
    assert ann.spent() == {}
    assert ann.ask(0, site="other.example") == (0, 1)


def test_the_papers_request_never_sees_what_its_caller_saved(store: Store) -> None:
    ann = Ann(store).see(0.5, 1, caller="tech.example").at(0.6)
    asked = ask((0,), query_sensitivity=2)
    assert ann.device.measure(QUERIER, asked, intermediary="tech.example") == (0, 0)
    assert ann.device.measure(QUERIER, asked) == (0, 2)


def test_by_default_the_standard_counts_them(store: Store) -> None:
    for week, known in enumerate(KNOWN):
        ann = Ann(store).see(week + 0.5, 1, **known).at(week + 0.6)
        assert ann.convert(caller="tech.example", lookback_days=1) == (0, 1)


def test_the_limit_is_one_of_two() -> None:
    with raises(ErrorKind.WRONG_TYPE):
        DeviceLimits(own_site="hidden")  # type: ignore[arg-type]  # the point of the test
    assert list(OwnSite) == [OwnSite.COUNTED, OwnSite.HIDDEN]
    assert ConversionOptions(TREFOIL_SERVICE, 1).checked(QUERIER, QUERIER, DeviceLimits()).hides_own is False
