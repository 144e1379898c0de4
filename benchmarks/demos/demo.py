"""`trefoil demo`: people, devices, sealed reports, three helper processes and one query, all real, within a minute."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.workloads.people import SHOP, asked_of_devices, people, plain_histograms, sealed_reports
from benchmarks.workloads.reports import Lie, lying_report
from device.actions import MeasurementOptions
from device.attribution import named_function
from device.budget import FilterKind
from device.device import Device
from device.limits import DeviceLimits
from device.overview import lacked_budget
from mpc_helpers.local.launcher import Launched, launched, prepare
from mpc_helpers.mpc import noise
from protocol import units
from protocol.answer import RejectionCounts
from protocol.batch import BatchReader, BatchWriter
from protocol.cli.console import add_bars, bar, out, progress, say, write_json
from protocol.cli.options import JsonFile, NoiseChoice, WholeKappa
from protocol.collector.limits import ReportKind
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.header import Header, coarse_time
from protocol.helper_set import HelperSet
from protocol.noise import NoiseMode, NoiseScale, laplace_variance
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import ask
from protocol.querier.result import QueryResult, Verdict, check_cutoff, judge
from protocol.querier.view import show_delta
from protocol.report import SealedReport
from protocol.units import entitlement

MAX_ROWS = 32
_KINDS = {
    FilterKind.SITE: "this site",
    FilterKind.GLOBAL: "all sites together",
    FilterKind.IMPRESSION_SITE: "where ads were seen",
    FilterKind.ADVERTISER: "where conversions were made",
    FilterKind.SIDE_QUERY: "side queries of all sites",
}


def title(text: str) -> None:
    say(f"\n== {text}", style="bold")


def show_histograms(truth: Sequence[int], central: Sequence[int], result: QueryResult, size: int) -> None:
    """Show the true, central-noise and MPC histograms side by side."""
    answer = result.answer
    central_sd = laplace_variance(result.query.gamma) ** 0.5
    table = Table()
    table.add_column("campaign", justify="right")
    table.add_column("true", justify="right")
    table.add_column(f"one trusted server\n(sd {central_sd:.1f})", justify="right")
    table.add_column(f"three helpers\n(sd {result.noise_sd:.1f})", justify="right")
    add_bars(table)
    largest = max(1, *answer.histogram)
    rows = zip(truth, central, answer.histogram, strict=True)
    for bucket, (true, curated, noisy) in enumerate(rows):
        if bucket < MAX_ROWS:
            table.add_row(str(bucket), str(true), str(curated), str(noisy), bar(noisy, largest))
    out.print(table)
    if len(truth) > MAX_ROWS:
        say(f"{len(truth) - MAX_ROWS} more campaigns; --json has them all")
    terms = f"{answer.noise.value}, {show_delta(result.delta)}ε = {units.show(answer.epsilon_micros)}"
    say(f"{answer.counted} of {answer.submitted} reports counted; noise {terms}")
    modes = ", ".join(f"{mode} {deviation:.1f}" for mode, deviation in deviations(result).items() if deviation)
    say(f"sd of the noise by mode, at the same ε: {modes}")
    say(f"a report has {size:,} bytes; cut into three columns, all of them took {result.uploaded_bytes:,} to upload")


def show_verdict(result: QueryResult, verdict: Verdict | None) -> None:
    """Show the bound on the bias from the side query, and whether the answer is acceptable."""
    if result.bias is not None:
        moved = f"at most {result.bias.bound:.0f} in total, with probability {1 - result.bias.beta:.0%}"
        say(f"bias: weeks that could not pay have moved the answer by {moved}")
    if verdict is not None:
        say(verdict.sentence())


def deviations(result: QueryResult) -> dict[str, float | None]:
    """Return the standard deviation of each noise mode at this ε; None where the mode does not support it."""
    query, deviations = result.query, dict[str, float | None]()
    for mode in NoiseMode:
        deviations[mode.value] = None
        with suppress(TrefoilError):
            scale = NoiseScale(mode, query.gamma, query.sensitivity + query.kappa)
            deviations[mode.value] = scale.standard_deviation
    return deviations


def show_without_budget(null: int, reports: int, epsilon: float, anything: bool) -> None:
    """Show how many reports are null for lack of budget. Sites and helpers cannot tell; the demo can."""
    if not null:
        return
    week = units.show(DeviceLimits().site_budget)
    say(f"{null} of {reports} reports are null: their week had less than ε = {epsilon:g} left for this site, of {week}")
    if not anything:
        say("All that found an advertisement are among them: the answer below is noise alone. Try --epsilon 0.5.")


def show_tampering(rejections: Sequence[RejectionCounts], refused: bool) -> None:
    """Show that the report with the altered header was rejected."""
    for number, counts in enumerate(rejections, start=1):
        reasons = ", ".join(f"{count} {reason.value}" for reason, count in counts.items()) or "nothing"
        say(f"helper {number} left out: {reasons}")
    say("It does not open under its new header, so it costs only itself." if refused else "IT WAS NOT NOTICED.")


def show_lie(rejections: Sequence[RejectionCounts], refused: bool, truth: int) -> None:
    """Show that the report that claimed 2^59 was rejected, and what it would have done."""
    left_out = [counts.get(Rejection.INVALID, 0) for counts in rejections]
    say(f"one report says 2^59 in bucket 0; left out as invalid by helpers 1, 2, 3: {left_out}")
    say(
        f"Without the check bucket 0 would have read about {truth + 2**59:,} instead of {truth:,}."
        if refused
        else "IT WAS COUNTED."
    )


def show_budget(device: Device[SealedReport], conversions: int) -> None:
    """Show the privacy filters of one person's device. They never leave a real one."""
    times = "once" if conversions == 1 else f"{conversions} times"
    say(f"someone who converted {times}; each week has a budget of its own")
    calendar = device.calendar()
    table = Table()
    for heading in ("week", "whose budget", "site", "spent ε", "of"):
        table.add_column(heading, justify="right" if heading in ("spent ε", "of") else "left")
    for state in sorted(device.budget(), key=lambda state: (state.epoch, state.kind)):
        spent, capacity = units.show(state.spent), units.show(state.capacity)
        table.add_row(calendar.dates(state.epoch), _KINDS[state.kind], state.site, spent, capacity)
    out.print(table)


