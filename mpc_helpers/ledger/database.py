"""A ledger's open database: one caller at a time, one transaction for each change, and the crash points around it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpc_helpers.ledger.attempt import Step
from mpc_helpers.ledger.file import LedgerOwner, clear_errors, open_connection


class Database:
    """Shared by everything that reads or writes one ledger file. `step` is called at each crash point of COMMIT.md."""

    def __init__(self, path: Path, owner: LedgerOwner, step: Callable[[Step], None]) -> None:
        self.path = path
        self.connection = open_connection(path, owner)
        self.step = step
        # Spent on reports and moves since the ledger was opened, by the wall and by the processor, for whoever watches.
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._lock = threading.RLock()
        self._committed: list[Callable[[], None]] = []

    def on_commit(self, call: Callable[[], None]) -> None:
        """Run `call` after each commit, before anybody else reads or writes."""
        self._committed.append(call)

    def close(self) -> None:
        """Let go of the file. An open transaction is rolled back, as in a crash."""
        with self._lock:
            self.connection.close()

    def forget_log(self) -> None:
        """Fold the log into the file and empty it, so that what was erased is not in it either. Best effort: the move
        before it is on disk, and the log is emptied sooner or later anyway.
        """
        with self._lock, suppress(sqlite3.Error):
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One caller at a time; what SQLite has against it becomes an error that an operator can act on."""
        with self._lock, clear_errors(self.path):
            yield self.connection

    def value(self, query: str, *values: bytes | int) -> Any:
        """The one value that `query` finds."""
        with self.reading() as connection:
            return connection.execute(query, values).fetchone()[0]

    @contextmanager
    def timed(self) -> Iterator[sqlite3.Connection]:
        """As `reading`, counted in `seconds` and `cpu_seconds`."""
        with self.reading() as connection:
            began, began_cpu = time.perf_counter(), time.thread_time()
            try:
                yield connection
            finally:
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.thread_time() - began_cpu

    @contextmanager
    def transaction(self, before: Step | None = None, after: Step | None = None) -> Iterator[sqlite3.Connection]:
        """All of the block or nothing of it, on disk when the block has ended."""
        with self.timed() as connection:
            # IMMEDIATE: the write lock is taken here, where nothing has been read yet that could change meanwhile.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                if before:
                    self.step(before)
                connection.execute("COMMIT")
                for call in self._committed:
                    call()
            except BaseException:
                with suppress(sqlite3.ProgrammingError):  # closed meanwhile, which rolls back as well
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise
        # Outside the lock: a test that stops the helper here closes the file.
        if after:
            self.step(after)
