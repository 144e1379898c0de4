"""Which reports are spent, and the attempt that holds each.

A report is locked exactly while the attempt it points to is not aborted, so voting, releasing and freeing touch one row
regardless of the batch's size. Reports are recorded by the day of their header's hour (`schema`): a lookup reads only
the days of its batch, and the watermark drops whole days.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpc_helpers.ledger.attempt import AttemptState, Reservation
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.engine import LedgerConnection, LedgerError
from mpc_helpers.ledger.schema import ELSEWHERE, HOURS_PER_DAY, NO_DAY, UNDATED, day_table, last_hour
from protocol.batch import DigestRows, Digests, sorted_order
from protocol.errors import ErrorKind
from protocol.wire import HASH_SIZE

Standings = npt.NDArray[np.uint8]
# Digests that are in memory at a time: enough that a statement costs nothing beside its rows, on each of 30 days.
_SPAN = 2**13
# Digests are evenly spread, so slices by their first byte are of one size. The last bound is above every digest.
_SLICES = [*(bytes([first]) for first in range(256)), b"\xff" * (HASH_SIZE + 1)]
# One digest of a group, by its place: the group is one value, so a statement has one text for any number of reports.
_DIGEST = f"substr(:digests, {HASH_SIZE} * place + 1, {HASH_SIZE})"


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


class _Group(NamedTuple):
    """Some reports of one day and kind: their places in the batch, and their digests, ascending."""

    day: int
    debug: bool
    places: npt.NDArray[np.intp]
    digests: bytes

    def values(self, **others: object) -> dict[str, object]:
        """Return the values of a statement over these reports."""
        return {"count": len(self.places), "digests": self.digests, **others}


class Reports:
    """The tables of reports, and the watermark below which they are dropped."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._places = database.engine.places

    def lookup(
        self, digests: DigestRows, hours: npt.NDArray[np.uint32], query_key: bytes, most_draws: int | None = None
    ) -> Standings:
        """Return each report's standing for `query_key`; what that query may take from a larger one counts as free.

        `hours` are those of the headers that the digests cover. For a report that was not admitted, whose header may
        say anything, the result means nothing.
        """
        standings = np.zeros(len(digests), dtype=np.uint8)
        of_attempt: dict[int, Standing] = {}
        with self._database.timed() as connection:
            days = _days(connection)
            for group in _groups(digests, hours):
                held = self._holders(connection, days, group)
                for attempt in {attempt for attempt, _ in held.values()} - set(of_attempt):
                    of_attempt[attempt] = self.standing(connection, attempt, query_key)
                for place, (attempt, draws) in held.items():
                    standings[group.places[place]] = _for_draws(of_attempt[attempt], draws, most_draws)
        return standings

    def count(self) -> int:
        """Return how many reports the ledger holds. Best effort: concurrent writes may be counted or not.

        Reads all tables in slices, so that no other caller waits for more than one of them. A report that was copied
        from `undated` to its day counts twice.
        """
        with self._database.reading() as connection:
            tables = [day_table(day) for day in _days(connection)]
        return sum(self._count_between(table, low, high) for table in tables for low, high in pairwise(_SLICES))

    def _count_between(self, table: str, low: bytes, high: bytes) -> int:
        with self._database.reading() as connection:
            # Forgotten since the days were read.
            if table not in map(day_table, _days(connection)):
                return 0
            between = f"SELECT count(*) FROM {table} WHERE digest >= ? AND digest < ?"  # noqa: S608  (an integer)
            return int(self._database.value(between, low, high))

    # The watermark never decreases, and admission rejects reports at or below it.

    @property
    def watermark(self) -> int:
        """Return the watermark: reports of this time or before are rejected, because they may have been forgotten."""
        watermark: int = self._database.value("SELECT watermark FROM ledger")
        return watermark

    def advance_watermark(self, time: int) -> list[int]:
        """Forget every day whose last hour is not after `time`. Return those days."""
        with self._database.transaction() as connection:
            _raise_watermark(connection, time)
            over = "newest <= (SELECT watermark FROM ledger)"
            days = [day for (day,) in connection.execute(f"SELECT day FROM days WHERE {over} ORDER BY day")]  # noqa: S608  (constant)
            # The rule on this deletion is what guards the tables.
            connection.execute(f"DELETE FROM days WHERE {over}")  # noqa: S608  (constant)
            for day in days:
                self._database.engine.drop_reports_table(connection, day_table(day))
            if NO_DAY in days:
                self._database.engine.add_reports_table(connection, UNDATED)
        return days

    # Rebuilding a peer's lost ledger.

    def export(self) -> Entries:
        """Return every report that is not free here, and the watermark, for a peer that lost its ledger."""
        with self._database.reading() as connection:
            rows = [
                digest
                for day in _days(connection)
                for (digest,) in connection.execute(
                    f"SELECT digest FROM {day_table(day)} reports"  # noqa: S608  (an integer)
                    " JOIN attempts ON attempts.attempt = reports.attempt WHERE state <> 'aborted'"
                )
            ]
            held = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, HASH_SIZE)
            return Entries(self.watermark, held[sorted_order(held)])

    def import_as_spent(self, entries: Entries, newest: int) -> None:
        """Record a peer's reports as spent elsewhere. Their headers are unknown here, and with them days and kinds.

        A day in the peer's entries would be its word only: a report listed under a wrong day would count again.
        `newest` is a time that no header of them is after.
        """
        statement = (
            f"INSERT INTO {UNDATED} {self._places} SELECT {_DIGEST}, :attempt, NULL, 0 FROM places WHERE true"  # noqa: S608  (constants)
            " ON CONFLICT DO NOTHING"
        )
        unknown = np.zeros(len(entries.digests), dtype=np.uint32)
        with self._database.transaction() as connection:
            _raise_watermark(connection, entries.watermark)
            connection.execute("INSERT INTO days VALUES (?, ?) ON CONFLICT DO NOTHING", (NO_DAY, newest))
            for group in _groups(entries.digests, unknown):
                connection.execute(statement, group.values(attempt=ELSEWHERE))

    # Inside the transaction that reserves.

    def any_drawn_too_often(self, reservation: Reservation) -> bool:
        """Return whether some accepted report was in as many draws as the query allows."""
        if reservation.most_draws is None:
            return False
        key, most_draws = reservation.query.key, reservation.most_draws
        standings = self.lookup(reservation.digests, reservation.hours, key, most_draws)
        return bool(np.any(standings == Standing.DRAWN))

    def point(self, connection: LedgerConnection, attempt: int, reservation: Reservation) -> int:
        """Point every accepted report that no live attempt holds at `attempt`. Return how many those were."""
        pointed = 0
        days = _days(connection)
        for group in _groups(reservation.digests, reservation.hours, reservation.debug_reports):
            if group.day not in days:
                connection.execute("INSERT INTO days VALUES (?, ?)", (group.day, last_hour(group.day)))
                self._database.engine.add_reports_table(connection, day_table(group.day))
                days.add(group.day)
            if NO_DAY in days:
                self._copy_to_day(connection, group)
            table = day_table(group.day)
            pointed += connection.execute(
                f"INSERT INTO {table} AS reports {self._places}"  # noqa: S608  (an integer)
                f" SELECT {_DIGEST}, :attempt, :debug, 0 FROM places WHERE true"
                " ON CONFLICT (digest) DO UPDATE SET attempt = excluded.attempt,"
                # Counted here, not when the earlier attempt was aborted: an abort touches one row for any batch size.
                " draws = reports.draws + (SELECT drawn FROM attempts WHERE attempt = reports.attempt)"
                " WHERE (SELECT state FROM attempts WHERE attempt = reports.attempt) = 'aborted'",
                group.values(attempt=attempt, debug=int(group.debug)),
            ).rowcount
        return pointed

    def _copy_to_day(self, connection: LedgerConnection, group: _Group) -> None:
        """Copy what was recorded without a day to the day that is now known, unless that was done before."""
        connection.execute(
            f"INSERT INTO {day_table(group.day)} {self._places}"  # noqa: S608  (an integer)
            " SELECT undated.digest, undated.attempt, undated.debug, undated.draws"
            f" FROM places JOIN undated ON undated.digest = {_DIGEST} WHERE true ON CONFLICT DO NOTHING",
            group.values(),
        )

    def conflicting_attempts(self, connection: LedgerConnection, attempt: int, reservation: Reservation) -> list[bytes]:
        """Return the attempts that hold some of these reports and may be preempted; raise `Conflict` if any may not."""
        days = _days(connection)
        groups = _groups(reservation.digests, reservation.hours)
        holders = {by for group in groups for by, _ in self._holders(connection, days, group).values()} - {attempt}
        preempted = []
        for holder in sorted(holders):
            if self.standing(connection, holder, reservation.query.key) is not Standing.FREE:
                raise Conflict("a report is held by another query")
            (held_by,) = connection.execute("SELECT attempt_id FROM attempts WHERE attempt = ?", (holder,)).fetchone()
            preempted.append(held_by)
        return preempted

    def standing(self, connection: LedgerConnection, attempt: int, query_key: bytes) -> Standing:
        """Return an attempt's standing (COMMIT.md, "Conflicts"): a smaller key preempts a larger reserved one."""
        row = connection.execute("SELECT state, query_key FROM attempts WHERE attempt = ?", (attempt,)).fetchone()
        state = AttemptState(row[0])
        if state is AttemptState.RELEASED:
            return Standing.SEEN
        if state is AttemptState.ABORTED or (state is AttemptState.RESERVED and row[1] > query_key):
            return Standing.FREE
        return Standing.BUSY

    def _holders(self, connection: LedgerConnection, days: set[int], group: _Group) -> dict[int, tuple[int, int]]:
        """Return, by place in the group, the attempt that holds a report, and its draw count if that attempt aborts."""
        held: dict[int, tuple[int, int]] = {}
        # What is recorded under a report's day is later than what was recorded without one.
        for day in (NO_DAY, group.day):
            if day in days:
                rows = connection.execute(
                    f"{self._places} SELECT place, reports.attempt, draws + drawn FROM places"  # noqa: S608  (an integer)
                    f" JOIN {day_table(day)} reports ON reports.digest = {_DIGEST}"
                    " JOIN attempts ON attempts.attempt = reports.attempt",
                    group.values(),
                )
                held.update({place: (attempt, draws) for place, attempt, draws in rows})
        return held


def _days(connection: LedgerConnection) -> set[int]:
    return {day for (day,) in connection.execute("SELECT day FROM days").fetchall()}


def _raise_watermark(connection: LedgerConnection, time: int) -> None:
    connection.execute("UPDATE ledger SET watermark = :time WHERE watermark < :time", {"time": time})


def _for_draws(standing: Standing, draws: int, most_draws: int | None) -> Standing:
    worn = standing is Standing.FREE and most_draws is not None and draws >= most_draws
    return Standing.DRAWN if worn else standing


def _groups(
    digests: DigestRows, hours: npt.NDArray[np.uint32], debug: npt.NDArray[np.bool_] | None = None
) -> Iterator[_Group]:
    """Yield digests by day and kind, in groups that bound memory for any batch size."""
    for start in range(0, len(digests), _SPAN):
        rows = np.ascontiguousarray(digests[start : start + _SPAN])
        span = slice(start, start + len(rows))
        kinds = 2 * (hours[span].astype(np.int64) // HOURS_PER_DAY)
        if debug is not None:
            kinds += debug[span]
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            yield _Group(kind // 2, bool(kind % 2), start + places, rows[places].tobytes())
