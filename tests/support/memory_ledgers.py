"""Ledgers that are SQLite databases in memory, from which a crash takes what was not committed."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from mpc_helpers.ledger.file import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from tests.support.commit_world import KEYS


@cache
def template(party: int) -> sqlite3.Connection:
    """An empty ledger, made once: making it takes longer than a run."""
    with tempfile.TemporaryDirectory() as folder:
        ReportLedger.create(Path(folder) / "ledger", LedgerOwner(party, KEYS[party]))
        with closing(sqlite3.connect(Path(folder) / "ledger")) as made:
            made.execute("PRAGMA journal_mode = DELETE")
            copy = sqlite3.connect(":memory:", isolation_level=None)
            made.backup(copy)
    return copy


class MemoryLedgers:
    """Stands for the disk: databases by path, which outlive the processes that have them open."""

    def __init__(self) -> None:
        self._databases: dict[Path, sqlite3.Connection] = {}

    def create(self, path: Path, party: int) -> None:
        database = sqlite3.connect(":memory:", isolation_level=None)
        template(party).backup(database)
        self._databases[path] = database

    def open(self, path: Path, _: LedgerOwner) -> Handle:
        return Handle(self._databases[path])

    def clear(self) -> None:
        for database in self._databases.values():
            database.close()
        self._databases.clear()


class Handle:
    """A process's connection to such a database. Closing it is a crash: what was not committed is gone."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database: sqlite3.Connection | None = database

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise sqlite3.ProgrammingError("the process that had it open is dead")
        return self._database

    @property
    def in_transaction(self) -> bool:
        return self._open().in_transaction

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        return self._open().execute(*statement)

    def executemany(self, *statement: Any) -> sqlite3.Cursor:
        return self._open().executemany(*statement)

    def close(self) -> None:
        if self._database is not None and self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._database = None
