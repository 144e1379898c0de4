"""`trefoil device` and `trefoil conformance` as a person runs them: results, JSON, hints, and no traceback."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner, Result

from device import agent
from device.budget import FilterKind
from device.dashboard.formatting import describe_clearing
from device.dashboard.pages import Action, perform
from device.errors import DatabaseUnavailable
from device.events import ImpressionOptions
from device.limits import DeviceLimits, OwnSite
from device.schedule import AtOnce, Caller, Delayed
from device.stores.sqlite_store import SqliteStore
from protocol.batch import BatchReader, BatchWriter
from protocol.cli import app as cli
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet, HpkeKeyConfig
from protocol.querier.regression.features import FeatureEncoding, Field, FieldKind
from protocol.report import SealedReport
from protocol.units import DAY
from tests.support.protocol_samples import HELPER_SET, helper_entry, signed
from tests.support.raising import raises

OURS = Path(__file__).parents[1] / "data" / "scenarios"
T = TypeVar("T")
PUBLISHER, SHOP, STORE = "news.example", "shop.example", "store.example"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments: object) -> TrefoilError:
    """Return the error that `trefoil.main` prints as two lines."""
    result = run(*arguments)
    assert isinstance(result.exception, TrefoilError), result.output
    return result.exception


IN_REAL_TIME = Delayed.within


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge no call for taking long on a busy machine."""
    monkeypatch.setattr("device.agent.Delayed.within", lambda _: AtOnce())


@pytest.fixture
def helpers(tmp_path: Path) -> Path:
    """A signed helper set whose keys are active now."""
    now = int(time.time())
    entries = [
        replace(helper_entry(party), hpke_keys=(HpkeKeyConfig(helper_entry(party).hpke_keys[0].key, 0, now + 10**6),))
        for party in range(3)
    ]
    helper_set = signed(HelperSet(HELPER_SET.number, (entries[0], entries[1], entries[2])))
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps(helper_set.to_json()))
    return path


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "ann.db"


def test_an_impression_a_conversion_and_what_they_cost(db: Path, helpers: Path, tmp_path: Path) -> None:
    output = succeed("device", "impression", "www.news.example", "--db", db, "--bucket", "2")
    assert "is a new device" in output
    assert "news.example for bucket 2" in output
    batch, result = tmp_path / "shop.batch", tmp_path / "result.json"
    where = ("--db", db, "--helpers", helpers, "--batch", batch)
    convert = ("device", "convert", "shop.example", *where, "--buckets", "4", "--epsilon", "0.25")
    succeed(*convert, "--json", result)
    succeed(*convert)
    written = json.loads(result.read_text())
    reports = list(BatchReader(batch))
    assert written["report"] == reports[0].digest.hex()
    assert written["bytes"] == len(reports[0].encode())
    assert "histogram" not in written
    assert len(reports) == 2
    output = succeed("device", "budget", "--db", db, "--json", result)
    assert "shop.example" in output
    budget = json.loads(result.read_text())
    spent = {entry["kind"]: entry["spent_micros"] for entry in budget["filters"]}
    assert spent == {"site": 500_000, "global": 500_000, "impression_site": 500_000}


