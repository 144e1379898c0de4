"""The extension in real Chromium before the real host: what the person sees, what they cannot, and the whole story."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, Playwright, expect

from benchmarks.workloads.chromium import Installation
from device.agent import system_clock
from device.browser.profiles import databases, services_folder
from mpc_helpers.local.launcher import Trio, launched_helpers
from protocol.batch import BatchWriter
from protocol.header import Header
from protocol.report import SealedReport
from tests.support.browser import (
    axe_findings,
    axe_source,
    misfits,
    needs_chromium,
    own_findings,
    picture,
    stretched,
    too_wide,
)
from tests.support.extension import MEASURE, REAL_HOST, SAVE, Answer, Person, Sites, browser_with, call, wait_for
from tests.support.processes import TREFOIL

pytestmark = needs_chromium
SHOP = "shop.example"
CROWD = 20


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three running helpers, which serve the shop."""
    folder = tmp_path_factory.mktemp("helpers") / "trio"
    with launched_helpers(folder, now=system_clock(), sites={SHOP: [SHOP]}, options={"processes": 0}) as running:
        yield running.trio


@pytest.fixture(scope="module")
def real(
    playwright: Playwright, sites: Sites, trio: Trio, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Person]:
    """A browser before the real host, which trusts the helpers. Nobody has agreed to anything yet."""
    installation = Installation(tmp_path_factory.mktemp("real"), REAL_HOST)
    services_folder(installation.data).mkdir(parents=True)
    (services_folder(installation.data) / "trefoil.json").write_bytes(trio.helper_set_path.read_bytes())
    with browser_with(playwright, sites, installation) as opened:
        opened.wait_ready()
        yield opened
        assert installation.errors == ""


def test_nothing_happens_until_the_person_agrees(real: Person) -> None:
    """A new device is off. That sites cannot tell is tested below."""
    page = real.open("https://shop.example/")
    assert page.evaluate(SAVE) == "saved" and real.ask("overview", origin="https://shop.example")["ads"] == 0
    welcome = real.own_page("welcome.html")
    expect(welcome.locator("#services")).to_have_text("trefoil")
    welcome.get_by_role("button", name="Switch measurement on").click()
    expect(welcome.get_by_role("status")).to_contain_text("Measurement is on")
    assert page.evaluate(SAVE) == "saved" and real.ask("overview", origin="https://shop.example")["ads"] == 1
    welcome.close()
    page.close()


ALL_THAT_A_PAGE_SEES = """async ([sale, calls]) => {
  const outcomes = [];
  for (const [method, options] of calls) {
    outcomes.push(await navigator.attribution[method](options).then(
      (result) => Object.keys(result), (error) => [error.name, error.message]));
  }
  const { report } = await navigator.attribution.measureConversion(sale);
  return [outcomes, [...navigator.attribution.aggregationServices.keys()], [...report]];
}"""


def test_off_and_on_are_the_same_to_a_page(real: Person) -> None:
    """Outcomes and errors word for word; of the report every byte that is not random, with an ad there to be found."""
    sale = {"aggregationService": "trefoil", "histogramSize": 4, "epsilon": 0.001, "value": 2, "maxValue": 3}
    calls = [["saveImpression", {"histogramIndex": index}] for index in (1, -1, 2**31)]
    calls += [["measureConversion", {**sale, **wrong}] for wrong in ({"histogramSize": 0}, {"epsilon": -1})]
    page = real.open("https://same.example/")
    seen = []
    for on in (True, False):
        real.ask("switch", on=on)
        outcomes, services, report = page.evaluate(ALL_THAT_A_PAGE_SEES, [sale, calls])
        header = Header.decode(SealedReport.decode(bytes(report)).header)
        # The rest is a nonce, hashes and proofs of random values, of a size that the terms decide.
        terms = replace(header.terms, time=3600)
        seen.append((outcomes, services, len(report), terms, header.helper_set, header.key_ids, header.suite))
    assert seen[0] == seen[1]
    real.ask("switch", on=True)
    page.close()


