"""`trefoil regression`: features, plan, fit and predict a publisher's model of which impressions lead to conversions.

`plan` compares the conversions per level of the widest field with the noise of a bucket, before any report is made.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from protocol.batch import BatchReader
from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile, NoiseChoice, check_result
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.noise import NoiseMode, NoiseScale, law_of
from protocol.querier.regression.features import (
    FeatureEncoding,
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
    area_under_curve,
    fit,
    log_loss,
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


# Our devices' default; the standard leaves it open. A report for more is null.
DEFAULT_SITE_BUDGET = 1.0
MAX_EFFECTS = 20
_LEAST_RATE, _LEAST_DEVIATION = 1e-9, 1e-9
_PREDICTIONS = "probability,low,high"
Row = Mapping[str, str]


def noise_of(epsilon: float, cap: int, mode: NoiseMode) -> Noise:
    """Return the noise in one number of an answer at this ε."""
    rate = Fraction(entitlement(epsilon), MICROS * cap)
    return Noise(NoiseScale(mode, rate, cap).variance, float(law_of(mode).shape))


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
    noise = f"noise of ±{math.sqrt(sums.noise.variance):.1f} in each number"
    say(f"{noise}; reports that a device could not pay for count as zeros")


def _show_effects(model: Model, encoding: FeatureEncoding) -> None:
    """Print how each level changes the log-odds against the average of its field."""
    table = Table("feature", "log-odds", "± (95 %)", title=f"a model of {model.rows:,} impressions")
    contrasts = _contrasts(encoding, model.mean) / model.scale
    effects = contrasts @ model.coefficients
    spread = model.interval_factor * row_deviations(contrasts, model.covariance[1:, 1:])
    for place in np.argsort(-np.abs(effects))[:MAX_EFFECTS]:
        table.add_row(encoding.names[place + 1], f"{effects[place]:+.2f}", f"{spread[place]:.2f}")
    out.print(table)


def _contrasts(encoding: FeatureEncoding, mean: Matrix) -> Matrix:
    """Return one contrast per column. Only differences within a field are identified: its columns sum to 1."""
    contrasts, start = np.eye(len(mean)), 0
    for field in encoding.fields:
        columns = slice(start, start + field.columns)
        contrasts[columns, columns] -= mean[columns]
        start += field.columns
    return contrasts


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
    lines = [_PREDICTIONS]
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
    check_result("--features", features, r'\{\s*"trefoil_features"')
    encoding = learn_encoding(read_rows(rows), category or [], number or [], bins=bins)
    encoding.save(features)
    say(f"{features}: {encoding.columns} columns, a cap of {encoding.cap}, {encoding.unit}")
    write_json(json_file, _summary(encoding))


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
    if reports < 1:
        raise TrefoilError("a plan takes at least one report", kind=ErrorKind.TOO_FEW)
    if not (_LEAST_RATE <= rate < 1):
        raise TrefoilError(f"a conversion rate is {_LEAST_RATE:g} to 1, not {rate}", kind=ErrorKind.OUT_OF_RANGE)
    encoding = FeatureEncoding.load(features)
    # At an ε of hundreds the variance is too small for a double, and 0.
    deviation = max(math.sqrt(noise_of(epsilon, encoding.cap, noise).variance), _LEAST_DEVIATION)
    per_report = rate / max(field.columns for field in encoding.fields)
    ratio, enough = reports * per_report / deviation, math.ceil(_LEAST[Outlook.GOOD] * deviation / per_report)
    outlook = next((name for name, least in _LEAST.items() if ratio >= least), Outlook.NONE)
    say(f"{reports:,} reports at ε = {epsilon:g}: expect {outlook.value}")
    say(f"conversions per level of the widest field are {ratio:.2f} times the noise; 4 is a good model")
    say(f"a good model takes about {enough:,} reports")
    if epsilon > DEFAULT_SITE_BUDGET:
        say(f"warning: a device pays at most ε = {DEFAULT_SITE_BUDGET:g} at its default limits; these reports are null")
    question = {"reports": reports, "epsilon": epsilon, "noise": noise.value, "noise_sd": deviation}
    expected = {"ratio": ratio, "outlook": outlook.name, "reports_for_good": enough}
    write_json(json_file, _summary(encoding) | question | expected)


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
    check_result("--model", model, r'\{\s*"trefoil_model"')
    encoding, sums = FeatureEncoding.load(features), LabelSums.load(answer)
    batch = BatchReader(reports)
    sums.check(encoding.unit, batch.root())
    design = join_features(batch, load_records(records, encoding))
    complete = sums.for_all()
    fitted = fit(design, complete.sums, complete.noise, encoding.unit)
    fitted.save(model)
    _show(fitted, encoding, sums)
    write_json(json_file, fitted.to_json() | {"names": encoding.names, "file": str(model)})


@regression.command("predict")
def predict_rows(
    model: Annotated[Path, typer.Option(metavar="FILE", help="The model.")],
    features: Features,
    rows: TableFile,
    label: Annotated[str | None, typer.Option(help="A column of 0 and 1, to score the predictions by.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", metavar="CSV", help="Write each prediction and its interval.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Predict the probability of a conversion after each impression; with --label, score the predictions.

    Example: trefoil regression predict --model model.json --features features.json --rows tomorrow.csv --out rates.csv
    """
    if output is not None:
        check_result("--out", output, _PREDICTIONS)
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
    if labels is not None:
        score, loss = area_under_curve(probability, labels), log_loss(probability, labels)
        say(f"AUC {score:.3f}, log-loss {loss:.4f}; {int(labels.sum()):,} rows have a conversion")
        result |= {"auc": score, "log_loss": loss}
    write_json(json_file, result)