def test_limits_chosen_at_creation_are_kept_with_the_database(tmp_path: Path, helpers: Path) -> None:
    db, result = tmp_path / "chosen.db", tmp_path / "result.json"
    chosen = ["--budget", 0.3, "--global-budget", 2, "--epoch-days", 1, "--own-site", "hidden", "--sites-per-action", 2]
    chosen += ["--delay-ms", 300, "--processor-ms", 7]
    succeed("device", "create", "--db", db, *chosen, "--debug")
    kept = {
        "site_budget": 300_000,
        "global_budget": 2_000_000,
        "impression_site_quota": 1_000_000,
        "advertiser_quota": 250_000,
        "side_query_quota": 250_000,
        "epoch_days": 1,
        "own_site": "hidden",
        "sites_per_action": 2,
        "delay_ms": 300,
        "processor_ms": 7,
    }
    shown = succeed("device", "budget", "--db", db, "--json", result)
    for each in (
        "ε = 0.3 for a site and 2 for all",
        "own ads hidden",
        "2 sites on one action",
        "300 ms after",
        "for 7 ms",
    ):
        assert each in " ".join(shown.split())
    assert json.loads(result.read_text())["settings"] == kept
    # Own ads are hidden, and ε = 0.3 is all that a site has.
    succeed("device", "impression", "shop.example", "--db", db, "--bucket", "1")
    common: list[str | Path] = ["--db", db, "--helpers", helpers, "--buckets", "2", "--lookback-days", "1"]
    common += ["--epsilon", "0.3", "--report", tmp_path / "one.report", "--json", result]
    histograms = []
    for _ in range(3):
        succeed("device", "convert", "shop.example", *common)
        histograms.append(json.loads(result.read_text())["histogram"])
        succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    assert histograms == [[0, 0], [1, 0], [0, 0]]


def test_a_device_keeps_its_own_limits_whatever_the_defaults_become(tmp_path: Path) -> None:
    db = tmp_path / "ann.db"
    agent.create(db, limits=DeviceLimits(site_budget=5, own_site=OwnSite.HIDDEN, sites_per_action=3, processor_ms=0))
    kept = agent.stored_limits(db)
    assert (kept.site_budget, kept.own_site, kept.sites_per_action) == (5, OwnSite.HIDDEN, 3)
    assert kept.processor_ms == 0
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE setting SET value = -1 WHERE name = 'site_budget'")
    with pytest.raises(TrefoilError):
        agent.stored_limits(db)
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("INSERT INTO setting VALUES ('budget_of_mallory', 9)")
    with raises(ErrorKind.FILE_DAMAGED):
        agent.stored_limits(db)


@pytest.mark.parametrize("option", [("--own-site", "free"), ("--budget", 0), ("--epoch-days", 0)])
def test_limits_that_no_device_can_have_are_refused(tmp_path: Path, option: tuple[str, object]) -> None:
    fail("device", "create", "--db", tmp_path / "ann.db", *option)
    assert not (tmp_path / "ann.db").exists()


def test_the_budget_names_weeks_by_their_dates(db: Path, helpers: Path, tmp_path: Path) -> None:
    """An epoch's number says nothing to a person: it counts from a start that the device drew for itself."""
    result = tmp_path / "result.json"
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    before = datetime.now(UTC)
    common: list[str | Path] = ["--db", db, "--helpers", helpers, "--buckets", "1"]
    succeed("device", "convert", "shop.example", *common, "--report", tmp_path / "one.report")
    output = succeed("device", "budget", "--db", db, "--json", result)
    paid = next(entry for entry in json.loads(result.read_text())["filters"] if entry["spent_micros"])
    first, last = datetime.fromisoformat(paid["from"]), datetime.fromisoformat(paid["to"])
    assert first <= before <= last and last - first == timedelta(weeks=1, seconds=-1)
    assert "week (UTC)" in output and f"{first:%Y-%m-%d} to {last:%Y-%m-%d}" in output
    assert "epoch" not in output


