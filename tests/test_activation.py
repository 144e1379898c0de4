"""Before a page's call reaches the device: its permissions policy, and whether its user has acted in its tab."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from device.browser import Browser, Page
from device.conversion import ConversionOptions
from device.device import Device
from device.errors import DOMException, RangeError
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.permissions_policy import Feature, PermissionsPolicy
from device.report import PlainSeal

LASTS = 600
AD = ImpressionOptions(1)
SALE = ConversionOptions(TREFOIL_SERVICE, 2)
NEWS, SHOP, ADS = "https://news.example", "https://shop.example", "https://ads.example"


class Person:
    """Someone at a browser, whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 1_900_000_000
        limits = DeviceLimits(activation_seconds=LASTS)
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
    """Whether it is a NotAllowedError."""
    try:
        call()
    except DOMException as error:
        assert error.name == "NotAllowedError"
        return True
    return False


def test_a_tab_in_which_nobody_acted_may_not_call(person: Person) -> None:
    assert refused(lambda: person.sees("a")) and refused(lambda: person.buys("a"))
    person.browser.activations.user_acted("b")
    assert refused(lambda: person.sees("a"))
    assert person.device.overview().impressions == [] and person.device.reports() == ()


@pytest.mark.parametrize(("later", "expected"), [(0, False), (LASTS, False), (LASTS + 1, True), (-1, True)])
def test_an_action_lasts_so_long(person: Person, later: int, expected: bool) -> None:
    """And not from a future that the clock was set back from."""
    person.browser.activations.user_acted("a")
    person.now += later
    assert refused(lambda: person.sees("a")) is expected


def test_a_tab_stays_open_to_its_site_once_it_has_called(person: Person) -> None:
    person.browser.activations.user_acted("a")
    person.sees("a", SHOP)
    person.now += 100 * LASTS
    person.browser.activations.navigated("a", "www.shop.example", "pay.shop.example")
    assert person.buys("a", "https://pay.shop.example") == (0, 1)


def test_one_action_is_one_site(person: Person) -> None:
    """A chain of redirects through many sites: the first of them that calls is the only one."""
    person.browser.activations.user_acted("a")
    person.browser.activations.navigated("a", "search.example", "news.example")
    person.sees("a")
    for number in range(3):
        person.browser.activations.navigated("a", "news.example" if number == 0 else f"r{number}.example", "x.example")
        assert refused(lambda: person.buys("a", "https://x.example"))
    person.browser.activations.user_acted("a")
    assert person.buys("a", "https://x.example") == (0, 1)


@pytest.mark.parametrize(
    ("before", "after"), [(None, "news.example"), ("localhost", "news.example"), ("a.co.uk", "b.co.uk")]
)
def test_what_is_another_site(person: Person, before: str | None, after: str) -> None:
    person.browser.activations.user_acted("a")
    person.sees("a")
    person.browser.activations.navigated("a", before, after)
    assert refused(lambda: person.sees("a"))


def test_an_action_is_used_up_by_a_call_not_by_a_refusal(person: Person) -> None:
    """And a call with options that are refused was a call."""
    person.browser.activations.user_acted("a")
    forbidden = Page(NEWS, tab="a", permissions_policy="save-impression=()")
    assert refused(lambda: person.browser.save_impression(forbidden, AD))
    with pytest.raises(RangeError):
        person.browser.save_impression(Page(NEWS, tab="a"), ImpressionOptions(-1))
    person.browser.activations.navigated("a", "news.example", "shop.example")
    assert refused(lambda: person.buys("a"))


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
        ('measure-conversion=("https://ads.example")', False, True),
        ('measure-conversion=("https://other.example")', False, False),
        ("save-impression=(), geolocation=()", True, True),
        ("measure-conversion=(), measure-conversion=*", True, True),
        # Whatever else stands there allows nobody.
        ("measure-conversion", False, False),
        ("measure-conversion=5", False, False),
        ('measure-conversion="https://ads.example"', False, False),
        ('measure-conversion=(%"*")', False, False),
        ("measure-conversion=(Self)", False, False),
        # What is no header is none.
        ("measure-conversion=(", True, True),
    ],
)
def test_who_may_call_by_the_pages_policy(person: Person, header: str, page: bool, frame: bool) -> None:
    def measures(frame: str | None) -> bool:
        asked = Page(SHOP, frame, permissions_policy=header)
        return not refused(lambda: person.browser.measure_conversion(asked, SALE))

    assert (measures(None), measures(ADS)) == (page, frame)


@pytest.mark.parametrize("feature", list(Feature))
def test_each_feature_is_forbidden_by_its_own_name(person: Person, feature: Feature) -> None:
    page = Page(NEWS, permissions_policy=f"{feature.value}=()")
    assert refused(lambda: person.browser.save_impression(page, AD)) is (feature is Feature.SAVE_IMPRESSION)
    assert refused(lambda: person.browser.measure_conversion(page, SALE)) is (feature is Feature.MEASURE_CONVERSION)


def test_a_refusal_says_whom_and_what() -> None:
    policy = PermissionsPolicy.parse("save-impression=self")
    with pytest.raises(DOMException, match=r"forbids save-impression to https://ads\.example"):
        policy.check(Feature.SAVE_IMPRESSION, NEWS, ADS)


def test_the_frame_that_calls_is_the_intermediary(person: Person) -> None:
    person.browser.save_impression(Page("https://www.news.example", ADS), AD)
    (saved,) = person.device.overview().impressions
    assert (saved.impression.site, saved.impression.caller) == ("news.example", "ads.example")
    with pytest.raises(DOMException, match=r"no single site|not a domain"):
        person.browser.save_impression(Page("http://["), AD)
