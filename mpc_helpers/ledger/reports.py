"""What is left of each report, and the attempt that holds it.

A report is locked exactly while the attempt it points to is undecided, and what is left of it follows from how that one
ended. So voting, releasing and freeing touch one row regardless of the batch's size. Reports are recorded by the day of
their header's hour (`schema`): a lookup reads only the days of its batch, and the watermark drops whole days.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpc_helpers.ledger.attempt import AttemptState, Reservation
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.engine import LedgerConnection, LedgerError
from mpc_helpers.ledger.schema import (
    ELSEWHERE,
    FAILED_DRAW,
    HOURS_PER_DAY,
    LEFT,
    MOST,
    NO_DAY,
    SITE_PREFIX,
    UNDATED,
    day_table,
    last_hour,
    site_prefix,
)
from protocol.amounts import Amount, Amounts, Left
from protocol.batch import DigestRows, Digests, sorted_order
from protocol.errors import ErrorKind, ProtocolError
from protocol.wire import HASH_SIZE

Standings = npt.NDArray[np.uint8]
# Digests that are in memory at a time, some 7 MB with what is made of them: enough that a statement costs nothing
# beside its rows, on each of 30 days.
_SPAN = 2**15
# Rows that are counted at a time.
_SLICE = 2**15
# One digest of a group, by its place: the group is one value, so a statement has one text for any number of reports.
# With the site's prefix as in the tables of days, and without as in `undated`.
_STRIDE = SITE_PREFIX + HASH_SIZE
_DATED = f"substr(:digests, {_STRIDE} * place + 1, {_STRIDE})"
_DIGEST = f"substr(:digests, {_STRIDE} * place + {SITE_PREFIX + 1}, {HASH_SIZE})"
# What peers learn of a report of which nothing was taken: more than any report paid.
EVERYTHING = 2**32 - 1
_MOST_DRAWS = 255
# Where it is not known what a report paid, a query needs all of it.
_ALL_OF_IT = Amount(EVERYTHING, 1, EVERYTHING)


class Standing(IntEnum):
    """Whether a query may reserve a report.

    SEEN: less is left than any query needs. LITTLE: less than this one needs. DRAWN: free, but in as many noise draws
    as the query allows. Only BUSY may change while the query waits.
    """

    FREE = 0
    BUSY = 1
    SEEN = 2
    DRAWN = 3
    LITTLE = 4


class Conflict(LedgerError):
    """An accepted report cannot be reserved. The attempt is aborted, so that this helper may vote NO."""

    kind = ErrorKind.BUSY


@dataclass(frozen=True, slots=True)
class Entries:
    """What a peer needs to rebuild a lost ledger: every report that was taken from or drawn, ascending and once.

    `left` is what each has left if every undecided attempt is released, `draws` the draws it was in if none is.
    """

    watermark: int
    digests: Digests = field(repr=False)
    left: npt.NDArray[np.uint32] = field(repr=False)
    draws: npt.NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        if not (len(self.digests) == len(self.left) == len(self.draws)):
            raise ProtocolError("a ledger's entries have one amount and one count of draws for each report")

    @classmethod
    def merged(cls, parts: Sequence[Entries]) -> Entries:
        """Return the entries of several ledgers or tables: of each report the least that one of them leaves."""
        digests = np.concatenate([part.digests for part in parts])
        left = np.concatenate([part.left for part in parts])
        draws = np.concatenate([part.draws for part in parts])
        order = sorted_order(digests)
        digests, left, draws = digests[order], left[order], draws[order]
        first = np.flatnonzero(np.append(True, (digests[1:] != digests[:-1]).any(axis=1))[: len(digests)])
        if len(first):
            left, draws = np.minimum.reduceat(left, first), np.maximum.reduceat(draws, first)
        return cls(max(part.watermark for part in parts), digests[first], left, draws)


class _Group(NamedTuple):
    """Some reports of one day, kind and amount: their places in the batch, and their prefixed digests, ascending."""

    day: int
    debug: bool
    amount: Amount
    places: npt.NDArray[np.intp]
    digests: bytes

    def values(self, **others: object) -> dict[str, object]:
        """Return the values of a statement over these reports."""
        return {"count": len(self.places), "digests": self.digests, **others}


class _Held(NamedTuple):
    """A report's row: the attempt that holds it, its draws if that attempt fails, and the most it can have left."""

    attempt: int
    draws: int
    most: int


