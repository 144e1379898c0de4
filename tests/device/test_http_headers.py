"""Save-Impression, Measure-Conversion and Clear-Site-Data headers: the standard's cases, and RFC 9651's grammar.

Permissions policy and user activation are checked before a page's call reaches the device.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from http_sf import DisplayString, Token
from hypothesis import given
from hypothesis import strategies as st

from device.conversion import ConversionOptions
from device.device import Device
from device.errors import DOMException, RangeError
from device.events import ConversionEventOptions, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from device.web.browser import Activations, Browser, Container, Document, Feature, Page, check_policy
from device.web.http_headers import (
    clears_impressions,
    parse_dictionary,
    parse_measure_conversion,
    parse_save_impression,
)
from protocol.errors import ErrorKind, ProtocolError
from protocol.units import DAY
from tests.support.raising import raises

CASES = Path(__file__).parents[3] / "shared" / "w3c" / "http-headers.json"
BASE = "https://base.example/abc/"


def cases(kind: str) -> list[Any]:
    if not CASES.exists():
        return []
    return [pytest.param(case, id=case["name"]) for case in json.loads(CASES.read_text())[kind]]


def snake(options: dict[str, Any]) -> dict[str, Any]:
    named = {re.sub("([A-Z])", lambda match: "_" + match[1].lower(), key): value for key, value in options.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in named.items()}


@pytest.mark.skipif(not CASES.exists(), reason="the standard's header cases (../shared/w3c) are not here")
@pytest.mark.parametrize("case", cases("saveImpression"))
def test_the_standards_save_impression_cases(case: dict[str, Any]) -> None:
    if case["expected"] is None:
        with pytest.raises(ProtocolError):
            parse_save_impression(case["input"])
    else:
        assert parse_save_impression(case["input"]) == ImpressionOptions(**snake(case["expected"]))


@pytest.mark.skipif(not CASES.exists(), reason="the standard's header cases (../shared/w3c) are not here")
@pytest.mark.parametrize("case", cases("measureConversion"))
def test_the_standards_measure_conversion_cases(case: dict[str, Any]) -> None:
    base = json.loads(CASES.read_text())["baseURL"]
    if case["expected"] is None:
        with pytest.raises(ProtocolError):
            parse_measure_conversion(case["input"], base)
    else:
        header = parse_measure_conversion(case["input"], base)
        assert header.options == ConversionOptions(**snake(case["expected"]["options"]))
        assert header.report_url == case["expected"]["reportUrl"]


def test_our_own_example_of_each() -> None:
    impression = parse_save_impression('histogram-index=2, conversion-sites=("a.example" "b.example";x), priority=-1')
    assert asdict(impression) == asdict(ImpressionOptions(2, conversion_sites=("a.example", "b.example"), priority=-1))
    conversion = parse_measure_conversion(
        'aggregation-service="trefoil", histogram-size=4, report-url="/reports?x=1", epsilon=0.5, credit=(2 1.5)', BASE
    )
    assert conversion.options == ConversionOptions("trefoil", 4, epsilon=0.5, credit=(2, 1.5))
    assert conversion.report_url == "https://base.example/reports?x=1"


def test_the_least_of_every_number_is_taken() -> None:
    impression = parse_save_impression("histogram-index=0, match-value=0, lifetime-days=1, priority=0")
    assert impression == ImpressionOptions(0, 0, lifetime_days=1)
    least = "value=1, max-value=1, lookback-days=1, match-values=(0), kappa=0"
    header = f'aggregation-service="trefoil", histogram-size=1, report-url="/r", {least}'
    assert parse_measure_conversion(header, BASE).options == ConversionOptions(
        "trefoil", 1, lookback_days=1, match_values=(0,)
    )
    assert parse_save_impression("histogram-index=1, lifetime-days=999999").lifetime_days == 999_999


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("match-values=3", ErrorKind.WRONG_TYPE),
        ('impression-sites="a.example"', ErrorKind.WRONG_TYPE),
        ("credit=1", ErrorKind.WRONG_TYPE),
        ("epsilon=x", ErrorKind.WRONG_TYPE),
        ("epsilon=?1", ErrorKind.WRONG_TYPE),
        ("credit=(?1)", ErrorKind.WRONG_TYPE),
        ("histogram-size=?1", ErrorKind.WRONG_TYPE),
        ("histogram-size=0", ErrorKind.OUT_OF_RANGE),
        ("lookback-days=0", ErrorKind.OUT_OF_RANGE),
        ("match-values=(4294967296)", ErrorKind.OUT_OF_RANGE),
    ],
)
def test_values_have_their_type_and_range(wrong: str, kind: ErrorKind) -> None:
    header = f'aggregation-service="trefoil", histogram-size=1, report-url="/r", {wrong}'
    with raises(kind, ProtocolError) as caught:
        parse_measure_conversion(header, BASE)
    assert wrong.partition("=")[0] in str(caught.value)


def test_missing_keys_are_named() -> None:
    with raises(ErrorKind.MISSING_FIELD, ProtocolError) as caught:
        parse_measure_conversion("histogram-size=1", BASE)
    assert "aggregation-service, report-url" in str(caught.value)


def test_a_side_query_by_header_is_a_member_of_ours() -> None:
    """The standard ignores unknown keys, so other devices accept the same header."""
    header = 'aggregation-service="trefoil", histogram-size=4, report-url="/r", kappa=5'
    assert parse_measure_conversion(header, BASE).options == ConversionOptions("trefoil", 4, kappa=5)
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError) as caught:
        parse_measure_conversion(header.replace("kappa=5", "kappa=-1"), BASE)
    assert "kappa" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a, b=?0;p=?1", {"a": True, "b": False}),
        ("a=1; b;  c=2", {"a": 1}),
        ("a=1.255", {"a": Decimal("1.255")}),
        ("a=:aGk=:", {"a": b"hi"}),
        ('a="x\\"\\\\y", b=tok/en:1', {"a": 'x"\\y', "b": Token("tok/en:1")}),
        ("a=( 1   2;q=3 ), b=()", {"a": (1, 2), "b": ()}),
        ("a=1,\t a=2", {"a": 2}),
        ("  ", {}),
        ('a=@17, b=%"%e2%82%ac"', {"a": datetime.fromtimestamp(17, UTC), "b": DisplayString("€")}),
    ],
)
def test_dictionaries(text: str, value: dict[str, Any]) -> None:
    """Each type of RFC 9651 once: `http-sf` has tests of its own."""
    assert parse_dictionary(text) == value


@pytest.mark.parametrize("text", ["A=1", "a=1,", "a=(1", "a=1.2345", "a=\xe9", "a=٣", "a=@1.5", 'a=%"%c3"'])
def test_what_is_no_dictionary(text: str) -> None:
    with raises(ErrorKind.MALFORMED, ProtocolError):
        parse_dictionary(text)


@pytest.mark.parametrize(
    "address",
    ["http://r.example", "https://", "https://:", "https://r.example:x", "javascript:1", "https://[1", "//:80"],
)
def test_reports_go_to_https_addresses_only(address: str) -> None:
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        parse_measure_conversion(f'aggregation-service="", histogram-size=1, report-url="{address}"', BASE)


@pytest.mark.parametrize(
    ("address", "resolved"),
    [
        ("https://R.Example:443", "https://r.example/"),
        ("//r.example:8443/x", "https://r.example:8443/x"),
        ("../x", "https://base.example/x"),
        ("", BASE),
        ("https://[::1]/x", "https://[::1]/x"),
    ],
)
def test_report_urls_are_resolved(address: str, resolved: str) -> None:
    header = f'aggregation-service="", histogram-size=1, report-url="{address}"'
    assert parse_measure_conversion(header, BASE).report_url == resolved


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """Never another exception: headers come from untrusted sites."""
    with contextlib.suppress(ProtocolError):
        parse_measure_conversion(text, BASE)


def test_a_very_long_header_is_refused() -> None:
    with raises(ErrorKind.TOO_LARGE, ProtocolError):
        parse_dictionary("a=1," * 100_000)


def test_dates_and_display_strings_of_unknown_keys_are_ignored() -> None:
    header = 'histogram-index=3, later=@1659578233, name=%"f%c3%bc%c3%bc \\", old=@-62135596800;x=%"a"'
    assert parse_save_impression(header).histogram_index == 3


@pytest.mark.parametrize("value", ["@3", '%"3"'])
def test_a_date_is_no_number_and_a_display_string_no_string(value: str) -> None:
    with raises(ErrorKind.WRONG_TYPE, ProtocolError):
        parse_save_impression(f"histogram-index={value}")


@pytest.mark.parametrize(
    ("header", "clears"),
    [
        ('"impressions"', True),
        ('"cache", "impressions"', True),
        ('"*"', True),
        ('"cache",\t"impressions" ', True),
        # No white space of HTTP.
        ('\N{NO-BREAK SPACE}"impressions"', False),
        ('"cookies"', False),
        ("impressions", False),
        ('"Impressions"', False),
        ("", False),
        ("*", False),
    ],
)
def test_which_clear_site_data_headers_clear_impressions(header: str, clears: bool) -> None:
    assert clears_impressions(header) is clears


LIFETIME = 600
AD = ImpressionOptions(1)
SALE = ConversionOptions(TREFOIL_SERVICE, 2)
NEWS, SHOP, ADS = "https://news.example", "https://shop.example", "https://ads.example"


class Person:
    """A person at a browser whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 1_900_000_000
        limits = DeviceLimits(activation_seconds=LIFETIME)
        self.device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: self.now, limits=limits)
        self.browser = Browser(self.device, lambda: self.now, limits)

    def sees(self, tab: str | None, origin: str = NEWS) -> None:
        self.browser.save_impression(Page(origin, tab=tab), AD)

    def buys(self, tab: str | None, origin: str = SHOP) -> tuple[int, ...]:
        return self.browser.measure_conversion(Page(origin, tab=tab), SALE)


