"""The live demonstration and the dashboard in real Chromium: the whole story, and everything that must be refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.demos.live.measurement import CROWD
from benchmarks.demos.live.web import CAMPAIGNS, Map, Place
from mpc_helpers.local.launcher import Trio
from tests.support.browser import (
    ANSWER_MS,
    address,
    axe_findings,
    axe_source,
    chromium,
    demonstration,
    idle_helpers,
    live_demonstration,
    misfits,
    needs_chromium,
    own_findings,
    person,
    picture,
    pull_slider,
    settle,
    stretched,
    too_wide,
)

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return idle_helpers(tmp_path_factory.mktemp("helpers"))


@pytest.fixture
def where(tmp_path: Path, trio: Trio) -> Iterator[Map]:
    """A demonstration with a fresh device. Its helpers are not running: only the story needs them."""
    with demonstration(tmp_path, trio) as places:
        yield places


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with person(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Map]:
    """`trefoil live` as a person starts it, with three helpers, on any free ports; stopped as Ctrl-C does."""
    with live_demonstration(tmp_path_factory.mktemp("live")) as places:
        yield places


def click_ad(page: Page, where: Map, place: Place, number: int = 0) -> None:
    page.goto(address(where, place))
    page.locator("a.ad").nth(number).click()
    page.wait_for_url(address(where, Place.SHOP))


def buy(page: Page, where: Map) -> str:
    """Buy once; what the shop's page says afterwards, without the bytes."""
    page.goto(address(where, Place.SHOP))
    page.get_by_role("button", name="Buy the shoes").click()
    told = page.get_by_role("status")
    expect(told).to_contain_text("Thank you")
    assert len(page.locator("#bytes").inner_text()) == 2 * 192
    return told.inner_text().replace(page.locator("#bytes").inner_text(), "")


def open_dashboard(page: Page, where: Map) -> None:
    page.goto(f"{where[Place.HOME]}/dashboard")
    expect(page.get_by_role("heading", name="What measurement has cost you")).to_be_visible()


def unfold(page: Page) -> None:
    """Click every fold open, as a person does."""
    for folded in page.locator("details:not([open]) > summary").all()[::-1]:
        folded.click()


def row(page: Page, table: str, name: str) -> list[str]:
    """The cells of one row."""
    found = page.get_by_role("table", name=table).get_by_role("row").filter(has_text=name).first
    return [cell.replace("\xa0", " ") for cell in found.locator("td").all_inner_texts()]


def test_the_whole_story(browser: Browser, live: Map) -> None:
    """From the ad to the histogram: click, buy, look at the cost, ask, hide in a crowd, replay, look at the helpers."""
    with person(browser) as page:
        page.goto(address(live, Place.HOME))
        picture(page, "start")
        says = page.frame_locator("#device-says").get_by_role("main")
        click_ad(page, live, Place.NEWS)
        expect(says).to_contain_text(f"I have remembered this ad: “{CAMPAIGNS[0]}”. No page is told.")
        assert page.get_by_role("navigation", name="Steps").locator("[aria-current=step]").inner_text() == "Buy shoes"
        assert page.get_by_role("navigation", name="Places").locator("[aria-current=page]").inner_text() == "Shop"
        buy(page, live)
        expect(says).to_contain_text("I have made 1 report.")
        # The call of the page before this one is listed too.
        expect(page.locator("#calls")).to_contain_text(
            re.compile(r"measureConversion\(.*Uint8Array\(\d+\).*news\.example.*saveImpression\({ histogramIndex: 0")
        )
        picture(page, "shop")

        page.get_by_role("link", name="look at your dashboard").click()
        expect(page.get_by_role("heading", name="What measurement has cost you")).to_be_visible()
        picture(page, "dashboard")
        unfold(page)
        assert row(page, "Budget of shoes.example", "now")[1:3] == ["0.3 ε", "0.7 ε"]
        assert "up to 0.3 ε in each of" in " ".join(row(page, "Reports sent", "shoes.example"))
        assert "news.example" in row(page, "Impressions stored", "news.example")

        ask_alone_then_in_a_crowd(page, live)
        replay(page)
        look_over_the_helpers_shoulders(page, live)


