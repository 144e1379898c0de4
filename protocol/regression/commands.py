"""`trefoil regression`: a publisher's model of which impressions lead to conversions. Bodies import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import JsonFile, NoiseChoice, PlotPlace
from protocol.noise_mode import NoiseMode

regression = typer.Typer(
    help="Learn from conversions that nobody shows you: plan, fit and use a logistic regression.", no_args_is_help=True
)

Features = Annotated[Path, typer.Option(metavar="FILE", help="The features file.", show_default=False)]
Table = Annotated[Path, typer.Option("--rows", metavar="CSV", help="Impressions, one a row.", show_default=False)]


@regression.command("features")
def learn_features(
    rows: Table,
    features: Features,
    category: Annotated[list[str] | None, typer.Option(help="A column of names; repeatable.")] = None,
    number: Annotated[list[str] | None, typer.Option(help="A column of numbers, cut in bins; repeatable.")] = None,
    bins: Annotated[int, typer.Option(help="Into how many bins.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Describe how an impression becomes a vector, from your own records of impressions.

    Example: trefoil regression features --rows shown.csv --category advertiser --number hour --features features.json
    """
    from protocol.console import write_json
    from protocol.regression.view import learn

    write_json(json_file, learn(rows, category or [], number or [], bins, features))


@regression.command("plan")
def plan_reports(
    features: Features,
    reports: Annotated[int, typer.Option(help="How many reports you expect.")],
    rate: Annotated[float, typer.Option(help="How often a conversion follows, such as 0.05.")],
    epsilon: Annotated[float, typer.Option(help="The ε that devices will be asked for.")] = 0.25,
    noise: NoiseChoice = NoiseMode.LOCAL,
    json_file: JsonFile = None,
) -> None:
    """Say what a model takes, before any device is asked.

    Example: trefoil regression plan --features features.json --reports 20000 --rate 0.05
    """
    from protocol.console import write_json
    from protocol.regression.view import show_plan

    write_json(json_file, show_plan(features, reports, rate, epsilon, noise))


@regression.command("fit")
def fit_model(
    answer: Annotated[Path, typer.Option(metavar="FILE", help="What trefoil query --json wrote.")],
    reports: Annotated[Path, typer.Option(metavar="FILE", help="The batch that it was asked about.")],
    records: Annotated[Path, typer.Option(metavar="FILE", help="What trefoil device label --records wrote.")],
    features: Features,
    model: Annotated[Path, typer.Option(metavar="FILE", help="Write the model here.")],
    json_file: JsonFile = None,
) -> None:
    """Fit the model that one answer supports; decline in words where the noise has eaten it.

    Example: trefoil regression fit --answer answer.json --reports news.batch --records news.records
    --features features.json --model model.json
    """
    from protocol.console import write_json
    from protocol.regression.view import fit_and_show

    write_json(json_file, fit_and_show(answer, reports, records, features, model))


@regression.command("predict")
def predict_rows(
    model: Annotated[Path, typer.Option(metavar="FILE", help="The model.")],
    features: Features,
    rows: Table,
    label: Annotated[str | None, typer.Option(help="A column of 0 and 1, to score the predictions by.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", metavar="CSV", help="Write each prediction and its interval.")
    ] = None,
    plot: PlotPlace = None,
    json_file: JsonFile = None,
) -> None:
    """Predict how likely a conversion is after each impression. With --label, --plot draws ROC and calibration.

    Example: trefoil regression predict --model model.json --features features.json --rows tomorrow.csv --out rates.csv
    """
    from protocol.console import write_json
    from protocol.regression.view import predict_and_show

    write_json(json_file, predict_and_show(model, features, rows, label, output, plot))
