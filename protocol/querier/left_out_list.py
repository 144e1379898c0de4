"""Which reports of a batch were left out, and why: the helpers' lists, by digest and record of the batch file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.batch import BatchReader
from protocol.console import say
from protocol.errors import Rejection, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import HelperSet
from protocol.left_out import WOULD_COUNT, reason_of
from protocol.querier.worth import QueryResult


@dataclass(frozen=True, slots=True)
class LeftOutReport:
    """One report that is not in the answer. `record` is its place in the batch file, from 0; None: would be counted."""

    record: int
    digest: bytes
    reasons: tuple[Rejection | None, Rejection | None, Rejection | None]


def left_out_reports(result: QueryResult, batch: BatchReader) -> Iterator[LeftOutReport]:
    """Every report left out, as far as the helpers' lists go, in the order of the batch file."""
    if batch.root() != result.query.batch_root:
        raise TrefoilError(
            f"{batch.path} has changed since it was queried: the helpers' lists are about other reports",
            "Name the batch as it was, or leave --left-out out.",
        )
    lists, order, digests = result.answer.left_out, batch.order(), batch.digests()
    touched = np.flatnonzero(np.any([codes != WOULD_COUNT for codes in lists], axis=0))
    for place in touched[np.argsort(order[touched], kind="stable")]:
        record = int(order[place])
        first, second, third = (_reason(int(codes[place])) for codes in lists)
        yield LeftOutReport(record, bytes(digests[record]), (first, second, third))


def write_left_out(path: Path, result: QueryResult, batch: BatchReader, names: Sequence[str]) -> int:
    """A table as CSV: a line for each report left out. Gives how many."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["record", "digest", *names])
    count = 0
    for report in left_out_reports(result, batch):
        count += 1
        writer.writerow([report.record, report.digest.hex(), *(_word(reason) for reason in report.reasons)])
    write_atomically(path, text.getvalue().encode())
    return count


def list_left_out(path: Path, result: QueryResult, reports: Path, helpers: Path) -> None:
    """Write the table and say how many it names."""
    names = [helper.name for helper in HelperSet.load(helpers).helpers]
    count = write_left_out(path, result, BatchReader(reports), names)
    say(f"{count:,} reports left out are in {path}")
    if missing := missing_from_lists(result):
        say(f"{missing:,} more were left out that no list names: a helper's list is at most 512 KiB long")


def missing_from_lists(result: QueryResult) -> int:
    """How many reports were left out that no list names, because the lists were cut for their length."""
    answer = result.answer
    listed = int(np.count_nonzero(np.any([codes != WOULD_COUNT for codes in answer.left_out], axis=0)))
    return answer.submitted - answer.counted - listed


def _reason(code: int) -> Rejection | None:
    return None if code == WOULD_COUNT else reason_of(code)


def _word(reason: Rejection | None) -> str:
    return "would count" if reason is None else reason.value
