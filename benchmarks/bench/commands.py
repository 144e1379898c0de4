"""`trefoil bench`: what things cost on this machine. Bodies import what they measure only when they are run."""

from __future__ import annotations

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
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per figure; the best of them counts.")] = 40,
) -> None:
    """Bytes per report, and the cost of sealing and opening beside the bare HPKE calls.

    Example: trefoil bench report --json report.json
    """
    from benchmarks.bench.report_cost import measure, show
    from benchmarks.origin import write_results

    results = measure(buckets or [16, 128, 1024], rounds)
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


@bench.command("throughput")
def bench_throughput(
    reports: Annotated[list[int] | None, typer.Option(help="Reports in a batch; may be repeated.")] = None,
    buckets: Annotated[list[int] | None, typer.Option(help="Histogram sizes; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Drives the workload, never keys or noise.")] = 1,
    json_file: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Three helpers end to end, beside plaintext, a trusted server, the bare HPKE opens and a naive MPyC program.

    Example: trefoil bench throughput --reports 20000 --buckets 128 --json throughput.json --plot plots
    """
    from benchmarks.bench import throughput
    from benchmarks.origin import write_results
    from protocol import console

    counts, sizes = reports or [20_000], buckets or [16, 128, 1024]
    with console.progress("throughput", throughput.STEPS * len(counts) * len(sizes)) as advance:
        run = throughput.run_grid(counts, sizes, seed, lambda note: advance(1, note=note))
    console.out.print(throughput.table(run.points))
    console.out.print(throughput.stage_table(run.points))
    result = run.to_json()
    for name, slope in throughput.exponents(run.points).items():
        console.out.print(f"{name}: exponent {slope:.2f}", highlight=False)
    if plot is not None:
        from benchmarks.bench.throughput_plots import draw_all

        for path in draw_all(result, plot):
            console.say(f"drawn: {path}")
    write_results(json_file, result, seed)


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
