"""Reservations and votes of a ledger, also for processes that are started and must not wait for pytest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpc_helpers.ledger.attempt import QueryName, ReceivedVote, Reservation
from mpc_helpers.ledger.engine import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.batch import Digests, sorted_order
from protocol.units import DAY, HOUR
from protocol.vote import Vote

OWNER = LedgerOwner(0, b"k" * 32)
YES = [ReceivedVote(1, Vote.YES, b"yes of 2"), ReceivedVote(2, Vote.YES, b"yes of 3")]
# The time of a report unless a test says otherwise.
TIME = 20_000 * DAY + 5 * HOUR
NO = [ReceivedVote(1, Vote.ABORTED, b"no of 2"), ReceivedVote(2, Vote.RENOUNCED, b"no of 3")]


def digests(*reports: int) -> Digests:
    rows = np.array([list(report.to_bytes(32, "little")) for report in reports], dtype=np.uint8).reshape(-1, 32)
    return rows[sorted_order(rows)]


def hours(count: int, time: int = TIME) -> npt.NDArray[np.uint32]:
    return np.full(count, time // HOUR, dtype=np.uint32)


def name(rank: int) -> QueryName:
    return QueryName(bytes([rank]) * 32, b"d" * 32)


def reservation(
    rank: int, number: int, *reports: int, time: int = TIME, debug: bool = False, made: Sequence[bool] | None = None
) -> Reservation:
    """An attempt of a query; `made` says which of its reports debug devices made, by default those it counts."""
    flags = np.array([debug] * len(reports) if made is None else made, dtype=np.bool_)
    return Reservation(
        bytes([rank, number]) * 16,
        name(rank),
        number,
        debug,
        digests(*reports),
        flags,
        hours(len(reports), time),
        site="",
    )


def reserve(ledger: ReportLedger, rank: int, number: int, *reports: int, time: int = TIME) -> bytes:
    wanted = reservation(rank, number, *reports, time=time)
    ledger.moves.reserve(wanted)
    return wanted.attempt_id