def show_end(result: QueryResult, truth: Sequence[int], *, kept: bool) -> None:
    """Show a summary and the next steps."""
    answer = result.answer
    worst = max(abs(noisy - true) for noisy, true in zip(answer.histogram, truth, strict=True))
    where = f"any of {len(truth)} campaigns" if len(truth) > 1 else "the campaign"
    off = f"their answer is off by at most {worst} in {where}"
    refused = "what was altered, what lied and what came twice was left out"
    say(
        f"\nThree helpers counted {answer.counted:,} reports and read none; {off}; {refused}."
        if kept
        else f"\nSOMETHING WAS COUNTED THAT MUST NOT BE, see above; {off}."
    )
    clicks = "is the same in your browser, with your own clicks"
    say(f"Next: trefoil live (in a clone: make live) {clicks}. README.md has every step as a command.")


MAX_BUCKETS = DeviceLimits().max_histogram_size


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo. `epsilon` is paid by each conversion, and sets the noise of the query."""

    reports: int = 2000
    buckets: int = 16
    epsilon: float = 0.5
    noise: NoiseMode = NoiseMode.LOCAL
    seed: int = 1
    kappa: int = 0
    function: str | None = None
    cutoff: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.reports <= 1_000_000):
            raise TrefoilError(
                f"the demo makes 1 to 1,000,000 reports, not {self.reports}", kind=ErrorKind.OUT_OF_RANGE
            )
        if not (0 < self.buckets <= MAX_BUCKETS):
            raise TrefoilError(
                f"a device's histogram has 1 to {MAX_BUCKETS} buckets, not {self.buckets}", kind=ErrorKind.OUT_OF_RANGE
            )
        if not (self.seed >= 0):
            raise TrefoilError(f"a seed is 0 or more, not {self.seed}", kind=ErrorKind.OUT_OF_RANGE)
        entitlement(self.epsilon)
        if self.cutoff is not None:
            check_cutoff(self.cutoff)
        self.measurement().options.checked(SHOP, SHOP, DeviceLimits())
        if self.function is not None:
            named_function(self.function)

    def measurement(self) -> MeasurementOptions:
        """Return the call that every conversion makes on its device."""
        return asked_of_devices(self.epsilon, self.buckets, self.kappa, self.function)


@dataclass(slots=True)
class Made:
    """The batch on disk, what is in it, and one person's device."""

    batch: BatchReader
    truth: list[int]
    device: Device[SealedReport]
    conversions: int
    without_budget: int


