"""`trefoil regression`: a publisher's model of which impressions lead to conversions.

`plan` estimates the reports that a model needs, before any is requested: conversions per level against the noise of a
bucket. Then follow features, fit and predict, the plot of scores, and the commands.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from protocol.batch import BatchReader
from protocol.cli.console import new_figure, out, picture_file, save_figure, say, write_json
from protocol.cli.options import JsonFile, NoiseChoice, PlotPlace
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.noise import NoiseMode, NoiseScale, law_of
from protocol.querier.regression.features import (
    FeatureEncoding,
    FieldKind,
    LabelSums,
    join_features,
    learn_encoding,
    load_records,
)
from protocol.querier.regression.model import (
    RATE_DEVIATIONS,
    FitVerdict,
    Labels,
    Matrix,
    Model,
    Noise,
    Numbers,
    area_under_curve,
    calibration,
    fit,
    log_loss,
    roc_curve,
    row_deviations,
)
from protocol.units import MICROS, entitlement


class Outlook(Enum):
    """What to expect of a ratio of conversions per level to noise, from `trefoil experiment regression`."""

    GOOD = "most of the possible gain"
    FAIR = "about half of the possible gain"
    POOR = "little of the possible gain; the fit may be declined"
    NONE = "nothing; the fit will be declined"


_LEAST = {Outlook.GOOD: 4.0, Outlook.FAIR: 2.0, Outlook.POOR: 0.9}


@dataclass(frozen=True, slots=True)
class RegressionPlan:
    """The estimate. `ratio` is the conversions per level of the widest field, divided by one bucket's noise."""

    reports: int
    ratio: float
    outlook: Outlook
    reports_for_good: int


def plan(reports: int, rate: float, widest_field: int, noise: Noise) -> RegressionPlan:
    """Return the estimate for a conversion `rate` and the number of levels of the widest field."""
    if reports < 1 or widest_field < 1:
        raise TrefoilError("a plan takes at least one report and one level", kind=ErrorKind.TOO_FEW)
    if not (0 < rate < 1):
        raise TrefoilError(f"a conversion rate is between 0 and 1, not {rate}", kind=ErrorKind.OUT_OF_RANGE)
    deviation = math.sqrt(noise.variance)
    each = rate / widest_field
    ratio = reports * each / deviation if deviation else math.inf
    outlook = next((name for name, least in _LEAST.items() if ratio >= least), Outlook.NONE)
    return RegressionPlan(reports, ratio, outlook, math.ceil(_LEAST[Outlook.GOOD] * deviation / each))


def draw_scores(path: Path, probability: Numbers, label: Labels) -> None:
    """Draw the ROC curve on the left, and calibration on the right."""
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    false, true = roc_curve(probability, label)
    left.plot(false, true, color="#4c72b0")
    left.plot([0, 1], [0, 1], color="#999999", linestyle=":")
    left.set_xlabel("impressions without a conversion, share above the threshold")
    left.set_ylabel("with a conversion")
    left.set_title(f"ROC, area {area_under_curve(probability, label):.3f}")
    predicted, observed, counts = calibration(probability, label)
    # Two standard deviations of a binomial fraction.
    reach = 2 * (observed * (1 - observed) / counts) ** 0.5
    right.errorbar(predicted, observed, yerr=reach, fmt="o", color="#4c72b0", capsize=2)
    largest = float(max(predicted.max(), observed.max()))
    right.plot([0, largest], [0, largest], color="#999999", linestyle=":")
    right.set_xlabel("predicted rate")
    right.set_ylabel("observed rate")
    right.set_title("calibration, in tenths")
    save_figure(path, figure)


# Our devices' default; the standard leaves it open. A report for more is null.
DEFAULT_SITE_BUDGET = 1.0
MAX_EFFECTS = 20
Row = Mapping[str, str]


def learn(rows: Path, categories: Sequence[str], numbers: Sequence[str], bins: int, path: Path) -> dict[str, object]:
    """Learn an encoding from a publisher's rows and write the features file."""
    encoding = learn_encoding(read_rows(rows), categories, numbers, bins=bins)
    encoding.save(path)
    say(f"{path}: {encoding.columns} columns, a cap of {encoding.cap}, {encoding.unit}")
    return _summary(encoding)


