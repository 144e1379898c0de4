"""What `trefoil query` shows: progress, the histogram with its error bars, left-out reports, and the list of queries.

The functions `…_and_show` run one subcommand each: they call the library and print its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import datetime
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from protocol import units
from protocol.batch import BatchReader
from protocol.cli.console import Advance, add_bars, bar, err, out, progress, say
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import HelperSet
from protocol.keys import load_identity
from protocol.left_out import WOULD_COUNT, reason_of
from protocol.querier.ask import OnStatus, Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import SHOWN_DIGITS, QueryFolder, ask_batch
from protocol.querier.result import CONFIDENCE, QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery, kind_to_query
from protocol.querier.spending import audit, check_choice, spending_of
from protocol.shares import PARTIES
from protocol.status import QueryState, QueryStatus


def left_out_reports(result: QueryResult, batch: BatchReader) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield each report that a helper's list names: its index in the batch file, its digest, and each helper's reason.

    In the order of the batch file.
    """
    if batch.root() != result.query.batch_root:
        raise TrefoilError(
            f"{batch.path} has changed since it was queried: the helpers' lists refer to other reports",
            "Name the original batch, or omit --left-out.",
            kind=ErrorKind.INCONSISTENT,
        )
    lists, order, digests = result.answer.left_out, batch.order(), batch.digests()
    rejected = _rejected(result)
    for place in rejected[np.argsort(order[rejected], kind="stable")]:
        record, codes = int(order[place]), [int(each[place]) for each in lists]
        reasons = ["would count" if code == WOULD_COUNT else reason_of(code).value for code in codes]
        yield record, bytes(digests[record]), reasons


def write_left_out(path: Path, result: QueryResult, batch: BatchReader, names: Sequence[str]) -> int:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["record", "digest", *names])
    count = 0
    for record, digest, reasons in left_out_reports(result, batch):
        count += 1
        writer.writerow([record, digest.hex(), *reasons])
    write_atomically(path, text.getvalue().encode())
    return count


def list_left_out(path: Path, result: QueryResult, reports: Path, helpers: Path) -> None:
    names = [helper.name for helper in HelperSet.load(helpers).helpers]
    count = write_left_out(path, result, BatchReader(reports), names)
    say(f"{count:,} reports left out are in {path}")
    if missing := missing_from_lists(result):
        say(f"{missing:,} more were left out and are in no list: a helper's list is at most 512 KiB long")


def missing_from_lists(result: QueryResult) -> int:
    """Return how many reports were left out but are in no list, because lists are truncated."""
    answer = result.answer
    return answer.submitted - answer.counted - _rejected(result).size


def _rejected(result: QueryResult) -> npt.NDArray[np.intp]:
    """Return the places of the reports that some helper's list names, in the batch's order by digest."""
    return np.flatnonzero(np.any([codes != WOULD_COUNT for codes in result.answer.left_out], axis=0))


# A list must not wait long for an unreachable helper.
LIST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ListedQuery:
    """One saved query with each helper's status."""

    saved: SavedQuery
    statuses: Mapping[int, QueryStatus | QueryFailed]

    @property
    def held(self) -> bool:
        statuses = self.statuses.values()
        return all(isinstance(each, QueryStatus) and each.state is QueryState.RELEASED for each in statuses)

    def describe(self, names: Sequence[str]) -> str:
        if self.held:
            return "answered: all three helpers hold it"
        return "; ".join(f"{names[party]}: {_state(status)}" for party, status in sorted(self.statuses.items()))

    def to_json(self, names: Sequence[str]) -> dict[str, object]:
        query = self.saved.query
        return {
            "query_id": query.query_id.hex(),
            "log_name": query.short_name,
            "made": self.saved.made,
            "deadline": query.deadline,
            "reports": query.batch_size,
            "epsilon_micros": query.epsilon_micros,
            "keeps_rest": query.keeps_rest,
            "paid_micros": _paid(self.saved),
            "noise": query.noise.value,
            "debug": query.debug,
            "answer_held": self.held,
            "helpers": {names[party]: _state(status) for party, status in self.statuses.items()},
        }


def _paid(saved: SavedQuery) -> int | None:
    """Return the most that a report of the query paid; None for queries of releases that did not save it."""
    return max((span.epsilon_micros for span in saved.spans), default=None)


