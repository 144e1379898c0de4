"""The privacy dashboard: its text, its actions, and its defences against other websites."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from device import agent
from device.budget import FilterKind
from device.conversion import ConversionOptions
from device.dashboard.formatting import (
    LocalTime,
    describe_clearing,
    describe_cost,
    describe_outcome,
    describe_usage,
    epsilon,
    guess_probability,
    odds_factor,
)
from device.dashboard.markup import Markup, budget_bar, join, tag
from device.dashboard.pages import (
    MAX_ROWS,
    SHOWN_SITES,
    Action,
    OverviewPage,
    RecipientTotal,
    confirmation_page,
    totals_by_intermediary,
    totals_by_site,
)
from device.dashboard.security import HOST, Session, bind_loopback, content_security_policy, origin_of
from device.dashboard.server import Dashboard, serve
from device.device import Device
from device.events import ImpressionOptions
from device.limits import DeviceLimits, OwnSite
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import LOGGED_EPOCHS, EpochEntry, EpochOutcome, ReportRecord
from protocol.errors import ErrorKind, TrefoilError
from tests.support.processes import TREFOIL, started
from tests.support.raising import raises

START = 1_790_000_000
WEEK = 7 * 86_400
QUARTER = ConversionOptions("trefoil", 4, epsilon=0.25)


@dataclass
class World:
    """A device with a clock that tests set."""

    now: int = START
    device: Device[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: self.now)

    def page(self, **options: bool) -> str:
        return OverviewPage(self.device.overview(), LocalTime(UTC), **options).render()  # type: ignore[arg-type] # only all_rows is passed


@pytest.fixture
def world() -> World:
    """Four ads over three weeks, then five purchases at ε = 0.25: the last of them finds nothing left."""
    made = World()
    for index in range(4):
        made.device.save_impression("news.example", ImpressionOptions(index, conversion_sites=["shoes.example"]))
        made.now += 3 * 86_400
    for _ in range(5):
        made.device.measure_conversion("shoes.example", QUARTER)
        made.now += 600
    return made


class Reader(HTMLParser):
    """Collects the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def text_of(page: str, reader: Reader | None = None) -> str:
    """Return the text of a page without tags, with white space collapsed."""
    reader = reader or Reader()
    reader.feed(page)
    return re.sub(r"\s+", " ", " ".join(reader.texts))


