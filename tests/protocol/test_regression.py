"""The publisher's regression: exact without noise, unique under any noise, declined where noise hides the effect."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from protocol.batch import BatchReader, BatchWriter
from protocol.cli import app as cli
from protocol.errors import ErrorKind, TrefoilError
from protocol.querier.regression.features import (
    FeatureEncoding,
    Field,
    FieldKind,
    LabelSums,
    Record,
    append_record,
    learn_encoding,
)
from protocol.querier.regression.model import (
    Design,
    FitVerdict,
    Matrix,
    Model,
    Noise,
    Rows,
    Sums,
    area_under_curve,
    fit,
    log_loss,
)
from protocol.querier.regression.view import fit_model, learn_features, plan_reports, predict_rows
from tests.support.protocol_samples import report, terms
from tests.support.raising import raises

QUIET = Noise(0.0)


def one_hot_world(seed: int, n: int, sizes: tuple[int, ...] = (4, 3), spread: float = 0.8) -> tuple[Rows, Matrix]:
    """An intercept, one-hot fields, and the probability of a conversion for each row (about 12 %)."""
    generator = np.random.default_rng(seed)
    columns, predictor = [np.ones((n, 1), np.int64)], np.full(n, -2.2)
    for size in sizes:
        level = generator.integers(size, size=n)
        columns.append(np.eye(size, dtype=np.int64)[level])
        predictor += generator.normal(0, spread, size)[level]
    return np.hstack(columns), 1 / (1 + np.exp(-predictor))


def label_sums(rows: Rows, labels: np.ndarray) -> Matrix:
    sums: Matrix = (rows * labels[:, None]).sum(axis=0).astype(np.float64)
    return sums


def plain_logistic(rows: Rows, labels: np.ndarray, steps: int = 40) -> Matrix:
    """Newton on the likelihood itself, with labels in the clear and no shrinkage; a pseudo-inverse where it is flat."""
    x = rows.astype(np.float64)
    theta = np.zeros(x.shape[1])
    for _ in range(steps):
        p = 1 / (1 + np.exp(-x @ theta))
        theta -= np.linalg.pinv(x.T @ ((p * (1 - p))[:, None] * x)) @ (x.T @ (p - labels))
    return 1 / (1 + np.exp(-x @ theta))


def test_without_noise_it_is_logistic_regression() -> None:
    rows, chance = one_hot_world(1, 40_000)
    labels = np.random.default_rng(2).random(len(chance)) < chance
    model = fit(Design(rows), label_sums(rows, labels), QUIET)
    assert model.verdict is FitVerdict.FITTED
    # Shrinking by 1/ω² of at least 1 moves a well-determined fit by little.
    assert np.abs(model.predict(rows.astype(float)) - plain_logistic(rows, labels)).max() < 0.01


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e7, 1e7), min_size=8, max_size=8), st.sampled_from([0.0, 1.0, 1e6]))
def test_a_fit_exists_for_any_answer(answer: list[float], variance: float) -> None:
    rows, _ = one_hot_world(3, 500)
    model = fit(Design(rows), np.array(answer), Noise(variance))
    predicted = model.predict(rows.astype(float))
    assert np.isfinite(predicted).all() and (predicted > 0).all() and (predicted < 1).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_the_projection_never_moves_a_sum_without_noise(seed: int, rare: int) -> None:
    """With a dense column of large numbers beside a level of a few rows, where a careless rank cut loses the level."""
    generator = np.random.default_rng(seed)
    n = 5_000
    level = np.zeros(n, np.int64)
    level[:rare] = 1
    rows = np.hstack([np.ones((n, 1), np.int64), np.eye(2, dtype=np.int64)[level], generator.integers(0, 1001, (n, 1))])
    labels = generator.random(n) < 0.3
    sums = label_sums(rows, labels)
    assert np.allclose(Design(rows).projection @ sums, sums, rtol=1e-7, atol=1e-6)


def test_the_projection_removes_what_no_label_could_have_made() -> None:
    rows, _ = one_hot_world(5, 1000)
    broken = np.zeros(8)
    broken[1] = 7.0  # one level more, and the count unchanged
    projected = Design(rows).projection @ broken
    assert abs(projected[0] - projected[1:5].sum()) < 1e-9
    assert abs(projected[0] - projected[5:].sum()) < 1e-9


def test_label_free_answers_are_declined() -> None:
    """At most one in a hundred passes by design; 200 label-free worlds pass 12 or more with probability below 10^−6."""
    rows, _ = one_hot_world(6, 4000)
    design, noise = Design(rows), Noise(600.0, 1.5)
    generator = np.random.default_rng(7)
    passed = 0
    for _ in range(200):
        labels = generator.random(len(rows)) < 0.1
        answer = label_sums(rows, labels) + noise.draw(generator, (8,))
        passed += fit(design, answer, noise).verdict is FitVerdict.FITTED
    assert passed < 12


def test_a_rate_lost_in_the_noise_is_said() -> None:
    rows, chance = one_hot_world(8, 1000)
    labels = np.random.default_rng(9).random(len(chance)) < chance
    model = fit(Design(rows), label_sums(rows, labels), Noise(10_000.0**2))
    assert model.verdict is FitVerdict.RATE_UNKNOWN


@pytest.mark.parametrize(("variance", "shape"), [(2 * 30.0**2 * 1.5, 1.5), (2 * 10.0**2 * 3, 3.0)])
def test_intervals_cover(variance: float, shape: float) -> None:
    """95 % stated; over 30 worlds the mean coverage below 0.80 would be 5 standard errors (0.03 each) off."""
    covered = []
    for seed in range(30):
        generator = np.random.default_rng([seed, 11])
        rows, chance = one_hot_world(seed, 20_000)
        labels = generator.random(len(chance)) < chance
        noise = Noise(variance, shape)
        model = fit(Design(rows), label_sums(rows, labels) + noise.draw(generator, (8,)), noise)
        if model.verdict is FitVerdict.FITTED:
            low, high = model.interval(rows[:300].astype(float))
            covered.append(np.mean((low <= chance[:300]) & (chance[:300] <= high)))
    assert len(covered) > 20
    assert 0.80 < float(np.mean(covered)) <= 1.0


def test_labels_that_come_together_widen_the_intervals() -> None:
    rows, chance = one_hot_world(12, 6_000)
    labels = np.random.default_rng(13).random(len(chance)) < chance
    tripled, groups = np.repeat(rows, 3, axis=0), np.repeat(np.arange(len(rows)), 3)
    answer = 3 * label_sums(rows, labels)
    apart = fit(Design(tripled), answer, Noise(100.0))
    together = fit(Design(tripled, groups), answer, Noise(100.0))
    alone = fit(Design(rows), label_sums(rows, labels), Noise(100.0 / 9))
    widths = [np.ptp(model.interval(rows[:50].astype(float)), axis=0).mean() for model in (apart, together, alone)]
    assert widths[1] > 1.4 * widths[0]
    assert widths[1] == pytest.approx(widths[2], rel=0.15)


def test_what_does_not_belong_together_is_refused() -> None:
    rows, _ = one_hot_world(14, 100)
    with raises(ErrorKind.INCONSISTENT):
        Sums.of(Design(rows), np.zeros(7), QUIET)
    with raises(ErrorKind.OUT_OF_RANGE):
        Design(-rows)
    with raises(ErrorKind.INVALID_VALUE):
        Design(rows[:, 1:])
    with raises(ErrorKind.INCONSISTENT):
        Design(rows, np.arange(99))
    model = fit(Design(rows), np.zeros(8), QUIET)
    with raises(ErrorKind.INCONSISTENT):
        model.predict(np.ones((2, 5)))


def test_a_model_is_kept_and_read_back(tmp_path: Path) -> None:
    rows, chance = one_hot_world(15, 20_000)
    labels = np.random.default_rng(16).random(len(chance)) < chance
    model = fit(Design(rows), label_sums(rows, labels), Noise(50.0), "features x")
    model.save(tmp_path / "model.json")
    again = Model.load(tmp_path / "model.json")
    some = rows[:20].astype(float)
    assert again.verdict is FitVerdict.FITTED and again.unit == "features x"
    assert np.array_equal(again.predict(some), model.predict(some))
    assert np.array_equal(again.interval(some), model.interval(some))
    (tmp_path / "model.json").write_text("{}")
    with raises(ErrorKind.MALFORMED):
        Model.load(tmp_path / "model.json")
    with raises(ErrorKind.FILE_UNREADABLE):
        Model.load(tmp_path / "none.json")


ENCODING = FeatureEncoding(
    (
        Field("advertiser", FieldKind.CATEGORY, levels=("a.example", "b.example")),
        Field("price", FieldKind.NUMBER, edges=(10.0, 50.0)),
    )
)


def test_a_row_becomes_a_vector_under_the_cap(tmp_path: Path) -> None:
    assert ENCODING.encode({"advertiser": "b.example", "price": 10}) == (1, 0, 1, 0, 1, 0)
    assert (ENCODING.columns, ENCODING.cap, len(ENCODING.names)) == (6, 3, 6)
    ENCODING.save(tmp_path / "features.json")
    again = FeatureEncoding.load(tmp_path / "features.json")
    assert again == ENCODING and again.unit == ENCODING.unit
    assert FeatureEncoding(ENCODING.fields[:1]).unit != ENCODING.unit


@pytest.mark.parametrize(
    ("row", "kind", "datum"),
    [
        ({"advertiser": "c.example", "price": 1}, ErrorKind.UNKNOWN_NAME, "row 7, column 'advertiser'"),
        ({"advertiser": "a.example", "price": "much"}, ErrorKind.WRONG_TYPE, "column 'price'"),
        ({"advertiser": "a.example", "price": float("nan")}, ErrorKind.OUT_OF_RANGE, "column 'price'"),
        ({"advertiser": "a.example"}, ErrorKind.MISSING_FIELD, "row 7 has no 'price'"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_column(row: dict[str, object], kind: ErrorKind, datum: str) -> None:
    with raises(kind, TrefoilError) as refused:
        ENCODING.encode(row, "row 7")
    assert datum in str(refused.value)


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {},
        {"trefoil_features": 1},
        {"trefoil_features": 1, "fields": []},
        {"trefoil_features": 1, "fields": [3]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "colour"}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "category", "levels": ["one"]}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "category", "levels": 5}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "number", "edges": [3, 2]}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "number", "edges": [3]}] * 2},
    ],
)
def test_a_bad_features_file_is_refused(stored: object, tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text(json.dumps(stored))
    with pytest.raises(TrefoilError):
        FeatureEncoding.load(tmp_path / "features.json")


def test_an_encoding_is_learnt_from_records() -> None:
    records = [{"site": f"s{i % 3}.example", "age": i} for i in range(100)]
    encoding = learn_encoding(records, ["site"], ["age"])
    assert encoding.fields[0].levels == ("s0.example", "s1.example", "s2.example")
    assert encoding.fields[1].edges == (25.0, 50.0, 75.0)
    filled = np.array([encoding.encode(record) for record in records]).sum(axis=0)
    assert filled.tolist() == [100, 34, 33, 33, 25, 25, 25, 25]
    with raises(ErrorKind.MISSING_FIELD):
        learn_encoding(records, ["colour"], [])


def test_scores() -> None:
    label = np.array([False, True, False, True])
    assert area_under_curve(np.array([0.1, 0.2, 0.3, 0.4]), label) == 0.75
    assert area_under_curve(np.zeros(4), label) == 0.5
    assert log_loss(np.full(4, 0.5), label) == pytest.approx(np.log(2))


PUBLISHER, SHOP, STORE = "news.example", "shop.example", "store.example"
REPORTS = 240


class Folder:
    """A publisher's folder: rows of impressions, features, a batch with its records, and an answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, self.features = path / "rows.csv", path / "features.json"
        self.batch, self.records = path / "news.batch", path / "news.records"
        self.answer, self.model = path / "answer.json", path / "model.json"

    def fit(self) -> str:
        """Fit the model, and return its verdict."""
        fit_model(self.answer, self.batch, self.records, self.features, self.model)
        return str(json.loads(self.model.read_text())["verdict"])

    def predict(self, label: str | None = None) -> list[dict[str, str]]:
        """Return the rows of the table of predictions."""
        table = self.path / "rates.csv"
        predict_rows(self.model, self.features, self.rows, label, table)
        with table.open() as file:
            return list(csv.DictReader(file))

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
    learn_features(folder.rows, folder.features, ["advertiser"], ["hour"])
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