def test_the_popup_shows_a_site_and_switches(real: Person) -> None:
    real.ask("switch", on=True)
    page = real.open("https://popup.example/")
    page.evaluate(SAVE)
    page.evaluate(MEASURE)
    popup = real.own_page("popup.html", tab_url="https://popup.example/", width=360)
    expect(popup.get_by_role("heading", level=1)).to_have_text("popup.example")
    expect(popup.locator("#facts")).to_contain_text("1 ad remembered")
    expect(popup.locator("#facts")).to_contain_text("1 sealed report")
    switch = popup.get_by_role("switch")
    expect(switch).to_have_attribute("aria-checked", "true")
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "false")
    assert real.ask("overview", origin="")["enabled"] is False
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "true")
    popup.close()
    nowhere = real.own_page("popup.html", tab_url="chrome://newtab/", width=360)
    expect(nowhere.get_by_role("heading", level=1)).to_have_text("This page is no site")
    nowhere.close()
    page.close()


def test_the_dashboard_without_a_port(real: Person) -> None:
    real.ask("switch", on=True)
    page = real.open("https://listed.example/")
    page.evaluate(SAVE)
    dashboard = real.own_page("dashboard.html")
    expect(dashboard.get_by_role("heading", level=1)).to_have_text("What measurement has cost you")
    expect(dashboard.locator("main")).to_contain_text("listed.example")
    dashboard.get_by_text("Switch measurement off…").click()
    dashboard.get_by_role("button", name="Switch off").click()
    expect(dashboard.locator(".notice").first).to_contain_text("measurement is off")
    assert real.ask("overview", origin="")["enabled"] is False
    real.ask("switch", on=True)
    dashboard.close()
    page.close()


def test_two_profiles_have_two_devices(real: Person, playwright: Playwright, sites: Sites, tmp_path: Path) -> None:
    """Of one person: what the one remembers the other does not, and neither renews the other's budgets."""
    real.ask("switch", on=True)
    page = real.open("https://profile.example/")
    page.evaluate(SAVE)
    shared = {"XDG_DATA_HOME": str(real.installation.folder)}
    (first,) = databases(real.installation.data)
    with browser_with(playwright, sites, Installation(tmp_path, REAL_HOST, environment=shared)) as second:
        second.wait_ready()
        assert len(databases(real.installation.data)) == 2 and databases(second.installation.data) == []
        overviews = [one.ask("overview", origin="https://profile.example") for one in (real, second)]
        # A document that outlives the extension is refused at once; the next host waits for the end of the first.
        outlived = second.open("https://outlived.example/")
        second.worker.evaluate("void setTimeout(() => chrome.runtime.reload())")
        wait_for(lambda: outlived.evaluate(SAVE) == "OperationError")
        wait_for(lambda: len(second.installation.processes) == 2)
        wait_for(lambda: (outlived.reload(), call(outlived, "saveImpression", {"histogramIndex": 1}))[1] is None)
    assert [(one["enabled"], one["ads"]) for one in overviews] == [(True, 1), (False, 0)]
    (other,) = {*databases(real.installation.data)} - {first}
    shutil.rmtree(other.parent)
    page.close()


SHOWS = {"popup": "#here:not([hidden])", "welcome": "#on", "dashboard": "#sites"}


