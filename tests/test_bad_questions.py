"""Bad input on the command line: an error that says what to do, nothing charged, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device import agent
from device.tick import AtOnce
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.regression.features import FeatureEncoding, Field, FieldKind
from tests.support import protocol_samples as samples
from tests.test_device_commands import fail, helpers, run, succeed
from tests.test_own_record import batch_file

__all__ = ["helpers"]

ADVERTISER = Field("advertiser", FieldKind.CATEGORY, levels=("bank.example", "shop.example"))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device.agent.Ticks", lambda _: AtOnce())


@pytest.fixture
def asked(tmp_path: Path, helpers: Path) -> list[str]:
    """`trefoil device label` with everything right, on a device with a conversion that would have to pay."""
    FeatureEncoding((ADVERTISER, Field("clicks", FieldKind.COUNT, most=3))).save(tmp_path / "features.json")
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
        (["advertiser=shop.example", "clicks=-1"], "clicks"),
        (["advertiser=shop.example", "clicks=0.5"], "clicks"),
        (["advertiser=shop.example", "clicks=4"], "clicks"),
        (["advertiser=other.example", "clicks=1"], "advertiser"),
        (["advertiser=shop.example"], "clicks"),
        (["advertiser"], "is not a field"),
    ],
    ids=["negative", "a fraction", "too large", "unknown", "one is missing", "no value"],
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
