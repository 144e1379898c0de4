"""`trefoil reports`: a batch of sealed reports to try things on. The body imports what it needs only when it is run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.choices import JsonFile

if TYPE_CHECKING:
    from rich.table import Table

    from protocol.header import ReportTerms


def reports(
    out: Annotated[Path, typer.Option("--out", help="The batch file to make.")],
    helpers: Annotated[Path, typer.Option("--helpers", help="The helper set, as `trefoil launch` makes it.")],
    count: Annotated[int, typer.Option(help="How many reports.")] = 10_000,
    buckets: Annotated[int, typer.Option(help="Histogram size.")] = 128,
    site: Annotated[str, typer.Option(help="For which site.")] = "shop.example",
    epsilon: Annotated[float, typer.Option(help="The ε that each device has paid for.")] = 1.0,
    skew: Annotated[float, typer.Option(help="How uneven the buckets are: 0 all alike, 1 a few large ones.")] = 0.0,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query; 0 is off.")] = 0,
    flagged: Annotated[float, typer.Option(help="Share of reports that no week could pay for; needs --kappa.")] = 0.0,
    show_truth: Annotated[
        bool, typer.Option("--show-truth", help="Print what an answer without noise would be.")
    ] = False,
    invalid: Annotated[int, typer.Option(help="So many lying devices besides, of every kind in turn.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is in the reports, never their keys or nonces.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Make a batch of reports from a seeded workload, on all cores.

    Example: trefoil reports --helpers /tmp/trefoil/helpers.json --count 10000 --skew 1 --show-truth --out shop.batch
    """
    from benchmarks.bulk_reports import Workload, make_batch
    from protocol import console
    from protocol.helper_set import HelperSet
    from protocol.places import check_file

    terms = _terms(site, epsilon, buckets, kappa)
    check_file("--out", out)
    workload = Workload(terms, count, seed, skew, flagged, invalid)
    with console.progress("sealing", count) as advance:
        make_batch(out, workload, HelperSet.load(helpers), progress=advance)
    size = out.stat().st_size
    lying = f" and {invalid:,} of lying devices" if invalid else ""
    console.say(f"{count:,} reports{lying}, {size:,} bytes: {out}")
    truth = workload.truth()
    if show_truth:
        console.out.print(_table(truth[:buckets], terms.unit))
        if kappa:
            console.say(f"reports of devices that could not pay: {truth[buckets] // kappa:,}")
    made = {"reports": count, "invalid": invalid, "buckets": buckets, "bytes": size, "truth": truth}
    console.write_json(json_file, made)


def _terms(site: str, epsilon: float, buckets: int, kappa: int) -> ReportTerms:
    """What devices promise of reports that are made now."""
    from benchmarks.bulk_reports import MAX_VALUE
    from protocol.epsilon import entitlement
    from protocol.header import ReportTerms, coarse_time

    hour = coarse_time(int(time.time()))  # noqa: TID251 - an edge: the reports are made now
    paid, most = entitlement(epsilon), 2 * MAX_VALUE
    return ReportTerms(site, site, hour, paid, most, buckets, kappa, unit="purchases", cap=MAX_VALUE, spread=1)


def _table(truth: Sequence[int], unit: str) -> Table:
    from rich.table import Table

    from protocol.console import add_bars, bar
    from protocol.querier.view import MAX_ROWS

    table = Table(title="the truth, which only a simulation knows")
    table.add_column("bucket", justify="right")
    table.add_column(unit, justify="right")
    add_bars(table)
    for bucket, value in enumerate(truth[:MAX_ROWS]):
        table.add_row(str(bucket), str(value), bar(value, max(1, *truth)))
    return table