def ask_alone_then_in_a_crowd(page: Page, where: Map) -> None:
    """By the button, and by pulling the slider. The newest answer is beside the tracker, with one sentence on top."""
    page.goto(address(where, Place.MEASUREMENT))
    expect(page.locator("#ask output")).to_have_text("You alone")
    page.get_by_role("button", name="Ask the three helpers").click()
    answer = page.locator("#answer")
    expect(answer).to_contain_text("1 report counted", timeout=ANSWER_MS)
    settle(page)
    expect(answer.locator(".verdict")).to_contain_text("Noise. 1 purchase cannot stand out")
    expect(page.locator("#why")).to_contain_text("does not reach “You alone”")
    buy(page, where)
    page.goto(address(where, Place.MEASUREMENT))
    expect(page.locator("#ask output")).to_have_text(f"{CROWD:,} people")
    page.get_by_role("button", name="Ask the three helpers again").click()
    expect(answer).to_contain_text("2,001 reports counted", timeout=ANSWER_MS)
    settle(page)
    expect(answer.get_by_role("img")).to_be_visible()
    assert_the_chart_shows_the_numbers(page)
    expect(answer).to_contain_text(re.compile("Weeks without budget .* Accept: the relative error is"))
    # By chance another verdict comes in less than one run of a thousand: so it is not asserted which.
    expect(page.locator(".beside #answer + #tracked")).to_contain_text("You bought shoes on shoes.example, because of")
    assert_the_answer_is_the_truth_with_noise(page)
    pull_slider(page, 200)
    expect(answer).to_contain_text("200 reports counted", timeout=ANSWER_MS)
    settle(page)
    expect(page.locator("#so-far li")).to_contain_text(["1 person", "200 people", "2,001 people"])


def assert_the_answer_is_the_truth_with_noise(page: Page) -> None:
    """Every answer lies within 190 of the exact count.

    The noise is a difference of two NB(3/2, e^(−1/10)); summing its probabilities yields P(|X| > 190) = 1.9·10⁻⁸, so
    four buckets fail by chance with a probability of 10⁻⁷.
    """
    page.get_by_text("The same in numbers").click()
    for campaign in CAMPAIGNS:
        tracker, answer, interval = (
            page.locator("#answer tbody tr").filter(has_text=campaign).locator("td").all_inner_texts()
        )
        assert abs(number(answer) - number(tracker)) <= 190
        low, high = (number(end) for end in interval.split(" to "))
        assert low < number(answer) < high and high - low < 80


def assert_the_chart_shows_the_numbers(page: Page) -> None:
    """A bar and an interval for each campaign, as long as the numbers of the page; zero is a line of the grid."""
    chart = page.locator("#answer .chart")
    for kind in ("exact", "noisy"):
        numbers = [abs(int(value)) for value in (chart.get_attribute(f"data-{_DATA[kind]}") or "").split(",")]
        widths = [float(bar.get_attribute("width") or 0) for bar in chart.locator(f".{kind}").all()]
        scale = max(widths) / max(numbers)
        assert widths == pytest.approx([scale * each for each in numbers], abs=0.01)
    assert chart.locator(".interval").count() == len(CAMPAIGNS) and chart.locator(".zero").count() == 1


_DATA = {"exact": "exact", "noisy": "answer"}


def number(text: str) -> int:
    return int(text.replace(",", "").replace("−", "-"))


def replay(page: Page) -> None:
    page.get_by_role("button", name="Ask about the same reports once more").click()
    refused = page.locator("#answer .warn")
    expect(refused).to_contain_text(
        "Refused: all 200 reports were counted before. Nothing was spent.", timeout=ANSWER_MS
    )
    settle(page)
    picture(page, "advertiser")


