"""The book of queries: what became of each, kept through restarts, one digest for each query id for ever."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.file import LedgerError
from protocol.status import Failure, QueryState


class QueryChanged(LedgerError):
    """The query id is known with other contents (HTTP 409)."""


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """A query's stored state, and why it has no answer if it ended without one."""

    name: QueryName
    state: QueryState
    updated: int
    failure: Failure | None = None


class QueryBook:
    """The `queries` table of a ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, entry: QueryRecord) -> None:
        """Store a state; `QueryChanged` when the id is known with another digest, and then nothing is stored."""
        detail = json.dumps(None if entry.failure is None else entry.failure.to_json())
        with self._database.reading() as connection:
            stored = connection.execute(
                "INSERT INTO queries VALUES (?, ?, ?, ?, ?) ON CONFLICT (query_key) DO UPDATE"
                " SET state = excluded.state, detail = excluded.detail, updated = excluded.updated"
                " WHERE query_digest = excluded.query_digest",
                (entry.name.key, entry.name.digest, entry.state.value, detail, entry.updated),
            ).rowcount
        if stored != 1:
            raise QueryChanged(
                "this query id was used before, for another batch or other parameters",
                "Choose a new query id, or submit exactly what was submitted first.",
            )

    def find(self, query_key: bytes) -> QueryRecord | None:
        """The stored state of a query."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT * FROM queries WHERE query_key = ?", (query_key,)).fetchone()
        return _decode(row) if row else None

    def all(self) -> list[QueryRecord]:
        """Every query this helper was ever asked, oldest change first."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT * FROM queries ORDER BY updated, query_key").fetchall()
        return [_decode(row) for row in rows]


def _decode(row: tuple[bytes, bytes, str, str, int]) -> QueryRecord:
    key, digest, state, detail, updated = row
    stored = json.loads(detail)
    failure = None if stored is None else Failure.from_json(stored)
    return QueryRecord(QueryName(key, digest), QueryState(state), updated, failure)
