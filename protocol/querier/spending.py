"""What answers have taken of each report of a querier's batches: from her own record, without asking anyone.

Reports are grouped by what they paid and by the answers they are in. Two computations share nothing but these groups:

- `ReportGroup.left`: what the next query may take, in micros, by the rule that helpers apply (`units.need`).
- `ReportGroup.overspent`: an audit of the helpers, in rates and exact fractions: Σ ε_q/Δ_q ≤ ε_r/Δ_r over the answers
  that a report is in. That is what the proof of SPEC.md §10 needs. A wrong rule, run by all three, would show here.

A query whose outcome is not recorded counts as an answer over the whole batch, so that what is left is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.batch import BatchReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.header import EPSILON_SPAN, SENSITIVITY_SPAN
from protocol.querier.query_folder import QueryFolder, RecordedQuery
from protocol.querier.saved_query import QueryOptions, kind_to_query, spans_of
from protocol.units import MAX_MICROS, MAX_SENSITIVITY, least_need, need, show
from protocol.wire import HASH_SIZE

_TERMS = np.dtype([("epsilon", ">u4"), ("sensitivity", ">u8")])


@dataclass(frozen=True, slots=True)
class ReportGroup:
    """Reports of equal ε and Δ that are in the same answers; `answers` without an outcome may be none."""

    count: int
    paid: int
    sensitivity: int
    answers: tuple[RecordedQuery, ...] = ()

    @property
    def left(self) -> int:
        """Return what can still be asked of each report, in micros of its own ε; 0 if it is used up."""
        if any(not answer.query.keeps_rest for answer in self.answers):
            return 0
        queries = [answer.query for answer in self.answers]
        costs = (need(self.paid, self.sensitivity, query.epsilon_micros, query.sensitivity) for query in queries)
        left = self.paid - sum(costs)
        return left if left >= least_need(self.paid) else 0

    @property
    def sure(self) -> bool:
        """Return whether each of its answers is known to be released, with these reports in it."""
        return all(answer.released for answer in self.answers)

    @property
    def overspent(self) -> bool:
        """Return whether the answers that are known to hold these reports are more than the rules of SPEC.md §3 allow.

        More rate than was paid for, two answers that each used the reports up, or one that was asked for when another
        had come that used them up.
        """
        released = [answer for answer in self.answers if answer.released]
        spent = sum((Fraction(each.query.epsilon_micros, each.query.sensitivity) for each in released), Fraction(0))
        wholes = {answer.query.query_id for answer in released if not answer.query.keeps_rest}
        too_late = any(wholes & answer.after for answer in released)
        return spent > Fraction(self.paid, self.sensitivity) or len(wholes) > 1 or too_late


@dataclass(frozen=True, slots=True)
class BatchSpending:
    """The groups of one batch. Answers over other batches count where they hold the same reports."""

    path: Path
    groups: tuple[ReportGroup, ...]

    @property
    def paid(self) -> int:
        """Return the most that a report of the batch paid, in micros."""
        return max((group.paid for group in self.groups), default=0)

    @property
    def left(self) -> tuple[int, int]:
        """Return the least and the most that is left of a report."""
        rests = [group.left for group in self.groups]
        return min(rests, default=0), max(rests, default=0)

    @property
    def sure(self) -> bool:
        """Return whether that is exact, and no lower bound."""
        return all(group.sure for group in self.groups)


def spending_of(paths: Sequence[Path]) -> list[BatchSpending]:
    """Add up, report by report, what the answers over these batches took. Each report counts once, in all of them."""
    batches = [BatchReader(path) for path in paths]
    rows = np.concatenate([np.empty((0, HASH_SIZE), dtype=np.uint8), *(batch.digests() for batch in batches)])
    keys = np.ascontiguousarray(rows).view([("", np.void, HASH_SIZE)]).ravel()
    distinct, places = np.unique(keys, return_inverse=True)
    folders = [[entry.on(batch) for entry in QueryFolder(batch.path).recorded()] for batch in batches]
    queries = [entry for entries in folders for entry in entries]
    membership = np.zeros((len(distinct), len(queries)), dtype=np.bool_)
    ends = np.cumsum([0, *(len(batch) for batch in batches)])
    spans = [places[start:stop] for start, stop in pairwise(ends)]
    column = 0
    for batch, entries, span in zip(batches, folders, spans, strict=True):
        for entry in entries:
            membership[span[entry.rows(batch)], column] = True
            column += 1
    return [
        BatchSpending(batch.path, _groups(batch, span, membership, queries))
        for batch, span in zip(batches, spans, strict=True)
    ]


def _groups(
    batch: BatchReader,
    span: npt.NDArray[np.intp],
    membership: npt.NDArray[np.bool_],
    queries: Sequence[RecordedQuery],
) -> tuple[ReportGroup, ...]:
    """Return the groups of one batch. Records whose terms no report may have are in none."""
    cut = np.ascontiguousarray(batch.records[:, EPSILON_SPAN.start : SENSITIVITY_SPAN.stop])
    terms = cut.view(_TERMS).ravel()
    epsilon, sensitivity = terms["epsilon"].astype(np.uint64), terms["sensitivity"].astype(np.uint64)
    usable = (epsilon > 0) & (epsilon <= MAX_MICROS) & (sensitivity > 0) & (sensitivity <= MAX_SENSITIVITY)
    _, first = np.unique(span, return_index=True)
    chosen = first[usable[first]]
    if not chosen.size:
        return ()
    alike = np.hstack([cut[chosen], np.packbits(membership[span[chosen]], axis=1)])
    values = np.ascontiguousarray(alike).view([("", np.void, alike.shape[1])]).ravel()
    _, starts, counts = np.unique(values, return_index=True, return_counts=True)
    return tuple(
        ReportGroup(
            int(count),
            int(epsilon[row]),
            int(sensitivity[row]),
            tuple(queries[at] for at in np.flatnonzero(membership[span[row]]).tolist()),
        )
        for row, count in zip(chosen[starts], counts, strict=True)
    )


def audit(paths: Sequence[Path]) -> list[BatchSpending]:
    """Return the spending of some batches, or raise an error if released answers cost a report more than it paid."""
    spent = spending_of(paths)
    for batch in spent:
        wrong = [group for group in batch.groups if group.overspent]
        if wrong:
            names = sorted({answer.query.short_name for group in wrong for answer in group.answers if answer.released})
            raise TrefoilError(
                f"{sum(group.count for group in wrong)} reports of {batch.path} are in answers that cost more than they"
                f" paid: {', '.join(names)}",
                "Keep the batch and its saved queries, and show them to the operators: no honest helper does this.",
                kind=ErrorKind.INCONSISTENT,
            )
    return spent


def check_choice(batch: BatchReader, options: QueryOptions) -> None:
    """Raise an error where a new query must say what becomes of the rest of its reports, and does not.

    Used up by default, budget is gone for good; kept by default, a report would be counted twice. So nothing is the
    default where `--epsilon` is below what some reports paid.
    """
    if options.epsilon_micros is None:
        if options.keeps_rest:
            hint = "Give --epsilon with what to take of each report."
            raise TrefoilError("--keep-rest needs --epsilon", hint, kind=ErrorKind.MISSING_OPTION)
        return
    kind = kind_to_query(batch, options.kind).terms
    if options.keeps_rest is not None or kind.debug:
        return
    terms = options.epsilon_micros, kind.sensitivity
    spans = [(span.epsilon_micros, span.sensitivity) for span in spans_of(batch) if span.site == kind.site]
    paid, rest = max(((span[0], span[0] - need(*span, *terms)) for span in spans), default=(0, 0))
    if rest > 0:
        raise TrefoilError(
            f"--epsilon {show(options.epsilon_micros)} is less than the {show(paid)} that the reports paid: say what"
            " becomes of the rest",
            f"Give --keep-rest to keep {show(rest)} of each report for later queries, or --use-up.",
            kind=ErrorKind.MISSING_OPTION,
        )