def look_over_the_helpers_shoulders(page: Page, where: Map) -> None:
    page.goto(address(where, Place.HELPERS))
    expect(page.get_by_text("This one is yours")).to_be_visible()
    page.get_by_role("link", name="Report after").click()
    expect(page.get_by_text("Somebody else's")).to_be_visible()
    page.goto(f"{where[Place.HELPERS]}/?report=1")
    numbers = page.locator("#views code").all_inner_texts()
    assert len(numbers) == 3 * 2 * len(CAMPAIGNS)
    # Three parts, each of them at two helpers; none is small, as the numbers of a report in the clear would be.
    assert len(set(numbers)) == 3 * len(CAMPAIGNS) and all(int(each, 16) > 2**20 for each in numbers)
    page.get_by_role("button", name="Add up the three parts").click()
    expect(page.locator("#sums .verdict")).to_have_text(f"Your purchase counts for “{CAMPAIGNS[0]}”.")
    sums = page.locator("#sums code").all_text_contents()
    assert len(set(sums)) == 3 * len(CAMPAIGNS) and all(int(each, 16) > 2**20 for each in sums)
    picture(page, "helpers")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_accessible(browser: Browser, live: Map, dark: bool) -> None:
    """Our own rules always, axe-core's where npm can fetch it. After the story, so that
    every page has something to show.
    """
    axe = axe_source()
    findings: list[str] = []
    with person(browser, dark=dark) as page:

        def check() -> None:
            findings.extend(own_findings(page))
            if axe is not None:
                # Colours are all that changes in the dark.
                findings.extend(axe_findings(page, axe, ("color-contrast",) if dark else ()))

        for place in Place:
            if place not in (Place.AGENT, Place.DASHBOARD):
                page.goto(address(live, place))
                check()
        buy(page, live)
        check()
        page.goto(f"{live[Place.AGENT]}/says")
        findings.extend(axe_findings(page, axe) if axe is not None else [])
        open_dashboard(page, live)
        unfold(page)
        check()
        home = page.url
        for action in ("clear-site?site=news.example", "clear-history", "switch-off", "switch-on"):
            page.goto(home + action)
            check()
    assert findings == []


def test_every_page_fits_a_telephone(browser: Browser, live: Map) -> None:
    """At 390 pixels nothing is wider than the screen and no text smaller than 11 pixels; rows of tables are cards."""
    axe = axe_source()
    findings: list[str] = []
    with person(browser, width=390) as page:
        for place in (*(each for each in Place if each is not Place.AGENT), None):
            page.set_viewport_size({"width": 390, "height": 900})
            if place is None:
                buy(page, live)
            elif place is Place.DASHBOARD:
                open_dashboard(page, live)
                unfold(page)
            else:
                page.goto(address(live, place))
            findings += misfits(page)
            findings += axe_findings(page, axe) if axe is not None else []
            if page.get_by_role("table").count():
                assert page.get_by_role("table").first.get_by_role("row").last.evaluate(_DISPLAY) == "block"
            findings += too_wide(stretched(page))
    assert findings == []


_DISPLAY = "(row) => getComputedStyle(row).display"


def test_the_check_of_sizes_finds_what_it_should(page: Page) -> None:
    small = "<svg viewBox='0 0 800 20' width='400'><text y='15' font-size='14'>half</text></svg>"
    small += "<svg viewBox='0 0 80 20' width='80'><text y='15' x='14' text-anchor='middle'>−100</text></svg>"
    page.set_content(
        f"<style>body {{ margin: 0 }}</style><p style='font-size: 9px'>nine</p>{small}<div style='width: 3000px'>x"
    )
    wide, nine, half, cut_off = misfits(page)
    assert "1900 pixels wider" in wide and "<div> ends at 3000: x" in wide
    assert "9.0 px: nine" in nine and "7.0 px: half" in half and "cut off: −100" in cut_off


def test_our_own_check_finds_what_it_should(page: Page) -> None:
    """Each planted fault must be found, so that a page without findings means something."""
    page.set_content(
        "<style>p { color: #bbb; background: #fff }</style><h1>One</h1><h3>Three</h3><p>pale</p><a href='#x'></a>"
        "<button></button><input><img src='data:,'><svg></svg><nav></nav><table><tr><th>x</th></tr></table>"
        "<i id='same'></i><i id='same'></i><i tabindex='3'></i>"
    )
    found = "\n".join(own_findings(page))
    for fault in (
        "names no language",
        "no title",
        "one main landmark",
        "skip to the content",
        "skips a level",
        "no name: <a",
        "no name: <button",
        "no label: <input",
        "no alternative text",
        "no name: <svg",
        "landmark without a name",
        "table without a caption",
        "header without a scope",
        "used twice",
        "order of focus",
        "contrast 1.9",
    ):
        assert fault in found, fault