@pytest.mark.parametrize("name", SHOWS)
def test_the_pages_fit_small_screens_and_are_accessible(real: Person, name: str) -> None:
    """Screenshots of each width, light and dark, are kept among the artefacts."""
    findings: list[str] = []
    axe = axe_source()
    for dark in (False, True):
        page = real.own_page(f"{name}.html", tab_url="https://popup.example/", dark=dark)
        page.wait_for_selector(SHOWS[name])
        for width in (320, 390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            findings += misfits(page) + own_findings(page)
            picture(page, f"browser-{name}-{width}{'-dark' if dark else ''}")
        # Colours are all that changes in the dark.
        findings += axe_findings(page, axe, ("color-contrast",) if dark else ()) if axe else []
        findings += [] if dark else too_wide(stretched(page))
        page.close()
    assert findings == []


def test_a_host_that_is_killed_in_a_call(real: Person) -> None:
    """Before the call, before the host has read it, and while many wait: all are refused; the next has a new host."""
    page = real.open("https://killer.example/")
    hosts = len(real.installation.processes)
    for moment in ("before", "unread", "waiting"):
        assert page.evaluate(SAVE) == "saved"
        host = real.installation.processes[-1]
        if moment == "unread":
            os.kill(host, signal.SIGSTOP)
        if moment != "before":
            page.evaluate(f"() => {{ window.calls = Promise.all(Array.from({{ length: 50 }}, () => {MEASURE})); }}")
            wait_for(lambda: real.worker.evaluate("device.pending.size") == 50)
        os.kill(host, signal.SIGKILL)
        wait_for(lambda: real.worker.evaluate("device.port === null"))
        if moment != "before":
            assert set(page.evaluate("calls")) == {"OperationError"}
    assert page.evaluate(SAVE) == "saved"
    assert len(real.installation.processes) == hosts + 3
    page.close()


def test_a_locked_database_and_a_full_disk_show_in_no_answer(real: Person) -> None:
    """Null reports of the same size, and saves that are not kept; nothing is said of why."""
    (database,) = databases(real.installation.data)
    real.ask("switch", on=True)
    page = real.open("https://locked.example/")
    size = page.evaluate(MEASURE)
    locking = sqlite3.connect(database, isolation_level=None)
    locking.execute("BEGIN IMMEDIATE")
    assert page.evaluate(MEASURE) == size
    locking.execute("ROLLBACK")
    locking.close()
    assert page.evaluate(SAVE) == "saved" and ads(real) == 1
    # As on a full disk: the host may not write beyond the first byte of any file.
    host = real.installation.processes[-1]
    most, hard = resource.prlimit(host, resource.RLIMIT_FSIZE)
    resource.prlimit(host, resource.RLIMIT_FSIZE, (1, hard))
    # The report leaves after its time, when the save before it was tried.
    assert page.evaluate(SAVE) == "saved" and page.evaluate(MEASURE) == size
    resource.prlimit(host, resource.RLIMIT_FSIZE, (most, hard))
    assert ads(real) == 1
    assert page.evaluate(SAVE) == "saved" and ads(real) == 2
    assert real.installation.processes[-1] == host
    real.ask("switch", on=False)
    page.close()


def ads(person: Person) -> int:
    count: int = person.ask("overview", origin="https://locked.example")["ads"]
    return count


def test_an_ad_and_a_purchase_are_counted_by_three_helpers(real: Person, trio: Trio, tmp_path: Path) -> None:
    """Two https sites, one browser with the real host, a crowd's reports, three running helpers, the shop's query."""
    pages = real.sites.pages
    pages["shop.example/buy"] = Answer("<!doctype html><button id='buy'>Buy</button>")
    pages["news.example/ad"] = Answer("<!doctype html><a id='ad' href='https://shop.example/buy'>An ad</a>")
    real.ask("switch", on=True)
    report = ad_and_purchase(real.context.new_page())
    assert real.ask("overview", origin=f"https://{SHOP}")["spent"] > 0
    helpers, batch_path, answer = trio.helper_set_path, tmp_path / "shop.batch", tmp_path / "answer.json"
    crowd = ["--count", CROWD, "--buckets", 16, "--epsilon", 0.5, "--unit", "count"]
    run_trefoil("reports", "--helpers", helpers, "--site", SHOP, *crowd, "--out", batch_path)
    # It joins the others.
    with BatchWriter(batch_path) as batch:
        batch.add(SealedReport.decode(report))
    key = trio.site_key_path(SHOP)
    run_trefoil("query", "run", "--reports", batch_path, "--helpers", helpers, "--site-key", key, "--json", answer)
    result = json.loads(answer.read_text())
    assert (result["reports_submitted"], result["reports_counted"]) == (CROWD + 1, CROWD + 1)
    assert len(result["answer"]) == 16


def run_trefoil(*arguments: object) -> None:
    """A process of its own: Playwright's event loop is running in this one."""
    subprocess.run([*TREFOIL, *map(str, arguments)], check=True, timeout=120)


def ad_and_purchase(page: Page) -> bytes:
    """Click the ad, then buy, as a person does; what the shop gets."""
    page.goto("https://news.example/ad")
    page.evaluate(
        """() => { document.getElementById("ad").onclick = () => {
          navigator.attribution.saveImpression({ histogramIndex: 3, conversionSites: ["shop.example"] }); }; }"""
    )
    page.click("#ad")
    page.wait_for_url("https://shop.example/buy")
    page.evaluate(
        """(sale) => { document.getElementById("buy").onclick = () => {
          window.sold = navigator.attribution.measureConversion(sale).then((made) => Array.from(made.report)); }; }""",
        {"aggregationService": "trefoil", "histogramSize": 16, "value": 5, "maxValue": 5, "epsilon": 0.5},
    )
    page.click("#buy")
    return bytes(page.evaluate("sold"))
