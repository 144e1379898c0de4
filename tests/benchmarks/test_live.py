"""The parts of the live demonstration, without a browser: who may call the device, what the crowd is, what is shown."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from benchmarks.demos.live.agent import THREADS
from benchmarks.demos.live.helper_views import helper_keys, sums_of, views_of
from benchmarks.demos.live.live import prepared
from benchmarks.demos.live.measurement import CROWD, OPTIONS, POPULARITY, SIZES, UNMOVED, Measurement, crowd
from benchmarks.demos.live.measurement_page import best_campaign, numbers_table, one_line
from benchmarks.demos.live.pages import MAX_CALL, SHOWN_CALLS
from benchmarks.demos.live.web import (
    BUCKETS,
    CAMPAIGNS,
    ROLES,
    SHOP_SITE,
    Map,
    Place,
    Tracker,
    exact_histogram,
    ports_taken,
)
from device.agent import Report, system_clock
from device.conversion import ConversionOptions
from device.dashboard.security import bind_loopback
from device.device import Device
from device.events import ImpressionOptions
from device.limits import DeviceLimits
from device.report import HelperSetSeal
from device.schedule import AtOnce, Delayed
from device.stores.memory_store import MemoryStore
from device.web.dictionaries import WrongType, read_options
from mpc_helpers.local.launcher import Trio, prepare
from protocol.batch import BatchReader
from protocol.collector.store import StoreReader
from protocol.errors import ErrorKind
from protocol.field import P, add, lift
from protocol.keys import load_identity
from protocol.report import SealedReport
from protocol.validity import histogram_in
from tests.support.raising import raises

CONVERSION = {"aggregationService": "trefoil", "histogramSize": BUCKETS, "epsilon": 0.2, "kappa": 1}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """Three helpers with keys. They do not run."""
    folder = tmp_path_factory.mktemp("helpers")
    return prepare(folder, now=system_clock(), sites={SHOP_SITE: [SHOP_SITE]})


@dataclass
class Visitor:
    """Sends what a browser would, from whatever origin it likes."""

    session: aiohttp.ClientSession
    where: Map
    device: Device[Report]

    async def get(self, place: Place, path: str = "/", **headers: str) -> tuple[int, str]:
        async with self.session.get(self.where[place] + path, headers=headers) as response:
            return response.status, await response.text()

    async def post(self, place: Place, path: str, data: object, origin: str | None = None) -> tuple[int, str]:
        headers = {"Origin": self.where[place] if origin is None else origin}
        async with self.session.post(self.where[place] + path, data=data, headers=headers) as response:
            return response.status, await response.text()

    async def call(self, name: str, options: object, origin: str, **more: str) -> aiohttp.ClientResponse:
        headers = {"Origin": origin, **more} if origin else more
        async with self.session.post(f"{self.where[Place.AGENT]}/{name}", json=options, headers=headers) as response:
            await response.read()
            return response

    async def measure(self) -> bytes:
        response = await self.call("measureConversion", CONVERSION, self.where[Place.SHOP])
        return base64.b64decode((await response.json())["report"])


@asynccontextmanager
async def visiting(folder: Path, trio: Trio) -> AsyncIterator[Visitor]:
    with prepared(folder, trio, 0, 1, AtOnce()) as (shown, sockets):
        async with shown.serving(sockets), aiohttp.ClientSession() as session:
            yield Visitor(session, shown.where, shown._device)


class TestOptions:
    def test_names_are_the_standards_and_unknown_members_are_ignored(self) -> None:
        passed = {
            "histogramIndex": 3.0,
            "conversionSites": ["a.example"],
            "lifetimeDays": 5,
            "priority": -1,
            "other": {},
        }
        expected = ImpressionOptions(3, conversion_sites=("a.example",), lifetime_days=5, priority=-1)
        assert read_options(ImpressionOptions, passed) == expected

    def test_a_conversion_with_everything(self) -> None:
        passed = {
            "aggregationService": "trefoil",
            "histogramSize": 8,
            "epsilon": 2,
            "value": 3,
            "maxValue": 5,
            "credit": [1, 0.5],
            "lookbackDays": 7,
            "matchValues": [1, 2],
            "impressionSites": ["a.example"],
            "impressionCallers": ["b.example"],
        }
        read = read_options(ConversionOptions, passed)
        assert read == ConversionOptions("trefoil", 8, 2.0, 3, 5, (1.0, 0.5), 7, (1, 2), ("a.example",), ("b.example",))

    @pytest.mark.parametrize(
        "passed",
        [
            None,
            [],
            {},
            {"histogramIndex": "1"},
            {"histogramIndex": True},
            {"histogramIndex": math.nan},
            {"histogramIndex": math.inf},
            {"histogramIndex": 1, "conversionSites": "a.example"},
            {"histogramIndex": 1, "conversionSites": [1]},
        ],
    )
    def test_a_wrong_type_is_a_type_error(self, passed: object) -> None:
        with pytest.raises(WrongType) as caught:
            read_options(ImpressionOptions, passed)
        assert caught.value.standard_name == "TypeError"


class TestAgent:
    async def test_the_origin_decides_which_site_it_is(self, tmp_path: Path, trio: Trio) -> None:
        """Nothing a page says about itself counts: the browser's Origin header does."""
        async with visiting(tmp_path, trio) as visitor:
            options = {"histogramIndex": 1, "site": "evil.example"}
            response = await visitor.call("saveImpression", options, visitor.where[Place.BLOG])
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == visitor.where[Place.BLOG]
            (saved,) = visitor.device.overview().impressions
            assert saved.impression.site == "blog.example"

    @pytest.mark.parametrize("name", ["saveImpression", "measureConversion"])
    async def test_other_origins_are_refused_and_change_nothing(self, tmp_path: Path, trio: Trio, name: str) -> None:
        async with visiting(tmp_path, trio) as visitor:
            own = visitor.where[Place.AGENT]
            for origin in ("http://evil.example", "null", "", own, visitor.where[Place.HOME]):
                response = await visitor.call(name, {"histogramIndex": 1, **CONVERSION}, origin)
                assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers, origin
            known = visitor.where[Place.NEWS]
            response = await visitor.call(name, {"histogramIndex": 1, **CONVERSION}, known, Host="evil.example")
            assert response.status == 403
            overview = visitor.device.overview()
            assert not overview.impressions and not overview.reports

    async def test_preflight_answers_known_origins_only(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            url = f"{visitor.where[Place.AGENT]}/saveImpression"
            for origin, status in ((visitor.where[Place.NEWS], 204), ("http://evil.example", 403)):
                async with visitor.session.options(url, headers={"Origin": origin}) as response:
                    assert response.status == status
                    assert ("Access-Control-Allow-Origin" in response.headers) == (status == 204)

    async def test_only_json_is_read(self, tmp_path: Path, trio: Trio) -> None:
        """A form of another page could send text without asking first."""
        async with visiting(tmp_path, trio) as visitor:
            news = visitor.where[Place.NEWS]
            assert (await visitor.post(Place.AGENT, "/saveImpression", '{"histogramIndex": 1}', news))[0] == 415

    async def test_a_header_does_the_same_as_a_call(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            blog = visitor.where[Place.BLOG]
            async with visitor.session.post(f"{blog}/clicked", data="3", headers={"Origin": blog}) as response:
                told = {"saveImpression": response.headers["Save-Impression"]}
            assert (await visitor.call("responseHeaders", told, blog)).status == 200
            assert opened(SealedReport.decode(await visitor.measure()), trio) == [0, 0, 0, 1]

    @pytest.mark.parametrize(
        "headers",
        [
            {"saveImpression": "histogram-index=x y"},
            {"saveImpression": "histogram-index=1000000"},
            {"saveImpression": 5},
            {"saveImpression": "rubbish("},
            {},
        ],
    )
    async def test_a_header_that_is_refused_is_ignored(
        self, tmp_path: Path, trio: Trio, headers: dict[str, object]
    ) -> None:
        async with visiting(tmp_path, trio) as visitor:
            response = await visitor.call("responseHeaders", headers, visitor.where[Place.SHOP])
            assert response.status == 200 and await response.json() == {}
            overview = visitor.device.overview()
            assert not overview.impressions and not overview.reports

    async def test_errors_have_the_standards_names(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            cases = {
                "TypeError": {},
                "RangeError": {"histogramIndex": 10**6},
                "SyntaxError": {"histogramIndex": 1, "conversionSites": ["localhost"]},
            }
            for name, options in cases.items():
                response = await visitor.call("saveImpression", options, visitor.where[Place.NEWS])
                assert response.status == 400 and (await response.json())["error"] == name

    def test_its_device_has_the_real_delay(self, tmp_path: Path, trio: Trio) -> None:
        """The other tests have one that does not depend on how busy the machine is."""
        with prepared(tmp_path, trio, 0, 1) as (shown, sockets):
            schedule = shown._device._schedule
            assert type(schedule) is Delayed and schedule.delay == DeviceLimits().delay_ms / 1000
            assert schedule._clock is time.monotonic and schedule._sleep is time.sleep
            for each in sockets.values():
                each.close()

    async def test_other_work_does_not_delay_a_call(self, tmp_path: Path, trio: Trio) -> None:
        """All threads that asyncio shares out are taken, for as long as the calls last."""
        free = threading.Event()
        async with visiting(tmp_path, trio) as visitor:
            others = [asyncio.create_task(asyncio.to_thread(free.wait, 60)) for _ in range(40)]
            try:
                answer = await asyncio.wait_for(
                    visitor.call("saveImpression", {"histogramIndex": 2}, visitor.where[Place.NEWS]), 20
                )
                report = await asyncio.wait_for(visitor.measure(), 20)
            finally:
                free.set()
            await asyncio.gather(*others)
            assert answer.status == 200 and opened(SealedReport.decode(report), trio) == [0, 0, 1, 0]

    async def test_more_calls_than_can_wait_are_refused(
        self, tmp_path: Path, trio: Trio, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("benchmarks.demos.live.agent.MOST_WAITING", -THREADS)
        async with visiting(tmp_path, trio) as visitor:
            response = await visitor.call("saveImpression", {"histogramIndex": 2}, visitor.where[Place.NEWS])
            assert response.status == 503

    async def test_full_and_empty_reports_have_one_size(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            empty = await visitor.measure()
            await visitor.call("saveImpression", {"histogramIndex": 2}, visitor.where[Place.NEWS])
            full = await visitor.measure()
            assert len(empty) == len(full) and empty != full
            assert opened(SealedReport.decode(empty), trio) == [0, 0, 0, 0]
            assert opened(SealedReport.decode(full), trio) == [0, 0, 1, 0]


def collected(folder: Path) -> list[SealedReport]:
    """What the shop's collector has on disk."""
    with StoreReader(folder / "collected") as store:
        return list(store.reports([shelf.number for shelf in store.shelves()]))


def opened(report: SealedReport, trio: Trio) -> list[int]:
    """What only all three helpers together could know, without the flag of the side query."""
    parts = {index: part for view in views_of(report, helper_keys(trio)) for index, part in view.components.items()}
    total = add(add(parts[0], parts[1]), parts[2])
    return lift(histogram_in(total, report.terms().shape))[:BUCKETS]


class TestCrowd:
    def test_its_reports_add_up_to_what_a_tracker_counts(self, trio: Trio) -> None:
        """The clear twin: open every report with all three keys, and compare the sums."""
        bought = list(crowd(60, trio.helper_set, now=system_clock(), seed=3))
        sums = [sum(column) for column in zip(*(opened(each.report, trio) for each in bought), strict=True)]
        assert sums == exact_histogram([each.credit for each in bought])
        assert len({each.report.digest for each in bought}) == 60

    def test_the_seed_decides_what_is_bought_and_nothing_else(self, trio: Trio) -> None:
        first, second = (list(crowd(40, trio.helper_set, now=system_clock(), seed=5)) for _ in range(2))
        assert [each.credit for each in first] == [each.credit for each in second]
        assert not {each.report.digest for each in first} & {each.report.digest for each in second}

    def test_its_reports_look_like_yours(self, trio: Trio) -> None:
        (theirs,) = crowd(1, trio.helper_set, now=system_clock(), seed=1)
        device = Device(MemoryStore(debug=False), HelperSetSeal(trio.helper_set), clock=system_clock)
        yours = device.measure_conversion(SHOP_SITE, OPTIONS)
        assert len(theirs.report.encode()) == len(yours.encode())
        assert theirs.report.terms().epsilon_micros == yours.terms().epsilon_micros and not theirs.report.terms().debug


class TestTracker:
    def test_the_last_click_gets_the_credit(self) -> None:
        tracker = Tracker()
        assert tracker.bought("shoes.example", 1) is None
        tracker.clicked(2, "blog.example", 2)
        tracker.clicked(0, "news.example", 3)
        assert tracker.bought("shoes.example", 4) == 0
        assert len(tracker.sightings) == 4

    def test_exact_counts_leave_out_who_clicked_nothing(self) -> None:
        assert exact_histogram([0, 0, None, 3]) == [2, 0, 0, 1]


def test_the_table_says_what_the_chart_shows() -> None:
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", numbers_table([4, 0, 1, 2], [7, -3, 0, 2], 5))
    assert cells[:6] == ["4", "7", "2 to 12", "0", "−3", "−8 to 2"]


class TestWebsites:
    async def test_the_shop_keeps_only_reports_made_for_it(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            assert (await visitor.post(Place.SHOP, "/reports", b"rubbish"))[0] == 400
            device = Device(MemoryStore(debug=False), HelperSetSeal(trio.helper_set), clock=system_clock)
            other = device.measure_conversion("hats.example", OPTIONS).encode()
            assert (await visitor.post(Place.SHOP, "/reports", other))[0] == 403
            wide = {**CONVERSION, "histogramSize": BUCKETS + 1}
            response = await visitor.call("measureConversion", wide, visitor.where[Place.SHOP])
            odd = base64.b64decode((await response.json())["report"])
            assert (await visitor.post(Place.SHOP, "/reports", odd))[0] == 400, "a batch is of one kind"
            mine = await visitor.measure()
            told = [await visitor.post(Place.SHOP, "/reports", mine) for _ in range(2)]
            assert [status for status, _ in told] == [201, 201] and SealedReport.decode(mine).digest.hex() in told[0][1]
            assert (await visitor.post(Place.SHOP, "/reports", await visitor.measure(), "http://evil.example"))[
                0
            ] == 403
            _, page = await visitor.get(Place.MEASUREMENT)
            assert "You have 1 report here that no query has counted yet" in page
            assert len(collected(tmp_path)) == 1

    async def test_a_publisher_knows_its_own_ads_only(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            statuses = [(await visitor.post(Place.NEWS, "/clicked", told))[0] for told in ("0", "2", "x", "")]
            assert statuses == [204, 400, 400, 400]

    async def test_pages_run_their_own_scripts_and_nothing_else(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            for place in (Place.HOME, Place.NEWS, Place.BLOG, Place.SHOP, Place.MEASUREMENT, Place.HELPERS):
                async with visitor.session.get(visitor.where[place] + "/") as response:
                    policy, page = response.headers["Content-Security-Policy"], await response.text()
                assert ("script-src 'self'" in policy) == (place.site is not None or place is Place.MEASUREMENT)
                assert "unsafe" not in policy and " style=" not in page
                assert all(body == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", page))
                assert (await visitor.get(place, Host="evil.example"))[0] == 403
                assert (await visitor.get(place, "/static/nothing"))[0] == 404


class TestMeasurement:
    async def test_a_crowd_joins_the_batch(self, tmp_path: Path, trio: Trio) -> None:
        """The helpers do not run, so that its question fails; the reports stay collected."""
        async with visiting(tmp_path, trio) as visitor:
            for position in ("7", "-1", "many", "", "9" * 5000):
                assert (await visitor.post(Place.MEASUREMENT, "/ask", {"position": position}))[0] == 400
            status, page = await visitor.post(Place.MEASUREMENT, "/ask", {"position": "1"})
            assert status == 200
            page = await self._settled(visitor, page)
            assert "about 50 people" in page and len(collected(tmp_path)) == SIZES[1] == 50
            _, views = await visitor.get(Place.HELPERS, "/?report=7&add=1")
            assert "Report 7 of 50" in views and views.count("<code>") == 1 + 3 * 2 * BUCKETS
            assert "Somebody else&#x27;s" in views and "Show yours" not in views
            assert "button is greyed out" in views and "disabled" in views
            await visitor.post(Place.SHOP, "/reports", await visitor.measure())
            assert "Show yours" in (await visitor.get(Place.HELPERS, "/?report=7"))[1]
            _, yours = await visitor.get(Place.HELPERS)
            assert "Report 51 of 51" in yours and "This one is yours" in yours and "disabled" not in yours

    async def test_helpers_that_do_not_answer_are_named_and_can_be_asked_again(
        self, tmp_path: Path, trio: Trio
    ) -> None:
        async with visiting(tmp_path, trio) as visitor:
            assert (await visitor.post(Place.MEASUREMENT, "/ask", {"position": "0"}))[0] == 409
            assert (await visitor.post(Place.MEASUREMENT, "/retry", {"batch": "1"}))[0] == 409
            _, page = await visitor.get(Place.MEASUREMENT)
            assert "does not reach “You alone”" in page and 'min="1"' in page
            await visitor.post(Place.SHOP, "/reports", await visitor.measure())
            assert 'min="0"' in (await visitor.get(Place.MEASUREMENT))[1]
            _, page = await visitor.post(Place.MEASUREMENT, "/ask", {"position": "0"})
            assert "The button is greyed until the answer is here" in page
            page = await self._settled(visitor, page)
            assert "cannot be reached" in page and "Ask again" in page and "about 1 person" in page
            assert "does not reach “You alone”" in page, "the report is in a batch of its own now"
            _, page = await visitor.post(Place.MEASUREMENT, "/retry", {"batch": "1"})
            assert "cannot be reached" in await self._settled(visitor, page)

    async def test_one_job_at_a_time(self, tmp_path: Path, trio: Trio) -> None:
        key = load_identity(trio.site_key_path(SHOP_SITE))
        measurement = Measurement(tmp_path, trio.helper_set, key, system_clock, 1)
        assert not measurement.busy
        async with measurement.running():
            measurement.ask(50)
            assert "50 people" in measurement.busy
            with raises(ErrorKind.BUSY):
                measurement.ask(50)
        assert not measurement.busy

    async def test_a_batch_is_what_the_collector_took_since_the_last_one(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            sizes = []
            for batch in ("1", "2"):
                for _ in range(int(batch)):
                    await visitor.post(Place.SHOP, "/reports", await visitor.measure())
                _, page = await visitor.post(Place.MEASUREMENT, "/ask", {"position": "0"})
                await self._settled(visitor, page)
                sizes.append(len(BatchReader(tmp_path / f"batch-{batch}")))
            assert sizes == [1, 2] and len(collected(tmp_path)) == 3

    @staticmethod
    async def _settled(visitor: Visitor, page: str) -> str:
        """The page once it has stopped reloading itself."""
        for _ in range(600):
            if 'http-equiv="refresh"' not in page:
                return page
            _, page = await visitor.get(Place.MEASUREMENT)
        raise AssertionError("the page never settles")


def noise_of_a_number() -> npt.NDArray[np.float64]:
    """Return the probabilities of the noise in one number, zero in the middle: a difference of two NB(3/2, e^(−1/10)).

    What is cut off, beyond 1,000, has a probability below 10⁻⁴².
    """
    ratio = math.exp(-0.1)
    one = [(1 - ratio) ** 1.5]
    for count in range(1, 1_000):
        one.append(one[-1] * (count + 0.5) / count * ratio)
    return np.convolve(one, one[::-1])


def chance_to_miss(people: int, rival: int, half_width: int) -> float:
    """Return the probability that the noisy counts of campaign 0 and of a rival are at most two half widths apart.

    Exactly, up to rounding: every person adds 1, −1 or 0 to their difference, independently, and noise is added twice.
    """
    mine, theirs = ((1 - UNMOVED) * POPULARITY[campaign] for campaign in (0, rival))
    noise = np.convolve(noise_of_a_number(), noise_of_a_number())
    reach = len(noise) // 2
    size = 1 << (2 * (people + reach)).bit_length()
    steps, added = np.zeros(size), np.zeros(size)
    steps[[0, 1, -1]] = 1 - mine - theirs, mine, theirs
    added[np.arange(-reach, reach + 1)] = noise
    apart = np.fft.irfft(np.fft.rfft(steps) ** people * np.fft.rfft(added), size)
    return float(apart[np.arange(-people - reach, 2 * half_width + 1)].sum())


class TestVerdict:
    @pytest.mark.parametrize(
        ("answer", "reports", "said"),
        [
            ([120, 30, 5, -8], 200, "“a” sold most: 84 to 156 of 200 purchases."),
            ([120, 60, 5, -8], 200, "“a” (120) and “b” (60) are too close to tell apart at ± 36."),
            ([36, 30, -90, 0], 200, "Noise: of 200 purchases no campaign stands out from ± 36."),
            # The same answer, from fewer people: noise, or the most that there can be.
            ([120, 30, 5, -8], 36, "Noise. 36 purchases cannot stand out, not even together, from ± 36"),
            ([120, 30, 5, -8], 1, "Noise. 1 purchase cannot stand out from ± 36"),
            ([120, 50, 5, -8], 100, "“a” sold most: 84 to 86 of 100 purchases."),
            ([150, 150, 5, -8], 100, "Noise: 100 purchases cannot add up to this"),
        ],
    )
    def test_an_answer_in_one_sentence(self, answer: list[int], reports: int, said: str) -> None:
        assert one_line("abcd", answer, 36, reports).startswith(said)

    def test_at_the_defaults_it_names_the_best_campaign(self) -> None:
        """In more than 99.9 % of draws, by an exact sum over the crowd's choices and the noise.

        Intervals that do not overlap are named, whatever the size of the batch; the chances of the rivals add up.
        """
        half_width = 36
        noise, middle = noise_of_a_number(), len(noise_of_a_number()) // 2
        assert noise[middle - half_width : middle + half_width + 1].sum() >= 0.95
        assert noise[middle - half_width + 1 : middle + half_width].sum() < 0.95, "a half width as of an answer"
        assert sum(chance_to_miss(CROWD, rival, half_width) for rival in (1, 2, 3)) < 0.001
        assert chance_to_miss(400, 2, half_width) > 0.5, "the default that was"

    @pytest.mark.statistical
    def test_a_thousand_draws(self) -> None:
        """All of the rule: with a chance of at most 0.001 a draw, more than 20 misses of 1,000 are below 10⁻¹⁸."""
        draw = np.random.default_rng()
        credited = [(1 - UNMOVED) * share for share in POPULARITY]
        counts = draw.multinomial(CROWD, [*credited, UNMOVED], size=1_000)[:, :BUCKETS]
        noise = noise_of_a_number()
        values = np.arange(len(noise)) - len(noise) // 2
        answers = counts + draw.choice(values, size=counts.shape, p=noise / noise.sum())
        named = [best_campaign([int(value) for value in answer], 36, CROWD) for answer in answers]
        assert named.count(0) >= 980


class TestApiCalls:
    async def test_calls_of_one_page_are_listed_on_the_next(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            for number in range(SHOWN_CALLS + 2):
                told = json.dumps({"call": f"save({number}, <b>)", "outcome": "→ {}"})
                assert (await visitor.post(Place.NEWS, "/calls", told))[0] == 204
            _, page = await visitor.get(Place.SHOP)
            listed = re.findall(r"<li><b>news.example</b><code>save\((\d), &lt;b&gt;\)</code>→ {}</li>", page)
            assert listed == [str(number) for number in range(SHOWN_CALLS + 1, 1, -1)]

    async def test_what_is_no_call_is_refused(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            long = json.dumps({"call": "x" * MAX_CALL, "outcome": "y"})
            for told in ("", "[]", "5", '{"call": "x"}', '{"call": 1, "outcome": "x"}', long):
                assert (await visitor.post(Place.SHOP, "/calls", told))[0] == 400, told
            told = json.dumps({"call": "x", "outcome": "y"})
            assert (await visitor.post(Place.SHOP, "/calls", told, "http://evil.example"))[0] == 403
            assert "<li><b>" not in (await visitor.get(Place.SHOP))[1]


class TestDeviceSays:
    async def test_what_it_remembered_is_said_in_a_frame_of_its_own(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            _, empty = await visitor.get(Place.AGENT, "/says")
            assert "I have remembered no ad yet." in empty
            await visitor.call("saveImpression", {"histogramIndex": 1}, visitor.where[Place.NEWS])
            async with visitor.session.get(visitor.where[Place.AGENT] + "/says") as response:
                policy, said = response.headers["Content-Security-Policy"], await response.text()
            assert f"I have remembered this ad: “{CAMPAIGNS[1]}”" in said
            framing = policy.split("frame-ancestors ")[1].split(";")[0]
            assert set(framing.split()) == set(visitor.where.sites())
            assert (await visitor.get(Place.AGENT, "/says", Origin="http://evil.example"))[0] == 403


class TestHome:
    async def test_hands_out_a_fresh_link_to_the_dashboard_each_time(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            found = []
            for _ in range(2):
                url = visitor.where[Place.HOME] + "/dashboard"
                async with visitor.session.get(url, allow_redirects=False) as response:
                    assert response.status == 303
                    found.append(response.headers["Location"])
            assert found[0] != found[1] and all(link.startswith(visitor.where[Place.DASHBOARD]) for link in found)

    async def test_names_every_address(self, tmp_path: Path, trio: Trio) -> None:
        async with visiting(tmp_path, trio) as visitor:
            _, page = await visitor.get(Place.HOME)
            assert all(visitor.where[place] in page for place in Place)


class TestPlaces:
    def test_every_place_has_an_origin_of_its_own_and_three_are_sites(self) -> None:
        with ports_taken(0) as (where, _):
            assert len(set(where.values())) == len(Place)
            assert sorted(where.sites().values()) == ["blog.example", "news.example", "shoes.example"]

    def test_a_taken_port_is_an_error_with_a_hint(self) -> None:
        with bind_loopback(0) as taken:
            taken.listen()
            port = taken.getsockname()[1]
            command = [sys.executable, "trefoil.py", "live", "--port", str(port)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1 and "hint:  Choose another --port." in ended.stderr


async def test_your_own_report_can_be_added_up(tmp_path: Path, trio: Trio) -> None:
    """All three parts are the report; any two are uniform: a small number among them has a chance below 10⁻⁶."""
    async with visiting(tmp_path, trio) as visitor:
        await visitor.call("saveImpression", {"histogramIndex": 2}, visitor.where[Place.NEWS])
        await visitor.post(Place.SHOP, "/reports", await visitor.measure())
        _, before = await visitor.get(Place.HELPERS)
        assert "Add up the three parts" in before and "All three parts" not in before
        _, page = await visitor.get(Place.HELPERS, "/?report=1&add=1")
        assert f"Your purchase counts for “{CAMPAIGNS[2]}”." in page
        await visitor.call("saveImpression", {"histogramIndex": 3}, visitor.where[Place.BLOG])
        (report,) = collected(tmp_path)
    pairs, numbers = sums_of(report, views_of(report, helper_keys(trio)))
    assert numbers == [0, 0, 1, 0] and len(pairs) == 3
    assert all(P >> 24 < int(number) < P - (P >> 24) for pair in pairs.values() for number in pair)


def test_the_moving_picture_moves_and_is_small() -> None:
    """As `python -m tests.support.moving_picture` has recorded it."""
    picture = ROLES.parents[2] / "benchmarks" / "results" / "screenshots" / "live.webp"
    assert picture.stat().st_size <= 600_000
    with Image.open(picture) as opened_picture:
        assert getattr(opened_picture, "n_frames", 1) >= 20


def test_each_helper_sees_uniform_numbers_and_never_the_report(trio: Trio) -> None:
    """All numbers of each helper, those of the proof too, from a crowd's reports: their mean is that of uniform ones.

    By Hoeffding the mean of n numbers in [0, 1) is off its expectation by more than 2.81/√n with a probability of at
    most 2·e^(−2·2.81²) < 2.8·10⁻⁷; three helpers fail by chance with less than 10⁻⁶.
    """
    bought = list(crowd(300, trio.helper_set, now=system_clock(), seed=2))
    keys = helper_keys(trio)
    for party in range(3):
        numbers = [
            int(value) / P
            for each in bought
            for part in views_of(each.report, keys)[party].components.values()
            for value in part
        ]
        assert len(numbers) == 300 * 2 * bought[0].report.terms().shape.expanded
        assert abs(sum(numbers) / len(numbers) - 0.5) < 2.81 / math.sqrt(len(numbers))
