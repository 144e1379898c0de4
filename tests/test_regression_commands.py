"""`trefoil regression`: from records and an answer to a model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import trefoil
from protocol.batch import BatchReader, BatchWriter
from protocol.errors import TrefoilError
from protocol.query import NoiseMode
from protocol.regression.answer_file import LabelSums
from protocol.regression.features import FeatureEncoding
from protocol.regression.records import Record, append_record
from protocol.regression.view import fit_and_show, learn, predict_and_show, show_plan
from tests.support.protocol_samples import report, terms

PUBLISHER, SHOP, STORE = "news.example", "shop.example", "store.example"
REPORTS = 240


class Folder:
    """A publisher's folder: rows of impressions, features, a batch with its records, and an answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, self.features = path / "rows.csv", path / "features.json"
        self.batch, self.records = path / "news.batch", path / "news.records"
        self.answer, self.model = path / "answer.json", path / "model.json"

    def fit(self) -> dict[str, object]:
        return fit_and_show(self.answer, self.batch, self.records, self.features, self.model)

    def change_answer(self, **changes: object) -> None:
        self.answer.write_text(json.dumps(json.loads(self.answer.read_text()) | changes))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Conversions follow the shop's ads in nine of ten, the store's in one of ten."""
    folder = Folder(tmp_path_factory.mktemp("publisher"))
    generator = np.random.default_rng(3)
    rows: list[dict[str, Any]] = []
    for number in range(REPORTS):
        advertiser, hour = (SHOP, STORE)[number % 2], int(generator.integers(24))
        converted = int(generator.random() < (0.9, 0.1)[number % 2])
        rows.append({"advertiser": advertiser, "hour": hour, "converted": converted})
    with folder.rows.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    learn(folder.rows, ["advertiser"], ["hour"], 4, folder.features)
    encoding = FeatureEncoding.load(folder.features)
    sums = np.zeros(encoding.columns)
    promised = terms(site=PUBLISHER, sensitivity=encoding.cap, buckets=encoding.columns, unit=encoding.unit)
    with BatchWriter(folder.batch) as batch:
        for place, row in enumerate(rows):
            vector = encoding.encode(row)
            sealed = report(str(place), [number * row["converted"] for number in vector], promised)
            batch.add(sealed)
            append_record(folder.records, Record(sealed.digest, vector))
            sums += np.array(vector) * row["converted"]
    answer = {
        "batch_root": BatchReader(folder.batch).root().hex(),
        "unit": encoding.unit,
        "answer": [int(each) for each in sums],
        "noise": "local",
        "noise_variance": 4.0,
        "reports_submitted": REPORTS,
        "reports_counted": REPORTS,
    }
    folder.answer.write_text(json.dumps(answer))
    return folder


@pytest.fixture
def folder(made: Folder, tmp_path: Path) -> Folder:
    """The same, to be spoilt."""
    copied = Folder(tmp_path)
    for name in ("rows", "features", "batch", "records", "answer"):
        getattr(copied, name).write_bytes(getattr(made, name).read_bytes())
    return copied


def test_a_model_is_fitted_used_and_drawn(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = folder.fit()
    assert fitted["verdict"] == "FITTED"
    assert "advertiser = shop.example" in capsys.readouterr().out
    picture, table = folder.path / "roc.png", folder.path / "rates.csv"
    scored = predict_and_show(folder.model, folder.features, folder.rows, "converted", table, picture)
    # Nine of ten against one of ten: even the hour's noise leaves little to wish for.
    assert isinstance(scored["auc"], float)
    assert scored["auc"] > 0.85
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open() as file:
        predicted = list(csv.DictReader(file))
    assert len(predicted) == REPORTS
    assert all(float(row["low"]) <= float(row["probability"]) <= float(row["high"]) for row in predicted)


def test_a_model_that_noise_has_eaten_is_declined_in_words(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.change_answer(noise_variance=10.0**6)
    assert folder.fit()["verdict"] == "RATE_UNKNOWN"
    assert "times the reports, or the ε" in capsys.readouterr().out
    sums = json.loads(folder.answer.read_text())["answer"]
    # As many conversions for every level as its share of impressions: nothing to see.
    rows = np.array([json.loads(line)["features"] for line in folder.records.read_text().splitlines()])
    folder.change_answer(noise_variance=4.0, answer=(rows.mean(axis=0) * sums[0]).tolist())
    assert folder.fit()["verdict"] == "NO_EFFECT"
    assert "every prediction is the rate itself" in capsys.readouterr().out


def test_reports_that_were_not_counted_scale_the_answer_up_to_one_in_a_hundred(folder: Folder) -> None:
    folder.change_answer(reports_counted=REPORTS - 2)
    sums = LabelSums.load(folder.answer).for_all()
    assert sums.counted == REPORTS
    assert sums.sums[0] == pytest.approx(LabelSums.load(folder.answer).sums[0] * REPORTS / (REPORTS - 2))
    assert folder.fit()["verdict"] == "FITTED"
    folder.change_answer(reports_counted=REPORTS - 3)
    with pytest.raises(TrefoilError, match="below 99%"):
        folder.fit()
    assert not folder.model.with_name("other.json").exists()


def spoil_record(folder: Folder, **changes: object) -> None:
    first, *rest = folder.records.read_text().splitlines()
    folder.records.write_text("\n".join([json.dumps(json.loads(first) | changes), *rest]) + "\n")


BAD = {
    "another batch": (lambda folder: folder.change_answer(batch_root="00" * 32), "another batch"),
    "other features": (lambda folder: folder.change_answer(unit="features 0"), "features file is"),
    "too few numbers": (lambda folder: folder.change_answer(answer=[1, 2]), "2 numbers"),
    "no answer": (lambda folder: folder.answer.write_text("[]"), "is not an answer"),
    "nobody counted": (lambda folder: folder.change_answer(reports_counted=0), "is not an answer"),
    "no records": (lambda folder: folder.records.unlink(), "cannot read"),
    "a record is missing": (
        lambda folder: folder.records.write_text("\n".join(folder.records.read_text().splitlines()[1:])),
        "1 of 240 reports",
    ),
    "no record": (lambda folder: folder.records.write_text("{}\n"), "row 1 is not a record"),
    "negative": (lambda folder: spoil_record(folder, features=[1, 1, 0, -1, 0, 0, 0]), "row 1, column 'hour"),
    "fraction": (lambda folder: spoil_record(folder, features=[1, 0.5, 0, 1, 0, 0, 0]), "row 1, column 'advertiser"),
    "above the cap": (lambda folder: spoil_record(folder, features=[1, 1, 1, 1, 0, 0, 0]), "add up to 4"),
    "wrong length": (lambda folder: spoil_record(folder, features=[1, 1]), "row 1 has 2 features"),
    "no features file": (lambda folder: folder.features.unlink(), "cannot read"),
}


@pytest.mark.parametrize(("spoil", "told"), BAD.values(), ids=BAD.keys())
def test_what_does_not_belong_together_is_refused_and_no_model_written(folder: Folder, spoil: Any, told: str) -> None:
    spoil(folder)
    with pytest.raises(TrefoilError) as refused:
        folder.fit()
    assert told in str(refused.value)
    assert refused.value.hint
    assert not folder.model.exists()


def test_visitors_with_several_impressions_widen_the_intervals(folder: Folder) -> None:
    table = folder.path / "rates.csv"

    def width() -> float:
        folder.fit()
        predict_and_show(folder.model, folder.features, folder.rows, None, table, None)
        with table.open() as file:
            return float(np.mean([float(row["high"]) - float(row["low"]) for row in csv.DictReader(file)]))

    alone = width()
    lines = [json.loads(line) for line in folder.records.read_text().splitlines()]
    named = [json.dumps(line | {"visitor": f"v{number // 4}"}) for number, line in enumerate(lines)]
    folder.records.write_text("\n".join(named) + "\n")
    # Four labels that may be one: up to twice as wide (Kish).
    assert width() > 1.4 * alone


def test_rows_to_predict_are_checked(folder: Folder) -> None:
    folder.fit()
    with pytest.raises(TrefoilError, match="need labels"):
        predict_and_show(folder.model, folder.features, folder.rows, None, None, folder.path / "roc.png")
    with pytest.raises(TrefoilError, match="row 1 has no 'bought'"):
        predict_and_show(folder.model, folder.features, folder.rows, "bought", None, None)
    folder.rows.write_text("advertiser,hour\nunknown.example,3\n")
    with pytest.raises(TrefoilError, match="row 1, column 'advertiser'"):
        predict_and_show(folder.model, folder.features, folder.rows, None, None, None)
    folder.rows.write_text("advertiser,hour\n")
    with pytest.raises(TrefoilError, match="no rows"):
        predict_and_show(folder.model, folder.features, folder.rows, None, None, None)
    learn_other = folder.path / "other.json"
    folder.rows.write_text("advertiser,hour\na,1\nb,2\n")
    learn(folder.rows, ["advertiser"], ["hour"], 2, learn_other)
    with pytest.raises(TrefoilError, match="other features"):
        predict_and_show(folder.model, learn_other, folder.rows, None, None, None)


def test_a_plan_says_what_is_needed_and_warns(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    planned = show_plan(folder.features, 20_000, 0.05, 0.25, NoiseMode.LOCAL)
    assert planned["outlook"] == "GOOD"
    assert show_plan(folder.features, 200, 0.05, 0.25, NoiseMode.LOCAL)["outlook"] == "NONE"
    assert "warning" not in capsys.readouterr().out
    show_plan(folder.features, 20_000, 0.05, 2.0, NoiseMode.LOCAL)
    assert "warning: a device pays at most ε = 1" in capsys.readouterr().out
    with pytest.raises(TrefoilError):
        show_plan(folder.features, 20_000, 1.5, 0.25, NoiseMode.LOCAL)


# On the command line


def run(*arguments: object) -> str:
    result = CliRunner().invoke(trefoil.app, [str(each) for each in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_commands_of_a_regression(folder: Folder) -> None:
    named = ("--features", folder.features)
    files = ("--answer", folder.answer, "--reports", folder.batch, "--records", folder.records)
    told = folder.path / "told.json"
    run("regression", "features", "--rows", folder.rows, *named, "--category", "advertiser", "--number", "hour")
    run("regression", "plan", *named, "--reports", 20_000, "--rate", 0.05, "--json", told)
    assert json.loads(told.read_text())["outlook"] == "GOOD"
    run("regression", "fit", *files, *named, "--model", folder.model, "--json", told)
    assert json.loads(told.read_text())["verdict"] == "FITTED"
    assert "AUC" in run(
        "regression", "predict", "--model", folder.model, *named, "--rows", folder.rows, "--label", "converted"
    )