def test_the_budget_runs_out_and_the_shop_is_not_told(page: Page, where: Map) -> None:
    click_ad(page, where, Place.BLOG)
    told = [buy(page, where) for _ in range(4)]
    assert len(set(told)) == 1, "the shop sees the same, with budget and without"
    open_dashboard(page, where)
    unfold(page)
    assert row(page, "Budget of shoes.example", "now")[1:3] == ["0.9 ε", "0.1 ε"]
    cells = page.get_by_role("table", name="Reports sent").locator("tbody tr td:nth-child(3)")
    costs = [cost.replace("\xa0", " ") for cost in cells.all_inner_texts()]
    assert re.fullmatch(r"0.1 ε in each of [45] weeks; 1 week had too little left and added nothing", costs[0])
    assert len(costs) == 4 and all(re.fullmatch(r"up to 0.3 ε in each of [56] weeks", cost) for cost in costs[1:])
    picture(page, "budget-used-up")


def test_a_purchase_fits_two_screens_of_a_telephone(browser: Browser, where: Map) -> None:
    with person(browser, width=390) as page:
        click_ad(page, where, Place.NEWS)
        buy(page, where)
        open_dashboard(page, where)
        assert page.evaluate("document.documentElement.scrollHeight") <= 2 * 844


def test_clearing_one_site(page: Page, where: Map) -> None:
    click_ad(page, where, Place.NEWS)
    click_ad(page, where, Place.BLOG)
    buy(page, where)
    open_dashboard(page, where)
    unfold(page)
    page.get_by_role("link", name="Clear shoes.example").click()
    picture(page, "confirmation")
    page.get_by_role("link", name="No, go back").click()
    assert page.locator("#impressions tbody tr").count() == 2, "asking changes nothing"
    unfold(page)
    page.get_by_role("link", name="Clear shoes.example").click()
    page.get_by_role("button", name="Clear this site").click()
    expect(page.get_by_role("status")).to_contain_text("Done")
    expect(page.get_by_text("No impression is stored")).to_be_visible()
    unfold(page)
    assert row(page, "Budget of shoes.example", "now")[1:3] == ["1 ε", "0 ε"]


def test_clearing_history(page: Page, where: Map) -> None:
    click_ad(page, where, Place.NEWS)
    buy(page, where)
    open_dashboard(page, where)
    page.get_by_role("link", name="Clear history").click()
    page.get_by_role("button", name="Clear everything").click()
    for told in (
        "Nothing is on record. This week is closed",
        "earlier ones are closed",
        "No site is on record",
        "No report is on record",
    ):
        expect(page.get_by_text(told)).to_be_visible()
    buy(page, where)
    open_dashboard(page, where)
    unfold(page)
    assert "Nothing. All of these weeks are closed: an empty report" in row(page, "Reports sent", "shoes.example")


def test_switching_off_and_on_again(page: Page, where: Map) -> None:
    said = buy(page, where)
    open_dashboard(page, where)
    page.get_by_role("link", name="Switch measurement off").click()
    page.get_by_role("button", name="Switch off").click()
    expect(page.get_by_text("Measurement is off", exact=True)).to_be_visible()
    click_ad(page, where, Place.NEWS)
    assert buy(page, where) == said, "no page can tell"
    open_dashboard(page, where)
    unfold(page)
    expect(page.get_by_text("No impression is stored")).to_be_visible()
    assert "Nothing. Measurement was off: an empty report" in row(page, "Reports sent", "shoes.example")
    page.get_by_role("link", name="Switch measurement on").click()
    page.get_by_role("button", name="Switch on").click()
    expect(page.get_by_text("Measurement is on", exact=True)).to_be_visible()


