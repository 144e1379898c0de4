"""Totals by who asked: by site, and by the intermediary that asked on its pages (paper, Figure 1).

From the log of reports, which goes back as far as it is kept. Weeks are budgets of their own, so what they paid is
added up within a week and never across weeks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from device.storage import ReportRecord


@dataclass(frozen=True, slots=True)
class AskerTotal:
    """What one site, or one intermediary on all of its sites, has had."""

    name: str
    # Of an intermediary the sites it asked on, of a site the intermediaries that asked on it.
    others: tuple[str, ...]
    reports: int
    # Reports that some week paid for; the others are empty.
    paid_for: int
    # The most that one week has paid for all of them together, in micros.
    most: int


def totals_by_site(records: Iterable[ReportRecord]) -> list[AskerTotal]:
    """Every site, whoever asked on its pages: this is whose budget pays."""
    return _totals(records, lambda record: record.site, lambda record: record.caller)


def totals_by_intermediary(records: Iterable[ReportRecord]) -> list[AskerTotal]:
    """Every intermediary, over all sites on whose pages it asked: it can put their answers together."""
    asked = [record for record in records if record.caller != record.site]
    return _totals(asked, lambda record: record.caller, lambda record: record.site)


def _totals(
    records: Iterable[ReportRecord], name: Callable[[ReportRecord], str], other: Callable[[ReportRecord], str]
) -> list[AskerTotal]:
    found: dict[str, list[ReportRecord]] = defaultdict(list)
    for record in records:
        found[name(record)].append(record)
    return [_total(asker, found[asker], other) for asker in sorted(found)]


def _total(name: str, records: Sequence[ReportRecord], other: Callable[[ReportRecord], str]) -> AskerTotal:
    weeks: Counter[int] = Counter()
    for record in records:
        for entry in record.epochs:
            weeks[entry.epoch] += entry.paid
    return AskerTotal(
        name,
        tuple(sorted({other(record) for record in records} - {name})),
        len(records),
        sum(any(entry.paid for entry in record.epochs) for record in records),
        max(weeks.values(), default=0),
    )
