"""Which reports are spent: what stands in the way of counting each, and the attempt that holds it.

A report is locked exactly while the attempt it points to is not aborted, so voting, releasing and freeing touch one row
whatever the batch's size.
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
from protocol.wire import HASH_SIZE

Standings = npt.NDArray[np.uint8]
# Digests in one statement: inserting takes half the time of one statement each, and larger ones are no faster.
_CHUNK = 500
# Digests are evenly spread, so slices by their first byte are of one size. The last bound is above every digest.
_SLICES = [*(bytes([first]) for first in range(256)), b"\xff" * (HASH_SIZE + 1)]


class Standing(IntEnum):
    """What a ledger knows of a report, from the point of view of one query.

    DRAWN is free, but was in as many draws of noise as the query allows.
    """

    FREE = 0
    BUSY = 1
    SEEN = 2
    DRAWN = 3


class Conflict(LedgerError):
    """An accepted report cannot be reserved. The attempt is aborted, so that this helper may say NO to it."""


@dataclass(frozen=True, slots=True)
class Entries:
    """What one ledger hands out so that a peer can rebuild a lost one: every report that is not free, ascending."""

    watermark: int
    digests: Digests = field(repr=False)


class Reports:
    """The `reports` table, and the watermark below which it forgets."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def lookup(self, digests: DigestRows, query_key: bytes, most_draws: int | None = None) -> Standings:
        """The standing of each report for `query_key`; what that query may take from a larger one counts as free."""
        standings = np.zeros(len(digests), dtype=np.uint8)
        known: dict[int, Standing] = {}
        with self._database.timed() as connection:
            for index, chunk in enumerate(_chunks(digests)):
                held = {digest: (attempt, draws) for digest, attempt, draws in _holders(connection, chunk)}
                for attempt in {attempt for attempt, _ in held.values()} - set(known):
                    known[attempt] = self.standing(connection, attempt, query_key)
                if held:  # a digest may be in a batch twice
                    mine = {digest: _for_draws(known[by], draws, most_draws) for digest, (by, draws) in held.items()}
                    found = [mine.get(digest, Standing.FREE) for digest in chunk]
                    standings[index * _CHUNK : index * _CHUNK + len(chunk)] = found
        return standings

    def count(self) -> int:
        """How many reports the ledger holds. Reads the whole table, in slices: nobody waits for more than one of them.

        What is written meanwhile may be counted or not, as suits a figure on a page.
        """
        between = "SELECT count(*) FROM reports WHERE digest >= ? AND digest < ?"
        return sum(int(self._database.value(between, *bounds)) for bounds in pairwise(_SLICES))

    # The watermark never goes back, and admission refuses reports at or below it.

    @property
    def watermark(self) -> int:
        """Reports of this time or before are refused: the ledger may have forgotten them."""
        watermark: int = self._database.value("SELECT watermark FROM ledger")
        return watermark

    def advance_watermark(self, time: int) -> int:
        """Forget the reports of attempts whose newest report is not after `time`. Gives how many were forgotten."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE ledger SET watermark = max(watermark, ?)", (time,))
            gone = "SELECT attempt FROM attempts WHERE newest <= (SELECT watermark FROM ledger)"
            return connection.execute(f"DELETE FROM reports WHERE attempt IN ({gone})").rowcount  # noqa: S608  (constant)

    # Rebuilding a peer's lost ledger.

    def export(self) -> Entries:
        """Every report that is not free here, and the watermark: what a peer that lost its ledger needs."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT digest FROM reports JOIN attempts USING (attempt) WHERE state <> 'aborted' ORDER BY digest"
            )
            held = b"".join(digest for (digest,) in rows)
            return Entries(self.watermark, np.frombuffer(held, dtype=np.uint8).reshape(-1, HASH_SIZE))

    def import_as_spent(self, entries: Entries) -> None:
        """Count what a peer holds as spent elsewhere. Its debug flags are not known here, and need not be."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE ledger SET watermark = max(watermark, ?)", (entries.watermark,))
            connection.executemany(
                "INSERT INTO reports VALUES (?, ?, NULL, 0) ON CONFLICT DO NOTHING",
                ((digest, ELSEWHERE) for chunk in _chunks(entries.digests) for digest in chunk),
            )

    # Inside the transaction that reserves.

    def any_drawn_too_often(self, reservation: Reservation) -> bool:
        """Whether some accepted report was in as many draws as the query allows."""
        if reservation.most_draws is None:
            return False
        standings = self.lookup(reservation.digests, reservation.query.key, reservation.most_draws)
        return bool(np.any(standings == Standing.DRAWN))

    def point(self, connection: sqlite3.Connection, attempt: int, reservation: Reservation) -> int:
        """Point every accepted report at `attempt` that no live attempt holds. Gives how many those were."""
        pointed = 0
        row_of_kind = [f"(?, {attempt:d}, {debug:d}, 0)" for debug in (False, True)]
        for index, chunk in enumerate(_chunks(reservation.digests)):
            kinds = reservation.debug_reports[index * _CHUNK : index * _CHUNK + len(chunk)].tolist()
            rows = ",".join([row_of_kind[debug] for debug in kinds])
            pointed += connection.execute(
                f"INSERT INTO reports VALUES {rows}"  # noqa: S608  (integers)
                " ON CONFLICT (digest) DO UPDATE SET attempt = excluded.attempt,"
                # Counted here, not when the attempt before was aborted: that touches one row, whatever the batch.
                " draws = reports.draws + (SELECT drawn FROM attempts WHERE attempt = reports.attempt)"
                " WHERE (SELECT state FROM attempts WHERE attempt = reports.attempt) = 'aborted'",
                chunk,
            ).rowcount
        return pointed

    def in_the_way(self, connection: sqlite3.Connection, attempt: int, reservation: Reservation) -> list[bytes]:
        """The attempts that hold some of these reports and may be taken from; `Conflict` if any may not."""
        chunks = _chunks(reservation.digests)
        holders = {holder for chunk in chunks for _, holder, _ in _holders(connection, chunk)} - {attempt}
        found = []
        for holder in sorted(holders):
            if self.standing(connection, holder, reservation.query.key) is not Standing.FREE:
                raise Conflict("a report is held by another query")
            (held_by,) = connection.execute("SELECT attempt_id FROM attempts WHERE attempt = ?", (holder,)).fetchone()
            found.append(held_by)
        return found

    def standing(self, connection: sqlite3.Connection, attempt: int, query_key: bytes) -> Standing:
        """COMMIT.md, "Conflicts": a smaller query takes from a larger one that is merely reserved."""
        row = connection.execute("SELECT state, query_key FROM attempts WHERE attempt = ?", (attempt,)).fetchone()
        state = AttemptState(row[0])
        if state is AttemptState.RELEASED:
            return Standing.SEEN
        if state is AttemptState.ABORTED or (state is AttemptState.RESERVED and row[1] > query_key):
            return Standing.FREE
        return Standing.BUSY


def _holders(connection: sqlite3.Connection, chunk: list[bytes]) -> list[tuple[bytes, int, int]]:
    """Each known report, the attempt that holds it, and in how many draws it will have been once that is given up."""
    marks = ",".join("?" * len(chunk))
    known = f"reports JOIN attempts USING (attempt) WHERE digest IN ({marks})"
    return connection.execute(f"SELECT digest, attempt, draws + drawn FROM {known}", chunk).fetchall()  # noqa: S608  (only question marks)


def _for_draws(standing: Standing, draws: int, most_draws: int | None) -> Standing:
    worn = standing is Standing.FREE and most_draws is not None and draws >= most_draws
    return Standing.DRAWN if worn else standing


def _chunks(digests: DigestRows) -> Iterator[list[bytes]]:
    """As SQLite takes them, so many at a time that a batch of any size takes little memory."""
    for start in range(0, len(digests), _CHUNK):
        data = np.ascontiguousarray(digests[start : start + _CHUNK]).tobytes()
        yield [data[at : at + HASH_SIZE] for at in range(0, len(data), HASH_SIZE)]
