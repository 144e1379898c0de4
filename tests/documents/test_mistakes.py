"""Mistakes of every kind over all commands: a clear message, a hint, an exit code, nothing charged and nothing left."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from device import agent
from device.schedule import AtOnce
from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.cli import console
from protocol.errors import TrefoilError
from protocol.querier.regression.features import FeatureEncoding, Field, FieldKind
from tests.device.test_device_commands import fail, helpers, run, succeed
from tests.protocol.test_own_record import batch_file
from tests.support import protocol_samples as samples
from tests.support.mistakes import MISTAKES, Outcome, all_outcomes, page

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "MISTAKES.md"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return all_outcomes(tmp_path_factory.mktemp("mistakes"))


def test_there_are_many_of_every_kind() -> None:
    lines = [line for lines in MISTAKES.values() for line in lines]
    assert len(lines) == len(set(lines)) >= 275
    assert all(len(each) >= 4 for each in MISTAKES.values())


def test_no_mistake_is_a_success_a_defect_or_a_traceback(outcomes: list[Outcome]) -> None:
    known = {cli.Exit.MISTAKE, cli.Exit.USAGE, cli.Exit.REFUSED, cli.Exit.TRY_AGAIN}
    assert [found for found in outcomes if found.code not in known or "Traceback" in found.errors] == []


def test_every_mistake_has_a_message_and_a_hint(outcomes: list[Outcome]) -> None:
    groups = {"device", "ledger", "query"}
    assert [found for found in outcomes if not (found.message and found.hint) and found.line not in groups] == []


def test_no_message_names_what_nobody_typed(outcomes: list[Outcome]) -> None:
    """A parameter of the library has an underscore between small letters; options have dashes."""
    wrong = [found for found in outcomes if re.search(r"\b[a-z]+_[a-z_]+\b must be", found.message)]
    assert wrong == []
    assert (
        cli.with_option("histogram_index must be 0 to 1023, not -1", {"--bucket"})
        == "--bucket must be 0 to 1023, not -1"
    )
    assert cli.with_option("value for money", {"--value"}) == "value for money"


def test_nothing_is_left_but_a_query_to_be_asked_again(outcomes: list[Outcome]) -> None:
    for found in outcomes:
        kept = all(path.startswith("shop.batch.queries") for path in found.left)
        assert not found.left or (kept and found.code == cli.Exit.TRY_AGAIN), found


def test_the_page_says_what_happens(outcomes: list[Outcome]) -> None:
    """Of wrong usage, whose words are typer's and differ by version, only code and place on the page are compared."""
    for ours, written in zip(page(outcomes).splitlines(), PAGE.read_text().splitlines(), strict=True):
        if " | 2 | " not in ours:
            assert written == ours, "write it again with: python -m tests.support.mistakes"
        else:
            assert written.split(" | ")[:2] == ours.split(" | ")[:2]