def show_plan(features: Path, reports: int, rate: float, epsilon: float, noise: NoiseMode) -> dict[str, object]:
    """Print and return the estimate for a number of reports at this ε."""
    encoding = FeatureEncoding.load(features)
    bucket_noise = noise_of(epsilon, encoding.cap, noise)
    widest = max(1 if field.kind is FieldKind.COUNT else field.columns for field in encoding.fields)
    estimate = plan(reports, rate, widest, bucket_noise)
    say(f"{estimate.reports:,} reports at ε = {epsilon:g}: expect {estimate.outlook.value}")
    say(f"conversions per level of the widest field are {estimate.ratio:.2f} times the noise; 4 is a good model")
    say(f"a good model takes about {estimate.reports_for_good:,} reports")
    if epsilon > DEFAULT_SITE_BUDGET:
        say(f"warning: a device pays at most ε = {DEFAULT_SITE_BUDGET:g} at its default limits; these reports are null")
    return _summary(encoding) | {
        "reports": estimate.reports,
        "epsilon": epsilon,
        "noise": noise.value,
        "noise_sd": bucket_noise.variance**0.5,
        "ratio": estimate.ratio,
        "outlook": estimate.outlook.name,
        "reports_for_good": estimate.reports_for_good,
    }


def noise_of(epsilon: float, cap: int, mode: NoiseMode) -> Noise:
    """Return the noise in one number of an answer at this ε."""
    rate = Fraction(entitlement(epsilon), MICROS * cap)
    return Noise(NoiseScale(mode, rate, cap).variance, float(law_of(mode).shape))


def fit_and_show(answer: Path, reports: Path, records: Path, features: Path, model: Path) -> dict[str, object]:
    """Fit the model that the answer supports, print its verdict and effects, and save it."""
    encoding, sums = FeatureEncoding.load(features), LabelSums.load(answer)
    batch = BatchReader(reports)
    sums.check(encoding.unit, batch.root())
    design = join_features(batch, load_records(records, encoding))
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
    """Print how each level changes the log-odds against the average of its field; for a count, per unit."""
    table = Table("feature", "log-odds", "± (95 %)", title=f"a model of {model.rows:,} impressions")
    contrasts = _contrasts(encoding, model.mean) / model.scale
    effects = contrasts @ model.coefficients
    spread = model.interval_factor * row_deviations(contrasts, model.covariance[1:, 1:])
    for place in np.argsort(-np.abs(effects))[:MAX_EFFECTS]:
        table.add_row(encoding.names[place + 1], f"{effects[place]:+.2f}", f"{spread[place]:.2f}")
    out.print(table)


def _contrasts(encoding: FeatureEncoding, mean: Matrix) -> Matrix:
    """Return one contrast per column. Only differences within a one-hot field are identified: its columns sum to 1."""
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
    """Predict every row; with labels, score the predictions and draw the scores."""
    if plot is not None and label is None:
        message = "--plot draws ROC and calibration, which need labels"
        raise TrefoilError(message, "Name their column with --label.", kind=ErrorKind.MISSING_OPTION)
    encoding, loaded = FeatureEncoding.load(features), Model.load(model)
    if loaded.unit != encoding.unit:
        hint = "Use the features file that it was fitted with."
        raise TrefoilError("the model was fitted with other features", hint, kind=ErrorKind.INCONSISTENT)
    table = read_rows(rows)
    if not table:
        raise TrefoilError(f"{rows} has no rows", kind=ErrorKind.TOO_FEW)
    encoded = np.array([encoding.encode(row, f"{rows}, row {place}") for place, row in enumerate(table, 1)], np.float64)
    labels = None if label is None else _labels(table, label, rows)
    probability = loaded.predict(encoded)
    if output is not None:
        _write(output, probability, *loaded.interval(encoded))
    say(f"{len(table):,} predictions, {probability.mean():.4f} on average")
    result: dict[str, object] = {"rows": len(table), "mean": float(probability.mean()), "verdict": loaded.verdict.name}
    if labels is None:
        return result
    score, loss = area_under_curve(probability, labels), log_loss(probability, labels)
    say(f"AUC {score:.3f}, log-loss {loss:.4f}; {int(labels.sum()):,} rows have a conversion")
    if plot is not None:
        draw_scores(picture_file(plot, "scores"), probability, labels)
    return result | {"auc": score, "log_loss": loss}