class FoldedReader(Reader):
    """Collects the text that a page shows before anything is unfolded."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("details", "summary"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("details", "summary"):
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open in ([], ["details", "summary"]):
            super().handle_data(data)


class TestMarkup:
    def test_text_is_escaped_and_markup_is_not(self) -> None:
        assert join(["<b>", tag("i", "a&b"), 3, None]) == "&lt;b&gt;<i>a&amp;b</i>3"

    def test_attributes_are_escaped_and_named_as_in_html(self) -> None:
        page = tag("input", class_='a"b', aria_label="<x>", disabled=True, id=None, hidden=False)
        assert page == '<input class="a&quot;b" aria-label="&lt;x&gt;" disabled>'
        assert isinstance(page, Markup)

    def test_a_bar_is_full_at_its_capacity_and_marked_there(self) -> None:
        assert 'class="spent" x="0" y="3" width="25.00"' in budget_bar(1, 4)
        assert 'class="full" x="0" y="3" width="100.00"' in budget_bar(4, 4)
        assert 'class="capacity"' in budget_bar(0, 4)


def test_the_page_says_what_a_budget_does_not_bound(world: World) -> None:
    """The guarantee as it holds: twice the budget in case 2 of Theorem 1, and one bound for all sites together."""
    text = text_of(world.page())
    assert "Twice as much is possible where a site counts ads on its own pages" in text
    assert "they learn at most 16 ε about a week" in text
    assert "two budgets of the one and one of the other" in text


def test_where_own_ads_are_hidden_the_page_says_no_more_than_that(world: World) -> None:
    limits = DeviceLimits(own_site=OwnSite.HIDDEN)
    text = text_of(OverviewPage(replace(world.device.overview(), limits=limits), LocalTime(UTC)).render())
    assert "Twice as much is possible where a site asks how many reports were empty" in text
    assert "own pages" not in text


class TestFormatting:
    def test_amounts_are_exact(self) -> None:
        assert (epsilon(250_000), epsilon(1), epsilon(0)) == ("0.25 ε", "0.000001 ε", "0 ε")

    def test_the_odds_are_rounded_up(self) -> None:
        assert odds_factor(1_000_000) == "×2.72" and odds_factor(100_000) == "×1.11" and odds_factor(1) == "×1.01"

    def test_a_budget_in_words(self) -> None:
        assert describe_usage(0, 10) == "untouched"
        assert describe_usage(5, 10).startswith("50 % used") and "less than 1 %" in describe_usage(1, 1000)
        assert describe_usage(10, 10).startswith("nothing left")

    @pytest.mark.parametrize("outcome", EpochOutcome)
    def test_every_outcome_has_words(self, outcome: EpochOutcome) -> None:
        paid = 5 if outcome is EpochOutcome.PAID else 0
        assert ("nothing, as" in describe_outcome(EpochEntry(1, outcome, paid))) == (outcome is not EpochOutcome.PAID)
        assert describe_cost([EpochEntry(1, outcome, paid)]).startswith("Nothing.") == (
            outcome is not EpochOutcome.PAID
        )

    def test_weeks_are_not_added_up(self) -> None:
        entries = [EpochEntry(1, EpochOutcome.PAID, 250_000), EpochEntry(2, EpochOutcome.PAID, 250_000)]
        assert describe_cost(entries) == "0.25 ε in each of 2 weeks"

    def test_a_week_that_could_not_pay_is_named_beside_those_that_did(self) -> None:
        entries = [EpochEntry(1, EpochOutcome.PAID, 100_000), EpochEntry(2, EpochOutcome.OUT_OF_BUDGET, 0)]
        assert describe_cost(entries) == "0.1 ε in one week; 1 week had too little left and added nothing"


class TestLog:
    def test_of_a_long_window_the_latest_epochs_are_kept(self) -> None:
        entries = tuple(EpochEntry(epoch, EpochOutcome.NOTHING_FOUND, 0) for epoch in range(40))
        kept = ReportRecord.decode(ReportRecord(START, 1, 2, "a.example", "a.example", entries).encode()).epochs
        assert [entry.epoch for entry in kept] == list(range(40 - LOGGED_EPOCHS, 40))

    def test_the_log_says_what_each_epoch_paid_and_why_not(self, world: World) -> None:
        first, *_, last = world.device.reports()
        paid = [entry for entry in first.epochs if entry.outcome is EpochOutcome.PAID]
        assert len(paid) >= 2 and {entry.paid for entry in paid} == {250_000}
        assert {entry.outcome for entry in last.epochs} == {EpochOutcome.OUT_OF_BUDGET, EpochOutcome.NOTHING_FOUND}
        assert all(entry.paid == 0 for entry in last.epochs)

    def test_the_log_agrees_with_the_filters(self, world: World) -> None:
        logged: dict[int, int] = {}
        for record in world.device.reports():
            for entry in record.epochs:
                logged[entry.epoch] = logged.get(entry.epoch, 0) + entry.paid
        spent = {state.epoch: state.spent for state in world.device.budget() if state.kind is FilterKind.SITE}
        assert {epoch: paid for epoch, paid in logged.items() if paid} == spent

    def test_after_forgetting_the_past_is_closed(self, world: World) -> None:
        world.device.clear_browsing_history(forget_visits=True)
        world.device.measure_conversion("shoes.example", QUARTER)
        assert {entry.outcome for entry in world.device.reports()[-1].epochs} == {EpochOutcome.CLOSED}


class TestOverviewPage:
    def test_shows_what_was_spent_what_is_left_and_why(self, world: World) -> None:
        page = text_of(world.page())
        assert "shoes.example" in page and "1 ε 0 ε nothing left" in page
        assert "0.25 ε in each of" in page and "Nothing. The budget is used up: an empty report" in page
        assert "Measurement is on" in page and "What all sites together may learn: at most 8 ε a week" in page
        assert "What may be learnt from ads this site showed: at most 4 ε a week" in page

    def test_totals_are_by_site_and_by_intermediary(self) -> None:
        """Figure 1: an ad-tech that asks on two sites' pages has had what both of their budgets paid in one week."""
        world = World()
        world.device.save_impression("news.example", ImpressionOptions(0))
        for site, caller in (
            ("shoes.example", None),
            ("shoes.example", "adtech.example"),
            ("hats.example", "adtech.example"),
        ):
            world.device.measure_conversion(site, QUARTER, intermediary=caller)
        world.device.measure_conversion("bags.example", replace(QUARTER, impression_sites=("blog.example",)))
        records = world.device.reports()
        assert totals_by_site(records) == [
            RecipientTotal("shoes.example", ("adtech.example",), 2, 2, 500_000),
            RecipientTotal("hats.example", ("adtech.example",), 1, 1, 250_000),
            RecipientTotal("bags.example", (), 1, 0, 0),
        ]
        assert totals_by_intermediary(records) == [
            RecipientTotal("adtech.example", ("hats.example", "shoes.example"), 2, 2, 500_000)
        ]
        page = text_of(world.page())
        assert "adtech.example hats.example, shoes.example 2 2 0.5 ε" in page
        assert "shoes.example adtech.example 2 2 0.5 ε" in page

    def test_weeks_are_not_added_up_in_totals_either(self, world: World) -> None:
        (total,) = totals_by_site(world.device.reports())
        assert (total.reports, total.paid_for, total.most) == (5, 4, 1_000_000)
        assert totals_by_intermediary(world.device.reports()) == []

    def test_shows_impressions_and_for_whom(self, world: World) -> None:
        assert re.search(r"news\.example 3 shoes\.example", text_of(world.page()))

    def test_an_unused_device_has_a_page_too_and_looking_changes_nothing(self) -> None:
        world = World()
        page = text_of(world.page())
        assert "Nothing is on record." in page and "No impression is stored" in page and "closed" not in page
        assert world.device.overview().calendar is None

    def test_a_busy_month_is_a_short_page(self) -> None:
        """Outside of folds: a summary, the switch, and the sites that have spent most, in that order."""
        world = World()
        for number in range(SHOWN_SITES + 5):
            world.device.save_impression("news.example", ImpressionOptions(0))
            options = replace(QUARTER, epsilon=(number + 1) / 50)
            world.device.measure_conversion(f"shop-{number}.example", options)
        shown, most = text_of(world.page(), FoldedReader()), SHOWN_SITES + 4
        assert f"shop-{most}.example has spent most: 0.26 ε of 1 ε" in shown
        places = [shown.index(f"shop-{number}.example 0.") for number in range(most, most - SHOWN_SITES, -1)]
        assert places == sorted(places) and "shop-0.example" not in shown and "5 more sites" in shown
        assert shown.index("Switch measurement off") < shown.index("went to") < places[0]
        assert "shop-0.example" in text_of(world.page())

    def test_after_clearing_only_true_things_are_said(self, world: World) -> None:
        world.device.clear_browsing_history(forget_visits=True)
        page = text_of(world.page())
        assert "Nothing is on record. This week is closed" in page and "have spent" not in page
        assert "Cleared, or restored from a copy, on 3 Oct: that week and earlier ones are closed" in page
        world.now += 5 * WEEK
        assert "Cleared" not in text_of(world.page()) and "Nothing is on record." in text_of(world.page())

    def test_long_lists_are_cut_until_asked_for(self) -> None:
        world = World()
        for _ in range(MAX_ROWS + 3):
            world.device.save_impression("news.example", ImpressionOptions(0))
        assert f"Show all {MAX_ROWS + 3}" in world.page()
        assert world.page(all_rows=True).count("news.example") == MAX_ROWS + 3
        assert '<details id="impressions" class="fold" open>' in world.page(all_rows=True)

    def test_has_no_script_no_inline_style_and_nothing_from_elsewhere(self, world: World) -> None:
        page = world.page()
        assert "<script" not in page and " style=" not in page and " on" not in re.sub(r"[^<]*<|>[^<]*", " ", page)
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)

    def test_a_closed_week_says_so(self, world: World) -> None:
        overview = world.device.overview()
        world.device.clear_browsing_history(["other.example"], forget_visits=True)
        assert overview.filters and "closed: history was cleared" in text_of(world.page())