def _takes(saved: SavedQuery) -> str:
    """Return the ε of a query, and what it was taken of where the rest is kept."""
    epsilon, paid = units.show(saved.query.epsilon_micros), _paid(saved)
    if not saved.query.keeps_rest:
        return epsilon
    return f"{epsilon}, rest kept" if paid is None else f"{epsilon} of {units.show(paid)}, rest kept"


def _state(status: QueryStatus | QueryFailed) -> str:
    if isinstance(status, QueryFailed):
        return "does not know it" if status.refused else "cannot be reached"
    return status.state.value


def list_and_show(reports: Path, helpers: Path) -> list[dict[str, object]]:
    helper_set = HelperSet.load(helpers)
    names = [helper.name for helper in helper_set.helpers]
    listed = asyncio.run(_poll(QueryFolder(reports).all(), helper_set))
    _show_list(listed, names, reports)
    return [entry.to_json(names) for entry in listed]


async def _poll(saved: Sequence[SavedQuery], helper_set: HelperSet) -> list[ListedQuery]:
    querier = Querier(helper_set, request_seconds=LIST_SECONDS)
    polled = await asyncio.gather(*(querier.statuses(one) for one in saved))
    return [ListedQuery(one, statuses) for one, statuses in zip(saved, polled, strict=True)]


def _show_list(listed: Sequence[ListedQuery], names: Sequence[str], reports: Path) -> None:
    if not listed:
        say(f"there is no query on {reports}")
        return
    headings = ("id", "in helpers' logs", "submitted (UTC)", "reports", "ε", "noise", "outcome")
    table = Table(*headings, title=f"queries on {reports}")
    for entry in listed:
        query = entry.saved.query
        made = datetime.datetime.fromtimestamp(entry.saved.made, datetime.UTC)
        table.add_row(
            query.query_id.hex()[:SHOWN_DIGITS],
            query.short_name,
            f"{made:%Y-%m-%d %H:%M}",
            str(query.batch_size),
            _takes(entry.saved),
            "debug" if query.debug else query.noise.value,
            entry.describe(names),
        )
    out.print(table)
    say("Fetch an answer with: trefoil query fetch --id ID")


MAX_ROWS = 64
# The progress of each state, in percent; the others are ends.
_WEIGHT = {
    QueryState.AWAITING: 0,
    QueryState.QUEUED: 5,
    QueryState.ADMITTING: 10,
    QueryState.AGREEING: 60,
    QueryState.COMPUTING: 75,
    QueryState.VOTING: 90,
}


def permille(share: float) -> int:
    """Return a fraction in thousandths, rounded down."""
    if not (0 <= share <= 1):
        message = f"--tolerate is a fraction from 0 to 1, not {share:g}"
        raise TrefoilError(message, "Half of the reports is 0.5.", kind=ErrorKind.OUT_OF_RANGE)
    return int(share * 1000)


@contextlib.contextmanager
def show_details(wanted: bool) -> Iterator[None]:
    """Print each helper's reasons if the query fails; unless `wanted`, add a hint about `--details` instead."""
    try:
        yield
    except QueryFailed as error:
        if wanted:
            for line in error.details:
                err.print(line, markup=False, highlight=False, soft_wrap=True)
        elif error.details:
            error.hint = f"{error.hint} Each helper's reasons: --details".strip()
        raise


def ask_and_show(
    reports: Path, helpers: Path, site_key: Path, options: QueryOptions, now: int, *, new: bool
) -> QueryResult:
    helper_set, key, batch = HelperSet.load(helpers), load_identity(site_key), BatchReader(reports)
    batch.check()
    if new or QueryFolder(reports).newest() is None:
        check_choice(batch, options)
        options = _rest_of_record(batch, options) if new else options
    with _bar() as on_status:
        result = asyncio.run(ask_batch(Querier(helper_set), batch, options, key, now, new=new, on_status=on_status))
    show(result, [helper.name for helper in helper_set.helpers])
    return result


def _rest_of_record(batch: BatchReader, options: QueryOptions) -> QueryOptions:
    """Return options that ask by default for what is left of the batch by its own record, if something was kept."""
    if options.epsilon_micros is not None:
        return options
    sensitivity = kind_to_query(batch, options.kind).terms.sensitivity
    (spent,) = spending_of([batch.path])
    groups = [group for group in spent.groups if group.left > 0]
    if not any(group.left < group.paid for group in groups):
        return options
    most = min(units.affordable(group.paid, group.sensitivity, group.left, sensitivity) for group in groups)
    say(f"asks for {units.show(most)}: by the record of {batch.path} no more is left of some reports")
    return replace(options, epsilon_micros=most, keeps_rest=bool(options.keeps_rest))


