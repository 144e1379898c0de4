"""`trefoil bias`, a querier's own record: which answers are certainly unbiased, from public facts (paper, Appendix F).

Run by the querier over all her batches. It costs no budget: no device and no helper is involved.

*The rule.* Appendix F: if every report r takes at most ε^r from an epoch x, and x has at least ε^G, then
Σ ε^r ≤ ε^G implies that x paid for all of them, so nothing was dropped. Here ε^r is the charge for the largest change
Δ + κ (`ReportSpan.most`), and the sum is over the reports that one device can have made and that can reach x.

*Which reports reach x.* Devices draw where their weeks begin, so x may be any interval [s, s + E). A report made at t
asks about the epochs that meet [t − L, t], so it reaches x if and only if s ≤ t and t − L < s + E. For reports made
from a to b that is some t in [a, b] if and only if a − L − E < s ≤ b. A report made after the last one of a batch has
charged nothing yet when that one is answered, so only batches that had begun by then count against it.

*Proof.* Let a report r of a batch B, made at t ≤ b_B, ask about an epoch x = [s, s + E) of its device. Everything that
x's filter for this site has paid by then was for reports of the same device, made at or before t, that reach x: each is
in a batch that began by b_B and for which a − L − E < s ≤ b; at most `per_device` of each batch are of this device;
each took at most `most`. If the sum, B included, is within the budget at every s with a_B − L − E < s ≤ b_B, the filter
had budget left for r, whatever the device holds. So no epoch was dropped for lack of this site's budget. ∎

*What it cannot know.* The limits that all sites share (the global filter, quotas) are used up by others too: only the
side query detects that. Neither counts epochs that a person has cleared, or devices that are switched off, as bias.
`Assumptions` holds what the querier must know herself; a batch that is missing here is missing in the sum.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from protocol.batch import BatchReader, is_batch
from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile
from protocol.errors import ErrorKind, TrefoilError
from protocol.querier.query_folder import SHOWN_DIGITS, SUFFIX, QueryFolder
from protocol.querier.result import BiasBound
from protocol.querier.saved_query import MAX_AGE, ReportSpan, spans_of
from protocol.units import DAY, MICROS, nearest_micros, show

# Weeks begin on Mondays: 1 January 1970 was a Thursday.
_MONDAY = 4 * DAY
# A century: every epoch that a report reaches is a row, and a date that calendars know.
MAX_DAYS = 36_525


class BiasStanding(Enum):
    """How much is known about the bias of an answer."""

    CERTAIN = "unbiased for certain"
    MEASURED = "measured"
    UNKNOWN = "unknown, measure it"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the rule needs and no header says. Days are those of devices; `budget` is in micros per epoch and site.

    `per_device` is the most reports of one device in a batch; `digits` the decimals of every ε that was requested.
    """

    per_device: int
    budget: int = MICROS
    lookback_days: int = 30
    epoch_days: int = 7
    digits: int = 3

    def __post_init__(self) -> None:
        for name in ("per_device", "budget", "lookback_days", "epoch_days"):
            if getattr(self, name) < 1:
                message = f"{name.replace('_', ' ')} must be 1 or more, not {getattr(self, name)}"
                raise TrefoilError(message, kind=ErrorKind.OUT_OF_RANGE)
        if not 0 <= self.digits <= 6:
            raise TrefoilError(
                f"digits of ε must be 0 to 6, not {self.digits}",
                "6 stands for any number of digits.",
                kind=ErrorKind.OUT_OF_RANGE,
            )


@dataclass(frozen=True, slots=True)
class QueriedBatch:
    """One batch: what its reports could cost, and its queries by id with the bias that each measured, if any.

    `answered` are the ids of those whose answer was fetched; a refused query has none.
    """

    path: Path
    spans: tuple[ReportSpan, ...]
    queries: tuple[tuple[str, BiasBound | None], ...] = ()
    answered: frozenset[str] = frozenset()

    @property
    def begun(self) -> int:
        return min(span.first for span in self.spans)

    @property
    def end(self) -> int:
        """Return the latest possible time of its last report."""
        return max(span.end for span in self.spans)

    @property
    def measured(self) -> BiasBound | None:
        return min((bias for _, bias in self.queries if bias), key=lambda bias: bias.bound, default=None)


@dataclass(frozen=True, slots=True)
class EpochBias:
    """The worst case over all device-epochs that begin within one epoch's length from `begins`."""

    begins: int
    # The most that one device can have paid for this site's reports, in micros.
    load: int
    batches: tuple[QueriedBatch, ...]
    standing: BiasStanding
    # The largest bound of the answers that are not certain, if all of them were measured.
    bound: float | None = None


