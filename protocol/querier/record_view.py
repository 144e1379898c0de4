"""`trefoil bias`: her own record as a person sees it, for every epoch and every answer."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from protocol import epsilon
from protocol.batch import BatchReader, is_batch
from protocol.console import out, say
from protocol.errors import TrefoilError
from protocol.querier.own_record import AskedBatch, BiasStanding, EpochBias, Knowledge, OwnRecord
from protocol.querier.query_folder import SHOWN_DIGITS, SUFFIX, QueryFolder
from protocol.querier.report_span import ReportSpan, spans_of


def record_and_show(paths: Sequence[Path], knowledge: Knowledge) -> list[dict[str, object]]:
    """What is known of every site's epochs and answers. Gives the same for programs."""
    batches = [_read(path) for path in _batches(paths)]
    sites = sorted({span.site for batch in batches for span in batch.spans})
    if not sites:
        raise TrefoilError(f"there are no reports in {', '.join(map(str, paths))}", "Name batches, or their folder.")
    records = [OwnRecord(site, [_of_site(batch, site) for batch in batches], knowledge) for site in sites]
    for record in records:
        _show(record)
    return [_to_json(record) for record in records]


def _batches(paths: Sequence[Path]) -> list[Path]:
    """The batches that are named, and those in folders that are: also where only the queries are left."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            found[path] = None
            continue
        inside = sorted(path.iterdir())
        files = [each for each in inside if each.is_file() and is_batch(each)]
        kept = [each.with_name(each.name.removesuffix(SUFFIX)) for each in inside if each.name.endswith(SUFFIX)]
        found |= dict.fromkeys([*files, *kept])
    return sorted(found)


def _read(path: Path) -> AskedBatch:
    folder = QueryFolder(path)
    saved = folder.all()
    queries = tuple((each.query.query_id.hex(), folder.bias_of(each.query.query_id)) for each in saved)
    if path.exists():
        return AskedBatch(path, spans_of(BatchReader(path)), queries)
    if not saved:
        raise TrefoilError(f"there is no batch {path}, and nothing was asked of it", "Name batches, or their folder.")
    if not all(each.spans for each in saved):
        raise TrefoilError(
            f"{path} is gone, and its queries do not say when its reports were made",
            "Restore the batch: without it nothing is certain about this site.",
        )
    # Of a batch that grew, every query names what it had then.
    return AskedBatch(path, _joined([span for each in saved for span in each.spans]), queries)


def _joined(spans: Sequence[ReportSpan]) -> tuple[ReportSpan, ...]:
    found: dict[object, ReportSpan] = {}
    for span in spans:
        key = (span.site, span.epsilon_micros, span.sensitivity, span.kappa)
        known = found.get(key, span)
        found[key] = replace(span, first=min(span.first, known.first), last=max(span.last, known.last))
    return tuple(found.values())


def _of_site(batch: AskedBatch, site: str) -> AskedBatch:
    return replace(batch, spans=tuple(span for span in batch.spans if span.site == site))


def _show(record: OwnRecord) -> None:
    knowledge = record.knowledge
    epochs = Table(title=f"{record.site}: epochs by the day on which they begin")
    epochs.add_column("from")
    epochs.add_column("batches", justify="right")
    epochs.add_column("ε asked, at most", justify="right")
    epochs.add_column("bias by this budget")
    for row in record.epochs():
        epochs.add_row(_day(row.begins), str(len(row.batches)), epsilon.show(row.asked), _words(row))
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
        f"Certain if: no device has more than {knowledge.per_device} in a batch; a device's epoch has at least "
        f"ε = {epsilon.show(knowledge.budget)} for {record.site} and {knowledge.epoch_days} days; no report looks "
        f"back further than {knowledge.lookback_days} days; every ε has at most {knowledge.digits} digits after the "
        "point; and every report made for this site, by whomever, is in these batches."
    )
    say(
        "Limits that all sites share can be used up by others. Only the side query sees that: have reports made with κ."
    )


def _answers(record: OwnRecord, batch: AskedBatch) -> list[tuple[str, str]]:
    if record.certain(batch):
        words = BiasStanding.CERTAIN.value
        return [(query[:SHOWN_DIGITS], words) for query, _ in batch.queries] or [("not asked", words)]
    if not batch.queries:
        return [("not asked", BiasStanding.UNKNOWN.value)]
    return [
        (query[:SHOWN_DIGITS], BiasStanding.UNKNOWN.value if found is None else _bound(found.bound, found.beta))
        for query, found in batch.queries
    ]


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
                "asked_micros": row.asked,
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
                "standing": record.standing(batch, found).name.lower(),
                "bias_bound": None if found is None else found.bound,
            }
            for batch in record.batches
            for query, found in batch.queries or ((None, None),)
        ],
    }


def _day(moment: int) -> str:
    return f"{datetime.datetime.fromtimestamp(moment, datetime.UTC):%Y-%m-%d}"