def _no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    "line",
    [
        "keygen helper --dir new --name north --address https://north.example:8443",
        "device impression news.example --db new.db --bucket 1",
        "plan --reports 10 --value-cap 5 --json new.json",
    ],
)
def test_a_full_disk_leaves_nothing(line: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trefoil", *line.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        preexec_fn=_no_room,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == cli.Exit.MISTAKE, done.stderr
    assert "error: " in done.stderr and "Traceback" not in done.stderr
    assert "hint:  Free some space" in done.stderr or "hint:  Is the disk full?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.out, "_width", width)
    monkeypatch.setattr(console.err, "_width", width)
    assert cli.run(["plan", "--reports", "2000", "--value-cap", "5"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width
    assert cli.run(["batch", "ls", "nowhere.batch"]) == cli.Exit.MISTAKE
    # One line, however narrow: the terminal breaks it, and whoever copies it gets it whole.
    assert "error: cannot read nowhere.batch: No such file or directory\n" in capsys.readouterr().err


__all__ = ["helpers"]

ADVERTISER = Field("advertiser", FieldKind.CATEGORY, levels=("bank.example", "shop.example"))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device.agent.Delayed.within", lambda _: AtOnce())


@pytest.fixture
def asked(tmp_path: Path, helpers: Path) -> list[str]:
    """`trefoil device label` with everything right, on a device with a conversion that would have to pay."""
    FeatureEncoding((ADVERTISER, Field("clicks", FieldKind.NUMBER, edges=(1.0, 3.0)))).save(tmp_path / "features.json")
    db = tmp_path / "ann.db"
    succeed("device", "conversion", "shop.example", "--db", db, "--publisher", "news.example")
    options = {"db": db, "helpers": helpers, "features": tmp_path / "features.json", "ago": 8 * 86_400}
    files = {"batch": tmp_path / "news.batch", "records": tmp_path / "news.records"}
    named = [text for name, value in (options | files).items() for text in (f"--{name}", str(value))]
    return ["device", "label", "news.example", *named, "--advertiser", "shop.example"]


def untouched(folder: Path) -> bool:
    """Nothing was paid, logged or written."""
    with agent.opened(folder / "ann.db") as device:
        clean = device.budget() == [] and list(device.reports()) == []
    return clean and not any((folder / name).exists() for name in ("news.batch", "news.records"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (["advertiser=shop.example", "clicks=many"], "clicks"),
        (["advertiser=shop.example", "clicks=inf"], "clicks"),
        (["advertiser=other.example", "clicks=1"], "advertiser"),
        (["advertiser=shop.example"], "clicks"),
        (["advertiser"], "is not a field"),
    ],
    ids=["no number", "not finite", "unknown", "one is missing", "no value"],
)
def test_features_that_are_none_are_refused(asked: list[str], tmp_path: Path, fields: list[str], told: str) -> None:
    error = fail(*asked, *(text for field in fields for text in ("--field", field)))
    assert told in str(error) and error.hint
    assert untouched(tmp_path)


def test_features_of_another_length_do_not_fit_the_batch(asked: list[str], tmp_path: Path) -> None:
    right = ["--field", "advertiser=shop.example"]
    other = tmp_path / "other.json"
    FeatureEncoding((ADVERTISER,)).save(other)
    succeed(*asked, *right, "--field", "clicks=1")
    with agent.opened(tmp_path / "ann.db") as device:
        before = device.budget(), list(device.reports())
    again = [str(other) if text == str(tmp_path / "features.json") else text for text in asked]
    error = fail(*again, *right)
    assert error.hint
    with agent.opened(tmp_path / "ann.db") as device:
        assert (device.budget(), list(device.reports())) == before


def test_an_advertiser_that_allows_nobody_need_not_call(tmp_path: Path) -> None:
    arguments = ["device", "conversion", "shop.example", "--db", str(tmp_path / "ann.db")]
    assert run(*arguments).exit_code == 2
    error = fail(*arguments, "--publisher", "shop.example")
    assert "itself" in str(error)
    assert not (tmp_path / "ann.db").exists(), "not even a device is made"


@pytest.mark.parametrize("cutoff", ["0", "-0.05", "nan", "inf"])
def test_a_cutoff_that_nothing_is_within_is_refused_before_anything_is_asked(cutoff: str, tmp_path: Path) -> None:
    batch = batch_file(tmp_path / "shop.batch", 500_000, 0)
    files = [
        "--reports",
        str(batch),
        "--helpers",
        str(tmp_path / "none.json"),
        "--site-key",
        str(tmp_path / "none.key"),
    ]
    error = fail("query", *files, "--cutoff", cutoff)
    assert "cutoff" in str(error) and "0.05" in error.hint
    assert not batch.with_name("shop.batch.queries").exists()


def test_an_answer_of_another_batch_is_refused(tmp_path: Path) -> None:
    """Two batches of the same features: only the root tells whose answer it is."""
    FeatureEncoding((ADVERTISER,)).save(tmp_path / "features.json")
    encoding = FeatureEncoding.load(tmp_path / "features.json")
    terms = samples.terms(sensitivity=encoding.cap, buckets=encoding.columns, unit=encoding.unit)
    roots = []
    for name in ("mine", "other"):
        path = samples.write_batch(
            tmp_path / name, [samples.report(f"{name} {each}", promised=terms) for each in range(2)]
        )
        roots.append(BatchReader(path).root())
    answer = {
        "batch_root": roots[1].hex(),
        "unit": encoding.unit,
        "answer": [0] * encoding.columns,
        "noise": "local",
        "noise_variance": 4.0,
        "reports_submitted": 2,
        "reports_counted": 2,
    }
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    (tmp_path / "records").write_text("")
    names = {"answer": "answer.json", "reports": "mine", "records": "records", "features": "features.json"}
    files = [text for name, value in names.items() for text in (f"--{name}", str(tmp_path / value))]
    error: TrefoilError = fail("regression", "fit", *files, "--model", tmp_path / "model.json")
    assert "another batch" in str(error) and error.hint
    assert not (tmp_path / "model.json").exists()
