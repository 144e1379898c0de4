"""What a helper's report ledger costs as it grows: lookup and reserve, opening, forgetting a day, bytes a report.

Batches hold reports of the last seven of thirty days. Processor time is that of the calling thread, and for PostgreSQL
also that of the server's process behind the connection. A ledger is opened by a process that has just written it, so
caches are warm: a start after a reboot also waits for the disk, which is not measured here.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.table import Table

from benchmarks.workloads import seeded
from mpc_helpers.identity.config import LedgerLocation, PostgresLocation
from mpc_helpers.ledger.attempt import QueryName, ReceivedVote, Reservation
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.batch import sorted_order
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, HOUR
from protocol.vote import Vote

BATCH = 50_000
_OWNER = LedgerOwner(0, b"b" * 32)
_DAYS = 30
_WINDOW = 7
_FIRST_DAY = 20_000
_ROUNDS = 5
_YES = [ReceivedVote(1, Vote.YES, b"yes"), ReceivedVote(2, Vote.YES, b"yes")]
_TICKS = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LedgerCost:
    """The costs of a ledger of `rows` reports; times of lookup and reserve are medians over batches of `BATCH`."""

    engine: str
    rows: int
    lookup_cpu_us: float
    reserve_cpu_us: float
    wall_us: float
    open_seconds: float
    forgotten_rows: int
    forget_seconds: float
    bytes_per_report: float


def measure(
    location: LedgerLocation | None, sizes: Sequence[int], advance: Callable[[int], object]
) -> list[LedgerCost]:
    """Fill one ledger to each size in turn, and measure it there. `location` is a database, or None for a new file."""
    with tempfile.TemporaryDirectory() as folder:
        place = location or Path(folder) / "ledger.sqlite"
        ReportLedger.create(place, _OWNER)
        batches = _batches()
        costs, rows = [], 0
        for size in sorted(sizes):
            with closing(ReportLedger(place, _OWNER)) as ledger:
                while rows < size - _ROUNDS * BATCH:
                    _spend(ledger, next(batches))
                    rows += BATCH
                    advance(BATCH)
            opening, ledger = _timed(lambda: ReportLedger(place, _OWNER))
            with closing(ledger):
                costs.append(_at(ledger, batches, opening, rows + _ROUNDS * BATCH, last=size == max(sizes)))
            rows += _ROUNDS * BATCH
    return costs


def _at(ledger: ReportLedger, batches: Iterator[Reservation], opening: float, rows: int, *, last: bool) -> LedgerCost:
    looking, reserving, walls = [], [], []
    clock = _processor_clock(ledger)
    for _ in range(_ROUNDS):
        batch = next(batches)
        gc.collect()
        began, start = time.perf_counter(), clock()
        standings = ledger.reports.lookup(batch.digests, batch.hours, batch.query.key)
        between = clock()
        ledger.moves.reserve(batch)
        looking.append(between - start)
        reserving.append(clock() - between)
        walls.append(time.perf_counter() - began)
        if standings.any():
            raise TrefoilError("a report that is new was in the ledger", kind=ErrorKind.INCONSISTENT)
        ledger.moves.vote(batch.attempt_id, b"share")
        ledger.moves.release(batch.attempt_id, _YES)
    look, reserve, wall = (1e6 * statistics.median(each) / BATCH for each in (looking, reserving, walls))
    ledger.measure()
    size = ledger.sizes()[0]
    forgotten, forgetting = _forget_a_day(ledger) if last else (0, 0.0)
    engine = "PostgreSQL" if _server(ledger) else "SQLite"
    return LedgerCost(engine, rows, look, reserve, wall, opening, forgotten, forgetting, size / rows)


def _forget_a_day(ledger: ReportLedger) -> tuple[int, float]:
    """Forget the first day that holds a full share of the reports."""
    day = _FIRST_DAY + _WINDOW
    ledger.reports.advance_watermark(day * DAY - HOUR)
    before = ledger.reports.count()
    seconds, _ = _timed(lambda: ledger.reports.advance_watermark((day + 1) * DAY - HOUR))
    return before - ledger.reports.count(), seconds


def _spend(ledger: ReportLedger, batch: Reservation) -> None:
    ledger.moves.reserve(batch)
    ledger.moves.vote(batch.attempt_id, b"share")
    ledger.moves.release(batch.attempt_id, _YES)


def _batches() -> Iterator[Reservation]:
    """Yield batches of new reports, each of the seven days up to one of thirty in turn."""
    rng = seeded.generator(1)
    debug = np.zeros(BATCH, dtype=np.bool_)
    number = 0
    while True:
        rows = rng.integers(0, 256, (BATCH, 32), dtype=np.uint8)
        newest = (_FIRST_DAY + _WINDOW + number % (_DAYS - _WINDOW)) * 24 + 23
        hours = rng.integers(newest - 24 * _WINDOW + 1, newest + 1, BATCH).astype(np.uint32)
        number += 1
        name = QueryName(number.to_bytes(32, "big"), bytes(32))
        attempt = (2**64 + number).to_bytes(32, "big")
        yield Reservation(attempt, name, 1, False, rows[sorted_order(rows)], debug, hours)


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _server(ledger: ReportLedger) -> int | None:
    """Return the process behind the connection, if there is one."""
    raw = getattr(ledger._database.connection, "raw", None)
    return None if raw is None else int(raw.info.backend_pid)


def _processor_clock(ledger: ReportLedger) -> Callable[[], float]:
    server = _server(ledger)
    if server is None:
        return time.thread_time
    stat = Path(f"/proc/{server}/stat")
    if not stat.exists():
        raise TrefoilError(
            "the database server is on another machine, so its processor time is not seen", kind=ErrorKind.UNAVAILABLE
        )

    def clock() -> float:
        fields = stat.read_text().rsplit(")", 1)[1].split()
        return time.thread_time() + (int(fields[11]) + int(fields[12])) / _TICKS

    return clock


def show(costs: Sequence[LedgerCost]) -> Table:
    """Return the costs as a table for a person."""
    table = Table("engine", "rows", "lookup + reserve µs", "wall µs", "open s, warm caches", "day forgotten s", "bytes")
    for cost in costs:
        forgotten = f"{cost.forget_seconds:.2f} ({cost.forgotten_rows:,} rows)" if cost.forgotten_rows else ""
        table.add_row(
            cost.engine,
            f"{cost.rows:,}",
            f"{cost.lookup_cpu_us:.2f} + {cost.reserve_cpu_us:.2f}",
            f"{cost.wall_us:.1f}",
            f"{cost.open_seconds:.3f}",
            forgotten,
            f"{cost.bytes_per_report:.1f}",
        )
    return table


def to_json(costs: Sequence[LedgerCost]) -> dict[str, object]:
    """Return the costs as `benchmarks/results` keeps them."""
    return {"batch": BATCH, "days": _DAYS, "ledgers": [asdict(cost) for cost in costs]}


def parse_location(url: str) -> PostgresLocation | None:
    """Return the database of a URL, or None for a file of the benchmark's own."""
    return PostgresLocation.parse(url) if url else None
