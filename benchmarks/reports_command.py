"""`trefoil reports`: a batch of sealed reports to try things on. The body imports what it needs only when it is run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def reports(
    out: Annotated[Path, typer.Option("--out", help="The batch file to make.")],
    helpers: Annotated[Path, typer.Option("--helpers", help="The helper set, as `trefoil launch` makes it.")],
    count: Annotated[int, typer.Option(help="How many reports.")] = 10_000,
    buckets: Annotated[int, typer.Option(help="Histogram size.")] = 128,
    site: Annotated[str, typer.Option(help="For which site.")] = "shop.example",
    epsilon: Annotated[float, typer.Option(help="The ε that each device has paid for.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides what is in the reports, never their keys or nonces.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the true sums here.")] = None,
) -> None:
    """Make a batch of reports from a seeded workload, on all cores.

    Example: trefoil reports --helpers /tmp/trefoil/helpers.json --count 10000 --out shop.batch
    """
    from benchmarks.bulk_reports import MAX_VALUE, Workload, make_batch
    from protocol import console
    from protocol.epsilon import entitlement
    from protocol.helper_set import HelperSet
    from protocol.report import ReportTerms, coarse_time

    now = int(time.time())  # noqa: TID251 - an edge: the reports are made now
    terms = ReportTerms(site, site, coarse_time(now), entitlement(epsilon), 2 * MAX_VALUE, buckets, unit="purchases")
    workload = Workload(terms, count, seed)
    with console.progress("sealing", count) as advance:
        make_batch(out, workload, HelperSet.load(helpers), progress=advance)
    size = out.stat().st_size
    console.out.print(f"{count:,} reports, {size:,} bytes: {out}", highlight=False)
    console.write_json(json_file, {"reports": count, "buckets": buckets, "bytes": size, "truth": workload.truth()})
