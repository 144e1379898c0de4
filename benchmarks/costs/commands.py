"""`trefoil bench`: measure what things cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.costs import browser_timing, device_timing, ledger_cost, noise_cost, report_cost, validity
from benchmarks.results import tables
from benchmarks.results.columns import on_terminal
from benchmarks.results.origin import ROOT, rerun, write_results
from benchmarks.throughput.grid import Extra, Grid, cells_of
from benchmarks.throughput.measurement import Target
from benchmarks.throughput.view import measure_throughput
from protocol.cli import console
from protocol.cli.options import JsonFile, PlotPlace, check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.hpke import CLASSICAL, Suite

bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


@bench.command("report")
def bench_report(
    json_file: JsonFile = None,
    buckets: Annotated[
        list[int] | None, typer.Option("--buckets", metavar="N", help="Histogram size; repeat for several.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per figure; the best of them counts.")] = 20,
    suite: Annotated[int, typer.Option(min=1, max=2, help="The cipher suite; 2 is post-quantum.")] = 1,
) -> None:
    """Measure the bytes of a checked report, and sealing and opening against bare HPKE calls and unchecked reports.

    Example: trefoil bench report --json report.json

    Example: trefoil bench report --suite 2 --buckets 128
    """
    costs = report_cost.measure(buckets or [16, 128, 1024], rounds, Suite(suite))
    report_cost.show(costs)
    write_results(json_file, report_cost.to_json(costs))


@bench.command("validity")
def bench_validity(
    json_file: JsonFile = None,
    reports: Annotated[int, typer.Option(min=2, help="Reports in each batch.")] = 100_000,
    invalid: Annotated[
        list[int] | None,
        typer.Option("--invalid", metavar="N", help="Dishonest devices among them; repeat for several."),
    ] = None,
    buckets: Annotated[int, typer.Option(min=1, help="Histogram size.")] = 128,
) -> None:
    """Measure what dishonest devices cost: exact counts and sums, seconds and bytes between helpers.

    Example: trefoil bench validity --reports 2000 --invalid 0 --invalid 20
    """
    costs = validity.measure(reports, invalid or [0, 1, 1_000, 50_000], buckets)
    console.out.print(on_terminal("Dishonest devices in a batch of checked debug reports", validity.COLUMNS, costs))
    write_results(json_file, {"validity": costs}, seed=0)


@bench.command("noise")
def bench_noise(
    buckets: Annotated[list[int] | None, typer.Option(help="Histogram sizes; may be repeated.")] = None,
    scale: Annotated[list[int] | None, typer.Option(min=1, help="Noise scales b = Δ/ε; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Sessions of each; the median is shown.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure processor time, bytes and rounds of each noise mode, and the accuracy that each buys.

    Modes that refuse a size are skipped. Example: trefoil bench noise --buckets 16 --buckets 4096 --scale 100
    """
    wanted = noise_cost.possible(buckets or [16, 128, 1024, 4096], scale or [100])
    if not wanted:
        raise TrefoilError(
            "no noise mode accepts so many buckets at this scale",
            "Choose fewer buckets or a smaller scale.",
            kind=ErrorKind.TOO_LARGE,
        )
    with console.progress("noise", len(wanted)) as advance:
        results = noise_cost.measure_all(wanted, repeats, advance)
    title = "Noise by mode, buckets and scale b: three workers over TLS"
    console.out.print(on_terminal(title, noise_cost.COLUMNS, results, words={"mode"}))
    write_results(json_file, {"noise": results})


@bench.command("throughput")
def bench_throughput(
    *,
    reports: Annotated[list[int] | None, typer.Option(help="Reports in a batch; may be repeated.")] = None,
    buckets: Annotated[list[int] | None, typer.Option(help="Histogram sizes; may be repeated.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Batches of each size: medians and ranges are shown.")] = 1,
    unchecked: Annotated[bool, typer.Option(help="Also reports whose numbers no helper checks.")] = False,
    suite: Annotated[
        int | None, typer.Option(min=1, max=2, help="Cipher suite: 1 X25519, 2 with ML-KEM.", show_default="1")
    ] = None,
    without: Annotated[list[Extra] | None, typer.Option(help="Baseline to skip; may be repeated.")] = None,
    profile: Annotated[bool, typer.Option(help="Also attribute processor time to stages.")] = False,
    helpers: Annotated[Path | None, typer.Option(help="Measure these helpers instead of three started here.")] = None,
    site_key: Annotated[Path | None, typer.Option(help="The key of a site registered with those helpers.")] = None,
    site: Annotated[str, typer.Option(help="That site.")] = "shop.example",
    seed: Annotated[int, typer.Option(help="Drives the workload, never keys or noise.")] = 1,
    json_file: JsonFile = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for every run here.")] = None,
    plot: PlotPlace = None,
) -> None:
    """Measure three helpers end to end, against plaintext, a trusted server, bare HPKE opens and naive MPyC.

    Example: trefoil bench throughput --reports 20000 --buckets 128 --without naive --json throughput.json
    """
    if csv is not None:
        check_file("--csv", csv)
    if (helpers is None) != (site_key is None):
        raise TrefoilError(
            "running helpers need both --helpers and --site-key",
            "Give both, or neither.",
            kind=ErrorKind.MISSING_OPTION,
        )
    given = None if helpers is None or site_key is None else Target.load(helpers, site_key, site)
    chosen = Suite(suite) if suite is not None else CLASSICAL if given is None else given.suite
    if given is not None and chosen is not given.suite:
        raise TrefoilError(
            f"devices seal to these helpers in suite {given.suite.value}",
            "Omit --suite.",
            kind=ErrorKind.CONFLICTING_OPTIONS,
        )
    cells = cells_of(reports or [20_000], buckets or [16, 128, 1024], chosen, unchecked=unchecked)
    measure_throughput(Grid(cells, seed, repeat, frozenset(without or ()), profile), given, json_file, csv, plot)