@dataclass
class Browser:
    """The person's browser: keeps cookies, sends its Origin with forms."""

    session: aiohttp.ClientSession
    origin: str
    dashboard: Dashboard
    home: str = ""

    async def open(self) -> None:
        status, body, _ = await self.get(self.dashboard.login_url())
        onward = re.search(r'url=(/[0-9a-f]+/)"', body)
        assert status == 200 and onward
        self.home = self.origin + onward[1]

    async def get(self, url: str, **headers: str) -> tuple[int, str, aiohttp.ClientResponse]:
        async with self.session.get(url, headers=headers) as response:
            return response.status, await response.text(), response

    async def post(self, action: str, fields: dict[str, str], origin: str | None = None) -> tuple[int, str]:
        headers = {"Origin": self.origin if origin is None else origin} if origin != "" else {}
        async with self.session.post(self.home + action, data=fields, headers=headers) as response:
            return response.status, await response.text()

    async def csrf_token(self, action: str) -> str:
        _, body, _ = await self.get(self.home + action)
        match = re.search(r'name="token" value="([^"]+)"', body)
        assert match
        return match[1]


@asynccontextmanager
async def browsing(device: Device[tuple[int, ...]]) -> AsyncIterator[Browser]:
    with bind_loopback(0) as bound:
        dashboard = Dashboard(device, origin_of(bound), local_time=LocalTime(UTC))
        jar = aiohttp.CookieJar(unsafe=True)
        async with serve(dashboard.app(), bound), aiohttp.ClientSession(cookie_jar=jar) as session:
            yield Browser(session, origin_of(bound), dashboard)