class OwnRecord:
    """All batches of one site, and the rule above applied to them."""

    def __init__(self, site: str, batches: Sequence[QueriedBatch], assumptions: Assumptions) -> None:
        self.site = site
        self.assumptions = assumptions
        self.batches = sorted((batch for batch in batches if batch.spans), key=lambda batch: (batch.end, batch.path))
        self._epoch = assumptions.epoch_days * DAY
        self._reach = assumptions.lookback_days * DAY + self._epoch

    def load(self, begins: int, by: int) -> int:
        """Return the most that the epoch starting at `begins` can have paid to this site by the time `by`."""
        return sum(self._price(batch, begins) for batch in self.batches if batch.begun <= by)

    def certain(self, batch: QueriedBatch) -> bool:
        """Return whether no epoch that the batch reaches can have run out of this site's budget."""
        starts = self._starts(min(span.first for span in batch.spans) - self._reach + 1, batch.end)
        affected = [start for start in starts if self._price(batch, start)]
        return all(self.load(start, batch.end) <= self.assumptions.budget for start in affected)

    def standing(self, batch: QueriedBatch, measured: BiasBound | None) -> BiasStanding:
        """Return what is known of an answer of `batch` whose side query measured `measured`."""
        if self.certain(batch):
            return BiasStanding.CERTAIN
        return BiasStanding.UNKNOWN if measured is None else BiasStanding.MEASURED

    def epochs(self) -> list[EpochBias]:
        """Return every epoch that a report reaches, earliest first."""
        if not self.batches:
            return []
        first = min(batch.begun for batch in self.batches) - self._reach + 1
        last = max(batch.end for batch in self.batches)
        rows = range((first - _MONDAY) // self._epoch, (last - _MONDAY) // self._epoch + 1)
        return [self._row(row * self._epoch + _MONDAY, last) for row in rows]

    def _row(self, begins: int, last: int) -> EpochBias:
        starts = self._starts(begins, begins + self._epoch - 1)
        load = max(self.load(start, last) for start in starts)
        touching = tuple(batch for batch in self.batches if any(self._price(batch, start) for start in starts))
        if load <= self.assumptions.budget:
            return EpochBias(begins, load, touching, BiasStanding.CERTAIN)
        bounds = [batch.measured for batch in touching if not self.certain(batch)]
        measured = [bias.bound for bias in bounds if bias is not None]
        if len(measured) < len(bounds):
            return EpochBias(begins, load, touching, BiasStanding.UNKNOWN)
        return EpochBias(begins, load, touching, BiasStanding.MEASURED, max(measured, default=0.0))

    def _price(self, batch: QueriedBatch, begins: int) -> int:
        """Return the most that one device pays for its reports in `batch` from the epoch starting at `begins`."""
        reached = [span for span in batch.spans if span.first - self._reach < begins <= span.end]
        most = max((span.most(self.assumptions.digits) for span in reached), default=0)
        return self.assumptions.per_device * most

    def _starts(self, first: int, last: int) -> list[int]:
        """Return the starts from `first` to `last` at which the load can change; it is constant in between."""
        changes = {span.first - self._reach + 1 for batch in self.batches for span in batch.spans}
        changes |= {span.end + 1 for batch in self.batches for span in batch.spans}
        return sorted({first, *(start for start in changes if first <= start <= last)})


# Of a query that was refused, failed, or whose answer was not fetched here.
NO_ANSWER = "no answer here: refused, or not fetched"


def bias(
    batches: Annotated[list[Path], typer.Argument(help="All batches of the site, or the folder that they are in.")],
    per_device: Annotated[
        int, typer.Option(min=1, help="The most reports of one device that a batch holds; only you can know it.")
    ],
    budget: Annotated[float, typer.Option(help="ε that a device's epoch has for your site, at least.")] = 1.0,
    lookback_days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, help="How far back any report looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, help="How long the epochs of devices are.")] = 7,
    digits: Annotated[
        int, typer.Option(min=0, max=6, help="Digits after the point of every ε that you asked for; 6 for any.")
    ] = 3,
    json: JsonFile = None,
) -> None:
    """Show which answers spent budgets cannot have biased, from your own batches alone. It costs no budget.

    Example: trefoil bias shop.batch --per-device 1
    """
    if not budget > 0:
        raise TrefoilError(
            f"--budget must be above 0, not {budget}", "Devices have 1 for each site.", kind=ErrorKind.OUT_OF_RANGE
        )
    assumptions = Assumptions(per_device, nearest_micros(budget), lookback_days, epoch_days, digits)
    read = [_read(path) for path in _batches(batches)]
    sites = sorted({span.site for batch in read for span in batch.spans})
    if not sites:
        message = f"there are no reports in {', '.join(map(str, batches))}"
        raise TrefoilError(message, "Name batches, or their folder.", kind=ErrorKind.TOO_FEW)
    records = [OwnRecord(site, [_of_site(batch, site) for batch in read], assumptions) for site in sites]
    for record in records:
        _show(record)
    write_json(json, [_to_json(record) for record in records])


def _batches(paths: Sequence[Path]) -> list[Path]:
    """Return the batches given, and those in folders given: also those of which only the saved queries are left."""
    batches: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            batches[path] = None
            continue
        inside = sorted(path.iterdir())
        files = [each for each in inside if each.is_file() and is_batch(each)]
        kept = [each.with_name(each.name.removesuffix(SUFFIX)) for each in inside if each.name.endswith(SUFFIX)]
        batches |= dict.fromkeys([*files, *kept])
    return sorted(batches)


def _read(path: Path) -> QueriedBatch:
    folder = QueryFolder(path)
    saved = folder.all()
    outcomes = {entry.query.query_id: entry for entry in folder.recorded()}
    biases = {query_id: entry.bias for query_id, entry in outcomes.items()}
    queries = tuple((each.query.query_id.hex(), biases.get(each.query.query_id)) for each in saved)
    answered = frozenset(query_id.hex() for query_id, entry in outcomes.items() if entry.answered)
    if path.exists():
        # No report was made much later than the file was written, whatever a malicious device's header says.
        written = int(path.stat().st_mtime)
        return QueriedBatch(path, spans_of(BatchReader(path), last=written + MAX_AGE), queries, answered)
    if not saved:
        message = f"there is no batch {path}, and no query on it"
        raise TrefoilError(message, "Name batches, or their folder.", kind=ErrorKind.FILE_MISSING)
    # Each query of a batch that grew has the spans of its time. Reports in several of them count once (`_price`).
    return QueriedBatch(path, tuple(span for each in saved for span in each.spans), queries, answered)


def _of_site(batch: QueriedBatch, site: str) -> QueriedBatch:
    return replace(batch, spans=tuple(span for span in batch.spans if span.site == site))


def _show(record: OwnRecord) -> None:
    assumptions = record.assumptions
    epochs = Table(title=f"{record.site}: epochs by the day on which they begin")
    epochs.add_column("from")
    epochs.add_column("batches", justify="right")
    epochs.add_column("ε paid, at most", justify="right")
    epochs.add_column("bias by this budget")
    for row in record.epochs():
        epochs.add_row(_day(row.begins), str(len(row.batches)), show(row.load), _words(row))
    out.print(epochs)
    answers = Table("batch", "query", "reports made", "bias by this budget", title=f"{record.site}: answers")
    for answer in _answers(record):
        days = sorted({_day(answer.batch.begun), _day(answer.batch.end)})
        query = (answer.query or "no query")[:SHOWN_DIGITS]
        answers.add_row(answer.batch.path.name, query, " to ".join(days), answer.words())
    out.print(answers)
    say(
        f"Certain if: no device has more than {assumptions.per_device} in a batch; a device's epoch has at least "
        f"ε = {show(assumptions.budget)} for {record.site} and {assumptions.epoch_days} days; no report looks "
        f"back further than {assumptions.lookback_days} days; every ε has at most {assumptions.digits} decimals; and "
        "every report made for this site, by any caller, is in these batches."
    )
    say("Other sites can use up the limits that all sites share. Only the side query detects that: request it with κ.")


@dataclass(frozen=True, slots=True)
class _AnswerRow:
    """One query of a batch, or None for a batch without one. `standing` is None if its answer is not here."""

    batch: QueriedBatch
    query: str | None
    bias: BiasBound | None
    standing: BiasStanding | None

    def words(self) -> str:
        if self.standing is None:
            return NO_ANSWER
        if self.standing is BiasStanding.MEASURED and self.bias is not None:
            likely = f"with probability {1 - self.bias.beta:.0%}"
            return f"{self.standing.value}: at most {self.bias.bound:,.1f} in total, {likely}"
        would_be = "an answer would be " if self.query is None and self.standing is BiasStanding.CERTAIN else ""
        return would_be + self.standing.value


def _answers(record: OwnRecord) -> list[_AnswerRow]:
    rows = []
    for batch in record.batches:
        for query, bias in batch.queries or ((None, None),):
            is_here = query is None or query in batch.answered
            rows.append(_AnswerRow(batch, query, bias, record.standing(batch, bias) if is_here else None))
    return rows


def _words(row: EpochBias) -> str:
    if row.bound is None:
        return row.standing.value
    return f"{row.standing.value}: at most {row.bound:,.1f} in any answer"


def _to_json(record: OwnRecord) -> dict[str, object]:
    return {
        "site": record.site,
        "epochs": [
            {
                "begins": row.begins,
                "asked_micros": row.load,
                "batches": [str(batch.path) for batch in row.batches],
                "standing": row.standing.name.lower(),
                "bias_bound": row.bound,
            }
            for row in record.epochs()
        ],
        "answers": [
            {
                "batch": str(row.batch.path),
                "query_id": row.query,
                "answered": row.query in row.batch.answered,
                "standing": "not_answered" if row.standing is None else row.standing.name.lower(),
                "bias_bound": None if row.bias is None else row.bias.bound,
            }
            for row in _answers(record)
        ],
    }


def _day(moment: int) -> str:
    return f"{datetime.datetime.fromtimestamp(moment, datetime.UTC):%Y-%m-%d}"
