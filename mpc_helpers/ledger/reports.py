"""Which reports are spent, and the attempt that holds each.

A report is locked exactly while the attempt it points to is not aborted, so voting, releasing and freeing touch one row
regardless of the batch's size.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mpc_helpers.ledger.attempt import AttemptState, Reservation
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.file import LedgerError
from mpc_helpers.ledger.schema import ELSEWHERE
from protocol.batch import DigestRows, Digests
from protocol.errors import ErrorKind
from protocol.wire import HASH_SIZE

Standings = npt.NDArray[np.uint8]
# Digests per statement: twice as fast as one statement each; larger ones are no faster.
_CHUNK = 500
# Digests are evenly spread, so slices by their first byte are of one size. The last bound is above every digest.
_SLICES = [*(bytes([first]) for first in range(256)), b"\xff" * (HASH_SIZE + 1)]


class Standing(IntEnum):
    """Whether a query may reserve a report. DRAWN: free, but in as many noise draws as the query allows."""

    FREE = 0
    BUSY = 1
    SEEN = 2
    DRAWN = 3


class Conflict(LedgerError):
    """An accepted report cannot be reserved. The attempt is aborted, so that this helper may vote NO."""

    kind = ErrorKind.BUSY


@dataclass(frozen=True, slots=True)
class Entries:
    """What a peer needs to rebuild a lost ledger: every report that is not free, ascending."""

    watermark: int
    digests: Digests = field(repr=False)


class Reports:
    """The `reports` table, and the watermark below which it is pruned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def lookup(self, digests: DigestRows, query_key: bytes, most_draws: int | None = None) -> Standings:
        """Return each report's standing for `query_key`; what that query may take from a larger one counts as free."""
        standings = np.zeros(len(digests), dtype=np.uint8)
        of_attempt: dict[int, Standing] = {}
        with self._database.timed() as connection:
            for index, chunk in enumerate(_chunks(digests)):
                held = {digest: (attempt, draws) for digest, attempt, draws in _holders(connection, chunk)}
                for attempt in {attempt for attempt, _ in held.values()} - set(of_attempt):
                    of_attempt[attempt] = self.standing(connection, attempt, query_key)
                if held:  # a digest may be in a batch twice
                    mine = {
                        digest: _for_draws(of_attempt[by], draws, most_draws) for digest, (by, draws) in held.items()
                    }
                    rows = [mine.get(digest, Standing.FREE) for digest in chunk]
                    standings[index * _CHUNK : index * _CHUNK + len(chunk)] = rows
        return standings

    def count(self) -> int:
        """Return how many reports the ledger holds. Best effort: concurrent writes may be counted or not.

        Reads the whole table in slices, so that no other caller waits for more than one of them.
        """
        between = "SELECT count(*) FROM reports WHERE digest >= ? AND digest < ?"
        return sum(int(self._database.value(between, *bounds)) for bounds in pairwise(_SLICES))

    # The watermark never decreases, and admission rejects reports at or below it.

    @property
    def watermark(self) -> int:
        """Return the watermark: reports of this time or before are rejected, because they may have been pruned."""
        watermark: int = self._database.value("SELECT watermark FROM ledger")
        return watermark

    def advance_watermark(self, time: int) -> int:
        """Prune the reports of attempts whose newest report is not after `time`. Return how many were pruned."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE ledger SET watermark = max(watermark, ?)", (time,))
            gone = "SELECT attempt FROM attempts WHERE newest <= (SELECT watermark FROM ledger)"
            return connection.execute(f"DELETE FROM reports WHERE attempt IN ({gone})").rowcount  # noqa: S608  (constant)

    # Rebuilding a peer's lost ledger.

    def export(self) -> Entries:
        """Return every report that is not free here, and the watermark, for a peer that lost its ledger."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT digest FROM reports JOIN attempts USING (attempt) WHERE state <> 'aborted' ORDER BY digest"
            )
            held = b"".join(digest for (digest,) in rows)
            return Entries(self.watermark, np.frombuffer(held, dtype=np.uint8).reshape(-1, HASH_SIZE))

    def import_as_spent(self, entries: Entries) -> None:
        """Record a peer's reports as spent elsewhere. Their debug flags are unknown here, and not needed."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE ledger SET watermark = max(watermark, ?)", (entries.watermark,))
            connection.executemany(
                "INSERT INTO reports VALUES (?, ?, NULL, 0) ON CONFLICT DO NOTHING",
                ((digest, ELSEWHERE) for chunk in _chunks(entries.digests) for digest in chunk),
            )

    # Inside the transaction that reserves.

    def any_drawn_too_often(self, reservation: Reservation) -> bool:
        """Return whether some accepted report was in as many draws as the query allows."""
        if reservation.most_draws is None:
            return False
        standings = self.lookup(reservation.digests, reservation.query.key, reservation.most_draws)
        return bool(np.any(standings == Standing.DRAWN))

    def point(self, connection: sqlite3.Connection, attempt: int, reservation: Reservation) -> int:
        """Point every accepted report that no live attempt holds at `attempt`. Return how many those were."""
        pointed = 0
        row_of_kind = [f"(?, {attempt:d}, {debug:d}, 0)" for debug in (False, True)]
        for index, chunk in enumerate(_chunks(reservation.digests)):
            kinds = reservation.debug_reports[index * _CHUNK : index * _CHUNK + len(chunk)].tolist()
            rows = ",".join([row_of_kind[debug] for debug in kinds])
            pointed += connection.execute(
                f"INSERT INTO reports VALUES {rows}"  # noqa: S608  (integers)
                " ON CONFLICT (digest) DO UPDATE SET attempt = excluded.attempt,"
                # Counted here, not when the earlier attempt was aborted: an abort touches one row for any batch size.
                " draws = reports.draws + (SELECT drawn FROM attempts WHERE attempt = reports.attempt)"
                " WHERE (SELECT state FROM attempts WHERE attempt = reports.attempt) = 'aborted'",
                chunk,
            ).rowcount
        return pointed

    def conflicting_attempts(
        self, connection: sqlite3.Connection, attempt: int, reservation: Reservation
    ) -> list[bytes]:
        """Return the attempts that hold some of these reports and may be preempted; raise `Conflict` if any may not."""
        chunks = _chunks(reservation.digests)
        holders = {holder for chunk in chunks for _, holder, _ in _holders(connection, chunk)} - {attempt}
        preempted = []
        for holder in sorted(holders):
            if self.standing(connection, holder, reservation.query.key) is not Standing.FREE:
                raise Conflict("a report is held by another query")
            (held_by,) = connection.execute("SELECT attempt_id FROM attempts WHERE attempt = ?", (holder,)).fetchone()
            preempted.append(held_by)
        return preempted

    def standing(self, connection: sqlite3.Connection, attempt: int, query_key: bytes) -> Standing:
        """Return an attempt's standing (COMMIT.md, "Conflicts"): a smaller key preempts a larger reserved one."""
        row = connection.execute("SELECT state, query_key FROM attempts WHERE attempt = ?", (attempt,)).fetchone()
        state = AttemptState(row[0])
        if state is AttemptState.RELEASED:
            return Standing.SEEN
        if state is AttemptState.ABORTED or (state is AttemptState.RESERVED and row[1] > query_key):
            return Standing.FREE
        return Standing.BUSY


def _holders(connection: sqlite3.Connection, chunk: list[bytes]) -> list[tuple[bytes, int, int]]:
    """Return each recorded report, the attempt that holds it, and its draw count if that attempt aborts."""
    marks = ",".join("?" * len(chunk))
    source = f"reports JOIN attempts USING (attempt) WHERE digest IN ({marks})"
    return connection.execute(f"SELECT digest, attempt, draws + drawn FROM {source}", chunk).fetchall()  # noqa: S608  (only question marks)


def _for_draws(standing: Standing, draws: int, most_draws: int | None) -> Standing:
    worn = standing is Standing.FREE and most_draws is not None and draws >= most_draws
    return Standing.DRAWN if worn else standing


def _chunks(digests: DigestRows) -> Iterator[list[bytes]]:
    """Yield digests as SQLite takes them, in chunks that bound memory for any batch size."""
    for start in range(0, len(digests), _CHUNK):
        data = np.ascontiguousarray(digests[start : start + _CHUNK]).tobytes()
        yield [data[at : at + HASH_SIZE] for at in range(0, len(data), HASH_SIZE)]
