"""What a helper's report ledger costs as it grows: lookup and reserve, opening, forgetting a day, bytes a report.

The ledger holds thirty days of some sites of equal size, which ask in turn: each batch has new reports of one site,
made in the last seven days. Processor time is that of the calling thread, and for PostgreSQL also that of the server's
process behind the connection. Cold means that the operating system keeps no page of the ledger in memory; of what a
database server keeps itself, its shared buffers, nothing is taken away.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.table import Table

from benchmarks.workloads import seeded
from mpc_helpers.identity.config import LedgerLocation, PostgresLocation
from mpc_helpers.ledger.attempt import QueryName, ReceivedVote, Reservation
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.amounts import Amount, Amounts
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
    """The costs of a ledger of `rows` reports; times of lookup and reserve are medians over batches of `BATCH`.

    `further_cpu_us` is both times of a second part of the same reports, 0 if queries use them up.
    """

    engine: str
    sites: int
    rows: int
    lookup_cpu_us: float
    reserve_cpu_us: float
    wall_us: float
    cold_cpu_us: float
    cold_wall_us: float
    cold_open_seconds: float
    forgotten_rows: int
    forget_seconds: float
    bytes_per_report: float
    further_cpu_us: float = 0.0


def measure(
    location: LedgerLocation | None,
    sizes: Sequence[int],
    sites: int,
    advance: Callable[[int], object],
    *,
    parts: bool = False,
) -> list[LedgerCost]:
    """Fill one ledger to each size in turn, and measure it there. `location` is a database, or None for a new file.

    With `parts`, every query takes a fifth of each report and keeps the rest.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = location or Path(folder) / "ledger.sqlite"
        ReportLedger.create(place, _OWNER)
        batches = _batches(sites, parts=parts)
        costs, rows = [], 0
        for size in sorted(sizes):
            with closing(ReportLedger(place, _OWNER)) as ledger:
                while rows < size - 2 * _ROUNDS * BATCH:
                    _spend(ledger, next(batches))
                    rows += BATCH
                    advance(BATCH)
                files = _files(ledger, place)
            _evict(files)
            opening, ledger = _timed(lambda: ReportLedger(place, _OWNER))
            with closing(ledger):
                rows += 2 * _ROUNDS * BATCH
                costs.append(_at(ledger, batches, files, (sites, rows, opening), last=size == max(sizes)))
    return costs


def _at(
    ledger: ReportLedger,
    batches: Iterator[Reservation],
    files: Callable[[], list[Path]],
    setting: tuple[int, int, float],
    *,
    last: bool,
) -> LedgerCost:
    sites, rows, opening = setting
    clock = _processor_clock(ledger)
    cold = [_round(ledger, next(batches), clock, files) for _ in range(_ROUNDS)]
    measured = [next(batches) for _ in range(_ROUNDS)]
    warm = [_round(ledger, batch, clock, None) for batch in measured]
    further = [0.0 if batch.whole else sum(_round(ledger, _second_part(batch), clock, None)[:2]) for batch in measured]
    look, reserve, wall = (1e6 * statistics.median(each) / BATCH for each in zip(*warm, strict=True))
    cold_cpu = 1e6 * statistics.median(looking + reserving for looking, reserving, _ in cold) / BATCH
    cold_wall = 1e6 * statistics.median(each for *_, each in cold) / BATCH
    ledger.measure()
    size = ledger.sizes()[0]
    forgotten, forgetting = _forget_a_day(ledger) if last else (0, 0.0)
    engine = "PostgreSQL" if _server(ledger) else "SQLite"
    times = (look, reserve, wall, cold_cpu, cold_wall, opening)
    second = 1e6 * statistics.median(further) / BATCH
    return LedgerCost(engine, sites, rows, *times, forgotten, forgetting, size / rows, second)


def _second_part(batch: Reservation) -> Reservation:
    """Return a reservation of the same part of the same reports for another query."""
    name = QueryName(batch.query.key[::-1], bytes(32))
    return replace(batch, attempt_id=batch.attempt_id[::-1], query=name)


def _round(
    ledger: ReportLedger, batch: Reservation, clock: Callable[[], float], evicted: Callable[[], list[Path]] | None
) -> tuple[float, float, float]:
    """Return the processor time of looking a batch up and of reserving it, and the wall-clock time of both."""
    if evicted is not None:
        _evict(evicted)
    gc.collect()
    began, start = time.perf_counter(), clock()
    standings = ledger.reports.lookup(batch.digests, batch.hours, batch.query.key, None, batch.amounts, site=batch.site)
    between = clock()
    ledger.moves.reserve(batch)
    end, wall = clock(), time.perf_counter() - began
    if standings.any():
        raise TrefoilError("a report that is new was in the ledger", kind=ErrorKind.INCONSISTENT)
    ledger.moves.vote(batch.attempt_id, b"share")
    ledger.moves.release(batch.attempt_id, _YES)
    return between - start, end - between, wall


def _files(ledger: ReportLedger, place: LedgerLocation) -> Callable[[], list[Path]]:
    """Return the function that lists the files of a ledger, or of the database cluster it is in."""
    if isinstance(place, Path):
        return lambda: [*place.parent.glob(place.name + "*")]
    folder = Path(ledger._database.value("SHOW data_directory"))
    return lambda: [path for path in folder.rglob("*") if path.is_file()]


def _evict(files: Callable[[], list[Path]]) -> None:
    """Have the operating system write these files and forget their pages."""
    for path in files():
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def _batches(sites: int, *, parts: bool) -> Iterator[Reservation]:
    """Yield batches of new reports, each of one site and of the seven days up to one of thirty, in turn."""
    rng = seeded.generator(1)
    debug = np.zeros(BATCH, dtype=np.bool_)
    amounts = Amounts(BATCH, (Amount(1_000_000, 1, 200_000 if parts else 1_000_000),))
    number = 0
    while True:
        rows = rng.integers(0, 256, (BATCH, 32), dtype=np.uint8)
        newest = (_FIRST_DAY + _WINDOW + number % (_DAYS - _WINDOW)) * 24 + 23
        hours = rng.integers(newest - 24 * _WINDOW + 1, newest + 1, BATCH).astype(np.uint32)
        number += 1
        name = QueryName(number.to_bytes(32, "big"), bytes(32))
        attempt = (2**64 + number).to_bytes(32, "big")
        site = f"shop-{number % sites}.example"
        whole = Reservation(attempt, name, 1, False, rows[sorted_order(rows)], debug, hours, site=site)
        yield replace(whole, amounts=amounts, whole=not parts)


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
    columns = ("sites", "rows", "lookup + reserve µs", "wall µs", "cold µs", "cold wall µs", "cold open s")
    table = Table("engine", *columns, "day forgotten s", "bytes")
    for cost in costs:
        forgotten = f"{cost.forget_seconds:.2f} ({cost.forgotten_rows:,} rows)" if cost.forgotten_rows else ""
        table.add_row(
            cost.engine,
            str(cost.sites),
            f"{cost.rows:,}",
            f"{cost.lookup_cpu_us:.2f} + {cost.reserve_cpu_us:.2f}",
            f"{cost.wall_us:.1f}",
            f"{cost.cold_cpu_us:.2f}",
            f"{cost.cold_wall_us:.1f}",
            f"{cost.cold_open_seconds:.3f}",
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