def audit_and_show(paths: Sequence[Path]) -> list[dict[str, object]]:
    """Print what the answers over some batches took of their reports, and return it as JSON; raise on too much."""
    spent = audit(paths)
    table = Table(title="released answers, report by report")
    for heading in ("batch", "reports", "answers", "paid", "left"):
        table.add_column(heading, justify="left" if heading == "batch" else "right")
    for batch in spent:
        for group in batch.groups:
            left = ("" if group.sure else "at least ") + units.show(group.left)
            cells = f"{group.count:,}", str(len(group.answers)), units.show(group.paid), left
            table.add_row(str(batch.path), *cells)
    out.print(table)
    say("no report is in answers that cost more than it paid")
    return [
        {
            "batch": str(batch.path),
            "reports": group.count,
            "answers": [answer.query.query_id.hex() for answer in group.answers],
            "paid_micros": group.paid,
            "left_micros": group.left,
            "exact": group.sure,
        }
        for batch in spent
        for group in batch.groups
    ]


def withdraw_and_show(reports: Path, helpers: Path, site_key: Path) -> dict[str, object]:
    folder = QueryFolder(reports)
    saved = folder.newest()
    if saved is None:
        hint = "List queries with: trefoil query list"
        raise TrefoilError(f"there is no query on {reports}", hint, kind=ErrorKind.FILE_MISSING)
    asyncio.run(Querier(HelperSet.load(helpers)).withdraw(saved, load_identity(site_key)))
    folder.keep_outcome(saved.query, None)
    say("withdrawn: the helpers will not answer this query, and its reports can be queried again")
    return {"query_id": saved.query.query_id.hex(), "withdrawn": True}


def fetch_and_show(reports: Path, helpers: Path, digits: str) -> QueryResult:
    """Fetch and print the answer to an earlier query. The batch may have changed since."""
    helper_set, folder = HelperSet.load(helpers), QueryFolder(reports)
    with _bar() as on_status:
        result = asyncio.run(Querier(helper_set).fetch(folder.find(digits), on_status))
    folder.keep_result(result)
    show(result, [helper.name for helper in helper_set.helpers])
    return result


@contextlib.contextmanager
def _bar() -> Iterator[OnStatus]:
    with progress("query, percent", 100) as advance:
        yield Follower(advance)


class Follower:
    """Turns the statuses of three helpers into one progress bar that never moves back."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._percent = 0

    def __call__(self, statuses: Mapping[int, QueryStatus]) -> None:
        done = sum(_share(status) for status in statuses.values()) // PARTIES
        slowest = min(statuses.values(), key=_share, default=None)
        if done > self._percent and slowest is not None:
            self._advance(done - self._percent, note=slowest.state.value)
            self._percent = done


def _share(status: QueryStatus) -> int:
    within = 50 * min(status.done, status.total) // status.total if status.total > 0 else 0
    return min(100, _WEIGHT.get(status.state, 100) + within)


def show(result: QueryResult, names: Sequence[str]) -> None:
    """Print the histogram as a table with bars, its error bounds, and the helpers' rejections."""
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
    _show_error(result)
    for name, counts in zip(names, answer.rejections, strict=True):
        if counts:
            reasons = ", ".join(f"{count} {reason.value}" for reason, count in counts.items())
            say(f"{name} left out: {reasons}")


def _show_error(result: QueryResult) -> None:
    answer = result.answer
    if result.query.debug:
        say("DEBUG: no noise was added; only debug reports were counted")
    else:
        paid = units.show(answer.epsilon_micros)
        terms = f"{answer.noise.value}, ε = {paid}, {show_delta(result.delta)}Δ = {answer.sensitivity}"
        say(f"noise: {terms}, sd {result.noise_sd:.2f} per bucket, attempt {answer.attempts}")
    if result.bias is not None:
        say(f"bias: at most {result.bias.bound:.1f} in total, with probability {1 - result.bias.beta:.0%}")


def show_delta(delta: Fraction) -> str:
    """Return δ as a power of two, rounded up; empty for pure ε."""
    if not delta:
        return ""
    exponent = math.log2(delta.numerator) - math.log2(delta.denominator)
    return f"δ = 2^{math.ceil(exponent * 10) / 10:.1f}, "
