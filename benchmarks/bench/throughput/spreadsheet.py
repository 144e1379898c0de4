"""A line for every run: what other programs read as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.bench.throughput.point import ThroughputPoint


def to_csv(points: Sequence[ThroughputPoint]) -> str:
    """Size, kind, run, seconds, processor seconds and every ratio, with a line of names first."""
    rows = [row for point in points for row in _rows(point)]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _rows(point: ThroughputPoint) -> Iterator[dict[str, object]]:
    stored: Mapping[str, Any] = point.to_json()
    for number, run in enumerate(stored["runs"], 1):
        yield {
            **{name: stored[name] for name in ("reports", "buckets", "checked", "suite")},
            "run": number,
            **{name: value for name, value in run.items() if name != "ratios"},
            **run["ratios"],
        }