class TestSecurity:
    async def test_the_link_works_once_and_only_the_cookie_after(self, world: World) -> None:
        async with browsing(world.device) as browser:
            invitation = browser.dashboard.login_url()
            assert (await browser.get(invitation))[0] == 200
            assert (await browser.get(invitation))[0] == 403
            await browser.open()
            assert (await browser.get(browser.home))[0] == 200
            browser.session.cookie_jar.clear()
            status, body, _ = await browser.get(browser.home)
            assert status == 403 and "shoes.example" not in body

    async def test_the_cookie_is_hidden_strict_and_bound_to_its_path(self, world: World) -> None:
        async with browsing(world.device) as browser:
            _, _, response = await browser.get(browser.dashboard.login_url())
            cookie = response.cookies[Session.COOKIE]
            assert cookie["httponly"] and cookie["samesite"] == "Strict" and len(cookie["path"]) == 17
            assert cookie.value not in repr(Session())

    @pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1", "127.0.0.1.evil.example:80"])
    async def test_another_host_name_is_refused(self, world: World, host: str) -> None:
        """DNS rebinding: the Host is not ours, wherever the name resolves to."""
        async with browsing(world.device) as browser:
            await browser.open()
            status, body, _ = await browser.get(browser.home, Host=host)
            assert status == 403 and "shoes.example" not in body
            invitation = browser.dashboard.login_url()
            assert (await browser.get(invitation, Host=host))[0] == 403
            assert (await browser.get(invitation))[0] == 200, "a refused request must not redeem the token"

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", ""])
    async def test_a_form_from_another_origin_changes_nothing(self, world: World, origin: str) -> None:
        async with browsing(world.device) as browser:
            await browser.open()
            token = await browser.csrf_token("clear-history")
            assert (await browser.post("clear-history", {"token": token}, origin))[0] == 403
            assert world.device.overview().impressions

    async def test_another_origin_cannot_read(self, world: World) -> None:
        async with browsing(world.device) as browser:
            await browser.open()
            status, body, response = await browser.get(browser.home, Origin="http://evil.example")
            assert status == 403 and "shoes.example" not in body
            assert "Access-Control-Allow-Origin" not in response.headers

    async def test_every_answer_carries_the_policy(self, world: World) -> None:
        async with browsing(world.device) as browser:
            await browser.open()
            for address in (
                browser.home,
                browser.origin + "/nowhere",
                browser.home + "nothing",
                browser.home + "switch-off",
            ):
                _, _, response = await browser.get(address)
                assert response.headers["Content-Security-Policy"] == content_security_policy()
                assert response.headers["Cache-Control"] == "no-store"
                assert response.headers["X-Frame-Options"] == "DENY"
        assert "script" not in content_security_policy() and "default-src 'none'" in content_security_policy()

    def test_listens_on_the_loopback_address_only(self) -> None:
        with bind_loopback(0) as bound:
            host, port = bound.getsockname()
            assert host == HOST == "127.0.0.1"
            bound.listen()
            with raises(ErrorKind.BUSY, TrefoilError) as caught:
                bind_loopback(port)
            assert str(port) in str(caught.value)


