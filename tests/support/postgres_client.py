"""A process that moves a ledger in PostgreSQL and, at one failpoint, kills or stops itself.

    python -m tests.support.postgres_client URL SCHEMA SIGKILL|SIGSTOP|REPLY_KEPT|REPLY_LOST FAILPOINT SHARE_KEYS

With the last two it stops in the next commit after the failpoint: when the server has replied, and before it reads the
reply; when it goes on, it reads it or finds it lost. Prints each move once it is durable, and at the end how the
process ended, and what it learns when it tries again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpc_helpers.identity.config import PostgresLocation
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.ledger import ReportLedger
from tests.support.ledger_samples import NO, OWNER, YES, reserve


def play(ledger: ReportLedger) -> None:
    """Go through every move once, on five attempts of one or two reports each."""
    moves = ledger.moves
    reserve(ledger, 4, 1, 40)
    done("reserved 4")
    moves.sweep()
    done("aborted 4")
    first = reserve(ledger, 1, 1, 10, 11)
    done("reserved 1")
    moves.vote(first, b"share")
    done("voted 1")
    moves.release(first, YES)
    done("released 1")
    second = reserve(ledger, 2, 1, 20, 21)
    done("reserved 2")
    moves.abort(second, "deadline")
    done("aborted 2")
    third = reserve(ledger, 3, 1, 30, 31)
    moves.vote(third, b"share")
    done("voted 3")
    moves.renounce(third, NO[:1], "a NO")
    done("renounced 3")
    moves.free(third, NO, "both NO")
    done("aborted 3")
    reserve(ledger, 5, 1, 50)
    done("reserved 5")


def done(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class StoppingConnection:
    """A connection whose process stops in a commit, between the server's reply and its own reading of it."""

    def __init__(self, raw: Any, lost: bool) -> None:
        self._raw, self._lost = raw, lost

    def execute(self, statement: Any, *values: Any) -> Any:
        import psycopg

        if statement != "COMMIT":
            return self._raw.execute(statement, *values)
        replied = self._raw.pgconn
        replied.send_query(b"COMMIT")
        while replied.flush():
            pass
        # Nothing else is outstanding: what can be read is the reply.
        assert select.select([self._raw.fileno()], [], [], 30)[0]
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._lost:
            raise psycopg.OperationalError("the connection is lost")
        while replied.is_busy():
            replied.consume_input()
        result = Reply((replied.get_result().command_status or b"").decode())
        while replied.get_result() is not None:
            pass
        return result

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._raw, attribute)


@dataclass(frozen=True)
class Reply:
    """As much of a cursor as a commit needs."""

    statusmessage: str


def main(url: str, schema: str, how: str, where: str, share_keys: str) -> None:
    def failpoint(at: Failpoint) -> None:
        if at.name != where:
            return
        if how in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[how])
            return
        connection: Any = ledger._database.connection
        if not isinstance(connection.raw, StoppingConnection):
            connection.raw = StoppingConnection(connection.raw, how == "REPLY_LOST")

    place = PostgresLocation(url, schema)
    ledger = ReportLedger(place, OWNER, failpoint=failpoint, share_keys=Path(share_keys))
    done("opened")
    try:
        play(ledger)
    except LedgerError as error:
        done(f"refused: {type(error).__name__}")
        try:
            ledger.check_held()
        except LedgerError as second:
            done(f"again: {second.kind.value}")
        return
    done("finished")


if __name__ == "__main__":
    main(*sys.argv[1:])