def test_a_device_that_does_not_answer_is_said_and_sells_shoes_again(browser: Browser, where: Map) -> None:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.route(f"{where[Place.AGENT]}/**", lambda route: route.abort())
        page.goto(address(where, Place.SHOP))
        page.get_by_role("button", name="Buy the shoes").click()
        expect(page.get_by_role("alert")).to_contain_text("did not answer")
        page.unroute_all()
        page.get_by_role("button", name="Buy the shoes").click()
        expect(page.get_by_role("status")).to_contain_text("Thank you")
        expect(page.get_by_role("alert")).to_be_hidden()
    finally:
        context.close()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until what is focused has this name; it must show that it is focused."""
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.textContent.trim()")
        if focused.startswith(name):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
    pytest.fail(f"Tab never reaches {name!r}")


def test_with_the_keyboard_alone(page: Page, where: Map) -> None:
    page.goto(address(where, Place.HOME))
    tab_to(page, "Begin: Click an ad")
    page.keyboard.press("Enter")
    page.wait_for_url(address(where, Place.NEWS))
    tab_to(page, "Trail shoes")
    page.keyboard.press("Enter")
    page.wait_for_url(address(where, Place.SHOP))
    tab_to(page, "Buy the shoes")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("Thank you")
    tab_to(page, "look at your dashboard")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="What measurement has cost you")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    tab_to(page, "Switch measurement off")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Switch off", exact=True)).to_be_visible()
    tab_to(page, "Switch off")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Measurement is off", exact=True)).to_be_visible()


def test_the_dashboard_reads_and_works_without_scripts(browser: Browser, where: Map) -> None:
    with person(browser) as page:
        click_ad(page, where, Place.NEWS)
        buy(page, where)
    with person(browser, scripts=False) as page:
        open_dashboard(page, where)
        unfold(page)
        assert row(page, "Budget of shoes.example", "now")[1:3] == ["0.3 ε", "0.7 ε"]
        page.get_by_role("link", name="Clear history").click()
        page.get_by_role("button", name="Clear everything").click()
        expect(page.get_by_text("No impression is stored")).to_be_visible()


def test_the_script_has_the_standards_names_shapes_and_errors(browser: Browser, where: Map) -> None:
    calls = """async () => {
      const caught = async (call) => { try { await call(); return "none"; } catch (error) { return `${error.name}`; } };
      const api = navigator.attribution;
      const good = { aggregationService: "trefoil", histogramSize: 4, epsilon: 0.25 };
      const { report } = await api.measureConversion(good);
      return {
        services: Array.from(api.aggregationServices.keys()),
        saved: await api.saveImpression({ histogramIndex: 1, conversionSites: ["shoes.example"], extra: 1 }),
        report: report instanceof Uint8Array && report.length,
        errors: [
          await caught(() => api.saveImpression()),
          await caught(() => api.saveImpression({ histogramIndex: 1n })),
          await caught(() => api.saveImpression({ histogramIndex: 1e6 })),
          await caught(() => api.saveImpression({ histogramIndex: 1, conversionSites: ["localhost"] })),
          await caught(() => api.measureConversion({ ...good, aggregationService: "other" })),
          await caught(() => api.measureConversion({ ...good, value: 2 })),
        ],
      };
    }"""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(address(where, Place.NEWS))
        told = page.evaluate(calls)
    finally:
        context.close()
    assert told["services"] == ["trefoil"] and told["saved"] == {} and told["report"] > 600
    assert told["errors"] == ["TypeError", "TypeError", "RangeError", "SyntaxError", "ReferenceError", "RangeError"]


def test_each_call_and_header_is_shown_as_it_happens(browser: Browser, where: Map) -> None:
    """Also one from the console, with its error, and a header. In a plain context: a refused call is an HTTP error,
    of which the console tells."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(address(where, Place.NEWS))
        expect(page.get_by_text("Nothing yet.")).to_be_visible()
        page.evaluate("navigator.attribution.saveImpression({ histogramIndex: 1 })")
        page.evaluate("navigator.attribution.saveImpression({ histogramIndex: 1e6 }).catch(() => {})")
        calls = page.locator("#calls li")
        expect(calls).to_contain_text([re.compile(r"1000000 .*→ RangeError"), re.compile(r"Index: 1 .*→ {}")])
        expect(page.get_by_text("Nothing yet.")).to_be_hidden()
        click_ad(page, where, Place.BLOG)
        expect(calls).to_have_count(3)
        header = 'Save-Impression: histogram-index=2, conversion-sites=("shoes.example")'
        expect(calls.first).to_contain_text(f"blog.example{header}")
    finally:
        context.close()