class TestActions:
    @pytest.mark.parametrize("action", Action)
    async def test_asking_changes_nothing(self, world: World, action: Action) -> None:
        before = world.device.overview()
        async with browsing(world.device) as browser:
            await browser.open()
            status, body, _ = await browser.get(f"{browser.home}{action.value}?site=news.example")
            assert status == 200 and "No, go back" in body
        assert world.device.overview() == before

    @pytest.mark.parametrize("action", Action)
    async def test_without_the_csrf_token_nothing_happens(self, world: World, action: Action) -> None:
        before = world.device.overview()
        async with browsing(world.device) as browser:
            await browser.open()
            for fields in ({"site": "news.example"}, {"site": "news.example", "token": "x"}):
                assert (await browser.post(action.value, fields))[0] == 403
        assert world.device.overview() == before

    async def test_clearing_a_site_takes_what_it_stored_and_closes_the_past_to_it(self, world: World) -> None:
        spent = [state for state in world.device.budget() if state.site != "news.example"]
        assert describe_clearing("news.example") in text_of(confirmation_page(Action.CLEAR_SITE, "", "news.example"))
        await self._do(world, "clear-site", site="news.example")
        closed = [
            state for state in world.device.budget() if state.kind is FilterKind.SITE and state.site == "news.example"
        ]
        assert not world.device.overview().impressions
        assert len(closed) >= 5 and all(state.remaining == 0 for state in closed)
        assert [state for state in world.device.budget() if state.site != "news.example"] == spent

    async def test_clearing_history_takes_everything(self, world: World) -> None:
        page = await self._do(world, "clear-history")
        overview = world.device.overview()
        assert not (overview.impressions or overview.filters or overview.reports)
        assert overview.barrier == world.now and "your history is cleared" in page

    async def test_switching_off_and_on(self, world: World) -> None:
        assert "Measurement is off" in await self._do(world, "switch-off")
        assert not world.device.overview().enabled
        assert "Measurement is on" in await self._do(world, "switch-on")
        assert world.device.overview().enabled

    async def test_unknown_actions_and_sites_are_refused(self, world: World) -> None:
        async with browsing(world.device) as browser:
            await browser.open()
            assert (await browser.get(browser.home + "clear-site?site=<script>"))[0] == 400
            assert (await browser.get(browser.home + "clear-everything"))[0] == 404

    @staticmethod
    async def _do(world: World, action: str, **fields: str) -> str:
        async with browsing(world.device) as browser:
            await browser.open()
            token = await browser.csrf_token(f"{action}?site={fields.get('site', 'x.example')}")
            status, body = await browser.post(action, {"token": token, **fields})
            assert status == 200
            return text_of(body)


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    """Wait for the file that a process writes when it is ready, and return its text."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text()


class TestCommand:
    def test_serves_a_database_at_the_address_it_says(self, tmp_path: Path) -> None:
        """How it stops is in test_stopping."""
        path, where = tmp_path / "device.sqlite", tmp_path / "url.json"
        agent.create(path)
        with started([*TREFOIL, "device", "dashboard", "--db", str(path), "--json", str(where)]) as process:
            url = json.loads(wait_for(where, process))["url"]
            with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - an address of our own
                assert response.status == 200
            process.terminate()
            assert url in process.communicate(timeout=20)[0]
            assert process.returncode == 0

    async def test_a_busy_database_is_a_page_that_says_so(self, tmp_path: Path) -> None:
        limits = DeviceLimits()
        path = tmp_path / "device.sqlite"
        SqliteStore.create(path, epoch_length=limits.epoch_length, debug=True)
        store = SqliteStore.open(path, epoch_length=limits.epoch_length, clock=lambda: START, wait=0.05)
        device = Device(store, PlainSeal(), clock=lambda: START, limits=limits)
        async with browsing(device) as browser:
            await browser.open()
            with store.transaction():
                status, body, _ = await browser.get(browser.home)
            assert status == 503 and "busy" in body
        store.close()


def test_the_example_of_epsilon_is_right_and_rounded_against_us() -> None:
    """A coin's guess after ε: at most e^ε/(1 + e^ε)."""
    for micros in (1, 100_000, 250_000, 1_000_000):
        odds = math.exp(micros / 1e6)
        assert 0 <= float(guess_probability(micros).removesuffix(" %")) - 100 * odds / (1 + odds) < 0.1
    assert (guess_probability(250_000), guess_probability(0)) == ("56.3 %", "50 %")