@dataclass(slots=True)
class DemoOutcome:
    """The outcome of the demo."""

    result: QueryResult
    truth: list[int]
    central: list[int]
    replay_refused: bool
    tamper_refused: bool
    invalid_refused: bool
    bytes_per_report: int
    without_budget: int = 0
    verdict: Verdict | None = None

    @property
    def all_refused(self) -> bool:
        """Return whether the helpers rejected the altered report, the dishonest report and the replay."""
        return self.replay_refused and self.tamper_refused and self.invalid_refused

    def to_json(self) -> dict[str, object]:
        """Return the fields of `--json`, which other programs rely on."""
        answer = self.result.answer
        return {
            "truth": self.truth,
            "answer": answer.histogram,
            "noise": answer.noise.value,
            "noise_sd": self.result.noise_sd,
            "noise_sd_by_mode": deviations(self.result),
            "delta": float(self.result.delta),
            "reports_submitted": answer.submitted,
            "reports_counted": answer.counted,
            "rejections": [{reason.value: count for reason, count in each.items()} for each in answer.rejections],
            "bytes_per_report": self.bytes_per_report,
            "reports_without_budget": self.without_budget,
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "replay_refused": self.replay_refused,
            "tamper_refused": self.tamper_refused,
            "invalid_refused": self.invalid_refused,
        }


def run_demo(options: DemoOptions, now: int) -> DemoOutcome:
    """Run the demo, and show each step as it happens."""
    with tempfile.TemporaryDirectory(prefix="trefoil-demo-") as name:
        folder = Path(name)
        title("Three helpers, each a process of its own with its own keys and ledger")
        trio = prepare(folder, now=now, sites={SHOP: [SHOP]})
        with launched(trio, wait=False) as running:
            title(f"{options.reports} conversions on people's devices, each sealed to the three helpers")
            made = _make_batch(folder / "batch", options, trio.helper_set, now)
            show_without_budget(made.without_budget, options.reports, options.epsilon, any(made.truth))
            running.wait_ready()
            outcome = _query(running, made, options)
            title("What one person's budget looks like afterwards")
            show_budget(made.device, made.conversions)
    show_end(outcome.result, outcome.truth, kept=outcome.all_refused)
    return outcome


def _make_batch(path: Path, options: DemoOptions, helper_set: HelperSet, now: int) -> Made:
    """Simulate every person on a real device, and again on its clear twin for the truth."""
    truth, measurement = np.zeros(options.buckets, dtype=np.int64), options.measurement()
    without_budget = 0

    def lives() -> Iterator[tuple[Device[SealedReport], list[SealedReport]]]:
        nonlocal truth, without_budget
        for person in people(options.seed, options.reports, options.buckets, now):
            device, reports = sealed_reports(person, measurement, helper_set)
            truth += np.sum(plain_histograms(person, measurement), axis=0, dtype=np.int64)
            for report in reports:
                writer.add(report)
            without_budget += sum(lacked_budget(record) for record in device.reports())
            advance(len(reports))
            yield device, reports

    with BatchWriter(path) as writer, progress("reports", options.reports) as advance:
        # Whose budget is shown has spent some of it, and bought often.
        device, reports = max(lives(), key=lambda life: (any(state.spent for state in life[0].budget()), len(life[1])))
        writer.add(raise_epsilon(reports[0]))
        writer.add(lying_report(Lie.HUGE, replace(reports[0].terms(), time=coarse_time(now)), helper_set))
    return Made(BatchReader(path), truth.tolist(), device, len(reports), without_budget)