@pytest.fixture
def person() -> Person:
    return Person()


def refused(call: Callable[[], object]) -> bool:
    """Return whether `call` raises NotAllowedError."""
    try:
        call()
    except DOMException as error:
        assert error.name == "NotAllowedError"
        return True
    return False


def test_a_tab_without_activation_may_not_call(person: Person) -> None:
    assert refused(lambda: person.sees("a")) and refused(lambda: person.buys("a"))
    person.browser.activations.user_acted("b")
    assert refused(lambda: person.sees("a"))
    assert person.device.overview().impressions == [] and person.device.reports() == ()


@pytest.mark.parametrize(("later", "expected"), [(0, False), (LIFETIME, False), (LIFETIME + 1, True), (-1, True)])
def test_an_action_lasts_so_long(person: Person, later: int, expected: bool) -> None:
    """Nor does one from the future count, after the clock was set back."""
    person.browser.activations.user_acted("a")
    person.now += later
    assert refused(lambda: person.sees("a")) is expected


def test_a_tab_stays_open_to_its_site_once_it_has_called(person: Person) -> None:
    person.browser.activations.user_acted("a")
    person.sees("a", SHOP)
    person.now += 100 * LIFETIME
    person.browser.activations.navigated("a", "pay.shop.example")
    assert person.buys("a", "https://pay.shop.example") == (0, 1)


