"""`trefoil regression` as a person sees it: what a model takes, what came of a fit, and how good predictions are."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from rich.table import Table

from protocol.batch import BatchReader
from protocol.console import out, say
from protocol.epsilon import MICROS, entitlement
from protocol.errors import TrefoilError
from protocol.noise_scale import NoiseScale, shape
from protocol.query import NoiseMode
from protocol.regression.answer_file import LabelSums
from protocol.regression.design import Matrix, Noise
from protocol.regression.evidence import row_deviations
from protocol.regression.features import FeatureEncoding, FieldKind, learn_encoding
from protocol.regression.fit import RATE_DEVIATIONS, fit
from protocol.regression.model import FitVerdict, Model
from protocol.regression.plan import plan
from protocol.regression.records import joined, load_records
from protocol.regression.scores import Labels, area_under_curve, log_loss

# What the standard leaves to devices, and ours take by default: more than this of one week nobody pays.
DEFAULT_SITE_BUDGET = 1.0
SHOWN_EFFECTS = 20
Row = Mapping[str, str]


def learn(rows: Path, categories: Sequence[str], numbers: Sequence[str], bins: int, path: Path) -> dict[str, object]:
    """Write the features file for a publisher's own records."""
    encoding = learn_encoding(read_rows(rows), categories, numbers, bins=bins)
    encoding.save(path)
    say(f"{path}: {encoding.columns} columns, a cap of {encoding.cap}, {encoding.unit}")
    return _described(encoding)


def show_plan(features: Path, reports: int, rate: float, epsilon: float, noise: NoiseMode) -> dict[str, object]:
    """What so many reports at this ε are likely to give."""
    encoding = FeatureEncoding.load(features)
    asked = noise_of(epsilon, encoding.cap, noise)
    widest = max(1 if field.kind is FieldKind.COUNT else field.columns for field in encoding.fields)
    planned = plan(reports, rate, widest, asked)
    say(f"{planned.reports:,} reports at ε = {epsilon:g}: expect {planned.outlook.value}")
    say(f"conversions per level of the widest field are {planned.ratio:.2f} times the noise; 4 is a good model")
    say(f"a good model takes about {planned.reports_for_good:,} reports")
    if epsilon > DEFAULT_SITE_BUDGET:
        say(
            f"warning: a device pays at most ε = {DEFAULT_SITE_BUDGET:g} at its default limits; these reports are zeros"
        )
    return _described(encoding) | {
        "reports": planned.reports,
        "epsilon": epsilon,
        "noise": noise.value,
        "noise_sd": asked.variance**0.5,
        "ratio": planned.ratio,
        "outlook": planned.outlook.name,
        "reports_for_good": planned.reports_for_good,
    }


def noise_of(epsilon: float, cap: int, mode: NoiseMode) -> Noise:
    """The noise in one number of an answer at this ε."""
    rate = Fraction(entitlement(epsilon), MICROS * cap)
    return Noise(NoiseScale(mode, rate, cap).variance, float(shape(mode)))


def fit_and_show(answer: Path, reports: Path, records: Path, features: Path, model: Path) -> dict[str, object]:
    """Fit the model that the answer supports, say what came of it, and keep it."""
    encoding, sums = FeatureEncoding.load(features), LabelSums.load(answer)
    batch = BatchReader(reports)
    sums.check(encoding.unit, batch.root())
    design = joined(batch, load_records(records, encoding))
    complete = sums.for_all()
    fitted = fit(design, complete.sums, complete.noise, encoding.unit)
    fitted.save(model)
    _show(fitted, encoding, sums)
    return fitted.to_json() | {"names": list(encoding.names), "file": str(model)}


def _show(model: Model, encoding: FeatureEncoding, sums: LabelSums) -> None:
    reach = RATE_DEVIATIONS * model.conversions_deviation
    say(f"{model.conversions:.0f} ± {model.conversions_deviation:.0f} conversions after {model.rows:,} impressions")
    match model.verdict:
        case FitVerdict.RATE_UNKNOWN:
            needed = reach / max(abs(model.conversions), 1.0)
            say(f"no model: {model.verdict.value}; it takes about {max(needed, 1.1):.1f} times the reports, or the ε")
        case FitVerdict.NO_EFFECT:
            say(f"no effect: {model.verdict.value}; every prediction is the rate itself")
        case FitVerdict.FITTED:
            _show_effects(model, encoding)
    say(f"noise of ±{sums.deviation:.1f} in each number; reports that a device could not pay for count as zeros")


