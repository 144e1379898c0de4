"""Theorem 4 by its cases, Theorem 18's factor, κ everywhere, charges that round up, and filters never overdrawn.

The bias side query: it never exceeds its stated bound, and two plausible ways to do it cheaper do not.

With the flag in the report the presence of an impression is protected by twice the budget (Theorem 1, case 2): one
budget for the database that has the epoch's events, one for the database that lacks them. The loss is exact, over all
adaptive sequences and over hundreds of queries in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.small_worlds import (
    UNBOUNDED,
    Event,
    Events,
    PlainDevice,
    SmallWorld,
    WorldQuery,
    query,
    worst_loss,
)
from device.attribution import Award, EqualCredit, LastTouch
from device.budget import (
    EMPTIED,
    EpochLoss,
    FilterKind,
    FilterOwner,
    LossTerms,
    PrivacyFilter,
    capacities,
    charges_of,
    check_and_consume,
    epoch_loss,
    report_sensitivity,
    states,
)
from device.conversion import AttributionRequest, check_epsilon, floor_micros
from device.device import Device, Payment
from device.errors import RangeError
from device.limits import DeviceLimits
from device.request import CheckedRequest, Match, SideQuery, SideQueryForm
from device.stores.storage import EpochOutcome
from protocol.errors import ErrorKind
from protocol.querier.result import bias_bound
from protocol.units import MAX_EPSILON, MICROS
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.raising import raises
from tests.support.small_worlds import paid_by, repeated_loss, without_epoch

epsilons = st.floats(min_value=1e-6, max_value=MAX_EPSILON)


def terms(epsilon: float, query_sensitivity: int, kappa: int = 0) -> LossTerms:
    return LossTerms(epsilon, floor_micros(epsilon), query_sensitivity, kappa)


@pytest.mark.parametrize(("buckets", "epochs", "sensitivity"), [(1, 1, 70), (1, 4, 70), (2, 1, 70), (2, 4, 140)])
def test_theorem_18(buckets: int, epochs: int, sensitivity: int) -> None:
    assert report_sensitivity(70, buckets, epochs) == sensitivity


def test_case_1_no_relevant_events_no_loss() -> None:
    for output in (None, 0):
        loss = epoch_loss(terms(1, 200), relevant=False, sensitivity=140, output=output)
        assert loss == EpochLoss(0, 0)


def test_without_a_side_query_there_is_no_kappa() -> None:
    assert LossTerms(1.0, 1_000_000, 200).kappa == 0


def test_case_2_the_site_pays_for_the_actual_report() -> None:
    loss = epoch_loss(terms(1, 16), relevant=True, sensitivity=8, output=4)
    assert loss == EpochLoss(site=250_000, everyone=500_000)
    assert epoch_loss(terms(1, 16), relevant=True, sensitivity=8, output=0).site == 0


def test_case_3_everyone_pays_the_reports_sensitivity() -> None:
    assert epoch_loss(terms(1, 200), relevant=True, sensitivity=140, output=None) == EpochLoss(700_000, 700_000)


def test_a_side_query_is_paid_with_data_or_without() -> None:
    with_data = epoch_loss(terms(1, 200, kappa=20), relevant=True, sensitivity=140, output=None)
    without = epoch_loss(terms(1, 200, kappa=20), relevant=False, sensitivity=140, output=None)
    assert with_data == EpochLoss(800_000, 800_000)
    assert without == EpochLoss(100_000, 100_000)


def test_a_side_query_may_cost_more_than_epsilon() -> None:
    assert epoch_loss(terms(1, 200, kappa=100), relevant=True, sensitivity=200, output=None).site == 1_500_000


@given(epsilons, st.integers(1, 2**33), st.integers(0, 2**34), st.integers(0, 2**20))
def test_a_charge_is_never_below_the_exact_one(epsilon: float, delta: int, sensitivity: int, kappa: int) -> None:
    """Exact for the ε that the header carries; at most one micro and a relative 2^-50 above it for the ε requested."""
    spent = terms(epsilon, delta, kappa).loss(sensitivity)
    assert spent >= Fraction(floor_micros(epsilon) * sensitivity, delta)
    assert spent <= math.ceil(Fraction(epsilon) * 10**6 * sensitivity / delta * (1 + Fraction(1, 2**50)))


@given(epsilons, st.integers(1, 2**32), st.data())
def test_without_a_side_query_no_charge_exceeds_epsilon(epsilon: float, max_value: int, data: st.DataObject) -> None:
    value = data.draw(st.integers(1, max_value))
    charged = terms(epsilon, 2 * max_value).loss(2 * value)
    assert charged <= math.ceil(epsilon * 10**6 * (1 + 2**-50))


def test_the_standards_arithmetic_in_its_own_order() -> None:
    """Another order of the same operations in doubles would charge otherwise."""
    assert terms(1, 6).loss(2) == 333_334
    epsilon = 0.7
    assert terms(epsilon, 20).loss(2) == math.ceil(2 / (20 / epsilon) * 1_000_000)


def test_a_float_may_not_lower_a_charge() -> None:
    """ε·Δ_x/Δ is 251722305 micros and two parts in 7485801982; doubles lose the rest, and charge one too little."""
    epsilon, sensitivity, delta = 3260.967032, 577_848_016, 7_485_801_982
    assert math.ceil(sensitivity / (delta / epsilon) * 1_000_000) == 251_722_305
    assert terms(epsilon, delta).loss(sensitivity) == 251_722_306


def test_a_float_may_raise_a_charge() -> None:
    """2/(2/0.29) is a little above 0.29 in doubles, and the ceiling takes it to the next micro."""
    raised = [k for k in range(1, 1000) if terms(k / 1000, 2).loss(2) > k * 1000]
    assert raised
    assert all(terms(k / 1000, 2).loss(2) == k * 1000 + 1 for k in raised)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, -math.inf, 4294.0000001, 1e308])
def test_epsilon_out_of_range(epsilon: float) -> None:
    with pytest.raises(RangeError):
        check_epsilon(epsilon)


def test_the_header_rounds_epsilon_down() -> None:
    assert floor_micros(0.3) == 299_999
    assert floor_micros(0.5) == 500_000
    assert floor_micros(4294) == 4_294_000_000
    assert floor_micros(1e-9) == 0
    assert terms(1e-9, 2).loss(2) == 1


# Filters

LIMITS = DeviceLimits(site_budget=10, global_budget=25, impression_site_quota=15)


@pytest.mark.parametrize("epsilon", [5e-324, 1e-300, 1e-9])
def test_no_epsilon_is_too_small_to_be_charged(epsilon: float) -> None:
    """In a simulation: no such report can be sealed."""
    assert LossTerms(epsilon, 0, 2).loss(1) == 1
    assert LossTerms(epsilon, 0, 2).loss(0) == 0


SITE = FilterOwner(FilterKind.SITE, "shop.example")
EVERYONE = FilterOwner(FilterKind.GLOBAL, "")


def test_the_numbers_that_databases_hold_stay_as_they_are() -> None:
    """Another number would make every filter of a device a new one."""
    numbers = {"SITE": 1, "GLOBAL": 2, "IMPRESSION_SITE": 3, "ADVERTISER": 5, "SIDE_QUERY": 6}
    assert {kind.name: kind.value for kind in FilterKind} == numbers
    outcomes = {"PAID": 1, "NOTHING_FOUND": 2, "OUT_OF_BUDGET": 3, "CLOSED": 4, "NOT_MEASURED": 5, "FAULT": 6}
    assert {outcome.name: outcome.value for outcome in EpochOutcome} == outcomes


def test_half_an_entry_is_no_filter() -> None:
    """A damaged ledger must not lose an amount without a word."""
    with pytest.raises(ValueError, match="shorter"):
        PrivacyFilter(bytes(8))


def test_each_filter_is_charged_once() -> None:
    charges = charges_of("shop.example", {"news.example", "blog.example"}, EpochLoss(1, 2))
    assert charges == {
        SITE: 1,
        EVERYONE: 2,
        FilterOwner(FilterKind.IMPRESSION_SITE, "news.example"): 2,
        FilterOwner(FilterKind.IMPRESSION_SITE, "blog.example"): 2,
    }


def test_one_filter_that_cannot_pay_spares_the_others() -> None:
    filters = {SITE: PrivacyFilter(), EVERYONE: PrivacyFilter()}
    filters[EVERYONE].consume(3, 20)
    assert not check_and_consume(3, {SITE: 6, EVERYONE: 6}, filters, capacities(LIMITS))
    assert (filters[SITE].spent(3), filters[EVERYONE].spent(3)) == (0, 20)
    assert check_and_consume(3, {SITE: 5, EVERYONE: 5}, filters, capacities(LIMITS))
    assert (filters[SITE].spent(3), filters[EVERYONE].spent(3)) == (5, 25)


def test_the_last_micro_can_be_spent_and_no_more() -> None:
    filters = {SITE: PrivacyFilter()}
    assert check_and_consume(0, {SITE: 10}, filters, capacities(LIMITS))
    assert not check_and_consume(0, {SITE: 1}, filters, capacities(LIMITS))
    assert check_and_consume(0, {SITE: 0}, filters, capacities(LIMITS))
    assert check_and_consume(1, {SITE: 10}, filters, capacities(LIMITS))


def test_a_charge_beyond_64_bits_is_refused_not_wrapped() -> None:
    filters = {SITE: PrivacyFilter()}
    filters[SITE].consume(0, 5)
    assert not check_and_consume(0, {SITE: 2**64 - 5}, filters, capacities(LIMITS))
    assert not check_and_consume(0, {SITE: 2**63}, filters, capacities(LIMITS))


def test_an_emptied_filter_stays_empty_under_any_limits() -> None:
    ledger = PrivacyFilter()
    ledger.empty(2)
    assert ledger.spent(2) == EMPTIED
    generous = DeviceLimits(site_budget=2**52)
    assert not check_and_consume(2, {SITE: 1}, {SITE: ledger}, capacities(generous))
    assert check_and_consume(3, {SITE: 1}, {SITE: ledger}, capacities(generous))
    shown = states({SITE: ledger}, generous)
    assert [(state.epoch, state.remaining) for state in shown] == [(2, 0), (3, 2**52 - 1)]


entries = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 2**40)), max_size=30)


@given(entries, st.integers(-40, 40))
def test_a_ledger_is_a_map_from_epochs_to_sums(charges: list[tuple[int, int]], forgotten: int) -> None:
    ledger, model = PrivacyFilter(), dict[int, int]()
    for epoch, amount in charges:
        ledger.consume(epoch, amount)
        model[epoch] = model.get(epoch, 0) + amount
    assert dict(ledger.entries()) == {epoch: amount for epoch, amount in model.items() if amount}
    copy = PrivacyFilter(ledger.encode())
    copy.forget_before(forgotten)
    assert all(copy.spent(epoch) == (model.get(epoch, 0) if epoch >= forgotten else 0) for epoch in range(-50, 50))


amounts = st.integers(0, 30)


@given(st.lists(st.tuples(st.integers(0, 2), amounts, amounts, amounts), max_size=40))
def test_no_sequence_of_charges_overdraws(requests: list[tuple[int, int, int, int]]) -> None:
    quota = FilterOwner(FilterKind.IMPRESSION_SITE, "news.example")
    filters = {SITE: PrivacyFilter(), EVERYONE: PrivacyFilter(), quota: PrivacyFilter()}
    capacity = capacities(LIMITS)
    for epoch, *owed in requests:
        charges = dict(zip(filters, owed, strict=True))
        before = [filters[owner].spent(epoch) for owner in filters]
        paid = check_and_consume(epoch, charges, filters, capacity)
        after = [filters[owner].spent(epoch) for owner in filters]
        assert after == ([b + a for b, a in zip(before, owed, strict=True)] if paid else before)
        assert all(filters[owner].spent(epoch) <= capacity[owner.kind] for owner in filters)


BUDGET = MICROS
SCARCE = DeviceLimits(site_budget=BUDGET, global_budget=8 * BUDGET, impression_site_quota=8 * BUDGET)
WORLDS: list[Events] = [
    (Event(0, 0),),
    (Event(1, 0),),
    (Event(0, 0), Event(1, 1)),
    (Event(0, 0), Event(0, 1, day=4), Event(1, 1)),
]
FORMS = [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH]
HUNDREDS = 300


def ask(epochs: Sequence[int], form: SideQueryForm, *, epsilon: float = 0.25, value: int = 2) -> AttributionRequest:
    """A report of sensitivity up to 4, and κ = 2 beside it."""
    return AttributionRequest(
        epochs=epochs,
        epsilon=epsilon,
        buckets=2,
        value=value,
        query_sensitivity=4,
        function=LastTouch(),
        side_query=SideQuery(2, form),
    )


def menu(form: SideQueryForm) -> list[WorldQuery]:
    """With the flag over one epoch and two, small and large, and without it."""
    plain = replace(ask((0, 1), form), side_query=None)
    return [
        query(ask((0, 1), form)),
        query(ask((0,), form, value=1)),
        query(ask((1,), form, epsilon=0.5)),
        query(plain),
    ]


def pairs(
    make: Callable[..., PlainDevice] = Device, limits: DeviceLimits = SCARCE
) -> list[tuple[SmallWorld, SmallWorld]]:
    """Every world beside itself without one of its epochs."""
    neighbours = [
        (world, without_epoch(world, epoch)) for world in WORLDS for epoch in {event.epoch for event in world}
    ]
    return [(SmallWorld(having, limits, make), SmallWorld(lacking, limits, make)) for having, lacking in neighbours]


def worst_of(asked: Sequence[WorldQuery], make: Callable[..., PlainDevice] = Device) -> Fraction:
    return max(worst_loss(world, neighbour, asked) for world, neighbour in pairs(make))


def worst_repeated(asked: WorldQuery, make: Callable[..., PlainDevice] = Device) -> Fraction:
    return max(repeated_loss(world, neighbour, [asked] * HUNDREDS) for world, neighbour in pairs(make))


@pytest.mark.parametrize("form", FORMS)
def test_no_adaptive_querier_learns_more_than_twice_the_budget(form: SideQueryForm) -> None:
    """And some learn more than once the budget, so the factor is no luxury."""
    worst = worst_of(menu(form))
    assert BUDGET < worst <= 2 * BUDGET


@pytest.mark.parametrize("form", FORMS)
def test_hundreds_of_queries_stay_under_the_bound(form: SideQueryForm) -> None:
    for asked in menu(form)[:2]:
        assert worst_repeated(asked) <= 2 * BUDGET


def only_where_there_is_data(terms: LossTerms, *, relevant: bool, sensitivity: int, output: int | None) -> EpochLoss:
    """Broken: κ is charged as Theorem 17 has it, to epochs with data alone."""
    paying = terms if relevant else replace(terms, kappa=0)
    return epoch_loss(paying, relevant=relevant, sensitivity=sensitivity, output=output)


@pytest.mark.parametrize("form", FORMS)
def test_charging_kappa_only_where_there_is_data_leaks(form: SideQueryForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch with data runs out and is flagged permanently; without data it never pays, and never is."""
    monkeypatch.setattr("device.device.epoch_loss", only_where_there_is_data)
    asked = query(ask((0, 1), form))
    # A quarter of the budget times κ/Δ for every query once the epoch has run out.
    assert worst_repeated(asked) > 10 * BUDGET
    assert worst_of([asked]) == UNBOUNDED


