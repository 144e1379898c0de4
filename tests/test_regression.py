"""The publisher's regression: right without noise, unique under any noise, honest about what noise has eaten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import TrefoilError
from protocol.regression.design import Design, Matrix, Noise, Rows
from protocol.regression.features import FeatureEncoding, FeatureError, Field, FieldKind, learn_encoding
from protocol.regression.fit import Sums, fit
from protocol.regression.model import FitVerdict, Model
from protocol.regression.plan import Outlook, plan
from protocol.regression.scores import area_under_curve, calibration, log_loss, roc_curve

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
    with pytest.raises(TrefoilError, match="the answer has 7 numbers and the features 8 columns"):
        Sums.of(Design(rows), np.zeros(7), QUIET)
    with pytest.raises(TrefoilError, match="whole numbers of at least 0"):
        Design(-rows)
    with pytest.raises(TrefoilError, match="intercept"):
        Design(rows[:, 1:])
    with pytest.raises(TrefoilError, match="99 groups for 100 rows"):
        Design(rows, np.arange(99))
    model = fit(Design(rows), np.zeros(8), QUIET)
    with pytest.raises(TrefoilError, match="8 features, not 5"):
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
    with pytest.raises(TrefoilError, match="is not a model"):
        Model.load(tmp_path / "model.json")
    with pytest.raises(TrefoilError, match="cannot read"):
        Model.load(tmp_path / "none.json")


ENCODING = FeatureEncoding(
    (
        Field("advertiser", FieldKind.CATEGORY, levels=("a.example", "b.example")),
        Field("price", FieldKind.NUMBER, edges=(10.0, 50.0)),
        Field("visits", FieldKind.COUNT, most=3),
    )
)


def test_a_row_becomes_a_vector_under_the_cap(tmp_path: Path) -> None:
    assert ENCODING.encode({"advertiser": "b.example", "price": 10, "visits": 2}) == (1, 0, 1, 0, 1, 0, 2)
    assert (ENCODING.columns, ENCODING.cap) == (7, 6)
    assert len(ENCODING.names) == 7
    ENCODING.save(tmp_path / "features.json")
    again = FeatureEncoding.load(tmp_path / "features.json")
    assert again == ENCODING and again.unit == ENCODING.unit
    assert FeatureEncoding(ENCODING.fields[:2]).unit != ENCODING.unit


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"advertiser": "c.example", "price": 1, "visits": 0}, "row 7, column 'advertiser': 'c.example' is not one of"),
        ({"advertiser": "a.example", "price": "much", "visits": 0}, "column 'price': 'much' is not a number"),
        ({"advertiser": "a.example", "price": float("nan"), "visits": 0}, "not a finite number"),
        ({"advertiser": "a.example", "price": 1, "visits": -1}, "whole number from 0 to 3"),
        ({"advertiser": "a.example", "price": 1, "visits": 1.5}, "whole number from 0 to 3"),
        ({"advertiser": "a.example", "price": 1}, "row 7 has no 'visits'"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_column(row: dict[str, object], said: str) -> None:
    with pytest.raises(FeatureError, match=said):
        ENCODING.encode(row, "row 7")


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
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "number", "edges": [3, 2]}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "count", "most": True}]},
        {"trefoil_features": 1, "fields": [{"name": "x", "kind": "count", "most": 1}] * 2},
    ],
)
def test_a_bad_features_file_is_refused(stored: object) -> None:
    with pytest.raises(FeatureError):
        FeatureEncoding.from_json(stored)


def test_an_encoding_is_learnt_from_records() -> None:
    records = [{"site": f"s{i % 3}.example", "age": i} for i in range(100)]
    encoding = learn_encoding(records, ["site"], ["age"])
    assert encoding.fields[0].levels == ("s0.example", "s1.example", "s2.example")
    assert encoding.fields[1].edges == (25.0, 50.0, 75.0)
    filled = np.array([encoding.encode(record) for record in records]).sum(axis=0)
    assert filled.tolist() == [100, 34, 33, 33, 25, 25, 25, 25]
    with pytest.raises(FeatureError, match="a row has no 'colour'"):
        learn_encoding(records, ["colour"], [])


def test_plan_says_what_to_expect() -> None:
    noise = Noise(100.0)
    assert plan(20_000, 0.05, 5, noise).outlook is Outlook.GOOD
    assert plan(1_000, 0.05, 5, noise).outlook is Outlook.POOR
    assert plan(100, 0.05, 5, noise).outlook is Outlook.NONE
    enough = plan(1, 0.05, 5, noise).reports_for_good
    assert plan(enough, 0.05, 5, noise).outlook is Outlook.GOOD
    assert plan(enough - 1, 0.05, 5, noise).outlook is not Outlook.GOOD
    with pytest.raises(TrefoilError, match="between 0 and 1"):
        plan(10, 1.0, 5, noise)


def test_scores() -> None:
    label = np.array([False, True, False, True])
    assert area_under_curve(np.array([0.1, 0.2, 0.3, 0.4]), label) == 0.75
    assert area_under_curve(np.zeros(4), label) == 0.5
    assert log_loss(np.full(4, 0.5), label) == pytest.approx(np.log(2))
    false, true = roc_curve(np.array([0.1, 0.2, 0.3, 0.4]), label)
    assert false.tolist() == [0, 0, 0.5, 0.5, 1] and true.tolist() == [0, 0.5, 0.5, 1, 1]
    predicted, seen, count = calibration(np.array([0.1, 0.2, 0.3, 0.4]), label, bins=2)
    assert predicted == pytest.approx([0.15, 0.35]) and seen.tolist() == [0.5, 0.5] and count.tolist() == [2, 2]
