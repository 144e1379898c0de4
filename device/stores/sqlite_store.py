"""A person's device database: one SQLite file, one durable transaction per call.

Write-ahead logging with `synchronous=FULL`: when a transaction has ended its charges are durable, and a process killed
at any moment leaves either all of a call or nothing. `BEGIN IMMEDIATE` serialises calls of threads and processes. The
file is for its owner alone (mode 0600).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from device.attribution import Need, Order
from device.budget import FilterKind, FilterOwner, PrivacyFilter
from device.epoch import EpochCalendar
from device.errors import DatabaseUnavailable
from device.events import ConversionEvent, EventSelection, Impression, SavedConversion, SavedImpression, Selection
from device.stores.instance import InstanceToken, fresh_token
from device.stores.schema import check_version, connect, create_database, inspect, refusal
from device.stores.storage import CLEANUP_LIMIT, EVERYTHING, MAX_LOG_RECORDS, ReportRecord, SiteCount
from protocol.errors import ErrorKind

# Impression._make without its length check, for speed: rows come by the hundred, and the query fixes their length.
_IMPRESSION = cast("Callable[[Any], Impression]", partial(tuple.__new__, Impression))
_STATE = "SELECT user_version, token, counter, enabled, epoch_start, barrier FROM pragma_user_version, device"
_ACCEPTED = """ FROM impression
WHERE time >= ? AND time < ? AND expires >= ?
AND (conversion_sites = '' OR instr(conversion_sites, ?) > 0)
AND (conversion_callers = '' OR instr(conversion_callers, ?) > 0)"""
_ALL = """
SELECT time, site, caller, histogram_index, match_value, priority, expires, conversion_sites, conversion_callers
FROM impression ORDER BY time, id"""
_IMPRESSIONS = "SELECT time, site, caller, histogram_index, match_value, priority"
# Parameters: the window's first second, the epoch length, the first epoch. Relative to it, no negative is divided.
_SITES = "SELECT DISTINCT (time - ?) / ? + ?, site"
_ORDERS = {
    Order.EARLIEST: " ORDER BY time, id",
    Order.LATEST: " ORDER BY time DESC, id",
    Order.PRECEDENCE: " ORDER BY priority DESC, time DESC, id",
}
_FILTERS = "SELECT site, paid FROM filter WHERE kind = ? AND site IN ({})"
_LISTED = """
SELECT id, conversion_sites, conversion_callers FROM impression
WHERE instr(conversion_sites, ?) > 0 OR instr(conversion_callers, ?) > 0"""
_CENSUS = """
SELECT site, count(*), min(time), max(time) FROM impression WHERE time >= ? AND time < ? GROUP BY site"""
_EVICT = """
DELETE FROM impression WHERE id IN (
    SELECT id FROM impression WHERE time >= ? AND time < ? AND (? IS NULL OR site = ?) ORDER BY time, id LIMIT ?)"""
# Of impressions or conversions.
_DROP = "DELETE FROM {0} WHERE id IN (SELECT id FROM {0} WHERE time < ? ORDER BY time LIMIT ?)"
_DROP_EXPIRED = "DELETE FROM {0} WHERE id IN (SELECT id FROM {0} WHERE expires < ? LIMIT ?)"
# The log is in the order of calls: only its beginning is scanned, so that the cost does not grow with its length.
_DROP_LOG = "DELETE FROM log WHERE time < ? AND id IN (SELECT id FROM log ORDER BY id LIMIT ?)"
_DROP_ACTIONS = """
DELETE FROM action WHERE (action, site) IN (SELECT action, site FROM action WHERE time < ? LIMIT ?)"""
_FIRST_FILTER = (0, "")
_NEXT_FILTERS = """
SELECT kind, site, paid FROM filter WHERE (kind, site) > (?, ?) ORDER BY kind, site LIMIT ?"""
_CONVERSIONS = """
SELECT time, site, caller, label FROM conversion
WHERE time >= ? AND time < ? AND expires >= ? AND site <> ? AND caller <> ? AND instr(publishers, ?) > 0"""
_ALL_CONVERSIONS = "SELECT time, site, caller, label, expires, publishers FROM conversion ORDER BY time, id"
_COUNT_CONVERSIONS = "SELECT count(*) FROM conversion WHERE time >= ? AND time < ?"
_EVICT_CONVERSION = """
DELETE FROM conversion WHERE id = (
    SELECT id FROM conversion WHERE time >= ?1 AND time < ?2 AND site = (
        SELECT site FROM conversion WHERE time >= ?1 AND time < ?2
        GROUP BY site ORDER BY count(*) DESC, min(time), site LIMIT 1)
    ORDER BY time, id LIMIT 1)"""


class _State(NamedTuple):
    """The device's own row, as read at the start of a transaction."""

    token: bytes
    counter: int
    enabled: int
    epoch_start: int | None
    barrier: int | None


