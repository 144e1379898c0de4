"""One bad helper among three, for tests: every message it sends passes through the test first.

It holds its own keys and nobody else's. What must hold is read off the ledgers of the two honest helpers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.messages import Body
from mpc_helpers.helper import Helper
from mpc_helpers.ledger.attempt import AttemptState, QueryName, VoteStatus
from protocol.batch import BatchReader
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.vote import Vote
from tests.support.three_helpers import ThreeHelpers, terms, until

BAD = 2
HONEST = (0, 1)
BUCKETS = 6
# `make chaos` runs these tests with joint noise too.
MODE = NoiseMode(os.environ.get("TREFOIL_NOISE", "local"))
# For queries that fail at their deadline: long enough for a busy machine to have uploaded them by then.
SHORT = QueryOptions(noise=MODE, tolerated_bad_permille=1000, seconds=5)
LONG = QueryOptions(noise=MODE, tolerated_bad_permille=1000, seconds=60)

Tamper = Callable[[int, Body], Body | None]


def helper_of(three: ThreeHelpers, party: int) -> Helper:
    helper = three.queries[party].helper
    assert isinstance(helper, Helper)
    return helper


def agreement_of(three: ThreeHelpers, party: int) -> Agreement:
    return helper_of(three, party)._agreement


def honestly(_target: int, body: Body) -> Body:
    return body


@dataclass
class BadHelper:
    """Helper 3 with a hand on its mouth: `tamper` sees each message to each peer, and may change or swallow it."""

    three: ThreeHelpers
    tamper: Tamper = honestly
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    carry: Any = None

    def __post_init__(self) -> None:
        # Set on the instance, which is what Server and Peers look up at each call.
        agreement: Any = agreement_of(self.three, BAD)
        self.peers, self.parties = agreement.peers, agreement.parties
        self.carry, receive = self.peers._send, agreement.receive

        async def send_changed(target: int, data: bytes) -> bytes | None:
            changed = self._changed(target, data)
            return None if changed is None else await self.carry(target, changed)

        async def reply_changed(peer: int, data: bytes) -> bytes | None:
            reply = await receive(peer, data)
            return None if reply is None else self._changed(peer, reply)

        self.peers._send, agreement.receive = send_changed, reply_changed

    def _changed(self, target: int, data: bytes) -> bytes | None:
        envelope = self.parties.open(BAD, data)
        body = self.tamper(target, envelope.body)
        if body is None:
            return None
        changed: bytes = replace(envelope, body=body).seal(self.parties.realm, self.parties.identity)
        self.sent.append((target, changed))
        return changed

    def vote(self, attempt_id: bytes, status: VoteStatus) -> messages.StateMessage:
        """A vote as it likes, whatever its ledger holds."""
        vote = Vote.YES if status is VoteStatus.YES else Vote.ABORTED
        return messages.StateMessage(attempt_id, status, (self.parties.sign_vote(attempt_id, vote),))


def five_reports(three: ThreeHelpers) -> BatchReader:
    one_each = np.eye(BUCKETS, dtype=int).tolist()[:5]
    return three.batch(three.seal(one_each, terms(BUCKETS)))


def truth_of(three: ThreeHelpers, result: QueryResult) -> list[int]:
    return [got - drawn for got, drawn in zip(result.answer.histogram, three.noise_of(result), strict=True)]


def heads(three: ThreeHelpers) -> list[int]:
    """How far the honest ledgers have come."""
    return [agreement_of(three, party).ledger.chain.head.sequence for party in HONEST]


def live_states(three: ThreeHelpers, asked: SavedQuery) -> list[AttemptState | None]:
    key = QueryName.of(asked.query).key
    records = [agreement_of(three, party).ledger.attempts.live(key) for party in HONEST]
    return [record.state if record else None for record in records]


async def never_released(three: ThreeHelpers, asked: SavedQuery, batch: BatchReader, match: str) -> QueryFailed:
    """The query fails, and the honest helpers hold nothing of it: its reports are free for the next."""
    with pytest.raises(QueryFailed, match=match) as refused:
        await three.ask(asked, batch)
    await until(lambda: live_states(three, asked) == [None, None])
    return refused.value


async def answered(three: ThreeHelpers, batch: BatchReader) -> None:
    """A new query over the same reports is answered, each counted once."""
    result = await three.ask(three.query(batch, LONG), batch)
    assert truth_of(three, result) == [1, 1, 1, 1, 1, 0]