def _labels(table: Sequence[Row], label: str, rows: Path) -> Labels:
    values = {"0": False, "1": True}
    wrong = next((place for place, row in enumerate(table, 1) if row.get(label) not in values), None)
    if wrong is not None:
        raise TrefoilError(f"{rows}, row {wrong} has no {label!r} that is 0 or 1", kind=ErrorKind.INVALID_VALUE)
    labels = np.array([values[row[label]] for row in table])
    if labels.all() or not labels.any():
        message = f"every row of {rows} has the same {label!r}"
        raise TrefoilError(message, "Scores need rows of both kinds.", kind=ErrorKind.TOO_FEW)
    return labels


def _write(path: Path, probability: Matrix, low: Matrix, high: Matrix) -> None:
    lines = ["probability,low,high"]
    lines += [f"{each:.6g},{least:.6g},{most:.6g}" for each, least, most in zip(probability, low, high, strict=True)]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file with a header line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file, strict=True, restval=""))
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None
    except (csv.Error, UnicodeDecodeError) as error:
        # Python's message about invalid UTF-8 names a byte, which does not help.
        why = error if isinstance(error, csv.Error) else "it is not in UTF-8"
        message = f"{path} is not a table: {why}"
        raise TrefoilError(message, "Give a CSV file with a header line.", kind=ErrorKind.MALFORMED) from None


def _summary(encoding: FeatureEncoding) -> dict[str, object]:
    return {"columns": encoding.columns, "cap": encoding.cap, "unit": encoding.unit}


regression = typer.Typer(
    help="Learn from conversions that stay private: plan, fit and use a logistic regression.", no_args_is_help=True
)

Features = Annotated[Path, typer.Option(metavar="FILE", help="The features file.", show_default=False)]
TableFile = Annotated[Path, typer.Option("--rows", metavar="CSV", help="Impressions, one a row.", show_default=False)]


@regression.command("features")
def learn_features(
    rows: TableFile,
    features: Features,
    category: Annotated[list[str] | None, typer.Option(help="A column of names; repeatable.")] = None,
    number: Annotated[list[str] | None, typer.Option(help="A column of numbers, cut in bins; repeatable.")] = None,
    bins: Annotated[int, typer.Option(help="The number of bins.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Describe how an impression becomes a vector, from your own records of impressions.

    Example: trefoil regression features --rows shown.csv --category advertiser --number hour --features features.json
    """
    write_json(json_file, learn(rows, category or [], number or [], bins, features))


@regression.command("plan")
def plan_reports(
    features: Features,
    reports: Annotated[int, typer.Option(help="How many reports you expect.")],
    rate: Annotated[float, typer.Option(help="The conversion rate, such as 0.05.")],
    epsilon: Annotated[float, typer.Option(help="The ε of each report.")] = 0.25,
    noise: NoiseChoice = NoiseMode.LOCAL,
    json_file: JsonFile = None,
) -> None:
    """Estimate what a model needs, before any report is requested.

    Example: trefoil regression plan --features features.json --reports 20000 --rate 0.05
    """
    write_json(json_file, show_plan(features, reports, rate, epsilon, noise))


@regression.command("fit")
def fit_model(
    answer: Annotated[Path, typer.Option(metavar="FILE", help="The answer of trefoil query --json.")],
    reports: Annotated[Path, typer.Option(metavar="FILE", help="The batch that was queried.")],
    records: Annotated[Path, typer.Option(metavar="FILE", help="The records of trefoil device label.")],
    features: Features,
    model: Annotated[Path, typer.Option(metavar="FILE", help="Write the model here.")],
    json_file: JsonFile = None,
) -> None:
    """Fit the model that one answer supports, or say that noise hides it.

    Example: trefoil regression fit --answer answer.json --reports news.batch --records news.records
    --features features.json --model model.json
    """
    write_json(json_file, fit_and_show(answer, reports, records, features, model))


@regression.command("predict")
def predict_rows(
    model: Annotated[Path, typer.Option(metavar="FILE", help="The model.")],
    features: Features,
    rows: TableFile,
    label: Annotated[str | None, typer.Option(help="A column of 0 and 1, to score the predictions by.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", metavar="CSV", help="Write each prediction and its interval.")
    ] = None,
    plot: PlotPlace = None,
    json_file: JsonFile = None,
) -> None:
    """Predict the probability of a conversion after each impression. With --label, --plot draws ROC and calibration.

    Example: trefoil regression predict --model model.json --features features.json --rows tomorrow.csv --out rates.csv
    """
    write_json(json_file, predict_and_show(model, features, rows, label, output, plot))