class FlagsFromData(Device[tuple[int, ...]]):
    """Broken: flags only reports that did lose an impression, which is what a querier would like to know."""

    def _attribute(self, conversion: CheckedRequest, found: Match, settled: Payment, award: Award) -> tuple[int, ...]:
        *histogram, _ = super()._attribute(conversion, found, settled, award)
        lost = conversion.kappa if any(epoch not in settled.paid for epoch in found.sites) else 0
        return (*histogram, lost)


@pytest.mark.parametrize("form", FORMS)
def test_a_flag_from_data_leaks(form: SideQueryForm) -> None:
    """Once both databases have run out only one of them is flagged, and neither pays any more."""
    asked = query(ask((0, 1), form))
    assert worst_repeated(asked, FlagsFromData) > 10 * BUDGET
    assert worst_of([asked], FlagsFromData) == UNBOUNDED


def test_every_requested_epoch_pays_kappa_with_data_or_without() -> None:
    """⌈ε·(sensitivity + κ)/Δ⌉ where there is an impression, ⌈ε·κ/Δ⌉ where not, to site and global filter."""
    world = SmallWorld((Event(0, 0),), SCARCE)
    world.ask(query(ask((0, 1), SideQueryForm.GENERAL)))
    for kind, site in ((FilterKind.SITE, "shop.example"), (FilterKind.GLOBAL, "")):
        assert paid_by(world.store, 0, kind, site) == 250_000 * (4 + 2) // 4
        assert paid_by(world.store, 1, kind, site) == 250_000 * 2 // 4
    # Of quotas, the publisher's pays for both where there is an impression, and where not that of side queries.
    assert paid_by(world.store, 0, FilterKind.IMPRESSION_SITE, "news.example") == 250_000 * (4 + 2) // 4
    assert paid_by(world.store, 0, FilterKind.SIDE_QUERY, "") == 0
    assert paid_by(world.store, 1, FilterKind.SIDE_QUERY, "") == 250_000 * 2 // 4


