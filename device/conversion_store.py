"""Where a device keeps conversion events: in memory or in its database, by the same rules.

Like all of a store, used inside its transaction only.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from device.conversion_event import ConversionEvent, EventSelection, SavedConversion

_MATCH = """
SELECT time, site, caller, label FROM conversion
WHERE time >= ? AND time < ? AND expires >= ? AND site <> ? AND caller <> ? AND instr(publishers, ?) > 0"""
_ALL = "SELECT time, site, caller, label, expires, publishers FROM conversion ORDER BY time, id"
_COUNT = "SELECT count(*) FROM conversion WHERE time >= ? AND time < ?"
_EVICT = """
DELETE FROM conversion WHERE id = (
    SELECT id FROM conversion WHERE time >= ?1 AND time < ?2 AND site = (
        SELECT site FROM conversion WHERE time >= ?1 AND time < ?2
        GROUP BY site ORDER BY count(*) DESC, min(time), site LIMIT 1)
    ORDER BY time, id LIMIT 1)"""
_DROP = "DELETE FROM conversion WHERE id IN (SELECT id FROM conversion WHERE time < ? ORDER BY time LIMIT ?)"

# No call may take long because much was left to do.
DROPPED_AT_ONCE = 200


class ConversionStore(Protocol):
    """The conversion events of one device."""

    def save(self, saved: SavedConversion) -> None: ...

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        """Events that `selection` accepts, by time; within one second in the order they were saved."""
        ...

    def all(self) -> Sequence[SavedConversion]:
        """Every event, by time, for the person to see."""
        ...

    def count_between(self, since: int, until: int) -> int:
        """How many were saved in [since, until)."""
        ...

    def evict_between(self, since: int, until: int) -> None:
        """Delete the oldest event in [since, until) of the site that has most there: who floods loses its own."""
        ...

    def drop_before(self, moment: int, most: int = DROPPED_AT_ONCE) -> bool:
        """Delete events dated before `moment`, of very many some; whether all of them are gone."""
        ...

    def clear_caller(self, site: str) -> None:
        """Remove what `site` saved as caller; strike it from all lists, deleting whose list that empties."""
        ...

    def forget(self, sites: Collection[str]) -> None:
        """Delete the events on these sites, or all of them if none are named."""
        ...


class ConversionList:
    """In memory, in the order of saving. The list is replaced, never changed, so that a store can put it back."""

    def __init__(self) -> None:
        self.saved: tuple[SavedConversion, ...] = ()

    def save(self, saved: SavedConversion) -> None:
        self.saved = (*self.saved, saved)

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        return sorted((saved.event for saved in self.saved if selection.accepts(saved)), key=lambda event: event.time)

    def all(self) -> Sequence[SavedConversion]:
        return sorted(self.saved, key=lambda saved: saved.event.time)

    def count_between(self, since: int, until: int) -> int:
        return len(self._between(since, until))

    def evict_between(self, since: int, until: int) -> None:
        inside = sorted(self._between(since, until), key=lambda saved: saved.event.time)
        if inside:
            held = Counter(saved.event.site for saved in inside)
            first = {saved.event.site: saved.event.time for saved in reversed(inside)}
            loses = min(held, key=lambda site: (-held[site], first[site], site))
            oldest = next(saved for saved in inside if saved.event.site == loses)
            self.saved = tuple(saved for saved in self.saved if saved is not oldest)

    def drop_before(self, moment: int, most: int = DROPPED_AT_ONCE) -> bool:
        old = sorted((saved for saved in self.saved if saved.event.time < moment), key=lambda saved: saved.event.time)
        gone = {id(saved) for saved in old[:most]}
        self.saved = tuple(saved for saved in self.saved if id(saved) not in gone)
        return len(old) < most

    def clear_caller(self, site: str) -> None:
        others = (saved for saved in self.saved if saved.event.caller != site)
        stripped = (replace(saved, publishers=saved.publishers - {site}) for saved in others)
        self.saved = tuple(saved for saved in stripped if saved.publishers)

    def forget(self, sites: Collection[str]) -> None:
        self.saved = tuple(saved for saved in self.saved if sites and saved.event.site not in sites)

    def _between(self, since: int, until: int) -> list[SavedConversion]:
        return [saved for saved in self.saved if since <= saved.event.time < until]


class SqlConversions:
    """In the device's database, on the connection of its store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def save(self, saved: SavedConversion) -> None:
        event = saved.event
        row = (event.time, saved.expires, event.site, event.caller, event.label, _listing(saved.publishers))
        self._connection.execute("INSERT INTO conversion VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)

    def matching(self, selection: EventSelection) -> Sequence[ConversionEvent]:
        query, publisher = _MATCH, selection.publisher
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
            for *event, expires, publishers in self._connection.execute(_ALL)
        ]

    def count_between(self, since: int, until: int) -> int:
        return int(self._connection.execute(_COUNT, (since, until)).fetchone()[0])

    def evict_between(self, since: int, until: int) -> None:
        self._connection.execute(_EVICT, (since, until))

    def drop_before(self, moment: int, most: int = DROPPED_AT_ONCE) -> bool:
        return self._connection.execute(_DROP, (moment, most)).rowcount < most

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


def _listing(sites: Collection[str]) -> str:
    """Sites with a space on both sides of each, so that one is found as a whole; no site contains a space."""
    return f" {' '.join(sorted(sites))} " if sites else ""
