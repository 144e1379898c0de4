"""`trefoil bench`: what things cost on this machine. Bodies import what they measure only when they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results here.")]


@bench.callback()
def bench_group() -> None:
    """Measure what things cost on this machine."""


@bench.command("report")
def bench_report(
    json_file: JsonFile = None,
    buckets: Annotated[
        list[int] | None, typer.Option("--buckets", metavar="N", help="Histogram size; repeat for several.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per figure; the best of them counts.")] = 20,
) -> None:
    """Bytes per report, and the cost of sealing and opening beside the bare HPKE calls.

    Example: trefoil bench report --json report.json
    """
    from benchmarks.report_cost import measure, show
    from protocol.console import write_json

    results = measure(buckets or [16, 128, 1024], rounds)
    show(results)
    write_json(json_file, results.to_json())
