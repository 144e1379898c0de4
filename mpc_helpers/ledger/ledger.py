"""The report ledger: one helper's durable memory of which reports are spent, and of every attempt to spend them.

Methods of its parts block on the disk and may be called from any thread; each is atomic.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mpc_helpers.ledger import file as ledger_file
from mpc_helpers.ledger.attempt import Step
from mpc_helpers.ledger.chain import Chain, PeerHeads
from mpc_helpers.ledger.database import Database
from mpc_helpers.ledger.file import LEDGER_ID_SIZE, LedgerOwner
from mpc_helpers.ledger.moves import Attempts, Moves
from mpc_helpers.ledger.queries import QueryBook
from mpc_helpers.ledger.reports import Reports


class ReportLedger:
    """One helper's ledger, open and held by this process. `step` is called at each crash point of COMMIT.md.

    `attempts` are what it knows of attempts and `moves` what changes them; `reports` are which of them are spent,
    `queries` what became of queries; `chain` and `peer_heads` are how far this ledger and the peers' have come.
    """

    def __init__(self, path: Path, owner: LedgerOwner, *, step: Callable[[Step], None] = lambda _: None) -> None:
        self.owner = owner
        self._database = Database(path, owner, step)
        self.peer_heads = PeerHeads(self._database)
        self.chain = Chain(self._database, self.peer_heads)
        self.reports = Reports(self._database)
        self.attempts = Attempts(self._database)
        self.moves = Moves(self._database, self.chain, self.reports, self.attempts)
        self.queries = QueryBook(self._database)

    @classmethod
    def create(cls, path: Path, owner: LedgerOwner, *, entropy: Callable[[int], bytes] = os.urandom) -> None:
        """Run when a helper's keys are made, and never to replace a ledger that was lost: see `rebuild`."""
        ledger_file.create(path, owner, entropy(LEDGER_ID_SIZE))

    @property
    def cpu_seconds(self) -> float:
        """Processor time spent on reports and moves since the ledger was opened."""
        return self._database.cpu_seconds

    @property
    def seconds(self) -> float:
        """Spent on reports and moves since the ledger was opened, for whoever watches this helper."""
        return self._database.seconds

    def close(self) -> None:
        """Let go of the file. An open transaction is rolled back, as in a crash."""
        self._database.close()
