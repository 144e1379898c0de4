"""`trefoil bias`: read a querier's batches, and show what is known about the bias of every epoch and answer."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from protocol import units
from protocol.batch import BatchReader, is_batch
from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile
from protocol.errors import ErrorKind, TrefoilError
from protocol.querier.own_record import Assumptions, BiasStanding, EpochBias, OwnRecord, QueriedBatch
from protocol.querier.query_folder import SHOWN_DIGITS, SUFFIX, QueryFolder
from protocol.querier.result import BiasBound
from protocol.querier.saved_query import MAX_AGE, ReportSpan, spans_of

# Of a query that was refused, failed, or whose answer was not fetched here.
NO_ANSWER = "no answer here: refused, or not fetched"


def bias(
    batches: Annotated[list[Path], typer.Argument(help="All batches of the site, or the folder that they are in.")],
    per_device: Annotated[
        int, typer.Option(min=1, help="The most reports of one device that a batch holds; only you can know it.")
    ],
    budget: Annotated[float, typer.Option(help="ε that a device's epoch has for your site, at least.")] = 1.0,
    lookback_days: Annotated[int, typer.Option(min=1, help="How far back any report looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(min=1, help="How long the epochs of devices are.")] = 7,
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
    assumptions = Assumptions(per_device, units.nearest_micros(budget), lookback_days, epoch_days, digits)
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
    # Each query of a batch that grew has the spans of its time.
    return QueriedBatch(path, _merge([span for each in saved for span in each.spans]), queries, answered)


def _merge(spans: Sequence[ReportSpan]) -> tuple[ReportSpan, ...]:
    merged: dict[object, ReportSpan] = {}
    for span in spans:
        key = (span.site, span.epsilon_micros, span.sensitivity, span.kappa)
        other = merged.get(key, span)
        merged[key] = replace(span, first=min(span.first, other.first), last=max(span.last, other.last))
    return tuple(merged.values())


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
        epochs.add_row(_day(row.begins), str(len(row.batches)), units.show(row.load), _words(row))
    out.print(epochs)
    answers = Table("batch", "query", "reports made", "bias by this budget", title=f"{record.site}: answers")
    for answer in _answers(record):
        days = sorted({_day(answer.batch.begun), _day(answer.batch.end)})
        query = (answer.query or "no query")[:SHOWN_DIGITS]
        answers.add_row(answer.batch.path.name, query, " to ".join(days), answer.words())
    out.print(answers)
    say(
        f"Certain if: no device has more than {assumptions.per_device} in a batch; a device's epoch has at least "
        f"ε = {units.show(assumptions.budget)} for {record.site} and {assumptions.epoch_days} days; no report looks "
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