@bench.command("device")
def bench_device(
    samples: Annotated[int, typer.Option(min=4, help="Calls of each state, and of each question.")] = 240,
    lanes: Annotated[int, typer.Option(min=1, help="Processes that wait for answers at the same time.")] = 20,
    delay_ms: Annotated[int, typer.Option(min=200, max=60_000, help="The device's delay in milliseconds.")] = 1000,
    busy: Annotated[int, typer.Option(min=0, max=100, help="Busy loops beside it, for a starved machine.")] = 0,
    seed: Annotated[int, typer.Option(help="Drives the order of the calls, never keys or nonces.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Measure a conversion on a device, and what its caller can infer from the time: full or empty, on or off.

    Example: trefoil bench device --samples 200 --json device-timing.json
    """
    conditions = device_timing.Conditions(lanes, delay_ms, busy)
    steps = samples + device_timing.steps(device_timing.QUESTIONS, samples)
    with console.progress("calls of each case", steps) as advance:
        result = device_timing.measure(samples, conditions, seed, advance)
    if missed := result.missed():
        steps = device_timing.steps(missed, device_timing.AGAIN * samples)
        with console.progress("calls of questions that are asked again", steps) as advance:
            # Other seeds than any of the first time.
            result = device_timing.ask_again(result, samples, seed + 1000, advance)
    for table in result.tables():
        console.out.print(table)
    write_results(json_file, result.to_json(), seed)


@bench.command("browser")
def bench_browser(
    samples: Annotated[int, typer.Option(min=2, help="Calls of each device, with the delay and without.")] = 240,
    busy: Annotated[int, typer.Option(min=0, max=100, help="Busy loops beside it, for a starved machine.")] = 0,
    seed: Annotated[int, typer.Option(help="Drives the order of the calls, never keys or nonces.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Measure what a page in Chromium, and whatever holds its host's pipe, can infer from the time of a conversion.

    Example: trefoil bench browser --samples 20 --busy 2
    """
    with console.progress("calls of each device", samples) as advance:
        result = browser_timing.measure(samples, busy, seed, advance)
    console.out.print(result.table())
    write_results(json_file, result.to_json(), seed)


@bench.command("ledger")
def bench_ledger(
    rows: Annotated[
        list[int] | None, typer.Option(help="Reports in the ledger, at least 500,000; may be repeated.")
    ] = None,
    sites: Annotated[int, typer.Option(min=1, help="Sites whose reports these are.")] = 100,
    ledger: Annotated[str, typer.Option(metavar="URL", help="A PostgreSQL database, instead of a SQLite file.")] = "",
    parts: Annotated[bool, typer.Option("--parts", help="With queries that take a fifth of each report.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure a report ledger as it grows: lookup and reserve, opening, forgetting a day, bytes a report.

    Example: trefoil bench ledger --rows 1000000 --rows 10000000 --json ledger.json
    """
    sizes = rows or [1_000_000]
    with console.progress("reports", max(sizes)) as advance:
        costs = ledger_cost.measure(ledger_cost.parse_location(ledger), sizes, sites, advance, parts=parts)
    console.out.print(ledger_cost.show(costs))
    write_results(json_file, ledger_cost.to_json(costs), seed=1)


@bench.command("results")
def bench_results(
    write: Annotated[
        bool, typer.Option("--write", help="Write the documents, instead of naming those that differ.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="First run the command of every file again: hours.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare the tables in documents with the files in benchmarks/results, or renew them.

    Example: trefoil bench results --write
    """
    if run:
        rerun()
    changed = [str(path.relative_to(ROOT)) for path in (tables.write_all() if write else tables.differing())]
    if changed and not write:
        raise TrefoilError(
            f"tables differ from the result files in {', '.join(changed)}",
            "Renew them: trefoil bench results --write",
            kind=ErrorKind.INCONSISTENT,
        )
    console.say(f"renewed: {', '.join(changed)}" if changed else "every table agrees with the result files")
    console.write_json(json_file, {"renewed": changed})
