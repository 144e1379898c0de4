"""`trefoil query` as a person sees it: a bar while the helpers work, then the histogram with its error bars."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from rich.table import Table

from protocol import epsilon
from protocol.batch import BatchReader
from protocol.console import Advance, add_bars, bar, err, out, progress, say
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.querier.ask import OnStatus, Querier
from protocol.querier.query_failed import QueryFailed
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.saved_query import QueryOptions
from protocol.querier.worth import CONFIDENCE, QueryResult
from protocol.shares import PARTIES
from protocol.status import QueryState, QueryStatus

MAX_ROWS = 64
# How far each state is, out of what a bar shows.
_WEIGHT = {
    QueryState.AWAITING: 0,
    QueryState.QUEUED: 5,
    QueryState.ADMITTING: 10,
    QueryState.AGREEING: 60,
    QueryState.COMPUTING: 75,
    QueryState.VOTING: 90,
    QueryState.RELEASED: 100,
    QueryState.FAILED: 100,
    QueryState.DISPUTED: 100,
    QueryState.WITHDRAWN: 100,
    QueryState.EXPIRED: 100,
}


def permille(share: float) -> int:
    """A share of one as whole thousandths."""
    if not (0 <= share <= 1):
        raise TrefoilError(f"--tolerate is a share from 0 to 1, not {share:g}", "Half of the reports is 0.5.")
    return int(share * 1000)


def one_errand(wanted: Mapping[str, bool]) -> None:
    """Refuse two at once of what a command does one of."""
    named = [option for option, given in wanted.items() if given]
    if len(named) > 1:
        raise TrefoilError(f"{' and '.join(named)} are different things to do", "Give one of them.")


@contextlib.contextmanager
def detailed(wanted: bool) -> Iterator[None]:
    """What each helper says about a failure: shown if wanted, and otherwise said to be there."""
    try:
        yield
    except QueryFailed as error:
        if wanted:
            for line in error.details:
                err.print(line, markup=False, highlight=False, soft_wrap=True)
        elif error.details:
            error.hint = f"{error.hint} What each helper says: --details".strip()
        raise


def ask_and_show(
    reports: Path, helpers: Path, site_key: Path | None, options: QueryOptions, now: int, *, new: bool
) -> QueryResult:
    """Ask, or take up again what was asked, and print the answer."""
    if site_key is None:
        raise TrefoilError("a query needs the key that signs it", "Name it with --site-key.")
    helper_set, key, batch = HelperSet.load(helpers), load_identity(site_key), BatchReader(reports)
    batch.check()
    with _bar() as on_status:
        result = asyncio.run(ask_batch(Querier(helper_set), batch, options, key, now, new=new, on_status=on_status))
    return _shown(result, helper_set)


def withdraw_and_show(reports: Path, helpers: Path, site_key: Path | None) -> dict[str, object]:
    """Take the newest query of a batch back."""
    if site_key is None:
        raise TrefoilError("a withdrawal needs the key that signed the query", "Name it with --site-key.")
    saved = QueryFolder(reports).newest()
    if saved is None:
        raise TrefoilError(f"nothing was asked of {reports}", "Show what was asked with: trefoil query --list")
    asyncio.run(Querier(HelperSet.load(helpers)).withdraw(saved, load_identity(site_key)))
    say("withdrawn: the helpers will not answer this query, and its reports are free")
    return {"query_id": saved.query.query_id.hex(), "withdrawn": True}


def fetch_and_show(reports: Path, helpers: Path, digits: str) -> QueryResult:
    """Print the answer to an earlier query, whatever has become of the batch since."""
    helper_set, folder = HelperSet.load(helpers), QueryFolder(reports)
    with _bar() as on_status:
        result = asyncio.run(Querier(helper_set).fetch(folder.find(digits), on_status))
    folder.keep_bias(result)
    return _shown(result, helper_set)


def _shown(result: QueryResult, helper_set: HelperSet) -> QueryResult:
    show(result, [helper.name for helper in helper_set.helpers])
    return result


@contextlib.contextmanager
def _bar() -> Iterator[OnStatus]:
    with progress("query, percent", 100) as advance:
        yield Follower(advance)


class Follower:
    """Turns what three helpers say into one bar that never goes back."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._shown = 0

    def __call__(self, statuses: Mapping[int, QueryStatus]) -> None:
        """Called with every round of statuses."""
        done = sum(_share(status) for status in statuses.values()) // PARTIES
        slowest = min(statuses.values(), key=_share, default=None)
        if done > self._shown and slowest is not None:
            self._advance(done - self._shown, note=slowest.state.value)
            self._shown = done


def _share(status: QueryStatus) -> int:
    within = 50 * min(status.done, status.total) // status.total if status.total > 0 else 0
    return min(100, _WEIGHT[status.state] + within)


def show(result: QueryResult, names: Sequence[str]) -> None:
    """The histogram as a table with bars, and what it is worth."""
    answer, unit = result.answer, result.query.unit
    table = Table(title=f"{result.query.site}: {answer.counted} of {answer.submitted} reports counted")
    table.add_column("bucket", justify="right")
    table.add_column(unit, justify="right")
    table.add_column(f"± ({CONFIDENCE:.0%})", justify="right")
    add_bars(table)
    largest = max(1, *answer.histogram)
    for bucket, value in enumerate(answer.histogram[:MAX_ROWS]):
        table.add_row(str(bucket), str(value), str(result.half_width), bar(value, largest))
    out.print(table)
    if len(answer.histogram) > MAX_ROWS:
        say(f"{len(answer.histogram) - MAX_ROWS} more buckets; --json has them all")
    _show_worth(result)
    for name, counts in zip(names, answer.rejections, strict=True):
        if counts:
            told = ", ".join(f"{count} {reason.value}" for reason, count in counts.items())
            say(f"{name} left out: {told}")


def _show_worth(result: QueryResult) -> None:
    answer = result.answer
    if result.query.debug:
        say("DEBUG: no noise was added; only debug reports were counted")
    else:
        paid = epsilon.show(answer.epsilon_micros)
        terms = f"{answer.noise.value}, ε = {paid}, {show_delta(result.delta)}Δ = {answer.sensitivity}"
        say(f"noise: {terms}, sd {result.noise_sd:.2f} per bucket, attempt {answer.attempts}")
    if result.bias is not None:
        say(f"bias: at most {result.bias.bound:.1f} in total, with probability {1 - result.bias.beta:.0%}")


def show_delta(delta: Fraction) -> str:
    """δ as a power of two, rounded up; nothing where ε is pure."""
    if not delta:
        return ""
    exponent = math.log2(delta.numerator) - math.log2(delta.denominator)
    return f"δ = 2^{math.ceil(exponent * 10) / 10:.1f}, "