def test_with_the_keyboard_the_slider_waits_for_the_button(page: Page, where: Map) -> None:
    page.goto(address(where, Place.MEASUREMENT))
    expect(page.locator("#ask output")).to_have_text("2,000 people")
    page.get_by_role("slider").focus()
    for shown in ("1,000 people", "500 people"):
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#ask output")).to_have_text(shown)
    expect(page.get_by_role("button", name="Ask the three helpers")).to_be_enabled()
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", "500 people")


class StrangersPage(BaseHTTPRequestHandler):
    """A page without any policy of its own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Stranger</title><link rel=icon href=data:,>")

    def log_message(self, *_said: object) -> None:
        """Nothing to say."""


@pytest.fixture
def stranger(page: Page) -> Iterator[Page]:
    """A page of an origin that nobody knows, in the same browser. It is served from this machine, as the others are:
    what comes from elsewhere, Chromium keeps away from this machine by itself, and would hide what we refuse.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), StrangersPage) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            opened = page.context.new_page()
            opened.goto(f"http://127.0.0.1:{server.server_port}/")
            yield opened
        finally:
            server.shutdown()
            thread.join()


FETCH = """async ([url, options]) => {
  try { const response = await fetch(url, options); return `${response.type} ${response.status}`; }
  catch (error) { return error.name; }
}"""


def test_another_origin_is_refused_by_the_agent(page: Page, stranger: Page, where: Map) -> None:
    agent = where[Place.AGENT]
    as_json = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": '{"histogramIndex": 1}'}
    as_text = {"method": "POST", "body": '{"histogramIndex": 1}', "mode": "no-cors"}
    for name in ("saveImpression", "measureConversion"):
        assert stranger.evaluate(FETCH, [f"{agent}/{name}", as_json]) == "TypeError"
        stranger.evaluate(FETCH, [f"{agent}/{name}", as_text])
    open_dashboard(page, where)
    expect(page.get_by_text("No impression is stored")).to_be_visible()
    expect(page.get_by_text("No report is on record")).to_be_visible()


POST_FORM = """(url) => {
  const form = document.createElement("form");
  form.method = "post";
  form.action = url;
  document.body.append(form);
  form.submit();
}"""


def test_another_origin_is_refused_by_the_dashboard(page: Page, stranger: Page, where: Map) -> None:
    """In the very browser that holds the cookie: reading across origins, framing, and sending a form."""
    click_ad(page, where, Place.NEWS)
    open_dashboard(page, where)
    home = page.url
    assert stranger.evaluate(FETCH, [home, {"credentials": "include"}]) == "TypeError"
    with stranger.expect_event("framenavigated", lambda frame: frame.url not in ("", "about:blank")) as framed:
        stranger.evaluate("(url) => { document.body.innerHTML = `<iframe src='${url}'></iframe>`; }", home)
    assert framed.value.url.startswith("chrome-error:") and "shoes.example" not in framed.value.content()
    stranger.evaluate(POST_FORM, f"{home}clear-history")
    stranger.wait_for_url(f"{home}clear-history")
    assert stranger.inner_text("body").startswith("Refused.")
    page.reload()
    assert page.locator("#impressions tbody tr").count() == 1


def test_the_dashboard_needs_its_cookie_and_its_own_name(browser: Browser, page: Page, where: Map) -> None:
    open_dashboard(page, where)
    home = page.url
    context = browser.new_context()
    try:
        assert context.request.get(home).status == 403
    finally:
        context.close()
    assert page.request.get(home).status == 200
    assert (
        page.request.get(home, headers={"Host": home.split("/")[2].replace("127.0.0.1", "evil.example")}).status == 403
    )
