"""`trefoil collect` and `trefoil batch`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from protocol.cli.console import out as console
from protocol.cli.console import say, write_json
from protocol.cli.options import JsonFile, check_file, check_folder
from protocol.cli.stopping import stop_event
from protocol.collector.batches import Every, check, closed_shelves, date_of, export, merge, split, summary
from protocol.collector.limits import CollectorLimits
from protocol.collector.server import PATH, collecting
from protocol.collector.store import StoreReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import remove_on_failure
from protocol.helper_set import HelperSet
from protocol.querier.spending import BatchSpending, spending_of
from protocol.units import DAY, show

app = typer.Typer(help="collector")
batch = typer.Typer(help="Batches of sealed reports: list, merge, split, check.", no_args_is_help=True)
app.add_typer(batch, name="batch")

Batches = Annotated[list[Path], typer.Argument(help="Batch files.")]


@app.command()
def collect(
    folder: Annotated[Path, typer.Argument(help="The folder that the reports are stored in.")],
    site: Annotated[list[str], typer.Option(help="A site to accept reports for; repeatable.")],
    certificate: Annotated[Path, typer.Option(help="The TLS certificate, PEM.")],
    key: Annotated[Path, typer.Option(help="Its private key, PEM.")],
    helpers: Annotated[
        list[Path] | None, typer.Option(help="Accept only reports sealed to this helper set; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any.")] = 8600,
    per_second: Annotated[int, typer.Option(min=1, help="Reports per second and site, in the long run.")] = 2_000,
    per_address: Annotated[int, typer.Option(min=1, help="Reports per second of one address, in the long run.")] = 10,
    site_megabytes: Annotated[int, typer.Option(min=1, help="The quota of one site.")] = 8_192,
    json: JsonFile = None,
) -> None:
    """Take sealed reports over HTTPS until interrupted. POST one report to /reports.

    Example: trefoil collect collected --site shop.example --certificate tls.crt --key tls.key
    """
    check_folder("FOLDER", folder)
    limits = CollectorLimits(
        sites=frozenset(site),
        helper_sets=frozenset(HelperSet.load(path).digest for path in helpers or ()),
        per_second=per_second,
        burst=5 * per_second,
        per_address=per_address,
        site_bytes=site_megabytes * 2**20,
    )

    async def serve() -> None:
        stop = stop_event()
        async with collecting(folder, limits, host, port, (certificate, key), _now) as bound:
            url = f"https://{host}:{bound}{PATH}"
            say(f"collecting reports of {', '.join(sorted(site))} at {url}; Ctrl-C stops")
            write_json(json, {"url": url, "folder": str(folder), "sites": sorted(site)})
            await stop.wait()
        say(f"stopped; every acknowledged report is in {folder}")

    asyncio.run(serve())


@batch.command("ls")
def batch_ls(
    paths: Annotated[list[Path], typer.Argument(help="Batch files, or folders of trefoil collect.")],
    json: JsonFile = None,
) -> None:
    """List what batches or a collector's folder hold, from public headers, and what is left by the saved queries.

    Example: trefoil batch ls shop.batch
    """
    rows = [row for path in paths for row in _rows(path)]
    spent = {str(each.path): each for each in spending_of([path for path in paths if not path.is_dir()])}
    for row in rows:
        if (each := spent.get(str(row.get("batch")))) is not None:
            least, most = each.left
            row |= {"paid_micros": each.paid, "left_micros": [least, most], "left_exact": each.sure}
    table = Table("where", "site", "kind", "what", "day")
    for heading in ("reports", "paid", "left"):
        table.add_column(heading, justify="right")
    for row in rows:
        where = row.get("batch", row.get("collector"))
        dates = sorted({date_of(int(str(row[end]))) for end in ("oldest", "newest")})
        cells = [", ".join(map(str, row[part])) for part in ("sites", "kinds", "descriptions")]  # type: ignore[call-overload]
        amounts = _amounts(spent.get(str(row.get("batch"))))
        table.add_row(str(where), *cells, " to ".join(dates), f"{row['reports']:,}", *amounts)
    console.print(table)
    for row in rows:
        if row["malformed"]:
            say(f"{row['batch']}: {row['malformed']:,} more records are no reports; helpers leave them out")
    write_json(json, rows)


def _amounts(spent: BatchSpending | None) -> tuple[str, str]:
    """Return what reports paid and what is left of them by the querier's own record; empty for a collector's folder."""
    if spent is None:
        return "", ""
    least, most = (show(amount) for amount in spent.left)
    left = least if least == most else f"{least} to {most}"
    return show(spent.paid), left if spent.sure else f"at least {left}"


def _rows(path: Path) -> list[dict[str, object]]:
    """Return one row for a batch, or one for each shelf of a collector's folder."""
    if not path.is_dir():
        return [summary(path).to_json()]
    with StoreReader(path) as store:
        return [
            {
                "collector": str(path),
                "sites": [shelf.site],
                "kinds": [shelf.kind],
                "descriptions": [shelf.description],
                "reports": shelf.reports,
                "repeated": 0,
                "malformed": 0,
                "oldest": shelf.hour,
                "newest": shelf.hour,
            }
            for shelf in store.shelves()
        ]