def test_colluding_queriers_with_flags_stay_under_twice_the_global_budget() -> None:
    limits = replace(SCARCE, global_budget=BUDGET)
    watched = (FilterKind.SITE, FilterKind.GLOBAL)
    asked = [query(ask((0, 1), SideQueryForm.GENERAL), site=site) for site in ("shop.example", "store.example")]
    for epoch in (0, 1):
        events = (Event(0, 0), Event(1, 1))
        world, neighbour = (
            SmallWorld(seen, limits, watched=watched) for seen in (events, without_epoch(events, epoch))
        )
        assert worst_loss(world, neighbour, asked) <= 2 * BUDGET


def test_the_last_touch_form_needs_last_touch() -> None:
    """Theorem 16 is about last touch; under another function its flag would miss biased reports."""
    asked = replace(ask((0, 1), SideQueryForm.LAST_TOUCH), function=EqualCredit())
    with raises(ErrorKind.CONFLICTING_OPTIONS, RangeError):
        SmallWorld((), SCARCE).ask(query(asked))


@pytest.mark.parametrize("form", FORMS)
def test_a_report_that_lost_something_is_always_flagged(form: SideQueryForm) -> None:
    """Equation (23) of the paper: reports that dropped epochs changed are among the flagged, so the bound holds."""
    for events in WORLDS:
        world, rich = (
            SmallWorld(events, SCARCE),
            SmallWorld(events, replace(SCARCE, site_budget=2**50, global_budget=2**50, side_query_quota=2**50)),
        )
        flagged = changed = 0
        for asked in (menu(form)[0], menu(form)[2], menu(form)[0]) * 4:
            report, full = world.ask(asked), rich.ask(asked)
            assert full[-1] == 0
            changed += report[:-1] != full[:-1]
            flagged += report[-1]
            assert report[:-1] == full[:-1] or report[-1] == 2
        assert changed > 0
        # What the querier concludes from a count without noise covers how far the answer can have moved.
        bound = bias_bound(flagged, kappa=2, sigma=0.0, largest_change=4, beta=0.05)
        assert bound.bound >= changed and bound.bound > 0.5


