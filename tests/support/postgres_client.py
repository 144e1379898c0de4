"""A process that moves a ledger in PostgreSQL and, at one failpoint, kills or stops itself.

    python -m tests.support.postgres_client URL SCHEMA SIGKILL|SIGSTOP FAILPOINT

Prints each move once it is durable, and at the end how the process ended.
"""

from __future__ import annotations

import os
import signal
import sys

from mpc_helpers.identity.config import PostgresLocation
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.ledger import ReportLedger
from tests.mpc_helpers.test_report_ledger import NO, OWNER, YES, reserve


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


def main(url: str, schema: str, how: str, where: str) -> None:
    def failpoint(at: Failpoint) -> None:
        if at.name == where:
            os.kill(os.getpid(), signal.Signals[how])

    ledger = ReportLedger(PostgresLocation(url, schema), OWNER, failpoint=failpoint)
    done("opened")
    try:
        play(ledger)
    except LedgerError as error:
        done(f"refused: {type(error).__name__}")
        return
    done("finished")


if __name__ == "__main__":
    main(*sys.argv[1:])