class Reports:
    """The tables of reports, and the watermark below which they are dropped."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._places = database.engine.places

    def lookup(
        self,
        digests: DigestRows,
        hours: npt.NDArray[np.uint32],
        query_key: bytes,
        most_draws: int | None = None,
        amounts: Amounts | None = None,
        *,
        site: str,
    ) -> Standings:
        """Return each report's standing for `query_key`; what that query may take from a larger one counts as free.

        `hours` and `site` are those of the headers that the digests cover. For a report that was not admitted, whose
        header may say anything, the result means nothing.
        """
        standings = np.zeros(len(digests), dtype=np.uint8)
        for group, place, held, holder in self._recorded(_groups(digests, hours, site, amounts=amounts), query_key):
            standings[group.places[place]] = _standing(group.amount, held, holder, most_draws)
        return standings

    def left(
        self,
        digests: DigestRows,
        hours: npt.NDArray[np.uint32],
        amounts: Amounts,
        query_key: bytes,
        *,
        site: str,
    ) -> Left:
        """Return what is left of each report for `query_key`; 0 of those that another query holds."""
        left = np.zeros(len(digests), dtype=np.int64)
        for amount, places in amounts.groups(0, len(digests)):
            left[places] = amount.paid
        for group, place, held, holder in self._recorded(_groups(digests, hours, site, amounts=amounts), query_key):
            left[group.places[place]] = held.most if holder is Standing.FREE else 0
        return left

    def _recorded(self, groups: Iterator[_Group], query_key: bytes) -> Iterator[tuple[_Group, int, _Held, Standing]]:
        """Yield each report that is recorded: its group and place there, its row, and the standing of its holder."""
        of_attempt: dict[int, Standing] = {}
        with self._database.timed() as connection:
            days = _days(connection)
            for group in groups:
                rows = self._holders(connection, days, group)
                for attempt in {held.attempt for held in rows.values()} - set(of_attempt):
                    of_attempt[attempt] = self.standing(connection, attempt, query_key)
                for place, held in rows.items():
                    yield group, place, held, of_attempt[held.attempt]

    def count(self) -> int:
        """Return how many reports the ledger holds. Best effort: concurrent writes may be counted or not.

        Reads all tables in slices, so that no other caller waits for more than one of them. A report that was copied
        from `undated` to its day counts twice.
        """
        with self._database.reading() as connection:
            tables = [day_table(day) for day in _days(connection)]
        return sum(size for table in tables for size in self._slices(table))

    def _slices(self, table: str) -> Iterator[int]:
        rest = f"FROM {table} WHERE digest > ?"
        end = f"SELECT digest {rest} ORDER BY digest LIMIT 1 OFFSET {_SLICE - 1}"
        last = b""
        while True:
            with self._database.reading() as connection:
                # Forgotten since the days were read.
                if table not in map(day_table, _days(connection)):
                    return
                row = connection.execute(end, (last,)).fetchone()
                size = _SLICE if row else self._database.value(f"SELECT count(*) {rest}", last)
            yield size
            if row is None:
                return
            (last,) = row

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
        """Return what is left of every report that was taken from or drawn, for a peer that lost its ledger."""
        with self._database.reading() as connection:
            tables = [self._entries(connection, day_table(day)) for day in sorted(_days(connection))]
            # A report that was copied to its day is in two tables.
            return Entries.merged([_nothing(self.watermark), *tables])

    def _entries(self, connection: LedgerConnection, table: str) -> Entries:
        rows = connection.execute(
            "SELECT digest, CASE WHEN state = 'aborted' THEN coalesce(reports.before, :everything) ELSE after END,"  # noqa: S608  (an integer)
            f" draws + CASE WHEN state = 'released' THEN 0 ELSE drawn END FROM {table} reports"
            " JOIN attempts ON attempts.attempt = reports.attempt"
            " WHERE state <> 'aborted' OR reports.before IS NOT NULL OR draws + drawn > 0",
            {"everything": EVERYTHING},
        ).fetchall()
        digests = np.frombuffer(b"".join(digest[-HASH_SIZE:] for digest, _, _ in rows), dtype=np.uint8).reshape(
            -1, HASH_SIZE
        )
        left = np.fromiter((left for _, left, _ in rows), dtype=np.uint32, count=len(rows))
        draws = np.fromiter((min(draws, _MOST_DRAWS) for *_, draws in rows), dtype=np.uint8, count=len(rows))
        return Entries(0, digests, left, draws)

    def import_from_peers(self, entries: Sequence[Entries], newest: int) -> None:
        """Record what both peers leave of each report: the less of both, and the more draws.

        Their headers are unknown here, and with them days, kinds, and what was paid: a peer may claim that more is
        left, so whatever is used later is clamped by the header. A day in the peer's entries would be its word only: a
        report listed under a wrong day would count again. `newest` is a time that no header of them is after.
        """
        statement = (
            f"INSERT INTO {UNDATED} {self._places} SELECT substr(:digests, {HASH_SIZE} * place + 1, {HASH_SIZE}),"  # noqa: S608  (constants)
            f" {ELSEWHERE}, NULL, :draws, NULL, :left FROM places WHERE true"
        )
        merged = Entries.merged(entries)
        with self._database.transaction() as connection:
            _raise_watermark(connection, merged.watermark)
            connection.execute("INSERT INTO days VALUES (?, ?) ON CONFLICT DO NOTHING", (NO_DAY, newest))
            for start in range(0, len(merged.digests), _SPAN):
                span = slice(start, start + _SPAN)
                digests = merged.digests[span]
                alike = merged.left[span].astype(np.int64) * (_MOST_DRAWS + 1) + merged.draws[span]
                for both in np.unique(alike).tolist():
                    left, draws = divmod(both, _MOST_DRAWS + 1)
                    rows = digests[alike == both]
                    values = {"count": len(rows), "digests": rows.tobytes(), "left": left, "draws": draws}
                    connection.execute(statement, values)

    # Inside the transaction that reserves.

    def any_drawn_too_often(self, reservation: Reservation) -> bool:
        """Return whether some accepted report was in as many draws as the query allows."""
        if reservation.most_draws is None:
            return False
        key, most_draws = reservation.query.key, reservation.most_draws
        standings = self.lookup(
            reservation.digests, reservation.hours, key, most_draws, reservation.amounts, site=reservation.site
        )
        return bool(np.any(standings == Standing.DRAWN))

    def point(self, connection: LedgerConnection, attempt: int, reservation: Reservation) -> int:
        """Point every accepted report with enough left at `attempt`, unless it is held. Return how many those were."""
        pointed = 0
        days = _days(connection)
        whole = reservation.whole
        for group in _of(reservation):
            if group.day not in days:
                connection.execute("INSERT INTO days VALUES (?, ?)", (group.day, last_hour(group.day)))
                self._database.engine.add_reports_table(connection, day_table(group.day))
                days.add(group.day)
            if NO_DAY in days:
                self._copy_to_day(connection, group)
            table, paid, need = day_table(group.day), group.amount.paid, group.amount.need
            insert = (
                f"INSERT INTO {table} AS reports {self._places}"  # noqa: S608  (an integer)
                f" SELECT {_DATED}, :attempt, :debug, 0, CAST(:before AS BIGINT), :after FROM places WHERE true"
            )
            # Draws are counted here, not when the earlier attempt ended: its last move touches one row for any size.
            update = (
                " ON CONFLICT (digest) DO UPDATE SET attempt = excluded.attempt, debug = excluded.debug,"  # noqa: S608
                f" draws = reports.draws + (SELECT {FAILED_DRAW} FROM attempts WHERE attempt = reports.attempt),"
                f" before = {LEFT}, after = CASE WHEN :whole = 1 THEN 0 ELSE {LEFT} - :need END WHERE {LEFT} >= :need"
            )
            values = group.values(
                attempt=attempt,
                debug=int(group.debug),
                before=None if whole else paid,
                after=0 if whole else paid - need,
                whole=int(whole),
                paid=paid,
                need=need,
            )
            pointed += self._database.engine.upsert(connection, insert, update, values)
        return pointed

    def _copy_to_day(self, connection: LedgerConnection, group: _Group) -> None:
        """Copy what was recorded without a day to the day that is now known, unless that was done before."""
        columns = ", ".join(f"undated.{name}" for name in ("attempt", "debug", "draws", "before", "after"))
        connection.execute(
            f"INSERT INTO {day_table(group.day)} {self._places} SELECT {_DATED}, {columns}"  # noqa: S608  (an integer)
            f" FROM places JOIN undated ON undated.digest = {_DIGEST} WHERE true ON CONFLICT DO NOTHING",
            group.values(),
        )

    def conflicting_attempts(self, connection: LedgerConnection, attempt: int, reservation: Reservation) -> list[bytes]:
        """Return the attempts that hold some of these reports and may be preempted; raise `Conflict` if any may not.

        Also if a report would have too little left without its holder: nothing is taken from others in vain, and a
        draw that was not made is not counted.
        """
        days = _days(connection)
        holders = set()
        for group in _of(reservation):
            for held in self._holders(connection, days, group).values():
                if held.attempt != attempt and held.most < group.amount.need:
                    raise Conflict("a report has too little left", kind=ErrorKind.REFUSED)
                holders.add(held.attempt)
        preempted = []
        for holder in sorted(holders - {attempt}):
            if self.standing(connection, holder, reservation.query.key) is not Standing.FREE:
                raise Conflict("a report is held by another query")
            (held_by,) = connection.execute("SELECT attempt_id FROM attempts WHERE attempt = ?", (holder,)).fetchone()
            preempted.append(held_by)
        return preempted

    def standing(self, connection: LedgerConnection, attempt: int, query_key: bytes) -> Standing:
        """Return an attempt's standing (COMMIT.md, "Conflicts"): a smaller key preempts a larger reserved one."""
        row = connection.execute("SELECT state, query_key FROM attempts WHERE attempt = ?", (attempt,)).fetchone()
        state = AttemptState(row[0])
        if state is AttemptState.RESERVED:
            return Standing.FREE if row[1] > query_key else Standing.BUSY
        return Standing.FREE if state in (AttemptState.ABORTED, AttemptState.RELEASED) else Standing.BUSY

    def _holders(self, connection: LedgerConnection, days: set[int], group: _Group) -> dict[int, _Held]:
        """Return the rows of those reports that are recorded, by place in the group."""
        held: dict[int, _Held] = {}
        # What is recorded under a report's day is later than what was recorded without one.
        for day in (NO_DAY, group.day):
            if day in days:
                digest = _DIGEST if day == NO_DAY else _DATED
                rows = connection.execute(
                    f"{self._places} SELECT place, reports.attempt,"  # noqa: S608  (an integer)
                    f" draws + CASE WHEN state = 'released' THEN 0 ELSE drawn END, {MOST} FROM places"
                    f" JOIN {day_table(day)} reports ON reports.digest = {digest}"
                    " JOIN attempts ON attempts.attempt = reports.attempt",
                    group.values(paid=group.amount.paid),
                )
                held.update({place: _Held(*row) for place, *row in rows})
        return held