def test_one_action_is_one_site(person: Person) -> None:
    """A chain of redirects through many sites: the first of them that calls is the only one."""
    person.browser.activations.user_acted("a")
    person.browser.activations.navigated("a", "news.example")
    person.sees("a")
    for number in range(3):
        person.browser.activations.navigated("a", "x.example" if number == 2 else f"r{number}.example")
        assert refused(lambda: person.buys("a", "https://x.example"))
    person.browser.activations.user_acted("a")
    assert person.buys("a", "https://x.example") == (0, 1)


@pytest.mark.parametrize(
    ("before", "after", "other"),
    [("a.co.uk", "b.co.uk", True), ("news.example", "", True), ("a.news.example", "b.news.example", False)],
)
def test_what_is_another_site(person: Person, before: str, after: str, other: bool) -> None:
    person.browser.activations.user_acted("a")
    person.sees("a", f"https://{before}")
    person.browser.activations.navigated("a", after)
    assert refused(lambda: person.sees("a", f"https://{before}")) is other


def test_an_open_tab_serves_the_site_that_opened_it(person: Person) -> None:
    """Also when the first call of a new document comes before the news of the navigation to it."""
    person.browser.activations.user_acted("a")
    person.sees("a")
    assert refused(lambda: person.buys("a"))
    person.browser.activations.user_acted("a")
    assert person.buys("a") == (0, 1)
    person.browser.activations.navigated("a", "shop.example")
    person.sees("a", SHOP)


def test_an_action_is_used_up_by_a_call_not_by_a_refusal(person: Person) -> None:
    """A call whose options are refused consumes it, too."""
    person.browser.activations.user_acted("a")
    by_policy = Page(SHOP, tab="a", permissions_policy="save-impression=()")
    for forbidden in (by_policy, Page("http://shop.example", tab="a")):
        assert refused(partial(person.browser.save_impression, forbidden, AD))
    with pytest.raises(RangeError):
        person.browser.save_impression(Page(NEWS, tab="a"), ImpressionOptions(-1))
    person.browser.activations.navigated("a", "shop.example")
    assert refused(lambda: person.buys("a"))