def test_publishers_charges_that_exceed_the_total_are_explained() -> None:
    """Two publishers' ads in one report: each pays all of it, everyone together once."""
    world = World()
    assert "add up to more" not in world.page()
    for publisher in ("news.example", "blog.example"):
        world.device.save_impression(publisher, ImpressionOptions(1))
    world.device.measure_conversion("shop.example", QUARTER)
    spent = {state.kind: state.spent for state in world.device.overview().filters}
    publishers = [s.spent for s in world.device.overview().filters if s.kind is FilterKind.IMPRESSION_SITE]
    assert len(publishers) == 2 and sum(publishers) > spent[FilterKind.GLOBAL]
    assert "These may add up to more than all sites together." in world.page()


def test_numbers_are_marked_and_every_cell_names_its_column() -> None:
    world = World()
    world.device.save_impression("news.example", ImpressionOptions(1))
    world.device.measure_conversion("shop.example", QUARTER)
    page = world.page()
    assert re.search(r'<td role="cell" class="number" data-label="Spent">0.25&nbsp;ε</td>', page)
    assert not re.search(r"<td(?![^>]*data-label)", page), "a card on a narrow screen has no heading above it"


def test_two_dashboards_share_no_secret(world: World) -> None:
    first, second = (Dashboard(world.device, "http://127.0.0.1:1") for _ in range(2))
    assert len({first.login_url(), first.login_url(), second.login_url()}) == 3
    assert not first._session.redeem(second.login_url().partition("token=")[2])