class SqliteStore:
    """A store in one file, opened with `open`. One connection, one thread at a time; every wait has a timeout."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, instance: InstanceToken, *, wait: float, debug: bool
    ) -> None:
        self.debug = debug
        self.conversions = SqlConversions(connection)
        self.services = SqlServices(connection)
        self._connection = connection
        self._path = path
        self._instance = instance
        self._wait = wait
        self._lock = threading.Lock()
        self._state: _State | None = None
        self._token_written = True
        # How long the next commit waits for readers of the log that it truncates, or None if it does not truncate it.
        self._truncation_wait: float | None = None
        self._pruned = _FIRST_FILTER

    create = staticmethod(create_database)

    @classmethod
    def open(cls, path: Path, *, epoch_length: int, clock: Callable[[], int], wait: float = 2.0) -> SqliteStore:
        """Open the database at `path`, or raise DatabaseError and leave the file unchanged.

        If it was restored or copied since this device last used it, move its barrier to now.
        """
        debug = inspect(path, wait, epoch_length)
        path.chmod(0o600)
        connection = connect(path, wait)
        store = cls(connection, path, InstanceToken(path), wait=wait, debug=debug)
        try:
            with store.transaction():
                store._close_if_copied(clock())
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        # A custom function that never returns keeps the lock; its transaction is rolled back when the process ends.
        if self._lock.acquire(timeout=self._wait):
            self._connection.close()
            self._instance.close()
            self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block from BEGIN IMMEDIATE to COMMIT. Raise DatabaseUnavailable if disk or lock do not permit it."""
        if not self._lock.acquire(timeout=self._wait):
            raise DatabaseUnavailable(
                f"{self._path} is busy", "Another call of this device is at work: retry later.", kind=ErrorKind.BUSY
            )
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._read_state()
            self._write_pending_token()
            yield
            self._commit()
        except sqlite3.Error as error:
            raise refusal(self._path, error) from None
        finally:
            self._state = None
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.rollback()
            self._lock.release()

    @contextmanager
    def discarded(self) -> Iterator[None]:
        self._connection.execute("SAVEPOINT discarded")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK TO discarded")
            self._connection.execute("RELEASE discarded")
            self._read_state()

    def _commit(self) -> None:
        state = self._row()
        self._connection.execute("UPDATE device SET counter = ?", (state.counter + 1,))
        self._connection.execute("COMMIT")
        try:
            self._instance.follow(state.token, state.counter + 1)
        except OSError:
            # The commit stands, and the caller must not learn about the disk; `_write_pending_token` retries.
            self._token_written = False
        if self._truncation_wait is not None:
            self._truncate_log(self._truncation_wait)

    def _truncate_log(self, wait: float) -> None:
        """Truncate the write-ahead log: what the person cleared must not stay there. If a reader holds it, retry later.

        Only the person's own call waits for the reader. A site's would be late for as long as one stays.
        """
        self._truncation_wait = 0.0
        with suppress(sqlite3.Error):
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * wait)}")
            if self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0:
                self._truncation_wait = None
        self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * self._wait)}")

    def _write_pending_token(self) -> None:
        """Write the token that could not be written after the last transaction; until that succeeds, raise."""
        if not self._token_written:
            state = self._row()
            try:
                self._instance.follow(state.token, state.counter)
            except OSError as error:
                raise DatabaseUnavailable(f"the token of {self._path} cannot be written: {error.strerror}") from None
            self._token_written = True

    def _close_if_copied(self, now: int) -> None:
        """Close all epochs of a database that this device did not write last (a copy), and assign it a fresh token.

        The barrier is durable before the sidecar vouches for the new token (`_commit` writes that last).
        """
        state = self._row()
        if not self._instance.vouches_for(state.token, state.counter):
            self.raise_barrier(max(now, self._instance.latest()))
            self._set("token", fresh_token())

    def _row(self) -> _State:
        if self._state is None:
            raise RuntimeError("a store must be used inside its transaction")
        return self._state

    def _read_state(self) -> None:
        version, *state = self._connection.execute(_STATE).fetchone()
        # A newer program may have changed the file since it was opened.
        check_version(self._path, version)
        self._state = _State(*state)

    def _set(self, column: str, value: int | bytes) -> None:
        self._connection.execute(f"UPDATE device SET {column} = ?", (value,))  # noqa: S608 - columns named in this file
        self._read_state()

    @property
    def enabled(self) -> bool:
        return bool(self._row().enabled)

    def set_enabled(self, enabled: bool) -> None:
        self._set("enabled", enabled)

    @property
    def epoch_start(self) -> int | None:
        return self._row().epoch_start

    def fix_epoch_start(self, start: int) -> None:
        if self._row().epoch_start is None:
            self._set("epoch_start", start)

    @property
    def barrier(self) -> int | None:
        return self._row().barrier

    def raise_barrier(self, moment: int) -> None:
        barrier = self._row().barrier
        if barrier is None or barrier < moment:
            self._set("barrier", moment)

    def save(self, saved: SavedImpression) -> None:
        time, site, *rest = saved.impression
        row = (time, saved.expires, site, *rest)
        lists = (_listing(saved.conversion_sites), _listing(saved.conversion_callers))
        self._connection.execute("INSERT INTO impression VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row + lists)

    def matched_sites(self, selection: Selection, calendar: EpochCalendar) -> Mapping[int, Collection[str]]:
        query, values = _accepted(selection)
        first = calendar.index(selection.since)
        epochs = (calendar.first_second(first), calendar.length, first)
        sites: dict[int, set[str]] = {}
        for epoch, site in self._connection.execute(_SITES + query, (*epochs, *values)):
            sites.setdefault(epoch, set()).add(site)
        return sites

    def matching(self, selection: Selection, need: Need = EVERYTHING) -> Sequence[Impression]:
        query, values = _accepted(selection)
        # SQLite reads a negative LIMIT as none.
        limited = f"{_IMPRESSIONS}{query}{_ORDERS[need.order]} LIMIT ?"
        most = -1 if need.most is None else need.most
        return list(map(_IMPRESSION, self._connection.execute(limited, (*values, most))))

    def impressions(self) -> Sequence[SavedImpression]:
        return [
            SavedImpression(Impression._make(impression), expires, frozenset(sites.split()), frozenset(callers.split()))
            for *impression, expires, sites, callers in self._connection.execute(_ALL)
        ]

    def census(self, since: int, until: int) -> Sequence[SiteCount]:
        return [SiteCount._make(row) for row in self._connection.execute(_CENSUS, (since, until))]

    def evict_oldest_between(self, since: int, until: int, count: int, site: str | None = None) -> None:
        self._connection.execute(_EVICT, (since, until, site, site, count))

    def drop_impressions_before(self, moment: int) -> None:
        self._connection.execute(_DROP.format("impression"), (moment, CLEANUP_LIMIT))

    def clear_caller(self, site: str) -> None:
        self._truncation_wait = self._wait
        self.conversions.clear_caller(site)
        self._connection.execute("DELETE FROM impression WHERE caller = ?", (site,))
        entry = f" {site} "
        for number, *lists in self._connection.execute(_LISTED, (entry, entry)).fetchall():
            sites, callers = (_listing(set(text.split()) - {site}) for text in lists)
            if [sites == "", callers == ""] != [text == "" for text in lists]:
                self._connection.execute("DELETE FROM impression WHERE id = ?", (number,))
            else:
                self._connection.execute(
                    "UPDATE impression SET conversion_sites = ?, conversion_callers = ? WHERE id = ?",
                    (sites, callers, number),
                )

    def filters_of(self, owners: Collection[FilterOwner]) -> dict[FilterOwner, PrivacyFilter]:
        filters = {}
        for kind in FilterKind:
            sites = [owner.site for owner in owners if owner.kind is kind]
            for part in (sites[start : start + CLEANUP_LIMIT] for start in range(0, len(sites), CLEANUP_LIMIT)):
                query = _FILTERS.format(", ".join("?" * len(part)))
                paid = dict(self._connection.execute(query, (kind, *part)))
                filters.update({FilterOwner(kind, site): PrivacyFilter(paid.get(site, b"")) for site in part})
        return filters

    def keep(self, filters: Mapping[FilterOwner, PrivacyFilter]) -> None:
        rows = [(*owner, ledger.encode()) for owner, ledger in filters.items()]
        self._connection.executemany("INSERT OR REPLACE INTO filter VALUES (?, ?, ?)", rows)

    def filters(self) -> Mapping[FilterOwner, PrivacyFilter]:
        rows = self._connection.execute("SELECT kind, site, paid FROM filter").fetchall()
        return {FilterOwner(FilterKind(kind), site): PrivacyFilter(paid) for kind, site, paid in rows}

    def forget(self, sites: Collection[str]) -> None:
        self._truncation_wait = self._wait
        self._connection.execute("DELETE FROM log")
        self.conversions.forget(sites)
        for table in ("impression", "filter", "action"):
            if not sites:
                self._connection.execute(f"DELETE FROM {table}")  # noqa: S608 - tables named in this file
            for site in sites:
                self._connection.execute(f"DELETE FROM {table} WHERE site = ?", (site,))  # noqa: S608

    def prune(self, first_epoch: int, before: int) -> bool:
        finished = self._prune_filters(first_epoch) & self.conversions.drop_before(before)
        for query in (_DROP.format("impression"), _DROP_LOG, _DROP_ACTIONS):
            finished &= self._connection.execute(query, (before, CLEANUP_LIMIT)).rowcount < CLEANUP_LIMIT
        return finished

    def drop_expired(self, now: int) -> bool:
        dropped = self._connection.execute(_DROP_EXPIRED.format("impression"), (now, CLEANUP_LIMIT)).rowcount
        return self.conversions.drop_expired(now) and dropped < CLEANUP_LIMIT

    def _prune_filters(self, first_epoch: int) -> bool:
        """Prune the next filters in key order, from where the last call stopped. Return whether it reached the end."""
        rows = self._connection.execute(_NEXT_FILTERS, (*self._pruned, CLEANUP_LIMIT)).fetchall()
        for kind, site, paid in rows:
            ledger = PrivacyFilter(paid)
            ledger.forget_before(first_epoch)
            if ledger.paid:
                self.keep({FilterOwner(FilterKind(kind), site): ledger})
            else:
                self._connection.execute("DELETE FROM filter WHERE kind = ? AND site = ?", (kind, site))
        finished = len(rows) < CLEANUP_LIMIT
        self._pruned = _FIRST_FILTER if finished else rows[-1][:2]
        return finished

    def log(self, record: ReportRecord, most: int = MAX_LOG_RECORDS) -> None:
        self._instance.saw(record.time)
        added = self._connection.execute("INSERT INTO log VALUES (NULL, ?, ?)", (record.time, record.encode()))
        self._connection.execute("DELETE FROM log WHERE id <= ?", ((added.lastrowid or 0) - most,))

    def reports(self) -> Sequence[ReportRecord]:
        return [ReportRecord.decode(data) for (data,) in self._connection.execute("SELECT record FROM log ORDER BY id")]

    def admit_to_action(self, action: str, site: str, limit: int, now: int) -> bool:
        rows = self._connection.execute("SELECT site FROM action WHERE action = ?", (action,)).fetchall()
        sites = {other for (other,) in rows}
        if site not in sites and len(sites) < limit:
            self._connection.execute("INSERT INTO action VALUES (?, ?, ?)", (action, site, now))
            return True
        return site in sites


class SqlConversions:
    """Conversion events in the device's database, on the connection of its store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def save(self, saved: SavedConversion) -> None:
        event = saved.event
        row = (event.time, saved.expires, event.site, event.caller, event.label, _listing(saved.publishers))
        self._connection.execute("INSERT INTO conversion VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        query, publisher = _CONVERSIONS, selection.publisher
        values: list[int | str] = [selection.since, selection.until, selection.now, publisher, publisher]
        values.append(f" {publisher} ")
        wanted: list[tuple[str, Collection[int | str]]] = [("site", selection.advertisers), ("label", selection.labels)]
        for column, allowed in wanted:
            if allowed:
                query += f" AND {column} IN ({', '.join('?' * len(allowed))})"
                values += allowed
        return list(map(ConversionEvent._make, self._connection.execute(f"{query} ORDER BY time, id", values)))

    def all(self) -> Sequence[SavedConversion]:
        return [
            SavedConversion(ConversionEvent._make(event), expires, frozenset(publishers.split()))
            for *event, expires, publishers in self._connection.execute(_ALL_CONVERSIONS)
        ]

    def count_between(self, since: int, until: int) -> int:
        return int(self._connection.execute(_COUNT_CONVERSIONS, (since, until)).fetchone()[0])

    def evict_between(self, since: int, until: int) -> None:
        self._connection.execute(_EVICT_CONVERSION, (since, until))

    def drop_before(self, moment: int, most: int = CLEANUP_LIMIT) -> bool:
        return self._connection.execute(_DROP.format("conversion"), (moment, most)).rowcount < most

    def drop_expired(self, now: int) -> bool:
        dropped = self._connection.execute(_DROP_EXPIRED.format("conversion"), (now, CLEANUP_LIMIT)).rowcount
        return dropped < CLEANUP_LIMIT

    def clear_caller(self, site: str) -> None:
        self._connection.execute("DELETE FROM conversion WHERE caller = ?", (site,))
        listed = "SELECT id, publishers FROM conversion WHERE instr(publishers, ?) > 0"
        for number, publishers in self._connection.execute(listed, (f" {site} ",)).fetchall():
            left = _listing(set(publishers.split()) - {site})
            self._connection.execute("UPDATE conversion SET publishers = ? WHERE id = ?", (left, number))
        self._connection.execute("DELETE FROM conversion WHERE publishers = ''")

    def forget(self, sites: Collection[str]) -> None:
        if not sites:
            self._connection.execute("DELETE FROM conversion")
        for site in sites:
            self._connection.execute("DELETE FROM conversion WHERE site = ?", (site,))


class SqlServices:
    """Helper sets in the device's database, on the connection of its store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self) -> Mapping[str, bytes]:
        return dict(self._connection.execute("SELECT name, signed_set FROM service ORDER BY name"))

    def keep(self, name: str, signed_set: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO service VALUES (?, ?)", (name, signed_set))

    def remove(self, name: str) -> None:
        self._connection.execute("DELETE FROM service WHERE name = ?", (name,))


def _accepted(selection: Selection) -> tuple[str, list[int | str]]:
    """Return `Selection.accepts` as SQL. Only question marks are added to the text, never a value."""
    values: list[int | str] = [selection.since, selection.until, selection.now]
    values += [f" {selection.conversion_site} ", f" {selection.conversion_caller} "]
    query = _ACCEPTED
    wanted: list[tuple[str, Collection[int | str]]] = [
        ("match_value", selection.match_values),
        ("site", selection.impression_sites),
        ("caller", selection.impression_callers),
    ]
    for column, allowed in wanted:
        if allowed:
            query += f" AND {column} IN ({', '.join('?' * len(allowed))})"
            values += allowed
    for column in ("site", "caller") if selection.hidden else ():
        query += f" AND {column} NOT IN ({', '.join('?' * len(selection.hidden))})"
        values += selection.hidden
    return query, values


def _listing(sites: Collection[str]) -> str:
    """Return the sites with a space on both sides of each, so that `instr` matches whole sites; none has a space."""
    return f" {' '.join(sorted(sites))} " if sites else ""