def _show_effects(model: Model, encoding: FeatureEncoding) -> None:
    """How each level moves the log-odds against the average of its field; a count, for each one more."""
    table = Table("feature", "log-odds", "± (95 %)", title=f"a model of {model.rows:,} impressions")
    contrasts = _contrasts(encoding, model.mean) / model.scale
    effects = contrasts @ model.coefficients
    spread = model.interval_factor * row_deviations(contrasts, model.covariance[1:, 1:])
    for place in np.argsort(-np.abs(effects))[:SHOWN_EFFECTS]:
        table.add_row(encoding.names[place + 1], f"{effects[place]:+.2f}", f"{spread[place]:.2f}")
    out.print(table)


def _contrasts(encoding: FeatureEncoding, mean: Matrix) -> Matrix:
    """One row for each column. Of a one-hot field only differences mean anything: its columns add up to 1."""
    contrasts, start = np.eye(len(mean)), 0
    for field in encoding.fields:
        columns = slice(start, start + field.columns)
        if field.kind is not FieldKind.COUNT:
            contrasts[columns, columns] -= mean[columns]
        start += field.columns
    return contrasts


def predict_and_show(
    model: Path, features: Path, rows: Path, label: str | None, output: Path | None, plot: Path | None
) -> dict[str, object]:
    """Predict every row; with labels, say how good the predictions are and draw them."""
    if plot is not None and label is None:
        raise TrefoilError("--plot draws ROC and calibration, which need labels", "Name their column with --label.")
    encoding, loaded = FeatureEncoding.load(features), Model.load(model)
    if loaded.unit != encoding.unit:
        raise TrefoilError("the model was fitted with other features", "Use the features file that it was fitted with.")
    table = read_rows(rows)
    if not table:
        raise TrefoilError(f"{rows} has no rows")
    encoded = np.array([encoding.encode(row, f"{rows}, row {place}") for place, row in enumerate(table, 1)], np.float64)
    happened = None if label is None else _labels(table, label, rows)
    probability = loaded.predict(encoded)
    if output is not None:
        _write(output, probability, *loaded.interval(encoded))
    say(f"{len(table):,} predictions, {probability.mean():.4f} on average")
    result: dict[str, object] = {"rows": len(table), "mean": float(probability.mean()), "verdict": loaded.verdict.name}
    if happened is None:
        return result
    score, loss = area_under_curve(probability, happened), log_loss(probability, happened)
    say(f"AUC {score:.3f}, log-loss {loss:.4f}; {int(happened.sum()):,} rows have a conversion")
    if plot is not None:
        from protocol.places import picture_file
        from protocol.regression.drawing import draw_scores

        draw_scores(picture_file(plot, "scores"), probability, happened)
    return result | {"auc": score, "log_loss": loss}


def _labels(table: Sequence[Row], label: str, rows: Path) -> Labels:
    known = {"0": False, "1": True}
    wrong = next((place for place, row in enumerate(table, 1) if row.get(label) not in known), None)
    if wrong is not None:
        raise TrefoilError(f"{rows}, row {wrong} has no {label!r} that is 0 or 1")
    happened = np.array([known[row[label]] for row in table])
    if happened.all() or not happened.any():
        raise TrefoilError(f"every row of {rows} has the same {label!r}", "Scores need rows of both kinds.")
    return happened


def _write(path: Path, probability: Matrix, low: Matrix, high: Matrix) -> None:
    from protocol.files import write_atomically

    lines = ["probability,low,high"]
    lines += [f"{each:.6g},{least:.6g},{most:.6g}" for each, least, most in zip(probability, low, high, strict=True)]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def read_rows(path: Path) -> list[Row]:
    """A table in CSV with a header line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file, strict=True, restval=""))
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        # What Python says of bytes that are no text differs from file to file, and helps nobody.
        why = error if isinstance(error, csv.Error) else "it is not in UTF-8"
        raise TrefoilError(f"{path} is not a table: {why}", "Give a CSV file with a header line.") from None


def _described(encoding: FeatureEncoding) -> dict[str, object]:
    return {"columns": encoding.columns, "cap": encoding.cap, "unit": encoding.unit}
