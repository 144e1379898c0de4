"""The report ledger: one helper's durable record of spent reports, of every attempt to spend them, and of queries.

Methods block on the disk, may be called from any thread, and are atomic.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpc_helpers.identity.config import LedgerLocation, PostgresLocation
from mpc_helpers.ledger.attempt import Failpoint, QueryName
from mpc_helpers.ledger.database import Chain, Database, PeerHeads
from mpc_helpers.ledger.engine import LEDGER_ID_SIZE, LedgerEngine, LedgerError, LedgerOwner, check_chain
from mpc_helpers.ledger.moves import Attempts, Moves
from mpc_helpers.ledger.reports import Reports
from mpc_helpers.ledger.share_keys import ShareKeys
from mpc_helpers.ledger.sqlite_engine import SqliteEngine
from protocol.errors import ErrorKind
from protocol.status import Failure, QueryState


def engine_at(location: LedgerLocation | LedgerEngine) -> LedgerEngine:
    """Return the engine for a ledger's location. An engine is its own location."""
    if isinstance(location, Path):
        return SqliteEngine(location)
    if not isinstance(location, PostgresLocation):
        return location
    try:
        # Here, because psycopg is an extra.
        from mpc_helpers.ledger.postgres_engine import PostgresEngine
    except ImportError:
        message = f"the ledger {location} needs psycopg, which is not installed"
        raise LedgerError(message, "Run: pip install 'trefoil[postgres]'", kind=ErrorKind.MISSING_DEPENDENCY) from None
    return PostgresEngine(location)


class QueryChanged(LedgerError):
    """The query id was used with other contents (HTTP 409)."""

    kind = ErrorKind.DUPLICATE


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """A query's stored state, and its failure if it ended without an answer."""

    name: QueryName
    state: QueryState
    updated: int
    failure: Failure | None = None


class QueryRecords:
    """The `queries` table: the state of each query, and one digest per query id, permanently."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, entry: QueryRecord) -> None:
        """Store a state, or raise `QueryChanged` if the id was used with another digest."""
        detail = json.dumps(None if entry.failure is None else entry.failure.to_json())
        with self._database.transaction() as connection:
            stored = connection.execute(
                "INSERT INTO queries VALUES (?, ?, ?, ?, ?) ON CONFLICT (query_key) DO UPDATE"
                " SET state = excluded.state, detail = excluded.detail, updated = excluded.updated"
                " WHERE queries.query_digest = excluded.query_digest",
                (entry.name.key, entry.name.digest, entry.state.value, detail, entry.updated),
            ).rowcount
        if stored != 1:
            raise QueryChanged(
                "this query id was used before, for another batch or other parameters",
                "Choose a new query id, or submit exactly what was submitted first.",
            )

    def find(self, query_key: bytes) -> QueryRecord | None:
        with self._database.reading() as connection:
            row = connection.execute("SELECT * FROM queries WHERE query_key = ?", (query_key,)).fetchone()
        return _decode(row) if row else None

    def all(self) -> list[QueryRecord]:
        """Return every query that was ever submitted, oldest change first."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT * FROM queries ORDER BY updated, query_key").fetchall()
        return [_decode(row) for row in rows]


def _decode(row: tuple[bytes, bytes, str, str, int]) -> QueryRecord:
    key, digest, state, detail, updated = row
    stored = json.loads(detail)
    failure = None if stored is None else Failure.from_json(stored)
    return QueryRecord(QueryName(key, digest), QueryState(state), updated, failure)


class ReportLedger:
    """One helper's ledger, locked by this process. `failpoint` is called at each failpoint of COMMIT.md.

    `share_keys` is the folder of the keys under which shares are stored, for a database that overwrites nothing.
    `attempts` reads attempts and `moves` changes them; `reports` are the spent reports, `queries` the queries' states;
    `chain` and `peer_heads` are the heads of this ledger and of the peers'.
    """

    def __init__(
        self,
        location: LedgerLocation | LedgerEngine,
        owner: LedgerOwner,
        *,
        failpoint: Callable[[Failpoint], None] = lambda _: None,
        share_keys: Path | None = None,
    ) -> None:
        self.owner = owner
        self._database = Database(engine_at(location), owner, failpoint)
        self.peer_heads = PeerHeads(self._database)
        self.chain = Chain(self._database, self.peer_heads)
        self.reports = Reports(self._database)
        keys = ShareKeys(share_keys)
        self.attempts = Attempts(self._database, keys)
        self.moves = Moves(self._database, self.chain, self.reports, self.attempts, keys)
        self.queries = QueryRecords(self._database)

    @classmethod
    def create(
        cls, location: LedgerLocation, owner: LedgerOwner, *, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        """Create an empty ledger with a helper's new keys. Never to replace a lost one: see `rebuild`."""
        engine_at(location).create(owner, entropy(LEDGER_ID_SIZE))

    @property
    def cpu_seconds(self) -> float:
        """Return the processor time spent on reports and moves since the ledger was opened."""
        return self._database.cpu_seconds

    @property
    def seconds(self) -> float:
        """Return the wall-clock time spent on reports and moves since the ledger was opened."""
        return self._database.seconds

    def check_held(self) -> None:
        """Raise unless the database responds and this process still holds the ledger. Changes nothing."""
        self._database.check_held()

    def measure(self) -> int:
        """Measure the ledger's size, and return how many reports it holds. Reads all of them, in slices."""
        self._database.engine.measure()
        return self.reports.count()

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the ledger with its log, and of the log; of a database, when it was measured last."""
        return self._database.engine.sizes()

    def verify(self) -> None:
        """Verify all that is stored and the whole chain, in time that grows with the ledger. Raise if it is damaged."""
        with self._database.reading() as connection:
            self._database.engine.verify(connection)
            check_chain(connection, self._database.engine, recent=None)

    def close(self) -> None:
        """Close the ledger. An open transaction is rolled back, as in a crash."""
        self._database.close()