def test_a_browsers_own_note_does_not_name_a_recorded_action_anew() -> None:
    """Else two sites would act on one action, each under a name of its own."""
    activations = Activations(lambda: 0, LIFETIME)
    activations.user_acted("a")
    activations.check("a", "news.example")
    activations.user_acted("a")
    action = activations.check("a", "news.example")
    assert activations.check("a", "shop.example", acted=True) == action


def test_a_tab_that_was_closed_is_forgotten(person: Person) -> None:
    person.browser.activations.user_acted("a")
    person.sees("a")
    person.browser.activations.closed("a")
    person.browser.activations.closed("never opened")
    assert refused(lambda: person.sees("a"))


def test_where_tabs_are_unknown_nothing_is_asked(person: Person) -> None:
    person.sees(None)
    assert person.buys(None) == (0, 1)


@pytest.mark.parametrize(
    ("header", "page", "frame"),
    [
        ("", True, True),
        ("measure-conversion=*", True, True),
        ("measure-conversion=(*)", True, True),
        ("measure-conversion=()", False, False),
        ("measure-conversion=self", True, False),
        ("measure-conversion=(self)", True, False),
        ('measure-conversion=(self "https://ads.example")', True, True),
        # What a page denies itself it cannot pass on.
        ('measure-conversion=("https://ads.example")', False, False),
        ('measure-conversion=(self "https://ADS.example:443/")', True, True),
        ('measure-conversion=("https://other.example")', False, False),
        ("save-impression=(), geolocation=()", True, True),
        ("measure-conversion=(), measure-conversion=*", True, True),
        # Any other value allows no origin.
        ("measure-conversion", False, False),
        ("measure-conversion=5", False, False),
        ('measure-conversion="https://ads.example"', False, False),
        ('measure-conversion=(%"*")', False, False),
        ("measure-conversion=(Self)", False, False),
        # A malformed header counts as absent.
        ("measure-conversion=(", True, True),
    ],
)
def test_who_may_call_by_the_pages_policy(person: Person, header: str, page: bool, frame: bool) -> None:
    def measures(frame: str | None) -> bool:
        caller = Page(SHOP, frame, permissions_policy=header)
        return not refused(lambda: person.browser.measure_conversion(caller, SALE))

    assert (measures(None), measures(ADS)) == (page, frame)


@pytest.mark.parametrize("feature", list(Feature))
def test_each_feature_is_forbidden_by_its_own_name(person: Person, feature: Feature) -> None:
    page = Page(NEWS, permissions_policy=f"{feature.value}=()")
    assert refused(lambda: person.browser.save_impression(page, AD)) is (feature is Feature.SAVE_IMPRESSION)
    assert refused(lambda: person.browser.measure_conversion(page, SALE)) is (feature is Feature.MEASURE_CONVERSION)


@pytest.mark.parametrize("listed", ["null", "no URL", "data:text/html,x"])
def test_no_list_names_an_origin_that_is_none(listed: str) -> None:
    """All documents without an origin of their own are called null: one that is listed would name every other."""
    documents = [Document("null"), Document(NEWS, f'save-impression=(self "{listed}")')]
    assert refused(lambda: check_policy(Feature.SAVE_IMPRESSION, documents))


def test_a_refusal_says_whom_and_what() -> None:
    with pytest.raises(DOMException) as caught:
        check_policy(Feature.SAVE_IMPRESSION, [Document(ADS), Document(NEWS, "save-impression=self")])
    assert caught.value.name == "NotAllowedError"
    assert "save-impression" in str(caught.value) and ADS in str(caught.value)


FRAMED = f"{ADS}/banner"


@pytest.mark.parametrize(
    ("container", "child", "allowed"),
    [
        (Container(), ADS, True),
        (Container("camera"), ADS, True),
        (Container("save-impression *"), ADS, True),
        (Container("save-impression 'none'"), ADS, False),
        (Container("Save-Impression 'NONE'"), ADS, False),
        (Container("save-impression 'self'"), ADS, False),
        (Container("save-impression 'self'"), NEWS, True),
        (Container("save-impression", FRAMED), ADS, True),
        (Container("save-impression 'src'", FRAMED), SHOP, False),
        (Container("save-impression", FRAMED, sandboxed=True), ADS, False),
        (Container("save-impression", FRAMED, sandboxed=True), "null", False),
        (Container("save-impression *", FRAMED, sandboxed=True), "null", True),
        (Container("save-impression", None), NEWS, True),
        (Container("save-impression", "about:blank"), NEWS, True),
        (Container("save-impression", "data:text/html,x"), "null", False),
        (Container("save-impression https://ads.example https://other.example"), ADS, True),
        (Container("save-impression https://other.example"), ADS, False),
        (Container("save-impression http://["), ADS, False),
        # Of two declarations both count.
        (Container("save-impression *; save-impression 'none'"), ADS, False),
        (Container(";; measure-conversion 'none';"), ADS, True),
    ],
)
def test_what_a_frame_allows(container: Container, child: str, allowed: bool) -> None:
    documents = [Document(child, containers=(container,)), Document(NEWS)]
    assert refused(lambda: check_policy(Feature.SAVE_IMPRESSION, documents)) is not allowed