def raise_epsilon(report: SealedReport) -> SealedReport:
    """Alter a report as a malicious querier would: claim that twice the ε was paid, to get half the noise."""
    header = Header.decode(report.header)
    raised = replace(header, terms=replace(header.terms, epsilon_micros=2 * header.terms.epsilon_micros))
    return SealedReport(raised.encode(), report.body, report.payloads)


def _query(running: Launched, made: Made, options: DemoOptions) -> DemoOutcome:
    """Run one query, then replay its batch, and show both outcomes."""
    # The report whose ε was raised is of another kind: an honest querier names the kind that she means.
    kind = ReportKind.of(Header.decode(made.batch[0].header)).name
    key = running.site_key(SHOP)
    query = partial(ask, made.batch.path, running.helper_set, key, epsilon=options.epsilon, noise=options.noise)
    ask_anew = partial(query, tolerate=0.7, kind=kind, new=True)
    title("One query, answered by three helpers that see no report")
    result = ask_anew()
    # What one trusted curator would add: discrete Laplace noise of the same scale.
    drawn = noise.draw_laplace(result.query.gamma, options.buckets, noise.system_coins())
    central = [value + noisy for value, noisy in zip(made.truth, drawn, strict=True)]
    tampered = all(counts.get(Rejection.UNOPENABLE) == 1 for counts in result.answer.rejections)
    invalid = all(counts.get(Rejection.INVALID) == 1 for counts in result.answer.rejections)
    size = len(made.batch[0].encode())
    show_histograms(made.truth, central, result, size)
    verdict = None if options.cutoff is None else judge(result, options.cutoff)
    show_verdict(result, verdict)
    title("A report whose ε was raised on the way")
    show_tampering(result.answer.rejections, tampered)
    title("A device that lies about its numbers")
    show_lie(result.answer.rejections, invalid, made.truth[0])
    title("The same batch a second time")
    refused, reason = _refused(ask_anew)
    say(reason if refused else f"NOT REFUSED: {reason}")
    return DemoOutcome(result, made.truth, central, refused, tampered, invalid, size, made.without_budget, verdict)


def _refused(question: Callable[[], QueryResult]) -> tuple[bool, str]:
    try:
        question()
    except QueryFailed as error:
        shortfall = error.shortfall
        return shortfall is not None and all(counts.get(Rejection.SEEN) for counts in shortfall.left_out), str(error)
    return False, "it was answered again"


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: the demo runs in real time


def demo(
    reports: Annotated[int, typer.Option(help="How many conversions.")] = 2000,
    buckets: Annotated[int, typer.Option(help="How many campaigns.")] = 16,
    epsilon: Annotated[float, typer.Option(help="ε that each conversion asks for.")] = 0.5,
    noise: NoiseChoice = NoiseMode.LOCAL,
    seed: Annotated[int, typer.Option(help="Decides what people see and buy; never keys or noise.")] = 1,
    function: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attribution function, as in `trefoil device convert`.")
    ] = None,
    kappa: WholeKappa = 0,
    cutoff: Annotated[float | None, typer.Option(help="Judge the answer, as in `trefoil query`.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show all of Trefoil once: people, devices, sealed reports, three helpers, one noisy answer.

    Example: trefoil demo --reports 500 --buckets 8 --json demo.json
    """
    options = DemoOptions(reports, buckets, epsilon, noise, seed, kappa, function, cutoff)
    outcome = run_demo(options, _now())
    write_json(json_file, outcome.to_json())
    if not outcome.all_refused:
        raise typer.Exit(1)
