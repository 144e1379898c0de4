"""Admit, as the helper's page calls it: a column on disk, under the rules of a query, on whatever opens reports.

That the shares of the admitted reports are summed in the same pass is a detail of it: opened once, each report is
checked, expanded and added up where it lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from pathlib import Path

from mpc_helpers.admission.cluster import Workplace
from mpc_helpers.admission.column import digests_of
from mpc_helpers.admission.ingest import Ingested, ingest
from mpc_helpers.admission.rules import AdmissionRules
from mpc_helpers.identity.membership import Membership
from protocol.batch import ColumnReader
from protocol.errors import TrefoilError
from protocol.header import TIME_STEP
from protocol.query import Query

# How far a report's hour may lie ahead of this helper's clock.
CLOCK_TOLERANCE = TIME_STEP
INGEST_TRIES = 3


class Admission:
    """One helper's. Reports are admitted for `lifetime` seconds; `running` batches at a time.

    `watermark` gives the time at or before which the ledger may have forgotten reports; `admitted` is called with
    each batch, for whoever counts.
    """

    def __init__(
        self,
        membership: Membership,
        place: Workplace,
        *,
        lifetime: int,
        running: int,
        watermark: Callable[[], int],
        admitted: Callable[[Ingested], None] = lambda _: None,
    ) -> None:
        self._membership = membership
        self._place = place
        self._lifetime = lifetime
        self._watermark = watermark
        self._admitted = admitted
        # Only admitting is rationed. A query that waits for its peers must not keep another from waiting for its own,
        # or three helpers that took queries in different orders would wait for each other for ever.
        self.turn = asyncio.Semaphore(running)

    async def admit(self, query: Query, column: Path, now: int, progress: Callable[[int], None]) -> Ingested:
        """What each report of the column is worth to this helper alone. Run with `turn` held."""
        oldest = max(await asyncio.to_thread(self._watermark), now - self._lifetime)
        rules = AdmissionRules.for_query(self._membership, query, oldest=oldest, newest=now + CLOCK_TOLERANCE)
        ingested = await asyncio.to_thread(self._ingest, column, rules, progress)
        self._admitted(ingested)
        return ingested

    def _ingest(self, column: Path, rules: AdmissionRules, progress: Callable[[int], None]) -> Ingested:
        """Run in a thread. A process that is killed takes its chunk along; opening again gives the same."""
        reader = ColumnReader(column)
        digests = digests_of(reader, rules.query.batch_root)
        for _ in range(INGEST_TRIES):
            with suppress(BrokenExecutor):
                return ingest(reader, digests, rules, self._place, progress)
        raise TrefoilError(
            "the processes that open reports keep dying", "Look at this helper's memory, or let it use fewer processes."
        )
