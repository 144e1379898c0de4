"""`trefoil bench`: what things cost on this machine. Bodies import what they measure only when they are run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import JsonFile, PlotPlace

bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


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
    suite: Annotated[int, typer.Option(min=1, max=2, help="The cipher suite; 2 is post-quantum.")] = 1,
) -> None:
    """Bytes of a checked report, and what sealing and opening cost beside bare HPKE calls and unchecked reports.

    Example: trefoil bench report --json report.json

    Example: trefoil bench report --suite 2 --buckets 128
    """
    from benchmarks.bench.report_cost import measure, show
    from benchmarks.origin import write_results
    from protocol.hpke import Suite

    results = measure(buckets or [16, 128, 1024], rounds, Suite(suite))
    show(results)
    write_results(json_file, results.to_json())


@bench.command("validity")
def bench_validity(
    json_file: JsonFile = None,
    reports: Annotated[int, typer.Option(min=2, help="Reports in each batch.")] = 100_000,
    invalid: Annotated[
        list[int] | None, typer.Option("--invalid", metavar="N", help="Lying devices among them; repeat for several.")
    ] = None,
    buckets: Annotated[int, typer.Option(min=1, help="Histogram size.")] = 128,
) -> None:
    """What lying devices cost: exact counts and sums, seconds and bytes between helpers.

    Example: trefoil bench validity --reports 2000 --invalid 0 --invalid 20
    """
    from benchmarks.bench.validity import measure, show, to_json
    from benchmarks.origin import write_results

    costs = measure(reports, invalid or [0, 1, 1_000, 50_000], buckets)
    show(costs)
    write_results(json_file, to_json(costs), seed=0)


@bench.command("noise")
def bench_noise(
    buckets: Annotated[list[int] | None, typer.Option(help="Histogram sizes; may be repeated.")] = None,
    scale: Annotated[list[int] | None, typer.Option(min=1, help="Noise scales b = Δ/ε; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Sessions of each; the median is shown.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Processor time, bytes and rounds of each noise mode, and the accuracy each buys.

    Modes that would refuse a size are left out. Example: trefoil bench noise --buckets 16 --buckets 4096 --scale 100
    """
    from benchmarks.bench import noise_cost
    from benchmarks.origin import write_results
    from protocol import console
    from protocol.errors import TrefoilError

    wanted = noise_cost.possible(buckets or [16, 128, 1024, 4096], scale or [100])
    if not wanted:
        raise TrefoilError("no noise mode takes so many buckets at such a scale", "Ask for fewer, or a smaller one.")
    with console.progress("noise", len(wanted)) as advance:
        results = noise_cost.measure_all(wanted, repeats, advance)
    console.out.print(noise_cost.table(results))
    write_results(json_file, noise_cost.to_json(results))


class Without(StrEnum):
    """What a throughput run can leave out."""

    NAIVE = "naive"
    SPU = "spu"
    INGEST = "ingest"


@bench.command("throughput")
def bench_throughput(
    *,
    reports: Annotated[list[int] | None, typer.Option(help="Reports in a batch; may be repeated.")] = None,
    buckets: Annotated[list[int] | None, typer.Option(help="Histogram sizes; may be repeated.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Batches of each size: medians and ranges are shown.")] = 1,
    unchecked: Annotated[bool, typer.Option(help="Also reports whose numbers no helper checks.")] = False,
    suite: Annotated[int | None, typer.Option(help="Cipher suite: 1 X25519, 2 with ML-KEM.", show_default="1")] = None,
    without: Annotated[list[Without] | None, typer.Option(help="What to leave out; may be repeated.")] = None,
    profile: Annotated[bool, typer.Option(help="Also processor time by what it was spent on.")] = False,
    helpers: Annotated[Path | None, typer.Option(help="Measure these helpers instead of three started here.")] = None,
    site_key: Annotated[Path | None, typer.Option(help="The key of a site that those helpers answer.")] = None,
    site: Annotated[str, typer.Option(help="That site.")] = "shop.example",
    spu_python: Annotated[
        Path | None, typer.Option(envvar="TREFOIL_SPU_PYTHON", help="A Python that has SecretFlow SPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Drives the workload, never keys or noise.")] = 1,
    json_file: JsonFile = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for every run here.")] = None,
    plot: PlotPlace = None,
) -> None:
    """Three helpers end to end, beside plaintext, a trusted server, the bare HPKE opens and other programs.

    Example: trefoil bench throughput --reports 20000 --buckets 128 --without naive --json throughput.json
    """
    from benchmarks.bench.throughput.command import Outputs, Wishes, run
    from benchmarks.bench.throughput.grid import Extra

    outputs = Outputs(json_file, csv, plot)
    wishes = Wishes(
        reports or [20_000],
        buckets or [16, 128, 1024],
        seed,
        repeat,
        suite,
        unchecked,
        [Extra(name.value) for name in without or ()],
        profile,
        helpers,
        site_key,
        site,
        spu_python,
    )
    run(wishes, outputs)


@bench.command("device")
def bench_device(
    samples: Annotated[int, typer.Option(min=10, help="Calls per case, without ticks and with them.")] = 2000,
    lanes: Annotated[int, typer.Option(min=1, help="Processes that wait for ticks at the same time.")] = 8,
    seed: Annotated[int, typer.Option(help="Drives the order of the calls, never keys or nonces.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """How long a device takes, and what a caller can tell from it: 10 or 100 impressions, full or empty, on or off.

    Example: trefoil bench device --samples 200 --json device.json
    """
    from benchmarks.bench import device_timing
    from benchmarks.origin import write_results
    from protocol import console

    with console.progress("calls of each case", device_timing.steps(samples)) as advance:
        result = device_timing.measure(samples, lanes, seed, advance)
    for table in device_timing.tables(result):
        console.out.print(table)
    write_results(json_file, result.to_json(), seed)


@bench.command("results")
def bench_results(
    write: Annotated[
        bool, typer.Option("--write", help="Write the documents, instead of naming those that differ.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="First run the command of every file again: hours.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Hold the documents that quote benchmarks/results to the files, or renew them from the files.

    Example: trefoil bench results --write
    """
    from benchmarks import rerun, result_files, results_page
    from protocol import console
    from protocol.errors import TrefoilError

    if run:
        rerun.rerun()
    found = results_page.write_all() if write else results_page.differing()
    names = ", ".join(str(path.relative_to(result_files.ROOT)) for path in found)
    if found and not write:
        raise TrefoilError(f"not as the files have it: {names}", "Renew them: trefoil bench results --write")
    console.say(f"renewed: {names}" if found else "every document is as the files have it")
    console.write_json(json_file, {"renewed": [str(path.relative_to(result_files.ROOT)) for path in found]})
