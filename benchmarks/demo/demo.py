"""The demo: people, devices, sealed reports, three helper processes and one query, all real, in under a minute."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.demo import view
from benchmarks.liars import Lie, lying_report
from benchmarks.workload import SHOP, asked_of_devices, people, plain_histograms, sealed_reports
from device.asked import Asked
from device.device import Device
from device.limits import DeviceLimits
from device.named_function import named_function
from device.shortfall import lacked_budget
from mpc_helpers.local.launcher import Launched, launched, prepare
from mpc_helpers.mpc import noise
from protocol.batch import BatchReader, BatchWriter
from protocol.console import progress
from protocol.epsilon import entitlement
from protocol.errors import Rejection, TrefoilError
from protocol.header import Header, coarse_time
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.querier.ask import Querier
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.querier.verdict import Verdict, check_cutoff, judge
from protocol.querier.worth import QueryResult
from protocol.query import NoiseMode
from protocol.report import SealedReport
from protocol.status import QueryState

T = TypeVar("T")

MAX_BUCKETS = DeviceLimits().max_histogram_size


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose. `epsilon` is what each conversion asks for and what the query adds noise for."""

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
            raise TrefoilError(f"the demo makes 1 to 1,000,000 reports, not {self.reports}")
        if not (0 < self.buckets <= MAX_BUCKETS):
            raise TrefoilError(f"a device's histogram has 1 to {MAX_BUCKETS} buckets, not {self.buckets}")
        if not (self.seed >= 0):
            raise TrefoilError(f"a seed is 0 or more, not {self.seed}")
        entitlement(self.epsilon)
        if self.cutoff is not None:
            check_cutoff(self.cutoff)
        self.asked().options.checked(SHOP, SHOP, DeviceLimits())
        if self.function is not None:
            named_function(self.function)

    def asked(self) -> Asked:
        """What every conversion asks of its device."""
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
    """What the demo found out."""

    result: QueryResult
    truth: list[int]
    central: list[int]
    replay_refused: bool
    tamper_refused: bool
    invalid_refused: bool
    bytes_per_report: int
    without_budget: int = 0
    verdict: Verdict | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def all_refused(self) -> bool:
        """Whether the helpers noticed all three: what was altered, what lied, and what came twice."""
        return self.replay_refused and self.tamper_refused and self.invalid_refused

    def to_json(self) -> dict[str, object]:
        """The fields that other programs rely on."""
        answer = self.result.answer
        return {
            "truth": self.truth,
            "answer": answer.histogram,
            "noise": answer.noise.value,
            "noise_sd": self.result.noise_sd,
            "noise_sd_by_mode": view.deviations(self.result),
            "delta": float(self.result.delta),
            "reports_submitted": answer.submitted,
            "reports_counted": answer.counted,
            "rejections": [{reason.value: count for reason, count in each.items()} for each in answer.rejections],
            "bytes_per_report": self.bytes_per_report,
            "reports_without_budget": self.without_budget,
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "seconds": self.seconds,
            "helper_seconds": at_helpers(self.result),
            "replay_refused": self.replay_refused,
            "tamper_refused": self.tamper_refused,
            "invalid_refused": self.invalid_refused,
        }