@batch.command("merge")
def batch_merge(
    paths: Batches, out: Annotated[Path, typer.Option(help="The new batch.")], json: JsonFile = None
) -> None:
    """Merge several batches of one site into a new one, without duplicates.

    Example: trefoil batch merge monday.batch tuesday.batch --out both.batch
    """
    check_file("--out", out)
    count = merge(paths, out)
    say(f"{count:,} reports in {out}")
    write_json(json, {"batch": str(out), "reports": count})


@batch.command("split")
def batch_split(
    path: Annotated[Path, typer.Argument(help="A batch file, or a folder of trefoil collect.")],
    out: Annotated[Path, typer.Option(help="The folder for the new batches.")],
    by: Annotated[Literal["day", "kind"], typer.Option(help="What each new batch has in common.")] = "day",
    json: JsonFile = None,
) -> None:
    """Split a batch, or a collector's folder, into one batch for each day (UTC) or kind.

    Example: trefoil batch split shop.batch --out days
    """
    check_folder("--out", out)
    targets = _export_days(path, out) if path.is_dir() else split(path, out, by_kind=by == "kind")
    for target in targets:
        say(str(target))
    write_json(json, [str(target) for target in targets])


def _export_days(folder: Path, out: Path) -> list[Path]:
    with StoreReader(folder) as store:
        days = closed_shelves(store.shelves(), Every.DAY, _now())
        if not days:
            newest = max((shelf.hour for shelf in store.shelves()), default=None)
            if newest is None:
                hint = "Post some to trefoil collect; trefoil batch ls shows what has come."
                raise TrefoilError(f"{folder} holds no reports yet", hint, kind=ErrorKind.TOO_FEW)
            message = f"{folder} holds reports of {date_of(newest)} only, a day that still takes reports"
            hint = f"A day can be split off an hour after it ends: from {date_of(newest + DAY)} 01:00 UTC on."
            raise TrefoilError(message, hint, kind=ErrorKind.TOO_FEW)
        targets = {
            out / f"{shelves[0].site}-{kind}-{date_of(start)}.batch": shelves
            for (kind, start), shelves in sorted(days.items())
        }
        with remove_on_failure(*targets):
            for target, shelves in targets.items():
                export(store, shelves, target)
    return list(targets)


@batch.command("check")
def batch_check(paths: Batches, json: JsonFile = None) -> None:
    """Check that each batch is undamaged, has no duplicates, and can be counted by one query; say by which.

    A query counts reports that paid for its ε or more, and are of its kind in all else.

    Example: trefoil batch check shop.batch
    """
    batches = [check(path) for path in paths]
    for each in batches:
        say(f"{each.path}: {each.reports:,} reports of {each.sites[0]}, {each.counted_by[0].description}")
        if len(each.counted_by) > 1:
            for query in each.counted_by:
                say(f"  query --kind {query.kind} counts {query.reports:,} of them: {query.description}")
    write_json(json, [each.to_json() for each in batches])


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
