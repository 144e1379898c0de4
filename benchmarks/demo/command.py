"""`trefoil demo`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from protocol.choices import JsonFile, NoiseChoice
from protocol.noise_mode import NoiseMode


def demo(
    reports: Annotated[int, typer.Option(help="How many conversions.")] = 2000,
    buckets: Annotated[int, typer.Option(help="How many campaigns.")] = 16,
    epsilon: Annotated[float, typer.Option(help="ε that each conversion asks for.")] = 0.5,
    noise: NoiseChoice = NoiseMode.LOCAL,
    seed: Annotated[int, typer.Option(help="Decides what people see and buy; never keys or noise.")] = 1,
    function: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attribution function, as in `trefoil device convert`.")
    ] = None,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query; 0 is off.")] = 0,
    cutoff: Annotated[float | None, typer.Option(help="Judge the answer, as in `trefoil query`.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show all of Trefoil once: people, devices, sealed reports, three helpers, one noisy answer.

    Example: trefoil demo --reports 500 --buckets 8 --json demo.json
    """
    from benchmarks.demo.demo import DemoOptions, run_demo
    from protocol.console import write_json

    options = DemoOptions(reports, buckets, epsilon, noise, seed, kappa, function, cutoff)
    shown = run_demo(options, int(time.time()))  # noqa: TID251 - an edge: commands read the real clock
    write_json(json_file, shown.to_json())
    if not shown.all_refused:
        raise typer.Exit(1)
