"""`trefoil device ...` and `trefoil conformance ...` as a person runs them: results, JSON, hints, and no traceback."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import trefoil
from device import actions, agent, errors
from device.asked import Asked
from device.conversion import ConversionOptions
from device.impression import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.tick import AtOnce, Ticks, Turn
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet, HpkeKeyConfig
from protocol.regression.features import FeatureEncoding, Field, FieldKind
from protocol.report import SealedReport
from tests.support.protocol_samples import HELPER_SET, helper_entry, signed

OURS = Path(__file__).parent / "scenarios"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(trefoil.app, [str(argument) for argument in arguments])


def succeed(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments: str | Path) -> TrefoilError:
    """The error that `trefoil.main` turns into two lines."""
    result = run(*arguments)
    assert isinstance(result.exception, TrefoilError), result.output
    return result.exception


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no bug: no call is cut off because it took long."""
    monkeypatch.setattr("device.agent.Ticks", lambda _: AtOnce())


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
    convert: list[str | Path] = [
        "device",
        "convert",
        "shop.example",
        "--db",
        db,
        "--helpers",
        helpers,
        "--buckets",
        "4",
        "--epsilon",
        "0.25",
    ]
    succeed(*convert, "--batch", batch, "--json", result)
    succeed(*convert, "--batch", batch)
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
    """To the person on their own machine, by words and in the JSON; the report itself looks like any other."""
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")

    def convert(epsilon: str, site: str = "shop.example") -> tuple[str, Any]:
        result = tmp_path / "result.json"
        where = ("--db", db, "--helpers", helpers, "--buckets", "2", "--report", tmp_path / "r", "--json", result)
        shown = " ".join(succeed("device", "convert", site, *where, "--epsilon", epsilon).split())
        return shown, json.loads(result.read_text())["shortfall"]

    shown, told = convert("2")
    assert told in shown and "asks for ε = 2 of every week" in told and "more than 1 left for shop.example" in told
    shown, told = convert("0.7")
    assert told is None and "null" not in shown
    # Weeks without an impression are still whole; the one that matters has 0.3.
    assert "asks for ε = 0.4" in convert("0.4")[1] and "none of these weeks" in convert("0.4")[1]
    assert convert("0.3")[1] is None
    for site in ("a.example", "b.example", "c.example"):
        assert convert("1", site)[1] is None
    # The publisher's quota of 4 is spent; this site's own budget is whole.
    assert "none of these weeks" in convert("1", "d.example")[1]


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
def test_every_attribution_function_has_a_door(
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
    shown = succeed("device", "convert", "shop.example", *where, *values, "--function", *function)
    assert json.loads(result.read_text())["histogram"] == [*histogram, 0]
    assert "can move it by at most" in shown and "noise is made for 12" in shown
    assert SealedReport.decode((tmp_path / "r").read_bytes()).terms().kappa == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--function", "third"), "no attribution function 'third'"),
        (("--function", "nowhere:at_all"), "cannot import nowhere:at_all"),
        (("--function", "json:nothing"), "cannot import json:nothing"),
        (("--function", "math:pi"), "not a function"),
        (("--function", "last", "--impression-site", "news.example"), "standard's call"),
        (("--kappa", "1", "--flag", "last-touch"), "last touch alone"),
        (("--function", "first", "--kappa", "1", "--flag", "last-touch"), "last-touch attribution only"),
        (("--kappa", "1", "--flag", "loud"), "no form 'loud'"),
        (("--kappa", "-1"), "kappa must be 0"),
    ],
)
def test_functions_and_flags_that_cannot_be(
    wrong: tuple[str, ...], message: str, db: Path, helpers: Path, tmp_path: Path
) -> None:
    """Refused in words, and nothing is paid or written."""
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "1")
    where = ("--db", db, "--helpers", helpers, "--buckets", "2", "--batch", tmp_path / "b")
    error = fail("device", "convert", "shop.example", *where, *wrong)
    assert message in str(error)
    assert not (tmp_path / "b").exists()
    with agent.opened(db) as device:
        assert device.budget() == [] and len(device.reports()) == 0


