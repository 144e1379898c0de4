"""The device as a whole: the paper's running example, the standard's calls, side queries, and what leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.experiments.small_worlds import START, WEEK
from device import errors
from device.attribution import Award, LastNSlots, LastTouch
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins, fair_coin
from device.errors import DOMException, RangeError
from device.events import Impression, ImpressionOptions
from device.limits import TREFOIL_SERVICE
from device.overview import shortfall
from device.report import DebugReport, DebugSeal, HelperSetSeal, PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.memory_store import MemoryStore
from device.stores.storage import EpochOutcome
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import add, lift
from protocol.header import Header, ReportTerms
from protocol.helper_set import HelperSet
from protocol.report import SealedReport, open_report, seal_report
from protocol.units import DAY
from protocol.validity import histogram_in
from tests.support.both_stores import Ann
from tests.support.protocol_samples import HELPER_SET, NOW, private_keys
from tests.support.raising import raises


def person(**limits: Any) -> Ann:
    """Return a person whose device is in memory, in which epoch 0 begins at START."""
    store = MemoryStore(debug=True)
    store.fix_epoch_start(START)
    return Ann(store, **limits)


# The paper's running example (§3.2)


def test_the_papers_running_example() -> None:
    """Ann saw Nike's ad in e1 and e2, not in e3, and buys shoes for $70 of at most $100 in e4.

    Nike asks for two slots over e1 to e4. Its budget for e1 is spent, so the report has $70 in one slot and a null; e2
    pays ε' = 70/100·ε, e3 and e4 pay nothing. (The paper writes sensitivities 70 and 100; with two slots Theorem 18
    doubles both, and the ratio is the same.)
    """
    world = person().see(1.1, match_value=5).see(2.1, match_value=5)
    world.see(3.1, site="blog.example", match_value=8)
    world.at(2.5).ask(1, site="nike.example", value=100, query_sensitivity=100, buckets=1)
    assert world.spent(site="nike.example") == {1: 1_000_000}
    report = world.at(4.5).ask(
        1,
        2,
        3,
        4,
        site="nike.example",
        epsilon=0.5,
        value=70,
        query_sensitivity=200,
        function=LastNSlots(),
        relevant=lambda impression: impression.match_value == 5,
    )
    assert report == (70, 0)
    assert world.spent(site="nike.example") == {1: 1_000_000, 2: 350_000}


def test_the_running_example_without_budget_is_all_null() -> None:
    world = person().see(1.1).see(2.1)
    for epoch in (1, 2):
        world.at(3).ask(epoch, site="nike.example", value=100, query_sensitivity=100, buckets=1)
    terms = {"value": 70, "query_sensitivity": 200, "function": LastNSlots()}
    assert world.at(4.5).ask(1, 2, 3, 4, site="nike.example", **terms) == (0, 0)


# The general request


def test_one_bucket_costs_half_of_several() -> None:
    world = person().see(0.1).see(1.1)
    world.at(1.5).ask(0, 1, site="one.example", buckets=1, epsilon=0.4)
    world.ask(0, 1, site="two.example", buckets=2, epsilon=0.4)
    assert world.spent(site="one.example") == {0: 200_000, 1: 200_000}
    assert world.spent(site="two.example") == {0: 400_000, 1: 400_000}


def test_a_single_epoch_pays_for_its_report_by_window_not_by_data() -> None:
    """Case 2 is for windows of one epoch; a window of two with data in one is case 3."""
    world = person().see(1.1, bucket=9)
    assert world.at(1.5).ask(1, site="one.example", epsilon=0.4) == (0, 0)
    assert world.ask(0, 1, site="two.example", epsilon=0.4) == (0, 0)
    # Also if the other cannot be used: it is yet to come.
    assert world.ask(1, 2, site="three.example", epsilon=0.4) == (0, 0)
    assert world.spent(site="one.example") == {}
    assert world.spent(site="two.example") == world.spent(site="three.example") == {1: 400_000}


def test_an_epoch_that_is_named_twice_is_one() -> None:
    world = person().see(0.1).at(0.5)
    assert world.ask(0, 0, epsilon=0.4) == (1, 0)
    assert (world.spent(), world.spent(FilterKind.GLOBAL)) == ({0: 200_000}, {0: 200_000})


def test_of_a_week_that_the_lookback_enters_only_its_end_is_read() -> None:
    world = person().see(0.1, bucket=0).see(0.9, bucket=1)
    assert world.at(1.2).convert(lookback_days=3, credit=(1.0, 1.0), value=2, max_value=2) == (0, 2)


def test_conversions_and_other_sites_requests_cost_an_epoch_nothing() -> None:
    """Conversions are events too, public to their own site: an epoch with nothing else pays nothing."""
    world = person().see(0.1)
    world.at(1.2).convert("shop.example", epsilon=0.1)
    world.at(1.5).convert("shop.example", epsilon=0.1)
    assert set(world.spent()) == {0}
    assert set(world.spent(FilterKind.GLOBAL)) == {0}


def test_epochs_out_of_reach_are_unusable_and_cost_no_memory() -> None:
    world = person().see(0.1)
    assert world.at(0.5).ask(10**9, site="future.example") == (0, 0)
    assert world.ask(-(10**9), site="past.example") == (0, 0)
    assert world.ask(0, 1, 2, site="shop.example") == (1, 0)
    assert all(abs(epoch) < 100 for ledger in world.store.filters().values() for epoch in ledger.paid)


# What an attribution function may see


def test_a_function_never_sees_the_queriers_own_events() -> None:
    """Nor any conversion: only impressions of other sites, and only relevant ones."""
    shown: list[Impression] = []

    def spy(relevant: Mapping[int, Sequence[Impression]], award: Award) -> Sequence[float]:
        shown.extend(impression for impressions in relevant.values() for impression in impressions)
        return [award.value]

    world = person().see(0.1, site="shop.example").see(0.2, site="www.shop.example").see(0.3, site="news.example")
    world.at(0.4).convert("other.example", epsilon=0.1)
    assert world.at(0.5).ask(0, function=spy) == (1, 0)
    assert [impression.site for impression in shown] == ["news.example"]


def test_an_epoch_with_only_own_events_is_an_empty_one() -> None:
    called = []
    world = person().see(0.1, site="shop.example")
    assert world.at(0.5).ask(0, 1, function=lambda *_: called.append(1) or [1]) == (0, 0)  # type: ignore[func-returns-value]  # the call is what counts
    assert (called, world.spent()) == ([], {})


def test_a_function_is_run_once_for_charge_and_report() -> None:
    """One that answers differently the second time would pay for the first answer and report the second."""
    answers = iter([[1], [1000]])
    world = person().see(0.1)
    assert world.at(0.5).ask(0, function=lambda *_: next(answers), value=1000, query_sensitivity=1000) == (1, 0)
    assert world.spent() == {0: 1000}


# The side query


@pytest.mark.parametrize("form", [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH])
def test_every_requested_epoch_pays_kappa_with_data_or_without(form: SideQueryForm) -> None:
    world = person().see(1.1)
    side = SideQuery(kappa=1, form=form)
    report = world.at(2.5).ask(0, 1, 2, epsilon=0.1, query_sensitivity=10, side_query=side, function=LastTouch())
    assert report == (1, 0, 0)
    assert world.spent() == world.spent(FilterKind.GLOBAL) == {0: 10_000, 1: 30_000, 2: 10_000}
    assert world.spent(FilterKind.IMPRESSION_SITE, "news.example") == {1: 30_000}


@pytest.mark.parametrize(
    ("exhausted", "general", "last_touch"),
    [([], 0, 0), ([0], 5, 0), ([2], 5, 5), ([1], 5, 5), ([0, 2], 5, 5)],
)
def test_the_flag_says_which_epochs_could_not_pay(exhausted: list[int], general: int, last_touch: int) -> None:
    """An impression in epoch 1 only. An earlier dropped epoch changes no last touch (Theorem 16)."""
    for form, flag in ((SideQueryForm.GENERAL, general), (SideQueryForm.LAST_TOUCH, last_touch)):
        world = person().see(1.1)
        for epoch in exhausted:
            # A side query alone empties an epoch without data: ε·κ/Δ is 1.
            side_query = None if epoch == 1 else SideQuery(1)
            world.at(2.5).ask(epoch, buckets=1, query_sensitivity=1, side_query=side_query)
        assert world.spent() == dict.fromkeys(exhausted, 1_000_000)
        report = world.at(2.5).ask(0, 1, 2, epsilon=0.01, query_sensitivity=10, side_query=SideQuery(5, form))
        assert report == ((0, 0, flag) if 1 in exhausted else (1, 0, flag))


def test_closed_epochs_do_not_raise_the_flag() -> None:
    world = person().see(0.1)
    world.at(0.5).device.clear_browsing_history(forget_visits=True)
    assert world.at(1.5).ask(0, 1, side_query=SideQuery(1)) == (0, 0, 0)
    assert world.spent() == {1: 500_000}


# The standard's calls, where no scenario shows them


def test_saving_an_impression_does_not_fix_the_start_and_a_conversion_does() -> None:
    store = MemoryStore(debug=True)
    now = START
    device = Device(store, PlainSeal(), clock=lambda: now, coins=DeviceCoins(lambda: 0.5, fair_coin))
    device.save_impression("news.example", ImpressionOptions(0))
    device.clear_impressions_for_site("other.example")
    assert store.epoch_start is None
    now += 100
    device.disable()
    device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 1))
    assert store.epoch_start is None
    device.enable()
    device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 1))
    assert store.epoch_start == (START + 100 - WEEK // 2) // 3600 * 3600


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"aggregation_service": "nobody", "histogram_size": 0}, errors.ReferenceError),
        ({"histogram_size": 2**32}, RangeError),
        ({"value": 2**33, "max_value": 2**33}, RangeError),
        ({"max_value": 0, "value": 0}, RangeError),
        ({"credit": [math.nan]}, RangeError),
        ({"match_values": [-1]}, RangeError),
        ({"match_values": [2**32]}, RangeError),
        ({"lookback_days": -1}, RangeError),
        ({"impression_sites": ["a"] * 31}, RangeError),
        ({"impression_sites": ["localhost"]}, DOMException),
        ({"impression_callers": ["x.localhost"]}, DOMException),
        ({"lookback_days": 0, "impression_sites": ["a"]}, RangeError),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_conversion_options_are_checked_on_or_off(
    options: dict[str, Any], error: type[Exception], enabled: bool
) -> None:
    world = person().see(0.1)
    if not enabled:
        world.device.disable()
    given = ConversionOptions(**{"aggregation_service": TREFOIL_SERVICE, "histogram_size": 2, **options})
    with pytest.raises(error):
        world.device.measure_conversion("shop.example", given)
    assert world.spent() == {}
    assert world.device.reports() == ()


@pytest.mark.parametrize("call", ["site", "intermediary"])
def test_localhost_is_refused_everywhere(call: str) -> None:
    world = person()
    site, intermediary = ("localhost", None) if call == "site" else ("shop.example", "a.localhost")
    with pytest.raises(DOMException):
        world.device.measure_conversion(site, ConversionOptions(TREFOIL_SERVICE, 1), intermediary=intermediary)
    with pytest.raises(DOMException):
        world.device.save_impression(site, ImpressionOptions(0), intermediary=intermediary)
    with pytest.raises(DOMException):
        world.device.clear_impressions_for_site("localhost")


def test_huge_lookbacks_and_lifetimes_are_clamped() -> None:
    world = person().see(0.0, lifetime_days=10**15)
    world.now = START + 30 * DAY
    assert world.convert(lookback_days=10**15, epsilon=0.1) == (1, 0)
    world.now += 1
    assert world.convert(lookback_days=10**15, epsilon=0.1) == (0, 0)


def test_the_largest_values_the_standard_allows() -> None:
    largest = 2**32 - 1
    world = person().see(0.1)
    assert world.at(0.5).convert(value=largest, max_value=largest, epsilon=0.5) == (largest, 0)
    assert world.spent() == {0: 500_000}
    assert world.convert("tiny.example", value=1, max_value=largest, epsilon=1) == (1, 0)
    assert world.spent(site="tiny.example") == {0: 1}


def test_clearing_budgets_reaches_back_and_not_ahead() -> None:
    world = person().see(0.1).see(1.1)
    world.at(1.5).device.clear_browsing_history(["www.shop.example"], forget_visits=False)
    assert world.convert(epsilon=0.1) == (0, 0)
    assert world.convert("other.example", epsilon=0.1) == (1, 0)
    assert world.see(2.1, bucket=1).at(2.5).convert(epsilon=1.0) == (0, 1)


def test_clearing_budgets_first_of_all_fixes_the_start_by_the_longest_lookback() -> None:
    """As in the standard, which looks the earliest epoch up first: 30 days are no whole number of weeks."""
    store = MemoryStore(debug=True)
    device = Device(store, PlainSeal(), clock=lambda: START, coins=DeviceCoins(lambda: 0.5, fair_coin))
    device.clear_browsing_history(["shop.example"], forget_visits=False)
    assert store.epoch_start == START - 30 * DAY - WEEK // 2


def test_clearing_nothing_without_forgetting_changes_nothing() -> None:
    world = person().see(0.1)
    world.at(0.5).device.clear_browsing_history([], forget_visits=False)
    assert world.convert() == (1, 0)


def test_what_the_person_is_told() -> None:
    world = person().see(0.1).see(2.1)
    world.at(0.5).convert()
    world.at(2.5).convert(epsilon=0.5)
    world.device.disable()
    world.convert()
    first, second, third = world.device.reports()
    assert [entry.outcome for entry in second.epochs][-3:] == [
        EpochOutcome.OUT_OF_BUDGET,
        EpochOutcome.NOTHING_FOUND,
        EpochOutcome.PAID,
    ]
    assert (first.site, first.epsilon_micros, second.epochs[-1].paid) == ("shop.example", 1_000_000, 500_000)
    assert {entry.outcome for entry in third.epochs} == {EpochOutcome.NOT_MEASURED}


def test_what_a_week_still_has_for_a_site_is_left_of_that_sites_own_budget() -> None:
    """Not of the quota that the same site has for its ads."""
    world = person().see(0.1, site="shop.example").see(0.2)
    world.at(0.5).convert("other.example", epsilon=0.25)
    assert world.device.overview().remaining("shop.example", 0) == 1_000_000
    world.convert("shop.example", epsilon=0.25, lookback_days=1)
    assert world.device.overview().remaining("shop.example", 0) == 1_000_000
    world.convert("shop.example", epsilon=0.25, lookback_days=3)
    assert world.device.overview().remaining("shop.example", 0) == 875_000


def test_the_price_of_a_report_that_no_week_could_pay_includes_its_side_query() -> None:
    world = person().see(0.1).at(0.2)
    options = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.8, kappa=2, lookback_days=1)
    assert world.device.measure_conversion("shop.example", options) == (0, 0, 2)
    request = options.checked("shop.example", "shop.example", world.limits)
    assert "ε = 1.2 " in (shortfall(request, world.device.overview()) or "")


def test_a_week_without_ads_that_paid_for_a_side_query_does_not_explain_the_null_report() -> None:
    world = person().see(3.5).at(4)
    options = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.5, kappa=2)
    request = options.checked("shop.example", "shop.example", world.limits)
    assert world.device.measure_conversion("shop.example", options) == (1, 0, 0)
    assert shortfall(request, world.device.overview()) is None
    assert world.device.measure_conversion("shop.example", options) == (0, 0, 2)
    [*_, record] = world.device.overview().reports
    without_ads = [entry for entry in record.epochs if entry.outcome is EpochOutcome.NOTHING_FOUND]
    assert all(entry.paid for entry in without_ads) and len(without_ads) == len(record.epochs) - 1
    assert shortfall(request, world.device.overview())


def test_a_week_that_the_person_closed_has_nothing_left() -> None:
    """It is not said of a report that no week had so much left in all of its budgets, where all weeks are closed."""
    world = person().see(0.1).at(0.2)
    world.device.clear_browsing_history(["other.example"], forget_visits=True)
    options = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.8)
    assert not any(world.device.measure_conversion("shop.example", options))
    request = options.checked("shop.example", "shop.example", world.limits)
    assert "more than 0 left" in (shortfall(request, world.device.overview()) or "")


# The optional limit against many sites acting together


def test_at_most_so_many_sites_act_on_one_user_action() -> None:
    world = person(sites_per_action=2).at(0.1)
    for site in ("a.example", "b.example", "c.example"):
        world.device.save_impression(site, ImpressionOptions(0), action="click 1")
    options = ConversionOptions(TREFOIL_SERVICE, 1, value=3, max_value=3, credit=[1, 1, 1], epsilon=0.1)

    def ask(site: str, action: str | None) -> int:
        return world.device.measure_conversion(site, options, action=action)[0]

    assert sum(world.device.measure_conversion("x.example", options, action="click 2")) == 3
    assert len(world.device.overview().impressions) == 2
    assert [ask(site, "click 3") for site in ("p.example", "q.example", "r.example", "p.example")] == [3, 3, 0, 3]
    assert ask("r.example", "click 4") == 3
    for enabled in (True, False):
        world.store.set_enabled(enabled)
        with raises(ErrorKind.FORBIDDEN, DOMException) as refused:
            ask("p.example", None)
        assert refused.value.name == "NotAllowedError"


# What leaves the device


def sealed_device(store: MemoryStore, seal: Any, now: int = NOW) -> Device[Any]:
    return Device(store, seal, clock=lambda: now, coins=DeviceCoins(lambda: 0.5, lambda: 0.5))


def opened(report: Any) -> list[int]:
    parts: dict[int, Any] = {}
    for party in range(3):
        parts.update(open_report(party, report, private_keys(party)))
    total = add(add(parts[0], parts[1]), parts[2])
    return lift(histogram_in(total, report.terms().shape))


def test_a_report_opens_to_the_histogram_and_its_header_to_the_request() -> None:
    device = sealed_device(MemoryStore(debug=False), HelperSetSeal(HELPER_SET))
    device.save_impression("news.example", ImpressionOptions(1))
    options = ConversionOptions(TREFOIL_SERVICE, 3, epsilon=0.3, value=5, max_value=8, unit="cents")
    report = device.measure_conversion("www.shop.example", options, intermediary="ads.example")
    assert opened(report) == [0, 5, 0]
    terms = Header.decode(report.header).terms
    assert (terms.site, terms.caller, terms.unit, terms.debug) == ("shop.example", "ads.example", "cents", False)
    assert (terms.epsilon_micros, terms.sensitivity, terms.buckets, terms.kappa) == (299_999, 16, 3, 0)
    assert terms.time == NOW - NOW % 3600


def test_a_side_query_adds_one_bucket_at_the_end() -> None:
    device = sealed_device(MemoryStore(debug=False), HelperSetSeal(HELPER_SET))
    device.save_impression("news.example", ImpressionOptions(1))
    epoch = device.calendar().index(NOW)
    device.clear_browsing_history(["shop.example"], forget_visits=False)
    request = AttributionRequest([epoch], 1.0, 2, 1, 2, side_query=SideQuery(4))
    report = device.measure("shop.example", request)
    assert opened(report) == [0, 0, 4]
    assert report.terms().kappa == 4


def test_real_and_null_reports_look_the_same() -> None:
    """Nothing found, nothing left, switched off: the same sizes, and headers that differ in random parts only."""
    device = sealed_device(MemoryStore(debug=False), HelperSetSeal(HELPER_SET))
    options = ConversionOptions(TREFOIL_SERVICE, 4)
    reports = [device.measure_conversion("shop.example", options)]
    device.save_impression("news.example", ImpressionOptions(1))
    reports += [device.measure_conversion("shop.example", options) for _ in range(2)]
    device.disable()
    reports.append(device.measure_conversion("shop.example", options))
    assert [opened(report) for report in reports] == [[0] * 4, [0, 1, 0, 0], [0] * 4, [0] * 4]
    assert len({(len(r.header), len(r.body), *map(len, r.payloads)) for r in reports}) == 1
    assert len({r.terms() for r in reports}) == 1
    assert len({r.digest for r in reports}) == 4


@pytest.mark.parametrize("side_query", [None, SideQuery(4)])
def test_a_report_whose_proof_fails_leaves_as_a_null_report_of_the_same_shape(
    monkeypatch: pytest.MonkeyPatch, side_query: SideQuery | None
) -> None:
    """The charge is durable: what fails after it must not be seen."""

    def fails(histogram: Sequence[int], terms: ReportTerms, helper_set: HelperSet) -> SealedReport:
        if any(histogram):
            raise ProtocolError("the proof does not hold")
        return seal_report(histogram, terms, helper_set)

    device = sealed_device(MemoryStore(debug=False), HelperSetSeal(HELPER_SET))
    device.save_impression("news.example", ImpressionOptions(1))
    epoch = device.calendar().index(NOW)
    request = AttributionRequest([epoch], 0.1, 3, 1, 8, side_query=side_query)
    real = device.measure("shop.example", request)
    monkeypatch.setattr("device.report.seal_report", fails)
    null = device.measure("shop.example", request)
    assert (any(opened(real)), any(opened(null))) == (True, False)
    assert len(opened(real)) == len(opened(null)) == (3 if side_query is None else 4)
    assert [len(part) for part in (null.header, null.body, *null.payloads)] == [
        len(part) for part in (real.header, real.body, *real.payloads)
    ]
    assert len(device.reports()) == 2


def test_what_cannot_be_sealed_is_refused_before_anything_is_spent() -> None:
    store = MemoryStore(debug=False)
    device = sealed_device(store, HelperSetSeal(HELPER_SET))
    device.save_impression("news.example", ImpressionOptions(0))
    with pytest.raises(RangeError):
        device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 2, epsilon=1e-9))
    with pytest.raises(RangeError):
        device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 2, unit=""))
    late = sealed_device(store, HelperSetSeal(HELPER_SET), now=NOW + 365 * DAY)
    late.save_impression("news.example", ImpressionOptions(0))
    with raises(ErrorKind.EXPIRED):
        late.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 2))
    assert device.budget() == []


def test_only_a_debug_device_shows_its_histogram_and_its_reports_say_so() -> None:
    for revealing in (PlainSeal(), DebugSeal(HELPER_SET)):
        with raises(ErrorKind.FORBIDDEN):
            sealed_device(MemoryStore(debug=False), revealing)
    device = sealed_device(MemoryStore(debug=True), DebugSeal(HELPER_SET))
    device.save_impression("news.example", ImpressionOptions(1))
    report = device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 2))
    assert isinstance(report, DebugReport)
    assert report.histogram == (0, 1)
    assert opened(report.sealed) == [0, 1]
    assert report.sealed.terms().debug
    assert "(0, 1)" not in repr(report)
    # A debug device that shows nothing still makes debug reports only.
    quiet = sealed_device(MemoryStore(debug=True), HelperSetSeal(HELPER_SET))
    assert quiet.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 2)).terms().debug