def test_a_model_is_fitted_and_used(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.fit() == "FITTED"
    assert "advertiser = shop.example" in capsys.readouterr().out
    predicted = folder.predict("converted")
    # Nine of ten against one of ten: even the hour's noise leaves little to wish for.
    score = re.search(r"AUC (\S+),", capsys.readouterr().out)
    assert score is not None and float(score[1]) > 0.85
    assert len(predicted) == REPORTS
    assert all(float(row["low"]) <= float(row["probability"]) <= float(row["high"]) for row in predicted)


def test_a_model_that_noise_has_eaten_is_declined_in_words(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.change_answer(noise_variance=10.0**6)
    assert folder.fit() == "RATE_UNKNOWN"
    assert "times the reports, or the ε" in capsys.readouterr().out
    sums = json.loads(folder.answer.read_text())["answer"]
    # As many conversions for every level as its share of impressions: nothing to see.
    rows = np.array([json.loads(line)["features"] for line in folder.records.read_text().splitlines()])
    folder.change_answer(noise_variance=4.0, answer=(rows.mean(axis=0) * sums[0]).tolist())
    assert folder.fit() == "NO_EFFECT"
    assert "every prediction is the rate itself" in capsys.readouterr().out


def test_reports_that_were_not_counted_scale_the_answer_up_to_one_in_a_hundred(folder: Folder) -> None:
    folder.change_answer(reports_counted=REPORTS - 2)
    sums = LabelSums.load(folder.answer).for_all()
    assert sums.counted == REPORTS
    assert sums.sums[0] == pytest.approx(LabelSums.load(folder.answer).sums[0] * REPORTS / (REPORTS - 2))
    assert folder.fit() == "FITTED"
    folder.change_answer(reports_counted=REPORTS - 3)
    with raises(ErrorKind.TOO_FEW):
        folder.fit()
    assert not folder.model.with_name("other.json").exists()


def spoil_record(folder: Folder, **changes: object) -> None:
    first, *rest = folder.records.read_text().splitlines()
    folder.records.write_text("\n".join([json.dumps(json.loads(first) | changes), *rest]) + "\n")


BAD = {
    "another batch": (lambda folder: folder.change_answer(batch_root="00" * 32), ErrorKind.WRONG_FILE, "batch"),
    "other features": (lambda folder: folder.change_answer(unit="features 0"), ErrorKind.INCONSISTENT, "features 0"),
    "too few numbers": (lambda folder: folder.change_answer(answer=[1, 2]), ErrorKind.INCONSISTENT, "2 numbers"),
    "no answer": (lambda folder: folder.answer.write_text("[]"), ErrorKind.MALFORMED, "answer.json"),
    "nobody counted": (lambda folder: folder.change_answer(reports_counted=0), ErrorKind.MALFORMED, "answer.json"),
    "no records": (lambda folder: folder.records.unlink(), ErrorKind.FILE_UNREADABLE, "news.records"),
    "a record is missing": (
        lambda folder: folder.records.write_text("\n".join(folder.records.read_text().splitlines()[1:])),
        ErrorKind.INCONSISTENT,
        "1 of 240 reports",
    ),
    "no record": (lambda folder: folder.records.write_text("{}\n"), ErrorKind.MALFORMED, "row 1"),
    "negative": (
        lambda folder: spoil_record(folder, features=[1, 1, 0, -1, 0, 0, 0]),
        ErrorKind.OUT_OF_RANGE,
        "row 1, column 'hour",
    ),
    "fraction": (
        lambda folder: spoil_record(folder, features=[1, 0.5, 0, 1, 0, 0, 0]),
        ErrorKind.OUT_OF_RANGE,
        "row 1, column 'advertiser",
    ),
    "above the cap": (lambda folder: spoil_record(folder, features=[1, 1, 1, 1, 0, 0, 0]), ErrorKind.TOO_LARGE, "4"),
    "wrong length": (lambda folder: spoil_record(folder, features=[1, 1]), ErrorKind.INCONSISTENT, "row 1"),
    "no features file": (lambda folder: folder.features.unlink(), ErrorKind.FILE_UNREADABLE, "features.json"),
}


@pytest.mark.parametrize(("spoil", "kind", "datum"), BAD.values(), ids=BAD.keys())
def test_inputs_that_do_not_match_are_refused_and_no_model_written(
    folder: Folder, spoil: Any, kind: ErrorKind, datum: str
) -> None:
    spoil(folder)
    with raises(kind, TrefoilError) as refused:
        folder.fit()
    assert datum in str(refused.value)
    assert refused.value.hint
    assert not folder.model.exists()


def test_visitors_with_several_impressions_widen_the_intervals(folder: Folder) -> None:
    def width() -> float:
        folder.fit()
        return float(np.mean([float(row["high"]) - float(row["low"]) for row in folder.predict()]))

    alone = width()
    lines = [json.loads(line) for line in folder.records.read_text().splitlines()]
    named = [json.dumps(line | {"visitor": f"v{number // 4}"}) for number, line in enumerate(lines)]
    folder.records.write_text("\n".join(named) + "\n")
    # Four labels that may be one: up to twice as wide (Kish).
    assert width() > 1.4 * alone


def test_rows_to_predict_are_checked(folder: Folder) -> None:
    folder.fit()
    with raises(ErrorKind.INVALID_VALUE, TrefoilError) as caught:
        folder.predict("bought")
    assert "row 1" in str(caught.value) and "'bought'" in str(caught.value)
    for rows, kind in (("unknown.example,3\n", ErrorKind.UNKNOWN_NAME), ("", ErrorKind.TOO_FEW)):
        folder.rows.write_text(f"advertiser,hour\n{rows}")
        with raises(kind):
            folder.predict()
    folder.rows.write_text("advertiser,hour\na,1\nb,2\n")
    learn_features(folder.rows, folder.features, ["advertiser"], ["hour"], 2)
    with raises(ErrorKind.INCONSISTENT):
        folder.predict()


def planned(folder: Folder, reports: int, epsilon: float = 0.25, rate: float = 0.05) -> dict[str, Any]:
    plan_reports(folder.features, reports, rate, epsilon, json_file=folder.path / "plan.json")
    result: dict[str, Any] = json.loads((folder.path / "plan.json").read_text())
    return result


def test_a_plan_says_what_is_needed_and_warns(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    enough = planned(folder, 1)["reports_for_good"]
    assert [planned(folder, reports)["outlook"] for reports in (enough, enough - 1, 200)] == ["GOOD", "FAIR", "NONE"]
    assert "warning" not in capsys.readouterr().out
    planned(folder, 20_000, epsilon=2.0)
    assert "warning: a device pays at most ε = 1" in capsys.readouterr().out
    for wrong in ({"reports": 20_000, "rate": 1.5}, {"reports": 0}):
        with pytest.raises(TrefoilError):
            planned(folder, **wrong)  # wrong on purpose


# On the command line


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_commands_of_a_regression(folder: Folder) -> None:
    named = ("--features", folder.features)
    files = ("--answer", folder.answer, "--reports", folder.batch, "--records", folder.records)
    told = folder.path / "told.json"
    run("regression", "features", "--rows", folder.rows, *named, "--category", "advertiser", "--number", "hour")
    # The variance at such an ε is too small for a double.
    run("regression", "plan", *named, "--reports", 10, "--rate", 0.05, "--epsilon", 4294)
    run("regression", "plan", *named, "--reports", 20_000, "--rate", 0.05, "--json", told)
    assert json.loads(told.read_text())["outlook"] == "GOOD"
    run("regression", "fit", *files, *named, "--model", folder.model, "--json", told)
    assert json.loads(told.read_text())["verdict"] == "FITTED"
    assert "AUC" in run(
        "regression", "predict", "--model", folder.model, *named, "--rows", folder.rows, "--label", "converted"
    )
