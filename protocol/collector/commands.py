"""`trefoil collect` and `trefoil batch`. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from protocol.choices import JsonFile

app = typer.Typer(help="collector")
batch = typer.Typer(help="Batches of sealed reports: list, merge, split, check.", no_args_is_help=True)
app.add_typer(batch, name="batch")

Batches = Annotated[list[Path], typer.Argument(help="Batch files.")]


@app.command()
def collect(
    folder: Annotated[Path, typer.Argument(help="Where the reports are kept.")],
    site: Annotated[list[str], typer.Option(help="A site whose reports are taken; once for each.")],
    certificate: Annotated[Path, typer.Option(help="The TLS certificate, PEM.")],
    key: Annotated[Path, typer.Option(help="Its private key, PEM.")],
    helpers: Annotated[
        list[Path] | None, typer.Option(help="Take only reports sealed to this helper set; once for each.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any.")] = 8600,
    per_second: Annotated[int, typer.Option(min=1, help="Reports of one site a second, in the long run.")] = 2_000,
    site_megabytes: Annotated[int, typer.Option(min=1, help="Room for one site.")] = 8_192,
    json: JsonFile = None,
) -> None:
    """Take sealed reports over HTTPS until interrupted. POST one report to /reports.

    Example: trefoil collect collected --site shop.example --certificate tls.crt --key tls.key
    """
    import asyncio

    from protocol.collector.limits import CollectorLimits
    from protocol.collector.server import PATH, collecting
    from protocol.console import say, write_json
    from protocol.helper_set import HelperSet
    from protocol.places import check_folder
    from protocol.stopping import stop_event

    check_folder("FOLDER", folder)
    limits = CollectorLimits(
        sites=frozenset(site),
        helper_sets=frozenset(HelperSet.load(path).digest for path in helpers or ()),
        per_second=per_second,
        burst=5 * per_second,
        site_bytes=site_megabytes * 2**20,
    )

    async def serve() -> None:
        stop = stop_event()
        async with collecting(folder, limits, host, port, (certificate, key), _now) as bound:
            url = f"https://{host}:{bound}{PATH}"
            say(f"collecting reports of {', '.join(sorted(site))} at {url}; Ctrl-C stops")
            write_json(json, {"url": url, "folder": str(folder), "sites": sorted(site)})
            await stop.wait()
        say(f"stopped; everything that was acknowledged is in {folder}")

    asyncio.run(serve())


@batch.command("ls")
def batch_ls(
    paths: Annotated[list[Path], typer.Argument(help="Batch files, or folders of trefoil collect.")],
    json: JsonFile = None,
) -> None:
    """What batches or a collector's folder hold, from public headers alone.

    Example: trefoil batch ls shop.batch
    """
    from rich.table import Table

    from protocol.collector.batches import date_of, summary
    from protocol.collector.store import StoreReader
    from protocol.console import out, write_json

    rows: list[dict[str, object]] = []
    for path in paths:
        if path.is_dir():
            with StoreReader(path) as store:
                rows += [
                    {
                        "collector": str(path),
                        "sites": [shelf.site],
                        "kinds": [shelf.kind],
                        "descriptions": [shelf.description],
                        "reports": shelf.reports,
                        "repeated": 0,
                        "oldest": shelf.hour,
                        "newest": shelf.hour,
                    }
                    for shelf in store.shelves()
                ]
        else:
            rows.append(summary(path).to_json())
    table = Table("where", "site", "kind", "what", "day")
    table.add_column("reports", justify="right")
    for row in rows:
        where = row.get("batch", row.get("collector"))
        days = sorted({date_of(int(str(row[end]))) for end in ("oldest", "newest")})
        words = [", ".join(map(str, row[part])) for part in ("sites", "kinds", "descriptions")]  # type: ignore[call-overload]
        table.add_row(str(where), *words, " to ".join(days), f"{row['reports']:,}")
    out.print(table)
    write_json(json, rows)


@batch.command("merge")
def batch_merge(
    paths: Batches, out: Annotated[Path, typer.Option(help="The new batch.")], json: JsonFile = None
) -> None:
    """Put several batches of one shape into a new one, each report once.

    Example: trefoil batch merge monday.batch tuesday.batch --out both.batch
    """
    from protocol.collector.batches import merge
    from protocol.console import say, write_json
    from protocol.places import check_file

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
    """Cut a batch, or everything a collector has, into one batch for each day (UTC) or kind.

    Example: trefoil batch split shop.batch --out days
    """
    from protocol.collector.batches import days, export, split
    from protocol.collector.store import StoreReader
    from protocol.console import say, write_json
    from protocol.places import check_folder

    check_folder("--out", out)
    if path.is_dir():
        with StoreReader(path) as store:
            made = []
            groups = days(store.shelves(), _now())
            for (kind, date), shelves in sorted(groups.items()):
                made.append(out / f"{shelves[0].site}-{kind}-{date}.batch")
                export(store, shelves, made[-1])
    else:
        made = split(path, out, by_kind=by == "kind")
    for target in made:
        say(str(target))
    write_json(json, [str(target) for target in made])


@batch.command("check")
def batch_check(paths: Batches, json: JsonFile = None) -> None:
    """Whether batches are whole, of one kind, and hold no report twice.

    Example: trefoil batch check shop.batch
    """
    from protocol.collector.batches import check
    from protocol.console import say, write_json

    found = [check(path) for path in paths]
    for each in found:
        say(f"{each.path}: {each.reports:,} reports of {each.sites[0]}, {each.descriptions[0]}")
    write_json(json, [each.to_json() for each in found])


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