def test_a_batch_holds_reports_of_one_kappa(db: Path, helpers: Path, tmp_path: Path) -> None:
    convert = ("device", "convert", "shop.example", "--db", db, "--helpers", helpers, "--buckets", "2")
    succeed(*convert, "--kappa", "3", "--batch", tmp_path / "b")
    succeed(*convert, "--kappa", "3", "--batch", tmp_path / "b")
    succeed(*convert, "--kappa", "3", "--function", "last", "--flag", "last-touch", "--batch", tmp_path / "c")
    assert "one file per site" in fail(*convert, "--batch", tmp_path / "b").hint
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
        command: list[str | Path] = [
            "device",
            "convert",
            "shop.example",
            "--db",
            db,
            "--helpers",
            helpers,
            "--buckets",
            "1",
        ]
        succeed(*command, "--epsilon", "0.1", "--report", tmp_path / "r", "--json", result)
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
    succeed("device", "clear", "--db", db, "--site", "shop.example")
    assert histogram() == [0]
    assert "spent" in succeed("device", "budget", "--db", db, "--site", "www.shop.example")
    assert "hats.example has cost" in succeed("device", "budget", "--db", db, "--site", "hats.example")
    succeed("device", "clear", "--db", db, "--forget-visits")
    assert "no site has cost" in succeed("device", "budget", "--db", db)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "shop.example", "--helpers", "HELPERS", "--buckets", "2"], "one place"),
        (["convert", "shop.example", "--helpers", "HELPERS", "--buckets", "0", "--report", "R"], "histogram_size"),
        (["convert", "localhost", "--helpers", "HELPERS", "--buckets", "1", "--report", "R"], "this machine"),
        (["convert", "shop.example", "--helpers", "nowhere.json", "--buckets", "1", "--report", "R"], "nowhere.json"),
        (["impression", "news.example", "--bucket", "5000"], "histogram_index"),
        (["clear"], "what to clear"),
        (["clear", "--stored-data"], "named sites"),
        (["clear", "--site", "a", "--forget-visits"], "single label"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(
    arguments: list[str], message: str, db: Path, helpers: Path, tmp_path: Path
) -> None:
    succeed("device", "create", "--db", db)
    places = {"HELPERS": str(helpers), "R": str(tmp_path / "r")}
    command = [places.get(argument, argument) for argument in arguments]
    error = fail("device", *command, "--db", db)
    assert message in str(error)
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
    convert: list[str | Path] = [
        "device",
        "convert",
        "shop.example",
        "--db",
        db,
        "--helpers",
        helpers,
        "--batch",
        batch,
    ]
    succeed("device", "impression", "news.example", "--db", db, "--bucket", "0")
    succeed(*convert, "--buckets", "2", "--epsilon", "0.1")
    size = batch.stat().st_size
    two = ["--buckets", "2"]
    for change in (["--buckets", "3"], [*two, "--unit", "cents"], [*two, "--intermediary", "ads.example"]):
        assert "holds reports" in str(fail(*convert, *change))
    # The options that would fit, where options are all that differs.
    assert fail(*convert, "--buckets", "3").hint.endswith("--buckets 2 --unit count --max-value 1 --kappa 0")
    assert "give" not in fail(*convert, *two, "--intermediary", "ads.example").hint
    assert batch.stat().st_size == size
    with agent.opened(db) as device:
        assert max(state.spent for state in device.budget()) == 100_000


def test_a_device_without_helpers_makes_no_reports(db: Path) -> None:
    agent.create(db)
    with agent.opened(db) as device, pytest.raises(errors.ReferenceError, match="no aggregation service"):
        device.measure_conversion("shop.example", ConversionOptions(TREFOIL_SERVICE, 1))


def test_reports_of_the_command_line_leave_at_the_tick(
    db: Path, helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do its impressions."""
    waited: list[float] = []
    agent.create(db)
    original = Ticks.turn

    def turn(self: Ticks, queue: Hashable, work: float, came: float) -> AbstractContextManager[Turn]:
        waited.append(self.tick)
        return original(self, queue, work, came)

    monkeypatch.setattr("device.agent.Ticks", Ticks)
    monkeypatch.setattr(Ticks, "turn", turn)
    actions.save_impression(db, "news.example", ImpressionOptions(0), None)
    options = ConversionOptions(TREFOIL_SERVICE, 1)
    asked = Asked(options)
    actions.convert(db, helpers, "shop.example", asked, None, actions.Destination(db.with_name("r"), is_batch=False))
    assert waited == [DeviceLimits().tick_seconds] * 2


@pytest.mark.parametrize("command", ["create", "impression", "convert", "budget", "clear", "on", "off", "reports"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    output = " ".join(succeed("device", command, "--help").split())
    assert "Example: trefoil device" in output
    assert "--json" in output


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
    text = (Path(__file__).parents[1] / "device" / "README.md").read_text()
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
    (helpers.parent / "tests").symlink_to(OURS.parent)
    for command in commands:
        succeed(*command.split()[1:])