def _days(connection: LedgerConnection) -> set[int]:
    return {day for (day,) in connection.execute("SELECT day FROM days").fetchall()}


def _raise_watermark(connection: LedgerConnection, time: int) -> None:
    connection.execute("UPDATE ledger SET watermark = :time WHERE watermark < :time", {"time": time})


def _nothing(watermark: int) -> Entries:
    digests = np.empty((0, HASH_SIZE), dtype=np.uint8)
    return Entries(watermark, digests, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint8))


def _standing(amount: Amount, held: _Held, holder: Standing, most_draws: int | None) -> Standing:
    """Return a report's standing for a query that needs `amount`, by that of the attempt that holds it."""
    # However its holder ends, it will not have more.
    if held.most < amount.need:
        return Standing.SEEN if held.most < amount.least else Standing.LITTLE
    worn = holder is Standing.FREE and most_draws is not None and held.draws >= most_draws
    return Standing.DRAWN if worn else holder


def _of(reservation: Reservation) -> Iterator[_Group]:
    debug, amounts = reservation.debug_reports, reservation.amounts
    return _groups(reservation.digests, reservation.hours, reservation.site, debug=debug, amounts=amounts)


def _groups(
    digests: DigestRows,
    hours: npt.NDArray[np.uint32],
    site: str,
    *,
    debug: npt.NDArray[np.bool_] | None = None,
    amounts: Amounts | None = None,
) -> Iterator[_Group]:
    """Yield digests by day, kind and amount, in groups that bound memory for any batch size."""
    prefix = np.frombuffer(site_prefix(site), dtype=np.uint8)
    amounts = Amounts(len(digests), (_ALL_OF_IT,)) if amounts is None else amounts
    for start in range(0, len(digests), _SPAN):
        bare = digests[start : start + _SPAN]
        rows = np.hstack([np.broadcast_to(prefix, (len(bare), SITE_PREFIX)), bare])
        span = slice(start, start + len(rows))
        kinds = 2 * (hours[span].astype(np.int64) // HOURS_PER_DAY)
        if debug is not None:
            kinds += debug[span]
        for amount, alike in amounts.groups(start, start + _SPAN):
            for kind in np.unique(kinds[alike]).tolist():
                places = alike[kinds[alike] == kind]
                yield _Group(kind // 2, bool(kind % 2), amount, start + places, rows[places].tobytes())
