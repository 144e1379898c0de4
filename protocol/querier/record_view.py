"""`trefoil bias`: read a querier's batches, and show what is known about the bias of every epoch and answer."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from protocol import units
from protocol.batch import BatchReader, is_batch
from protocol.cli.console import out, say
from protocol.errors import ErrorKind, TrefoilError
from protocol.querier.own_record import (
    Assumptions,
    BiasStanding,
    EpochBias,
    MeasuredBias,
    OwnRecord,
    QueriedBatch,
)
from protocol.querier.query_folder import SHOWN_DIGITS, SUFFIX, QueryFolder
from protocol.querier.saved_query import MAX_AGE, ReportSpan, spans_of

# Of a query that was refused, failed, or whose answer was not fetched here.
NO_ANSWER = "no answer here: refused, or not fetched"


def record_and_show(paths: Sequence[Path], assumptions: Assumptions) -> list[dict[str, object]]:
    """Print what is known of every site's epochs and answers, and return it as JSON."""
    batches = [_read(path) for path in _batches(paths)]
    sites = sorted({span.site for batch in batches for span in batch.spans})
    if not sites:
        message = f"there are no reports in {', '.join(map(str, paths))}"
        raise TrefoilError(message, "Name batches, or their folder.", kind=ErrorKind.TOO_FEW)
    records = [OwnRecord(site, [_of_site(batch, site) for batch in batches], assumptions) for site in sites]
    for record in records:
        _show(record)
    return [_to_json(record) for record in records]


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
    ids = [each.query.query_id for each in saved]
    queries = tuple((query_id.hex(), folder.bias_of(query_id)) for query_id in ids)
    if path.exists():
        # No report was made much later than the file was written, whatever a malicious device's header says.
        written = int(path.stat().st_mtime)
        return QueriedBatch(path, spans_of(BatchReader(path), last=written + MAX_AGE), queries)
    if not saved:
        message = f"there is no batch {path}, and no query on it"
        raise TrefoilError(message, "Name batches, or their folder.", kind=ErrorKind.FILE_MISSING)
    if not all(each.spans for each in saved):
        raise TrefoilError(
            f"{path} is missing, and its saved queries do not say when its reports were made",
            "Restore the batch: without it nothing is certain about this site.",
            kind=ErrorKind.FILE_MISSING,
        )
    # Each query of a batch that grew has the spans of its time.
    return QueriedBatch(path, _merge([span for each in saved for span in each.spans]), queries)


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
    answers = Table(title=f"{record.site}: answers")
    for heading in ("batch", "query", "reports made", "bias by this budget"):
        answers.add_column(heading)
    for batch in record.batches:
        days = sorted({_day(batch.begun), _day(batch.end)})
        for query, words in _answers(record, batch):
            answers.add_row(batch.path.name, query, " to ".join(days), words)
    out.print(answers)
    say(
        f"Certain if: no device has more than {assumptions.per_device} in a batch; a device's epoch has at least "
        f"ε = {units.show(assumptions.budget)} for {record.site} and {assumptions.epoch_days} days; no report looks "
        f"back further than {assumptions.lookback_days} days; every ε has at most {assumptions.digits} decimals; and "
        "every report made for this site, by any caller, is in these batches."
    )
    say("Other sites can use up the limits that all sites share. Only the side query detects that: request it with κ.")


def _answers(record: OwnRecord, batch: QueriedBatch) -> list[tuple[str, str]]:
    certain = record.certain(batch)
    if not batch.queries:
        words = "an answer would be " + BiasStanding.CERTAIN.value if certain else BiasStanding.UNKNOWN.value
        return [("no query", words)]
    rows = []
    for query, bias in batch.queries:
        if not _answered(batch, query):
            words = NO_ANSWER
        elif certain:
            words = BiasStanding.CERTAIN.value
        else:
            words = BiasStanding.UNKNOWN.value if bias is None else _bound(bias.bound, bias.beta)
        rows.append((query[:SHOWN_DIGITS], words))
    return rows


def _answered(batch: QueriedBatch, query: str) -> bool:
    return QueryFolder(batch.path).answered(bytes.fromhex(query))


def _bound(bound: float, beta: float) -> str:
    return f"{BiasStanding.MEASURED.value}: at most {bound:,.1f} in total, with probability {1 - beta:.0%}"


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
                "batch": str(batch.path),
                "query_id": query,
                "answered": query is not None and _answered(batch, query),
                "standing": _standing(record, batch, query, bias),
                "bias_bound": None if bias is None else bias.bound,
            }
            for batch in record.batches
            for query, bias in batch.queries or ((None, None),)
        ],
    }


def _standing(record: OwnRecord, batch: QueriedBatch, query: str | None, bias: MeasuredBias | None) -> str:
    if query is not None and not _answered(batch, query):
        return "not_answered"
    return record.standing(batch, bias).name.lower()


def _day(moment: int) -> str:
    return f"{datetime.datetime.fromtimestamp(moment, datetime.UTC):%Y-%m-%d}"