def run_demo(options: DemoOptions, now: int) -> DemoOutcome:
    """The whole story, told as it happens."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trefoil-demo-") as name:
        folder = Path(name)
        view.title("Three helpers, each a process of its own with its own keys and ledger")
        trio = prepare(folder, now=now, sites={SHOP: [SHOP]})
        with launched(trio, wait=False) as running:
            view.title(f"{options.reports} conversions on people's devices, each sealed to the three helpers")
            with _timed(seconds, "make reports"):
                made = _make_batch(folder / "batch", options, trio.helper_set, now)
            view.show_without_budget(made.without_budget, options.reports, options.epsilon, any(made.truth))
            with _timed(seconds, "start helpers (rest)"):
                running.wait_ready()
            shown = _query(running, made, options, seconds, now)
            view.title("What one person's budget looks like afterwards")
            view.show_budget(made.device, made.conversions)
    shown.seconds = added_up(seconds, time.perf_counter() - start)
    view.show_seconds(shown.seconds, at_helpers(shown.result))
    view.show_end(shown.result, shown.truth, kept=shown.all_refused)
    return shown


def added_up(stages: Mapping[str, float], total: float) -> dict[str, float]:
    """The stages in hundredths of a second, what is left of the total as a stage of its own, and their sum."""
    seconds = {name: round(value, 2) for name, value in stages.items()}
    seconds["other"] = round(max(0.0, total - sum(seconds.values())), 2)
    return seconds | {"total": round(sum(seconds.values()), 2)}


def _make_batch(path: Path, options: DemoOptions, helper_set: HelperSet, now: int) -> Made:
    """Live every person's life on a real device, and once more on its clear twin for the truth."""
    truth, asked = np.zeros(options.buckets, dtype=np.int64), options.asked()
    busiest: tuple[tuple[bool, int], Device[SealedReport]] | None = None
    without_budget = 0
    spoilt: SealedReport | None = None
    with BatchWriter(path) as writer, progress("reports", options.reports) as advance:
        for person in people(options.seed, options.reports, options.buckets, now):
            device, reports = sealed_reports(person, asked, helper_set)
            truth += np.sum(plain_histograms(person, asked), axis=0, dtype=np.int64)
            for report in reports:
                writer.add(report)
            without_budget += sum(lacked_budget(record) for record in device.reports())
            spoilt = spoilt or raise_epsilon(reports[0])
            # Whose budget is shown has spent some of it, and bought often.
            rank = (any(state.spent for state in device.budget()), len(reports))
            if busiest is None or rank > busiest[0]:
                busiest = (rank, device)
            advance(len(reports))
        if spoilt is None:
            raise TrefoilError("the workload made no report")
        writer.add(spoilt)
        writer.add(lying_report(Lie.HUGE, replace(reports[0].terms(), time=coarse_time(now)), helper_set))
        if busiest is None:
            raise TrefoilError("the workload has no people")
    (_, conversions), shown = busiest
    return Made(BatchReader(path), truth.tolist(), shown, conversions, without_budget)


def raise_epsilon(report: SealedReport) -> SealedReport:
    """What a cheating querier would do: claim that twice the ε was paid, to be allowed half the noise."""
    header = Header.decode(report.header)
    raised = replace(header, terms=replace(header.terms, epsilon_micros=2 * header.terms.epsilon_micros))
    return SealedReport(raised.encode(), report.body, report.payloads)


def _query(running: Launched, made: Made, options: DemoOptions, seconds: dict[str, float], now: int) -> DemoOutcome:
    """One query, then the same batch a second time."""
    helper_set, key = running.trio.helper_set, load_identity(running.trio.site_key_path(SHOP))
    wishes = QueryOptions(entitlement(options.epsilon), options.noise, tolerated_bad_permille=700, seconds=600)

    def ask() -> QueryResult:
        asked = make_query(made.batch, wishes, helper_set, key, max(now, _now()))
        return asyncio.run(Querier(helper_set).ask(asked, made.batch))

    view.title("One query, answered by three helpers that see no report")
    result = ask()
    # The helpers' states are parts of the querier's wait: counted once.
    inside = at_helpers(result)
    seconds.update({f"query: {name}": value for name, value in result.seconds.items() if name not in inside})
    gamma = result.query.gamma
    central = [value + drawn for value, drawn in zip(made.truth, _central_noise(gamma, options.buckets), strict=True)]
    tampered = all(counts.get(Rejection.UNOPENABLE) == 1 for counts in result.answer.rejections)
    invalid = all(counts.get(Rejection.INVALID) == 1 for counts in result.answer.rejections)
    size = len(made.batch[0].encode())
    view.show_histograms(made.truth, central, result, size)
    verdict = None if options.cutoff is None else judge(result, options.cutoff)
    view.show_verdict(result, verdict)
    view.title("A report whose ε was raised on the way")
    view.show_tampering(result.answer.rejections, tampered)
    view.title("A device that lies about its numbers")
    view.show_lie(result.answer.rejections, invalid, made.truth[0])
    view.title("The same batch a second time")
    with _timed(seconds, "replay"):
        refused, reason = _refused(ask)
    view.show_replay(refused, reason)
    return DemoOutcome(result, made.truth, central, refused, tampered, invalid, size, made.without_budget, verdict)


def at_helpers(result: QueryResult) -> dict[str, float]:
    """How long the slowest helper was in each state, all of it while the querier waited."""
    states = [state.value for state in QueryState]
    return {state: result.seconds[state] for state in states if state in result.seconds}


def _refused(ask: Callable[[], QueryResult]) -> tuple[bool, str]:
    try:
        ask()
    except QueryFailed as error:
        found = error.shortfall
        return found is not None and all(counts.get(Rejection.SEEN) for counts in found.left_out), str(error)
    return False, "it was answered again"


def _central_noise(rate: Fraction, buckets: int) -> list[int]:
    """What one trusted curator would add: discrete Laplace noise of the same scale."""
    return noise.draw_laplace(rate, buckets, noise.system_coins())


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: the demo runs in real time
