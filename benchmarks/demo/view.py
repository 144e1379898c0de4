"""The demo as a person sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich.table import Table

from device.device import Device
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind
from protocol import epsilon
from protocol.answer import RejectionCounts
from protocol.console import add_bars, bar, out, say
from protocol.errors import Rejection, TrefoilError
from protocol.noise_scale import NoiseScale, laplace_variance
from protocol.querier.verdict import Verdict
from protocol.querier.view import show_delta
from protocol.querier.worth import QueryResult
from protocol.query import NoiseMode
from protocol.report import SealedReport

MAX_ROWS = 32
_KINDS = {
    FilterKind.SITE: "this site",
    FilterKind.GLOBAL: "all sites together",
    FilterKind.IMPRESSION_SITE: "where ads were seen",
}


def title(text: str) -> None:
    """A heading."""
    say(f"\n== {text}", style="bold")


def show_histograms(truth: Sequence[int], central: Sequence[int], result: QueryResult, size: int) -> None:
    """True, noisy-central and MPC histograms side by side."""
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
    terms = f"{answer.noise.value}, {show_delta(result.delta)}ε = {_epsilon(result)}"
    say(f"{answer.counted} of {answer.submitted} reports counted; noise {terms}")
    modes = ", ".join(f"{mode} {deviation:.1f}" for mode, deviation in deviations(result).items() if deviation)
    say(f"sd of the noise by mode, at the same ε: {modes}")
    say(f"a report has {size:,} bytes; cut into three columns, all of them took {result.uploaded_bytes:,} to upload")


def show_verdict(result: QueryResult, verdict: Verdict | None) -> None:
    """What the side query says about what is missing, and whether the answer is good enough."""
    if result.bias is not None:
        moved = f"at most {result.bias.bound:.0f} in total, with probability {1 - result.bias.beta:.0%}"
        say(f"bias: weeks that could not pay have moved the answer by {moved}")
    if verdict is not None:
        say(verdict.sentence())


def deviations(result: QueryResult) -> dict[str, float | None]:
    """The standard deviation that each noise mode would have had; None where the mode takes no such ε."""
    query, found = result.query, dict[str, float | None]()
    for mode in NoiseMode:
        found[mode.value] = None
        with suppress(TrefoilError):
            scale = NoiseScale(mode, query.gamma, query.sensitivity + query.kappa)
            found[mode.value] = scale.standard_deviation
    return found


def show_without_budget(null: int, reports: int, asked: float, anything: bool) -> None:
    """Reports that are null because no week could pay. The sites and helpers cannot tell; the demo may."""
    if not null:
        return
    week = epsilon.show(DeviceLimits().site_budget)
    say(f"{null} of {reports} reports are null: their week had less than ε = {asked:g} left for this site, of {week}")
    if not anything:
        say("All that found an advertisement are among them: the answer below is noise alone. Try --epsilon 0.5.")


def show_tampering(rejections: Sequence[RejectionCounts], refused: bool) -> None:
    """What became of the report with the altered header."""
    for number, counts in enumerate(rejections, start=1):
        told = ", ".join(f"{count} {reason.value}" for reason, count in counts.items()) or "nothing"
        say(f"helper {number} left out: {told}")
    say("It does not open under its new header, so it costs only itself." if refused else "IT WAS NOT NOTICED.")


def show_lie(rejections: Sequence[RejectionCounts], refused: bool, truth: int) -> None:
    """What became of the report that said 2^59, and what it would have done."""
    left_out = [counts.get(Rejection.INVALID, 0) for counts in rejections]
    say(f"one report says 2^59 in bucket 0; left out as invalid by helpers 1, 2, 3: {left_out}")
    say(
        f"Without the check bucket 0 would have read about {truth + 2**59:,} instead of {truth:,}."
        if refused
        else "IT WAS COUNTED."
    )


def show_replay(refused: bool, reason: str) -> None:
    """What the helpers said the second time."""
    say(reason if refused else f"NOT REFUSED: {reason}")


def show_budget(device: Device[SealedReport], conversions: int) -> None:
    """The privacy filters of one person's device. They never leave it; the demo may look."""
    times = "once" if conversions == 1 else f"{conversions} times"
    say(f"someone who converted {times}; each week has a budget of its own")
    calendar = device.calendar()
    table = Table()
    for heading in ("week", "whose budget", "site", "spent ε", "of"):
        table.add_column(heading, justify="right" if heading in ("spent ε", "of") else "left")
    for state in sorted(device.budget(), key=lambda state: (state.epoch, state.kind)):
        spent, capacity = epsilon.show(state.spent), epsilon.show(state.capacity)
        table.add_row(calendar.dates(state.epoch), _KINDS[state.kind], state.site, spent, capacity)
    out.print(table)


def show_end(result: QueryResult, truth: Sequence[int], *, kept: bool) -> None:
    """What was seen, in a sentence, and where to go on."""
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


def show_seconds(seconds: Mapping[str, float], at_helpers: Mapping[str, float]) -> None:
    """Where the time went."""
    table = Table(title="where the time went")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}", end_section=name == "other")
    out.print(table)
    parts = ", ".join(f"{state} {value:.2f}" for state, value in at_helpers.items())
    say(f"of the query's wait, at the slowest helper: {parts}")


def _epsilon(result: QueryResult) -> str:
    return epsilon.show(result.answer.epsilon_micros)
