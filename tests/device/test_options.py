"""What sites and limits may say: impressions, requests at the edges of their ranges, limits, registrable domains."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.attribution import EqualCredit, LastNTouch
from device.conversion import AttributionRequest, Conversion, ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.errors import DOMException, RangeError
from device.events import ANY_DAYS, Impression, ImpressionOptions, SavedImpression, Selection
from device.limits import MAX_EPOCHS, TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal, report_terms
from device.site import load_tables, parse_site
from device.stores.memory_store import MemoryStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MAX_SENSITIVITY
from tests.support.raising import raises

LIMITS = DeviceLimits(max_histogram_size=5, max_conversion_sites=3, max_conversion_callers=3)


def save(**options: Any) -> SavedImpression:
    return ImpressionOptions(**{"histogram_index": 0, **options}).saved("a.example", "b.example", 1000, LIMITS)


def test_defaults() -> None:
    saved = save(histogram_index=4)
    assert saved.impression == Impression(1000, "a.example", "b.example", 4, 0, 0)
    assert saved.expires == 1000 + 30 * DAY
    assert saved.conversion_sites == saved.conversion_callers == frozenset()


@pytest.mark.parametrize(
    "options",
    [
        {"histogram_index": 5},
        {"histogram_index": -1},
        {"histogram_index": 2**64},
        {"lifetime_days": 0},
        {"lifetime_days": -1},
        {"match_value": -1},
        {"match_value": 2**32},
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"conversion_sites": ["a.example"] * 4},
        {"conversion_callers": ["a.example"] * 4},
        {"conversion_sites": [":"] * 4},
        {"histogram_index": 5, "conversion_sites": [":"]},
        {"lifetime_days": 0, "conversion_callers": [":"]},
    ],
)
def test_range_errors(options: dict[str, Any]) -> None:
    with pytest.raises(RangeError):
        save(**options)


@pytest.mark.parametrize("option", ["conversion_sites", "conversion_callers"])
def test_malformed_sites_are_syntax_errors(option: str) -> None:
    with raises(ErrorKind.MALFORMED, DOMException):
        save(**{option: ["a.example", ":"]})


def test_extremes_are_allowed() -> None:
    saved = save(match_value=2**32 - 1, priority=-(2**31), lifetime_days=10**15)
    assert saved.expires == 1000 + LIMITS.max_lookback
    assert saved.impression.priority == -(2**31)


def test_sites_of_lists_are_registrable_domains() -> None:
    assert save(conversion_sites=["www.a.example", "a.example"]).conversion_sites == {"a.example"}


def select(**changes: Any) -> Selection:
    base = {"since": 0, "until": 10_000, "now": 2000, "conversion_site": "c.example", "conversion_caller": "c.example"}
    return Selection(**{**base, **changes})


def test_expiry_and_window_edges() -> None:
    saved = save(lifetime_days=1)
    last = 1000 + DAY
    assert select(now=last).accepts(saved)
    assert not select(now=last + 1).accepts(saved)
    assert select(since=1000, until=1001).accepts(saved)
    assert not select(since=1001).accepts(saved)
    assert not select(until=1000).accepts(saved)


def test_the_queriers_own_events_can_be_hidden() -> None:
    assert not select(hidden={"a.example"}).accepts(save())
    assert not select(hidden={"b.example"}).accepts(save()), "its frame saved it"
    assert select(hidden={"c.example"}).accepts(save())


# Requests

CONVERSION_LIMITS = DeviceLimits()
OPTIONS = ConversionOptions(TREFOIL_SERVICE, 4)
REQUEST = AttributionRequest([0], epsilon=1.0, buckets=1, value=1, query_sensitivity=1)


def checked(asked: ConversionOptions | AttributionRequest, **changes: Any) -> Conversion:
    return replace(asked, **changes).checked("shop.example", "shop.example", CONVERSION_LIMITS)


@pytest.mark.parametrize(
    ("asked", "name", "least", "most"),
    [
        (OPTIONS, "histogram_size", 1, CONVERSION_LIMITS.max_histogram_size),
        (OPTIONS, "max_value", 1, 2**32 - 1),
        (replace(OPTIONS, max_value=7), "value", 1, 7),
        (OPTIONS, "lookback_days", 1, ANY_DAYS),
        (OPTIONS, "kappa", 0, MAX_SENSITIVITY),
        (REQUEST, "buckets", 1, CONVERSION_LIMITS.max_histogram_size),
        (replace(REQUEST, query_sensitivity=MAX_SENSITIVITY), "value", 1, MAX_SENSITIVITY),
        (REQUEST, "query_sensitivity", 1, MAX_SENSITIVITY),
    ],
)
def test_each_number_has_its_least_and_its_largest(
    asked: ConversionOptions | AttributionRequest, name: str, least: int, most: int
) -> None:
    for allowed in (least, most):
        checked(asked, **{name: allowed})
    for wrong in (least - 1, most + 1):
        with raises(ErrorKind.OUT_OF_RANGE, RangeError) as refused:
            checked(asked, **{name: wrong})
        assert name in str(refused.value)


def test_epochs_of_a_request_are_within_a_thousand_of_each_other() -> None:
    assert checked(REQUEST, epochs=[5, 4 + MAX_EPOCHS], query_sensitivity=2, buckets=2).epochs == (5, 4 + MAX_EPOCHS)
    for wrong in ([5, 5 + MAX_EPOCHS], []):
        with raises(ErrorKind.TOO_FEW if not wrong else ErrorKind.OUT_OF_RANGE, RangeError):
            checked(REQUEST, epochs=wrong, query_sensitivity=2, buckets=2)


def test_the_querys_sensitivity_covers_the_reports() -> None:
    """Twice the value for two buckets and epochs, the value itself for one of either (Theorem 18)."""
    two = {"epochs": [0, 1], "buckets": 2, "value": 2}
    for change in ({"epochs": [0]}, {"buckets": 1}):
        checked(REQUEST, **two | change, query_sensitivity=2)
    checked(REQUEST, **two, query_sensitivity=4)
    with raises(ErrorKind.INCONSISTENT, RangeError):
        checked(REQUEST, **two, query_sensitivity=3)


@pytest.mark.parametrize("credit", [(1.0,), (1.0, 1.0), (1.0, 2.0, 3.0)])
def test_as_many_coins_are_tossed_as_parts_of_the_value_can_be_odd(credit: tuple[float, ...]) -> None:
    """One fewer than there are shares, in both APIs; whatever is found."""
    tossed: list[float] = []

    def coin() -> float:
        tossed.append(0.5)
        return 0.5

    coins = DeviceCoins(credit=coin)
    device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: 1_900_000_000, coins=coins)
    device.measure_conversion("shop.example", replace(OPTIONS, credit=credit))
    assert len(tossed) == len(credit) - 1
    device.measure("shop.example", replace(REQUEST, function=LastNTouch(credit)))
    assert len(tossed) == 2 * (len(credit) - 1)


@pytest.mark.parametrize("value", [1, 3])
def test_the_headers_cap_and_spread_are_the_querys_and_never_this_conversions_value(value: int) -> None:
    """The header is public: a cap that followed the value would show what was bought."""
    options = ConversionOptions(TREFOIL_SERVICE, 4, value=value, max_value=3, credit=[1.0, 1.0])
    request = options.checked("shop.example", "shop.example", DeviceLimits())
    terms = report_terms(request, 1_900_000_000, debug=False)
    assert (terms.cap, terms.sensitivity, terms.spread) == (3, 6, 2)
    paper = AttributionRequest([0], 0.5, 4, value, 7, EqualCredit()).checked(
        "shop.example", "shop.example", DeviceLimits()
    )
    terms = report_terms(paper, 1_900_000_000, debug=False)
    assert (terms.cap, terms.spread) == (7, 4)
    # No more buckets than there are units to put into them.
    least = replace(options, value=1, max_value=1).checked("shop.example", "shop.example", DeviceLimits())
    assert report_terms(least, 1_900_000_000, debug=False).spread == 1


# Limits

# By hand, so that a bound cannot move unseen: the least and the largest value of every limit that is a number.
BOUNDS = {
    **dict.fromkeys(["site_budget", "global_budget", "impression_site_quota"], (1, 2**53 - 1)),
    **dict.fromkeys(["advertiser_quota", "side_query_quota"], (1, 2**53 - 1)),
    **dict.fromkeys(["sites_per_action", "max_credit_size", "max_publishers", "max_advertisers"], (1, 65_535)),
    **dict.fromkeys(["max_match_values", "max_conversion_sites", "max_conversion_callers"], (0, 65_535)),
    **dict.fromkeys(["max_impression_sites", "max_impression_callers", "max_labels"], (0, 65_535)),
    **dict.fromkeys(["max_impressions_per_site", "max_impressions_per_epoch"], (1, 2**31 - 1)),
    **dict.fromkeys(["max_sites_per_epoch", "max_conversions_per_epoch", "max_log_records"], (1, 2**31 - 1)),
    "activation_seconds": (1, 366 * 86_400 - 1),
    # The work of a call ends before its answer leaves, for any two of them.
    "delay_ms": (200, 60_000),
    "work_ms": (1, 199),
    "processor_ms": (0, 999),
    "epoch_days": (1, 3660),
    "max_lookback_days": (1, 36_600),
    "max_histogram_size": (1, 2**20),
}


def made(**limits: Any) -> DeviceLimits:
    return DeviceLimits(**limits)


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items(), ids=BOUNDS)
def test_every_limit_has_its_bounds(name: str, bounds: tuple[int, int]) -> None:
    for allowed in bounds:
        assert getattr(made(**{name: allowed}), name) == allowed
    for wrong in (bounds[0] - 1, bounds[1] + 1):
        with raises(ErrorKind.OUT_OF_RANGE, TrefoilError) as refused:
            made(**{name: wrong})
        assert f"{name} must be {bounds[0]} to {bounds[1]}, not {wrong}" in str(refused.value)


@pytest.mark.parametrize("name", BOUNDS)
def test_only_one_limit_can_be_left_out(name: str) -> None:
    if name == "sites_per_action":
        assert made(sites_per_action=None).sites_per_action is None
        return
    with raises(ErrorKind.OUT_OF_RANGE, TrefoilError) as refused:
        made(**{name: None})
    assert name in str(refused.value)


def test_every_limit_that_is_a_number_is_here() -> None:
    others = {"own_site", "aggregation_services"}
    assert {field.name for field in fields(DeviceLimits)} == BOUNDS.keys() | others


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("shop.example", "shop.example"),
        ("www.shop.example", "shop.example"),
        ("a.b.c.shop.co.uk", "shop.co.uk"),
        ("ann.github.io", "ann.github.io"),
        ("x.ann.github.io", "ann.github.io"),
        ("SHOP.Example", "shop.example"),
        ("shop.example.", "shop.example"),
        ("münchen.de", "xn--mnchen-3ya.de"),
        ("www.münchen.de", "xn--mnchen-3ya.de"),
        ("a_b.shop.example", "shop.example"),
        ("x.unknown-suffix", "x.unknown-suffix"),
        ("www.ck", "www.ck"),
    ],
)
def test_a_host_stands_for_its_site(host: str, site: str) -> None:
    assert parse_site(host) == site
    assert parse_site(site) == site


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            ".",
            "..",
            "a",
            "com",
            "co.uk",
            "github.io",
            ":",
            "shop.example:443",
            "https://shop.example",
            "a b.example",
        ),
        *(
            "a/b.example",
            "-a.example",
            "a..example",
            "a.example..",
            ".shop.example",
            "127.0.0.1",
            "1.2.3",
            "0x7f.1",
            "[::1]",
        ),
        *("%41.example", "localhost", "foo.localhost", "LOCALHOST", "localhost.", "\x00.example"),
        *("x" * 64 + ".example", "a." * 130 + "example"),
    ],
)
def test_what_is_no_site(host: str) -> None:
    with pytest.raises(DOMException) as refused:
        parse_site(host)
    assert refused.value.name == "SyntaxError"
    assert refused.value.standard_name == {"error": "DOMException", "name": "SyntaxError"}


@given(st.text(max_size=40))
def test_any_text_is_a_site_or_a_syntax_error(host: str) -> None:
    try:
        site = parse_site(host)
    except DOMException:
        return
    assert parse_site(site) == site
    assert site.isascii()
    assert " " not in site


def test_a_host_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    assert parse_site(longest) == f"{'c' * 63}.{'d' * 61}"
    for wrong in (f"{longest}e", "", "."):
        with pytest.raises(DOMException):
            parse_site(wrong)


@pytest.mark.parametrize("host", [None, 5, b"shop.example", ["shop.example"], {}, object()])
def test_what_is_no_text_is_no_site(host: object) -> None:
    """Also what cannot be a key of a cache."""
    with raises(ErrorKind.WRONG_TYPE, DOMException) as refused:
        parse_site(host)
    assert refused.value.name == "SyntaxError"


def steps(host: str) -> list[str]:
    """Return the functions that are called when a host is parsed, in order."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        called.append(argument.__qualname__ if event.startswith("c_") else f"{event} {frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        parse_site(host)
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("host", ["www.never-met-before.example", "www.nie-gesehene-bücher.example"])
def test_a_host_that_was_met_before_takes_the_same_steps(host: str) -> None:
    """With a cache a site would learn from the time of its own call which hosts this device has met."""
    load_tables()
    first = steps(host)
    assert "call parse_site" in first
    assert steps(host) == first


@pytest.mark.parametrize("number", [np.array([1, 2]), np.bool_(True), int, 1.0, "1", None, True])
def test_what_is_no_whole_number_is_refused_as_such(number: Any) -> None:
    """Also a class or an array, which have what a number is converted by, and refuse."""
    no_list: Any = np.array(1)
    for options in (ImpressionOptions(number), ImpressionOptions(0, conversion_sites=no_list)):
        with raises(ErrorKind.WRONG_TYPE, RangeError):
            options.saved("a.example", "a.example", 0, DeviceLimits())


def test_a_list_is_read_no_further_than_it_may_be_long() -> None:
    """One without end would be read until the memory is full."""
    long: Any = iter(range(10_000))
    with raises(ErrorKind.TOO_LARGE, RangeError):
        replace(OPTIONS, match_values=long).checked("shop.example", "shop.example", DeviceLimits())
    assert next(long) == DeviceLimits().max_match_values + 1


def test_numbers_of_other_libraries_become_our_own() -> None:
    saved = ImpressionOptions(np.int64(7)).saved("a.example", "a.example", 0, DeviceLimits())  # type: ignore[arg-type]  # the point of the test
    assert type(saved.impression.histogram_index) is int


def test_a_limit_too_long_to_write_out_is_refused_all_the_same() -> None:
    with raises(ErrorKind.OUT_OF_RANGE, TrefoilError):
        made(site_budget=10**5000)


def test_limits_are_no_lower_than_the_standard_allows() -> None:
    limits = DeviceLimits()
    assert limits.max_match_values >= 30 and limits.max_impression_sites >= 30
    assert limits.max_conversion_sites >= 5 and limits.max_credit_size >= 10
    assert limits.max_conversion_callers >= 10 and limits.max_impression_callers >= 10
    assert limits.max_lookback_days >= 30 and limits.max_impressions_per_site >= 1000
    assert limits.global_budget % limits.site_budget == limits.impression_site_quota % limits.site_budget == 0


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("straße.de", "xn--strae-oqa.de"),
        ("www.STRASSE.de", "strasse.de"),
        ("faß.example", "xn--fa-hia.example"),
        ("münchen.example", "xn--mnchen-3ya.example"),
        ("MÜNCHEN.example", "xn--mnchen-3ya.example"),
        ("ｓｈｏｐ。example", "shop.example"),
        ("βόλος.example", "xn--nxasmm1c.example"),
        ("☕.example", "xn--53h.example"),
        ("例え.jp.", "xn--r8jz45g.jp"),
        # A joiner between letters that it joins or keeps apart (RFC 5892, A.1 and A.2).
        ("क्\u200dष.example", "xn--11b2ezcw70k.example"),
        ("نامه\u200cای.example", "xn--mgba3gch31f060k.example"),
        ("XN--MNCHEN-3YA.example", "xn--mnchen-3ya.example"),
        ("www.xn--strae-oqa.de", "xn--strae-oqa.de"),
    ],
)
def test_hosts_are_mapped_as_browsers_map_them(host: str, site: str) -> None:
    assert parse_site(host) == site


@pytest.mark.parametrize(
    "host",
    [
        "a\u0300\ufffd.example",
        "\u0301a.example",
        "a\u2028b.example",
        "אa.example",
        "１２7.0.0.1",
        # Joiners that join nothing: names that look like others.
        "sho\u200cp.example",
        "sho\u200dp.example",
        "\u200dshop.example",
        "नी\u200dल.example",
        # Not the encoding of a name: empty, plain ASCII, a capital letter, a joiner, an overflow.
        "xn--.example",
        "xn--shop-.example",
        "xn--mnchen-psa.example",
        "xn--shop-276a.example",
        "xn--99999999.example",
    ],
)
def test_hosts_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(DOMException):
        parse_site(host)