@pytest.mark.parametrize(
    ("policies", "allowed"),
    [
        (("", "", ""), True),
        (("save-impression=()", "", ""), False),
        (("", "save-impression=()", ""), False),
        (("", "save-impression=self", ""), False),
        (("", "", "save-impression=()"), False),
        (("", "", f'save-impression=(self "{ADS}")'), True),
        # The page allows the innermost frame, but not the one that holds it.
        (("", "", f'save-impression=(self "{SHOP}")'), False),
        (("save-impression=self", "save-impression=*, geolocation=()", ""), True),
    ],
)
def test_every_document_of_a_chain_has_a_say(policies: tuple[str, str, str], allowed: bool) -> None:
    """A shop's frame in an ad's frame on a newspaper's page."""
    documents = [Document(origin, policy) for origin, policy in zip((SHOP, ADS, NEWS), policies, strict=True)]
    assert refused(lambda: check_policy(Feature.SAVE_IMPRESSION, documents)) is not allowed


def test_the_frame_that_calls_is_the_intermediary(person: Person) -> None:
    person.browser.save_impression(Page("https://www.news.example", ADS), AD)
    (saved,) = person.device.overview().impressions
    assert (saved.impression.site, saved.impression.caller) == ("news.example", "ads.example")
    with pytest.raises(DOMException) as caught:
        person.browser.save_impression(Page("https://["), AD)
    assert caught.value.name == "SyntaxError"


@pytest.mark.parametrize(
    "page",
    [
        Page("http://news.example"),
        Page(NEWS, frame="http://ads.example"),
        Page(NEWS, ADS, documents=(Document(ADS), Document("http://between.example"), Document(NEWS))),
    ],
)
def test_a_page_over_http_may_not_call(person: Person, page: Page) -> None:
    """The standard's interface exists in secure contexts alone."""
    assert refused(lambda: person.browser.save_impression(page, AD))
    assert refused(lambda: person.browser.measure_conversion(page, SALE))


def test_the_display_side_is_behind_the_same_checks(person: Person) -> None:
    """An advertiser's page saves, and the publisher's measures a week after its ad."""
    bought = ConversionEventOptions(["news.example"])
    asked = LabelOptions(TREFOIL_SERVICE, (2, 1), 3, 0.5, 8 * DAY, ("shop.example",))
    person.browser.save_conversion(Page(SHOP, ADS), bought)
    (saved,) = person.device.overview().conversions
    assert (saved.event.site, saved.event.caller) == ("shop.example", "ads.example")
    person.now += 8 * DAY
    assert person.browser.measure_impression(Page(NEWS), asked) == (2, 1)
    for page in (Page(SHOP, permissions_policy="save-impression=()"), Page(SHOP, tab="a")):
        assert refused(partial(person.browser.save_conversion, page, bought))
    for page in (Page(NEWS, permissions_policy="measure-conversion=()"), Page(NEWS, tab="a")):
        assert refused(partial(person.browser.measure_impression, page, asked))


def test_a_tabs_action_is_the_one_that_sites_are_counted_by() -> None:
    """Every call of a tab names its action, without which such a device refuses; a new action begins anew."""
    limits = DeviceLimits(sites_per_action=1)
    now = 1_900_000_000
    device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: now, limits=limits)
    browser = Browser(device, lambda: now, limits)
    browser.activations.user_acted("a")
    browser.save_impression(Page(NEWS, tab="a"), AD)
    assert refused(lambda: browser.save_impression(Page(ADS, tab="a"), AD))
    assert [one.impression.site for one in device.overview().impressions] == ["news.example"]
    browser.activations.user_acted("a")
    browser.save_impression(Page(ADS, tab="a"), AD)
    assert [one.impression.site for one in device.overview().impressions] == ["news.example", "ads.example"]
