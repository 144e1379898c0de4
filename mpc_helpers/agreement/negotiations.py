"""Every negotiation that is under way at one helper, by query, and why those that failed did."""

from __future__ import annotations

from mpc_helpers.agreement.errors import AgreementError
from mpc_helpers.agreement.negotiation import Negotiation
from mpc_helpers.ledger.attempt import AttemptState

_REMEMBERED_REFUSALS = 1000


class Negotiations:
    """In memory only: a restart forgets them all, and the queries that still wait begin again."""

    def __init__(self) -> None:
        self._by_query: dict[bytes, Negotiation] = {}
        # For peers that still wait. Bounded: a query that fails here costs its peers a line, not us our memory.
        self._refusals: dict[bytes, str] = {}

    def begin(self, negotiation: Negotiation) -> None:
        """One at a time for each query. One that has led to an attempt makes room for the next."""
        key = negotiation.query.key
        earlier = self._by_query.get(key)
        if earlier is not None and not earlier.agreed:
            raise AgreementError("this query is already being agreed on")
        self._by_query[key] = negotiation
        self._refusals.pop(key, None)

    def find(self, query_key: bytes) -> Negotiation | None:
        """The negotiation about a query, if there is one."""
        return self._by_query.get(query_key)

    def fail(self, negotiation: Negotiation, reason: str) -> None:
        """It came to nothing; peers that still wait hear why."""
        key = negotiation.query.key
        # Only if it is still this one: the query may have been asked again since.
        if self._by_query.get(key) is negotiation:
            del self._by_query[key]
        while len(self._refusals) >= _REMEMBERED_REFUSALS:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[key] = reason

    def refusal(self, query_key: bytes) -> str:
        """Why this helper does not propose for a query at present."""
        negotiation = self._by_query.get(query_key)
        waiting = f"waiting for {negotiation.waiting}" if negotiation else "has not begun this query"
        return self._refusals.get(query_key, waiting)

    def attempt_moved(self, attempt_id: bytes, state: AttemptState) -> None:
        """Called after each commit: reports may be free now that others wait for, or an attempt be over."""
        self.wake()
        for negotiation in list(self._by_query.values()):
            # A vote is no end: the negotiation goes on answering RESERVED to a peer that has not heard it yet.
            if negotiation.attempt_id == attempt_id and state is not AttemptState.VOTED:
                negotiation.ended.set()
                if negotiation.agreed:
                    self._by_query.pop(negotiation.query.key, None)

    def wake(self) -> None:
        """Let every query that waits look again."""
        for negotiation in self._by_query.values():
            negotiation.changed.set()
