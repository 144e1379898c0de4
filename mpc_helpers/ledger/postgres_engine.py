"""The PostgreSQL engine: a ledger that outgrew one disk, or has a standby host. One process holds it at a time.

Two things keep a second process out. An advisory lock of the session refuses it at once, with a hint. And
`ledger.epoch` is a fencing token: it rises whenever a process opens the ledger, and every transaction first locks that
row with the epoch that its own process holds. A process that was paused, and taken for dead, changes nothing.

Transactions are READ COMMITTED. Each locks the one row of `ledger` before it reads, so writers run one after another
and every statement sees all that was committed before: no serialization failure can occur.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from mpc_helpers.identity.config import PostgresLocation
from mpc_helpers.ledger.engine import (
    NEVER_RESTORE,
    OTHER_VERSION,
    LedgerClosed,
    LedgerError,
    LedgerOwner,
    LedgerTakenOver,
    check_chain,
    check_owner,
    damaged,
)
from mpc_helpers.ledger.postgres_schema import drop_functions, guards, reports_table, tables, triggers
from mpc_helpers.ledger.schema import (
    APPLICATION_ID,
    ELSEWHERE,
    FIRST_ATTEMPT,
    NEVER_PRUNED,
    SCHEMA_VERSION,
    UNDATED,
    day_table,
)
from protocol.errors import ErrorKind

LOCK_SECONDS = 2.0
# How long the outcome of a commit is asked for whose reply was lost.
DOUBT_SECONDS = 30.0
# How long measuring the tables may take.
MEASURE_SECONDS = 60
_SETTINGS = {
    # Statements find rows by key. Statistics of a table that was empty an hour ago must not suggest anything else:
    # a batch of 50,000 reports read by as many scans would take hours.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    # A plan with something disabled looks expensive, and expensive plans would be compiled, for half a second each.
    "jit": "off",
    "default_transaction_isolation": "read\\ committed",
    # A client that cannot be reached any more loses its lock within half a minute.
    "idle_in_transaction_session_timeout": "30s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": "5s",
    "lock_timeout": "5s",
    # That of a role would end large statements, and the wait for a synchronous standby: as if that had the commit.
    "statement_timeout": "0",
}
# A server that cannot be reached any more breaks the connection within half a minute, also while we wait for a reply.
_DEADLINES: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_DURABLE = ("fsync", "full_page_writes")
_STOP = "Another process has it open. Stop that helper first; if its host is dead or paused: trefoil ledger take-over"
_REACH = (
    "Check the ledger's URL, role and server. A helper that runs resumes by itself when the database can be reached."
    " Nothing was half written."
)
_READ_ONLY = "Promote this server if it is a standby that should take over. Or name the one that may be written to."
_OWNER = "Name the role that owns the ledger's schema; to create one, a role that owns the database."
_SPACE = "Free disk space or repair the disk. Voted attempts resume by themselves."


class PostgresConnection:
    """A session that holds a ledger. One that broke is replaced between transactions, if the epoch is still ours."""

    def __init__(self, location: PostgresLocation) -> None:
        self._location = location
        self._closed: LedgerClosed | None = None
        self._in_transaction = False
        self._epoch: int | None = None
        self._transaction_id = ""
        self.raw = self._connect()

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        settings = _SETTINGS | {"search_path": self._location.schema}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        raw = psycopg.connect(self._location.conninfo(), autocommit=True, options=options, **_DEADLINES)
        # At least: a server that waits for its standbys (remote_apply) is left alone.
        weak = "current_setting('synchronous_commit') IN ('off', 'local')"
        stronger = f"CASE WHEN {weak} THEN set_config('synchronous_commit', 'on', false) END"
        path, _ = raw.execute(f"SELECT current_setting('search_path'), {stronger}".encode()).fetchone() or ("", None)
        if path != self._location.schema:
            raw.close()
            raise psycopg.OperationalError("sessions do not keep their settings; name the server itself, not a pooler")
        return raw

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> psycopg.Cursor[Any]:
        """Run a statement of the shared dialect."""
        return self._usable().execute(_translated(statement), values or None)

    def run(self, statement: str) -> None:
        """Run a statement without values: one of several, or one that defines something."""
        self._usable().execute(statement.encode())

    def begin(self) -> None:
        """Begin a transaction under the ledger's lock, or raise if another process holds it by now."""
        raw = self._usable()
        self._in_transaction = True
        raw.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        row = raw.execute(
            "SELECT pg_current_xact_id()::text FROM ledger WHERE epoch = %s FOR UPDATE", (self._epoch,)
        ).fetchone()
        if row is None:
            raise self._end(LedgerTakenOver(self._location))
        (self._transaction_id,) = row

    def commit(self) -> None:
        """Commit. If the reply is lost, ask for the outcome; if that cannot be had, close, as in a crash."""
        try:
            done = self.raw.execute("COMMIT").statusmessage
        except psycopg.OperationalError:
            self.raw.close()
            if not self._was_committed():
                raise
        else:
            # The server replies ROLLBACK, without an error, if a statement failed and its error was ignored.
            if done != "COMMIT":
                raise psycopg.errors.InFailedSqlTransaction("the transaction had failed, and was rolled back")
        finally:
            self._in_transaction = False

    def _was_committed(self) -> bool:
        """Ask for the outcome of the last transaction until a server decides. If none does, close, as in a crash."""
        deadline = time.monotonic() + DOUBT_SECONDS
        while True:
            outcome, cause = "", None
            try:
                # Under its name, so that it can be interrupted.
                with self._connect() as self.raw:
                    outcome = self._outcome(self.raw)
                    if outcome == "committed":
                        # A server that crashed shows it although its synchronous standbys may not have it. Whatever
                        # is written after it waits for them.
                        self.raw.execute("SELECT 1 FROM ledger FOR UPDATE")
                # Otherwise ask again: the server may still be finishing it, or rolling it back.
                if outcome in ("committed", "aborted"):
                    return outcome == "committed"
            except psycopg.OperationalError as error:
                cause = error
            # The deadline holds while the server replies, too: it waits for a dead synchronous standby without a limit.
            if outcome == "unknown" or time.monotonic() > deadline or self._closed is not None:
                message = f"the connection to the ledger {self._location} broke in a commit, whose outcome is unknown"
                hint = "Restart the helper: it reads what was committed."
                raise self._end(LedgerClosed(message, hint)) from cause
            time.sleep(0.1)

    def _outcome(self, raw: psycopg.Connection[tuple[Any, ...]]) -> str:
        """Return what became of the last transaction: committed, aborted, in progress, or unknown."""
        if raw.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
            # A standby has not heard of it yet, or never will. It decides when it is promoted.
            return "in progress"
        try:
            (status,) = raw.execute("SELECT pg_xact_status(%s::xid8)", (self._transaction_id,)).fetchone() or (None,)
        except psycopg.errors.InvalidParameterValue:
            # This server never assigned the id: it crashed before any of the transaction was in its log.
            status = "aborted"
        # An id that a crash lost is assigned again, and so it is after a failover to a standby that lagged. But our
        # transaction left its id on the row that it locked, or wrote, and nobody else does under our epoch.
        epoch, ours = raw.execute(
            "SELECT epoch, %(id)s::xid8::xid IN (xmin, xmax) FROM ledger", {"id": self._transaction_id}
        ).fetchone() or (None, False)
        if epoch != self._epoch:
            # Whatever the outcome: the process that holds the ledger by now goes on from it.
            raise self._end(LedgerTakenOver(self._location))
        return "unknown" if status is None or (status == "committed" and not ours) else str(status)

    def roll_back(self) -> None:
        """Roll back. A session that does not respond is closed: the server rolls back then."""
        self._in_transaction = False
        if self.raw.closed or self.raw.info.transaction_status is TransactionStatus.IDLE:
            return
        try:
            self.raw.execute("ROLLBACK")
        except psycopg.Error:
            self.raw.close()

    def take_over(self) -> None:
        """Raise the epoch: from here on the process that held the ledger before is fenced."""
        self._lock()
        row = self.raw.execute("UPDATE ledger SET epoch = epoch + 1 RETURNING epoch").fetchone()
        self._hold(int(row[0]) if row else 0)

    def close(self) -> None:
        """Close the session. The server rolls back what is open, and releases the lock."""
        self._end(LedgerClosed(f"the ledger {self._location} is not open"))

    def interrupt(self) -> None:
        """Break the connection under the thread that waits for a reply. It learns that the ledger is closed."""
        self._closed = self._closed or LedgerClosed(f"the ledger {self._location} is not open")
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.raw.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)

    def _end(self, error: LedgerClosed) -> LedgerClosed:
        """Close the session for good. Every later call raises the first such error, which says why."""
        self._closed = self._closed or error
        self.raw.close()
        return error

    def _hold(self, epoch: int) -> None:
        # In a session of a replica no trigger runs, and with them neither the rules nor the fence.
        if self.raw.execute("SHOW session_replication_role").fetchone() != ("origin",):
            message = f"sessions of the ledger {self._location} run no triggers"
            raise LedgerError(message, "Reset session_replication_role of its role and its database.")
        self._epoch = epoch
        self.raw.execute("SELECT set_config('trefoil.epoch', %s, false)", (str(epoch),))

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while self.raw.execute(f"SELECT pg_try_advisory_lock({LOCK})".encode()).fetchone() != (True,):
            if time.monotonic() > deadline:
                raise LedgerError(f"cannot use the ledger {self._location}: locked", _STOP, kind=ErrorKind.BUSY)
            time.sleep(0.02)

    def _usable(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._closed is not None:
            raise self._closed
        if self.raw.info.transaction_status is TransactionStatus.ACTIVE:
            # A caller was interrupted within a statement, whose reply would be taken for the next one's.
            self.raw.close()
        if self.raw.closed and self._in_transaction:
            # Not in a new session: the rest of the transaction would be done there without its beginning.
            raise psycopg.OperationalError("the connection broke in a transaction")
        if self.raw.closed and self._epoch is not None:
            self.raw = self._connect()
            try:
                # Before the lock too: the process that took over holds it, and we would wait in vain.
                self._check_epoch()
                self._lock()
                self._check_epoch()
                self._hold(self._epoch)
            except BaseException:
                # No later call may use a session without the lock.
                self.raw.close()
                raise
        return self.raw

    def _check_epoch(self) -> None:
        if self.raw.execute("SELECT epoch FROM ledger").fetchone() != (self._epoch,):
            raise self._end(LedgerTakenOver(self._location))


# Those that run in a session of the helper.
_TRIGGERS = (
    "SELECT relname, tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
    " WHERE relnamespace = ?::regnamespace AND tgenabled IN ('O', 'A')"
)
LOCK = f"{APPLICATION_ID}, 'ledger'::regclass::oid::bigint::bit(32)::integer"


class PostgresEngine:
    """The `LedgerEngine` of a ledger in one schema of a PostgreSQL database."""

    places = "WITH places (place) AS (SELECT generate_series(0, :count - 1))"

    def __init__(self, location: PostgresLocation) -> None:
        self.location = location
        self._bytes = 0

    def __str__(self) -> str:
        return str(self.location)

    def exists(self) -> bool:
        """Return whether the schema exists."""
        with self.errors(), self._session() as raw:
            row = raw.execute("SELECT to_regnamespace(%s) IS NOT NULL", (self.location.schema,)).fetchone()
            return row == (True,)

    def create(self, owner: LedgerOwner, ledger_id: bytes) -> None:
        """Create an empty ledger, in one transaction. An existing schema is never replaced."""
        with self.errors():
            connection = PostgresConnection(self.location)
            try:
                connection.run("BEGIN")
                connection.raw.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.location.schema)))
                for statement in tables():
                    connection.run(statement)
                row = (ledger_id, owner.party, owner.identity_key)
                connection.execute("INSERT INTO ledger VALUES (1, ?, ?, ?, 0)", row)
                connection.execute(FIRST_ATTEMPT, {"attempt": ELSEWHERE, "nobody": bytes(32), "newest": NEVER_PRUNED})
                for statement in guards():
                    connection.run(statement)
                self.add_reports_table(connection, UNDATED)
                connection.run("COMMIT")
            except psycopg.errors.DuplicateSchema:
                raise self._exists() from None
            finally:
                connection.close()

    @contextmanager
    def draft(self) -> Iterator[PostgresEngine]:
        """Yield an engine for a schema that takes this one's name when the block succeeds."""
        draft = self.location.with_schema(f"{self.location.schema}_new")
        names = [sql.Identifier(place.schema) for place in (draft, self.location)]
        drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(names[0])
        if self.exists():
            raise self._exists()
        with self.errors(), self._session() as raw:
            raw.execute(drop)
            try:
                yield PostgresEngine(draft)
                raw.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(*names))
            except psycopg.errors.DuplicateSchema:
                raise self._exists() from None
            finally:
                raw.execute(drop)

    def open(self, owner: LedgerOwner) -> PostgresConnection:
        """Open the ledger of `owner` and fence every process that held it before."""
        with self.errors():
            connection = PostgresConnection(self.location)
            try:
                self._check(connection, owner)
                connection.take_over()
            except BaseException:
                connection.close()
                raise
        return connection

    def check_readable(self, owner: LedgerOwner) -> None:
        """Raise a `LedgerError` unless this is the ledger of `owner`. The process that holds it is not disturbed."""
        with self.errors():
            connection = PostgresConnection(self.location)
            try:
                self._check(connection, owner)
            finally:
                connection.close()

    def end_other_sessions(self, owner: LedgerOwner) -> int:
        """Fence the process that holds the ledger and end its session. Return how many sessions were ended.

        Run by an operator when that process's host is dead or paused, and the server still holds its lock.
        """
        with self.errors():
            connection = PostgresConnection(self.location)
            try:
                self._check(connection, owner)
                # First, because a session within a transaction has the row of the epoch locked.
                ended = connection.raw.execute(
                    "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 30000)) FROM pg_locks"
                    " WHERE locktype = 'advisory' AND classid = %s AND objid = 'ledger'::regclass::oid"
                    " AND pid <> pg_backend_pid()",
                    (APPLICATION_ID,),
                ).fetchone()
                connection.raw.execute("UPDATE ledger SET epoch = epoch + 1")
                return int(ended[0]) if ended else 0
            finally:
                connection.close()

    def verify(self, connection: PostgresConnection) -> None:
        """Read every table of reports through its index."""
        for table in _report_tables(connection):
            lost = "(SELECT 1 FROM attempts WHERE attempts.attempt = reports.attempt)"
            held = f"SELECT count(*) FROM {table} reports WHERE NOT EXISTS {lost}"  # noqa: S608  (an integer)
            if connection.execute(held).fetchone() != (0,):
                raise damaged(self, f"reports in {table} point to no attempt")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate PostgreSQL's errors into errors that an operator can act on."""
        try:
            yield
        except psycopg.Error as error:
            raise self._translated(error) from None

    def _translated(self, error: psycopg.Error) -> LedgerError:
        # The first line only: details could quote values.
        text = str(error).strip().split("\n")[0]
        match error:
            case psycopg.IntegrityError():
                return LedgerError(f"the ledger {self} refused a change: {text}", kind=ErrorKind.REFUSED)
            case psycopg.errors.DataCorrupted() | psycopg.errors.IndexCorrupted() | psycopg.errors.UndefinedTable():
                return damaged(self, text)
            case psycopg.errors.LockNotAvailable():
                return LedgerError(f"cannot use the ledger {self}: {text}", _STOP, kind=ErrorKind.BUSY)
            case psycopg.errors.DiskFull() | psycopg.errors.IoError():
                return LedgerError(f"cannot use the ledger {self}: {text}", _SPACE, kind=ErrorKind.NO_SPACE)
            case psycopg.errors.InsufficientPrivilege():
                return LedgerError(f"cannot use the ledger {self}: {text}", _OWNER, kind=ErrorKind.FORBIDDEN)
            case psycopg.errors.ReadOnlySqlTransaction():
                return LedgerError(f"cannot use the ledger {self}: {text}", _READ_ONLY)
            case psycopg.InterfaceError():
                return LedgerClosed(f"the ledger {self} is not open: {text}")
            case _:
                return LedgerError(f"cannot use the ledger {self}: {text}", _REACH)

    def erase_log(self, connection: PostgresConnection) -> None:
        """Do nothing: what pages and logs keep of a share cannot be read without its key (`share_keys`)."""

    def upsert(self, connection: PostgresConnection, insert: str, update: str, values: Mapping[str, Any]) -> int:
        """Insert rows, or update those that exist. Return how many were either.

        Mostly none exists, and a plain insertion searches the index once for each row instead of twice.
        """
        connection.run("SAVEPOINT plain")
        try:
            inserted = connection.execute(insert, values).rowcount
        except psycopg.errors.UniqueViolation:
            connection.run("ROLLBACK TO plain")
            inserted = connection.execute(insert + update, values).rowcount
        connection.run("RELEASE plain")
        return inserted

    def add_reports_table(self, connection: PostgresConnection, table: str) -> None:
        """Create an empty table of reports with its triggers."""
        for statement in reports_table(table):
            connection.run(statement)

    def drop_reports_table(self, connection: PostgresConnection, table: str) -> None:
        """Drop a table of reports and its functions, which do not go with it."""
        connection.run(f"DROP TABLE {table}")
        connection.run(drop_functions(table))

    def measure(self) -> None:
        """Measure the ledger's tables and indexes. The log is the whole server's, and not counted."""
        with self.errors(), self._session() as raw:
            # It would wait as long as any session has one of the tables locked.
            raw.execute("SELECT set_config('statement_timeout', %s, false)", (f"{MEASURE_SECONDS}s",))
            row = raw.execute(
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
                " WHERE relkind = 'r' AND relnamespace = %s::regnamespace",
                (self.location.schema,),
            ).fetchone()
        self._bytes = int(row[0]) if row else 0

    def sizes(self) -> tuple[int, int]:
        """Return the bytes that were measured last, and 0 for the log."""
        return self._bytes, 0

    def _session(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.location.conninfo(), autocommit=True, **_DEADLINES)

    def _exists(self) -> LedgerError:
        return LedgerError(f"{self} exists and is not replaced", NEVER_RESTORE, kind=ErrorKind.FILE_EXISTS)

    def _check(self, connection: PostgresConnection, owner: LedgerOwner) -> None:
        # By its full name: a schema that the role must not read is refused, and not taken for one that is missing.
        if connection.execute("SELECT to_regclass(?)", (f"{self.location.schema}.ledger",)).fetchone() == (None,):
            raise LedgerError(f"there is no ledger at {self}", NEVER_RESTORE, kind=ErrorKind.FILE_MISSING)
        kind, version = connection.execute("SELECT kind, version FROM ledger").fetchone() or (0, 0)
        if kind != APPLICATION_ID:
            raise LedgerError(f"{self} is not a report ledger", NEVER_RESTORE, kind=ErrorKind.WRONG_FILE)
        if version != SCHEMA_VERSION:
            message = f"{self} is a ledger of version {version}; expected version {SCHEMA_VERSION}"
            raise LedgerError(message, OTHER_VERSION, kind=ErrorKind.UNKNOWN_VERSION)
        for setting in _DURABLE:
            if connection.execute("SELECT current_setting(?)", (setting,)).fetchone() != ("on",):
                raise LedgerError(
                    f"the database of {self} runs with {setting} = off",
                    "Losing the last commit to a power cut is the same as restoring an old backup. Turn it on.",
                )
        # One snapshot for all statements: the process that holds the ledger may commit a move between two of them.
        connection.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        enabled = connection.execute(_TRIGGERS, (self.location.schema,)).fetchall()
        if off := triggers(_report_tables(connection)) - set(enabled):
            table, name = min(off)
            message = f"the trigger {name} on the table {table} of {self} is missing or disabled"
            hint = "Enable what was disabled: ALTER TABLE … ENABLE TRIGGER USER. "
            raise LedgerError(message, hint + NEVER_RESTORE, kind=ErrorKind.FILE_DAMAGED)
        check_owner(connection, self, owner)
        check_chain(connection, self)
        connection.run("ROLLBACK")


def _report_tables(connection: PostgresConnection) -> set[str]:
    days = connection.execute("SELECT day FROM days").fetchall()
    return {UNDATED} | {day_table(day) for (day,) in days}


@lru_cache(maxsize=512)
def _translated(statement: str) -> bytes:
    return re.sub(r"(?<!:):([a-z_]+)", r"%(\1)s", statement.replace("?", "%s")).encode()