def test_a_single_report_file(db: Path, helpers: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.report"
    succeed("device", "convert", "shop.example", "--db", db, "--helpers", helpers, "--buckets", "3", "--report", path)
    report = SealedReport.decode(path.read_bytes())
    assert (report.terms().site, report.terms().buckets, report.terms().debug) == ("shop.example", 3, False)


def test_a_debug_device_shows_the_histogram(db: Path, helpers: Path, tmp_path: Path) -> None:
    succeed("device", "create", "--db", db, "--debug")
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1", "--conversion-site", "shop.example")
    result = tmp_path / "result.json"
    output = succeed(
        *("device", "convert", "shop.example", "--db", db, "--helpers", helpers, "--buckets", "2", "--value", "3"),
        *("--max-value", "5", "--credit", "1", "--credit", "1", "--report", tmp_path / "r", "--json", result),
    )
    assert "the histogram is [0, 3]" in output
    assert json.loads(result.read_text())["histogram"] == [0, 3]
    assert SealedReport.decode((tmp_path / "r").read_bytes()).terms().debug


def test_a_report_that_no_week_could_pay_for_says_so(db: Path, helpers: Path, tmp_path: Path) -> None:
    """Only the person sees the warning, in text and JSON; the report itself looks like any other."""
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")

    def convert(epsilon: str, site: str = "shop.example") -> tuple[str, Any]:
        result = tmp_path / "result.json"
        where = ("--db", db, "--helpers", helpers, "--buckets", "2", "--report", tmp_path / "r", "--json", result)
        output = " ".join(succeed("device", "convert", site, *where, "--epsilon", epsilon).split())
        return output, json.loads(result.read_text())["shortfall"]

    output, warning = convert("2")
    assert warning in output and "ε = 2" in warning and "shop.example" in warning
    output, warning = convert("0.7")
    assert warning is None and "null" not in output
    # Weeks without an impression are still whole; the one that matters has 0.3.
    assert "asks for ε = 0.4" in convert("0.4")[1] and "none of these weeks" in convert("0.4")[1]
    assert convert("0.3")[1] is None
    for site in ("a.example", "b.example", "c.example"):
        assert convert("1", site)[1] is None
    # The publisher's quota of 4 is spent; this site's own budget is whole.
    assert "none of these weeks" in convert("1", "d.example")[1]


class TooLate(AtOnce):
    """A schedule that has no time for any measurement."""

    def measure(self, caller: Caller, came: float, work: Callable[[], T], fallback: Callable[[], T]) -> T:
        return fallback()


def test_a_report_for_which_there_was_no_time_is_said_to_be_null(
    db: Path, helpers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person's terminal says so; the next one, in time, says nothing."""
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")
    common = ("--db", db, "--helpers", helpers, "--buckets", "4", "--batch", tmp_path / "shop.batch")
    with monkeypatch.context() as starved:
        starved.setattr("device.agent.Delayed.within", lambda _: TooLate())
        assert "had no time" in " ".join(succeed("device", "convert", "shop.example", *common).split())
    assert "null" not in succeed("device", "convert", "shop.example", *common)


def test_a_batch_that_another_process_writes_costs_nothing(db: Path, helpers: Path, tmp_path: Path) -> None:
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")
    batch = tmp_path / "shop.batch"
    common = ("--db", db, "--helpers", helpers, "--buckets", "4", "--batch", batch)
    convert = ("device", "convert", "shop.example", *common)
    with BatchWriter(batch):
        assert fail(*convert).kind is ErrorKind.BUSY
    with agent.opened(db) as device:
        assert device.budget() == []
    succeed(*convert)
    assert len(list(BatchReader(batch))) == 1


@pytest.mark.parametrize(
    ("function", "histogram"),
    [
        (["last"], [0, 0, 6]),
        (["first"], [6, 0, 0]),
        (["equal"], [2, 2, 2]),
        (["last-n", "--credit", "2", "--credit", "1"], [0, 2, 4]),
        (["slots"], [2, 2, 2]),
        (["middle:middle_touch"], [0, 6, 0]),
    ],
)
def test_every_attribution_function_can_be_named(
    function: list[str], histogram: list[int], db: Path, helpers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours by name, and one's own from a file in the current folder."""
    (tmp_path / "middle.py").write_text(
        "def middle_touch(relevant, award):\n"
        "    touches = sorted((one for week in relevant.values() for one in week), key=lambda one: one.time)\n"
        "    middle = touches[len(touches) // 2].histogram_index\n"
        "    return [award.value if bucket == middle else 0 for bucket in range(award.buckets)]\n"
    )
    monkeypatch.chdir(tmp_path)
    now = int(time.time())
    agent.create(db, debug=True)
    for bucket in range(3):
        with agent.opened(db, clock=lambda moment=now - 60 + bucket: moment) as device:  # type: ignore[misc]  # a clock
            device.save_impression("news.example", ImpressionOptions(bucket))
    result = tmp_path / "result.json"
    where = ("--db", db, "--helpers", helpers, "--buckets", "3", "--report", tmp_path / "r", "--json", result)
    values = ("--value", "6", "--max-value", "6", "--kappa", "2", "--epsilon", "0.5")
    output = succeed("device", "convert", "shop.example", *where, *values, "--function", *function)
    assert json.loads(result.read_text())["histogram"] == [*histogram, 0]
    assert "noise is made for 12" in output
    assert SealedReport.decode((tmp_path / "r").read_bytes()).terms().kappa == 2


@pytest.mark.parametrize(
    ("wrong", "datum"),
    [
        (("--function", "third"), "third"),
        (("--function", "nowhere:at_all"), "nowhere:at_all"),
        (("--function", "json:nothing"), "json:nothing"),
        (("--function", "math:pi"), "math:pi"),
        (("--function", "last", "--impression-site", "news.example"), "--impression-site"),
        (("--kappa", "1", "--flag", "last-touch"), "Theorem 16"),
        (("--function", "first", "--kappa", "1", "--flag", "last-touch"), "last-touch"),
        (("--kappa", "1", "--flag", "loud"), "loud"),
        (("--kappa", "-1"), "kappa"),
        (("--value", "3"), "--value 3"),
    ],
)
def test_wrong_functions_and_flags(wrong: tuple[str, ...], datum: str, db: Path, helpers: Path, tmp_path: Path) -> None:
    """They are refused, and nothing is paid or written."""
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")
    where = ("--db", db, "--helpers", helpers, "--buckets", "2", "--batch", tmp_path / "b")
    assert datum in str(fail("device", "convert", "shop.example", *where, *wrong))
    assert not (tmp_path / "b").exists()
    with agent.opened(db) as device:
        assert device.budget() == [] and len(device.reports()) == 0


def test_a_batch_holds_reports_of_one_kappa(db: Path, helpers: Path, tmp_path: Path) -> None:
    convert = ("device", "convert", "shop.example", "--db", db, "--helpers", helpers, "--buckets", "2")
    succeed(*convert, "--kappa", "3", "--batch", tmp_path / "b")
    succeed(*convert, "--kappa", "3", "--batch", tmp_path / "b")
    succeed(*convert, "--kappa", "3", "--function", "last", "--flag", "last-touch", "--batch", tmp_path / "c")
    assert fail(*convert, "--batch", tmp_path / "b").kind is ErrorKind.INCONSISTENT
    # Nor of two largest values, which helpers check; and what does not fit is not paid for.
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")
    with agent.opened(db) as device:
        before = device.budget()
    more = ("--kappa", "3", "--value", "2", "--max-value", "2", "--epsilon", "0.01")
    assert "at most 1 each" in str(fail(*convert, *more, "--batch", tmp_path / "b"))
    with agent.opened(db) as device:
        assert device.budget() == before
    assert [report.terms().kappa for name in "bc" for report in BatchReader(tmp_path / name)] == [3, 3, 3]


def test_switching_and_clearing(db: Path, helpers: Path, tmp_path: Path) -> None:
    succeed("device", "create", "--db", db, "--debug")

    def histogram() -> list[int]:
        result = tmp_path / "result.json"
        where = ("--db", db, "--helpers", helpers, "--report", tmp_path / "r", "--json", result)
        succeed("device", "convert", "shop.example", *where, "--buckets", "1", "--epsilon", "0.1")
        numbers: list[int] = json.loads(result.read_text())["histogram"]
        return numbers

    succeed("device", "off", "--db", db)
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    succeed("device", "on", "--db", db)
    assert histogram() == [0]
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    assert histogram() == [1]
    succeed("device", "clear", "--db", db, "--site", "news.example", "--stored-data")
    assert histogram() == [0]
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    assert histogram() == [1]
    told = succeed("device", "clear", "--db", db, "--site", "www.shop.example")
    assert describe_clearing("shop.example") in " ".join(told.split())
    assert histogram() == [0]
    assert "spent" in succeed("device", "budget", "--db", db, "--site", "www.shop.example")
    assert "no cost of hats.example is on record" in succeed("device", "budget", "--db", db, "--site", "hats.example")
    assert "closed" not in succeed("device", "reports", "--db", db)
    succeed("device", "clear", "--db", db, "--forget-visits")
    for command, nothing in (("budget", "no cost is on record"), ("reports", "no report is on record")):
        output = " ".join(succeed("device", command, "--db", db).split())
        assert nothing in output and "that week and earlier ones are closed" in output


def test_clearing_a_site_means_the_same_on_the_command_line_and_on_the_page(db: Path) -> None:
    cleared = []
    for path, clear in (
        (db, lambda path: succeed("device", "clear", "--db", path, "--site", "shop.example")),
        (db.with_name("bob.db"), _clear_on_the_page),
    ):
        agent.create(path, clock=lambda: 1_800_000_000)
        with agent.opened(path) as device:
            device.save_impression("shop.example", ImpressionOptions(0))
            device.save_impression("news.example", ImpressionOptions(1, conversion_sites=["shop.example"]))
            device.save_impression("news.example", ImpressionOptions(2))
        clear(path)
        with agent.opened(path) as device:
            overview = device.overview()
        kept = [saved.impression.histogram_index for saved in overview.impressions]
        cleared.append((kept, {(state.kind, state.site, state.remaining) for state in overview.filters}))
    assert cleared[0] == cleared[1] == ([2], {(FilterKind.SITE, "shop.example", 0)})


def _clear_on_the_page(path: Path) -> None:
    with agent.opened(path) as device:
        perform(device, Action.CLEAR_SITE, {"site": "shop.example"})


@pytest.mark.parametrize(
    ("arguments", "datum"),
    [
        (["convert", "shop.example", "--helpers", "HELPERS", "--buckets", "2"], ErrorKind.MISSING_OPTION),
        (
            ["convert", "shop.example", "--helpers", "HELPERS", "--buckets", "2", "--report", "R", "--batch", "R"],
            ErrorKind.CONFLICTING_OPTIONS,
        ),
        (["convert", "shop.example", "--helpers", "HELPERS", "--buckets", "0", "--report", "R"], "histogram_size"),
        (["convert", "localhost", "--helpers", "HELPERS", "--buckets", "1", "--report", "R"], "localhost"),
        (["convert", "shop.example", "--helpers", "nowhere.json", "--buckets", "1", "--report", "R"], "nowhere.json"),
        (["impression", "news.example", "--bucket", "5000"], "histogram_index"),
        (["clear"], ErrorKind.MISSING_OPTION),
        (["clear", "--stored-data"], ErrorKind.CONFLICTING_OPTIONS),
        (["clear", "--site", "a", "--forget-visits"], "'a'"),
    ],
)
def test_mistakes_leave_nothing_behind(
    arguments: list[str], datum: str | ErrorKind, db: Path, helpers: Path, tmp_path: Path
) -> None:
    succeed("device", "create", "--db", db)
    places = {"HELPERS": str(helpers), "R": str(tmp_path / "r")}
    command = [places.get(argument, argument) for argument in arguments]
    error = fail("device", *command, "--db", db)
    assert datum is error.kind if isinstance(datum, ErrorKind) else datum in str(error)
    assert not (tmp_path / "r").exists()
    with agent.opened(db) as device:
        assert device.budget() == []
        assert device.overview().impressions == []


def test_a_missing_or_damaged_database(db: Path) -> None:
    assert "create" in fail("device", "budget", "--db", db).hint
    db.write_bytes(b"x" * 5000)
    assert "damaged" in str(fail("device", "impression", "news.example", "--db", db, "--bucket", "0"))
    assert db.read_bytes() == b"x" * 5000


def test_a_batch_of_another_shape_is_refused_before_anything_is_paid(db: Path, helpers: Path, tmp_path: Path) -> None:
    batch = tmp_path / "shop.batch"
    convert = ("device", "convert", "shop.example", "--db", db, "--helpers", helpers, "--batch", batch)
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    succeed(*convert, "--buckets", "2", "--epsilon", "0.1")
    size = batch.stat().st_size
    two = ["--buckets", "2"]
    for change in (["--buckets", "3"], [*two, "--unit", "cents"], [*two, "--intermediary", "ads.example"]):
        assert fail(*convert, *change).kind is ErrorKind.INCONSISTENT
    # The options that would fit, where options are all that differs.
    assert fail(*convert, "--buckets", "3").hint.endswith("--buckets 2 --unit count --max-value 1 --kappa 0")
    assert "give" not in fail(*convert, *two, "--intermediary", "ads.example").hint
    assert batch.stat().st_size == size
    with agent.opened(db) as device:
        assert max(state.spent for state in device.budget()) == 100_000


def test_reports_of_the_command_line_leave_after_the_delay(
    db: Path, helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its impressions do not wait for one."""
    measured: list[tuple[float, Caller]] = []
    agent.create(db)
    original = Delayed.measure

    def measure(self: Delayed, caller: Caller, came: float, work: Any, fallback: Any) -> Any:
        measured.append((self.delay, caller))
        return original(self, caller, came, work, fallback)

    monkeypatch.setattr(Delayed, "within", IN_REAL_TIME)
    monkeypatch.setattr(Delayed, "measure", measure)
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    written = ("--buckets", "1", "--report", db.with_name("r"))
    succeed("device", "convert", "shop.example", "--db", db, "--helpers", helpers, *written)
    assert measured == [(DeviceLimits().delay_ms / 1000, Caller("shop.example", "shop.example"))]


def test_a_save_that_was_not_kept_is_not_called_saved(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, the command says so; on a database that cannot be written, it fails. To a site neither would show."""
    impression = ("device", "impression", "news.example", "--db", db, "--bucket", "0")
    conversion = ("device", "conversion", "shop.example", "--db", db, "--publisher", "news.example")
    assert "saved an" in succeed(*impression)
    succeed("device", "off", "--db", db)
    for save in (impression, conversion):
        output = succeed(*save)
        assert "nothing was saved" in output and "saved a" not in output
    succeed("device", "on", "--db", db)

    def full_disk(*_: object) -> None:
        raise DatabaseUnavailable("full")

    monkeypatch.setattr(SqliteStore, "save", full_disk)
    assert fail(*impression).kind is ErrorKind.UNAVAILABLE


@pytest.fixture
def features(tmp_path: Path) -> Path:
    path = tmp_path / "features.json"
    fields = (
        Field("advertiser", FieldKind.CATEGORY, levels=(SHOP, STORE)),
        Field("hour", FieldKind.NUMBER, edges=(6, 12, 18)),
    )
    FeatureEncoding(fields).save(path)
    return path


def label_arguments(features: Path, helpers: Path) -> tuple[object, ...]:
    folder = features.parent
    where = ("--db", folder / "ann.db", "--helpers", helpers, "--features", features)
    files = ("--batch", folder / "new.batch", "--records", folder / "new.records")
    return ("device", "label", PUBLISHER, *where, *files, "--field", "hour=20", "--ago", 8 * DAY)


def test_a_conversion_and_a_label_from_the_command_line(features: Path, helpers: Path) -> None:
    db = features.parent / "ann.db"
    output = succeed("device", "conversion", SHOP, "--db", db, "--publisher", PUBLISHER, "--label", 3)
    assert PUBLISHER in output
    for _ in range(2):
        succeed(*label_arguments(features, helpers), "--field", f"advertiser={SHOP}", "--advertiser", SHOP)
    batch = BatchReader(features.parent / "new.batch")
    terms = batch[0].terms()
    encoding = FeatureEncoding.load(features)
    assert (terms.site, terms.unit, terms.sensitivity) == (PUBLISHER, encoding.unit, encoding.cap)
    records = [json.loads(line) for line in (features.parent / "new.records").read_text().splitlines()]
    assert [bytes.fromhex(record["report"]) for record in records] == [report.digest for report in batch]
    assert records[0]["features"] == list(encoding.encode({"advertiser": SHOP, "hour": 20}))
    with agent.opened(db) as device:
        (saved,) = device.overview().conversions
        # Saved today, after the window closed: no conversion matched, and nothing was paid.
        assert (saved.event.label, device.budget()) == (3, [])


def test_a_label_for_which_there_was_no_time_is_said_to_be_null(
    features: Path, helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device.agent.Delayed.within", lambda _: TooLate())
    wanted = (*label_arguments(features, helpers), "--field", f"advertiser={SHOP}", "--advertiser", SHOP)
    assert "had no time" in " ".join(succeed(*wanted).split())


def test_bad_labels_are_refused_and_write_nothing(features: Path, helpers: Path) -> None:
    shop = ("--field", f"advertiser={SHOP}", "--advertiser", SHOP)
    for bad, datum in (
        ((*shop, "--ago", DAY), "7"),
        (("--field", "advertiser=unknown.example", "--advertiser", SHOP), "'advertiser'"),
        (("--field", "hour", "--advertiser", SHOP), "'hour'"),
        (("--advertiser", SHOP), "'advertiser'"),
        (("--field", f"advertiser={SHOP}", "--advertiser", PUBLISHER), "itself"),
        ((*shop, "--epsilon", 0), "epsilon"),
    ):
        assert datum in str(fail(*label_arguments(features, helpers), *bad))
    assert not (features.parent / "new.batch").exists()
    assert not (features.parent / "new.records").exists()
    db = features.parent / "ann.db"
    assert "itself" in str(fail("device", "conversion", SHOP, "--db", db, "--publisher", SHOP))


def test_conformance_counts_and_exits(tmp_path: Path) -> None:
    result = tmp_path / "results.json"
    count = len(list(OURS.glob("*.json"))) - 1
    output = succeed("conformance", "w3c", OURS, "--json", result)
    assert output.endswith(f"{count} passed, 0 failed\n")
    assert json.loads(result.read_text())["passed"] == count
    event: dict[str, Any] = {"seconds": 1, "event": "clearImpressionsForSite", "site": "localhost"}
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "one.json").write_text(json.dumps({"events": [event]}))
    failed = run("conformance", "w3c", tmp_path / "wrong")
    assert failed.exit_code == 1
    assert "0 passed, 1 failed" in failed.output


def readme_blocks(fence: str) -> list[str]:
    text = (Path(__file__).parents[2] / "device" / "README.md").read_text()
    if fence == "python":
        return [block.split("```")[0] for block in text.split("```python\n")[1:]]
    return [line.strip() for line in text.splitlines() if line.startswith("    trefoil ")]


@pytest.mark.parametrize("number", range(2))
def test_the_readmes_examples_run(number: int) -> None:
    blocks = readme_blocks("python")
    assert len(blocks) == 2
    exec(blocks[number], {})  # noqa: S102 - our own documentation


def test_the_readmes_commands_run(helpers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = readme_blocks("sh")
    assert len(commands) == 8
    monkeypatch.chdir(helpers.parent)
    # As the page's other block makes it, from records of impressions.
    advertisers = Field("advertiser", FieldKind.CATEGORY, levels=("bank.example", "shop.example"))
    FeatureEncoding((advertisers, Field("hour", FieldKind.NUMBER, edges=(12.0,)))).save(Path("features.json"))
    (helpers.parent / "tests").symlink_to(OURS.parents[1])
    for command in commands:
        succeed(*command.split()[1:])