@pytest.mark.parametrize("kind", list(Kind))
def test_side_queries_of_sites_without_ads_do_not_use_up_everyones_budget(kind: Kind) -> None:
    """Eight sites without an ad, one request each; then an honest shop measures an ad of the same weeks."""
    with fresh_store(kind) as store:
        ann = Ann(store).see(3.5, 1)
        for number in range(8):
            # ε·κ/Δ = 1 of every week.
            assert ann.at(4.5).convert(f"drain{number}.example", kappa=2, match_values=[7])[-1] == 2 * (number > 0)
        assert set(ann.spent(FilterKind.GLOBAL).values()) == {MICROS}
        # Nor do they spoil a report with a side query. Weeks without an ad cannot pay for theirs, so it is flagged.
        assert ann.convert("careful.example", kappa=1, epsilon=0.5) == (0, 1, 1)
        assert ann.convert() == (0, 1)


def test_a_quota_of_side_queries_that_others_use_up_tells_no_more_than_the_bound() -> None:
    """Each differing answer is paid for by one of the databases, whichever filter refuses the other."""
    limits = replace(SCARCE, side_query_quota=BUDGET // 2)
    watched = (FilterKind.SITE, FilterKind.SIDE_QUERY)
    asked = [*menu(SideQueryForm.GENERAL), query(ask((0,), SideQueryForm.GENERAL), site="store.example")]
    for world in WORLDS:
        pair = [SmallWorld(events, limits, watched=watched) for events in (world, without_epoch(world, 0))]
        assert worst_loss(pair[0], pair[1], asked[:-1]) <= 2 * BUDGET
        # With another site that asks, and passes its answers on.
        assert worst_loss(pair[0], pair[1], asked) <= 4 * BUDGET
