"""A query taken back by its querier: no helper that has taken the withdrawal ever votes for it, whoever hands it in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation
from mpc_helpers.identity.config import load_config
from mpc_helpers.service.policy import Refusal
from mpc_helpers.service.queries import ENDED_PER_PLACE
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.connections import HelperConnections
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.query import SignedQuery, Withdrawal
from protocol.shares import PARTIES
from protocol.status import QueryState, QueryStatus
from protocol.units import HOUR
from tests.support import protocol_samples as samples
from tests.support.bad_helper import BAD, agreement_of, helper_of
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, terms, three_helpers, until

LONG = QueryOptions(seconds=60)


def made(three: ThreeHelpers) -> tuple[SavedQuery, BatchReader]:
    batch = three.batch(three.seal([[1, 0]] * 4, terms(2)))
    return three.query(batch, LONG), batch


def querier(three: ThreeHelpers) -> Querier:
    return Querier(three.helper_set, patience=5, request_seconds=5)


async def handed_in(three: ThreeHelpers, saved: SavedQuery, parties: tuple[int, ...] = (0, 1, 2)) -> list[QueryState]:
    """What helpers say to someone who hands them a signed query, as a bad helper may."""
    path = f"/v1/queries/{saved.query.digest.hex()}"
    async with HelperConnections(three.helper_set, 5.0) as helpers:
        found = [await helpers.put(party, path, saved.signed.encode()) for party in parties]
    return [QueryStatus.from_json(status).state for status in found]


def veto(three: ThreeHelpers) -> Callable[[], None]:
    """Helper 3 leaves every report out, so that a query fails at once. Gives how to make it stop."""
    agreement: Any = agreement_of(three, BAD)
    honest = agreement.agree

    async def nothing(of: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Negotiation:
        empty, left_out = np.zeros_like(batch.admitted), {Rejection.UNOPENABLE: len(batch.digests)}
        negotiation: Negotiation = await honest(of, replace(batch, admitted=empty, rejections=left_out), deadline)
        return negotiation

    agreement.agree = nothing
    return lambda: delattr(agreement, "agree")


async def test_a_bad_helper_cannot_revive_a_query_that_was_withdrawn(tmp_path: Path) -> None:
    """It lets the query fail, and behaves once the querier has asked another. The first stays dead."""
    async with three_helpers(tmp_path) as three:
        _, batch = made(three)
        behave = veto(three)

        async def ask(*, new: bool) -> QueryResult:
            return await ask_batch(querier(three), batch, LONG, three.site_key(), three.clock(), new=new)

        with pytest.raises(QueryFailed, match="helper-3 alone leaves out"):
            await ask(new=False)
        old = QueryFolder(batch.path).newest()
        assert old is not None
        with pytest.raises(QueryFailed, match="helper-3 alone leaves out"):
            await ask(new=True)
        behave()
        assert await handed_in(three, old) == [QueryState.WITHDRAWN] * 3
        assert (await ask(new=False)).answer.counted == 4
        with pytest.raises(QueryFailed, match=r"The query was withdrawn\. Nothing was spent\."):
            await querier(three).fetch(old)


async def test_without_a_withdrawal_it_can(tmp_path: Path) -> None:
    """Why there are withdrawals: the failed query is handed in again, and the new one finds its reports spent."""
    async with three_helpers(tmp_path) as three:
        old, batch = made(three)
        behave = veto(three)
        with pytest.raises(QueryFailed):
            await three.ask(old, batch)
        behave()
        await handed_in(three, old)
        digest = old.query.digest
        await until(lambda: three.queries[0].status(digest).state is QueryState.RELEASED)
        with pytest.raises(QueryFailed, match="all 4 reports were counted before"):
            await three.ask(three.query(batch, LONG), batch)


async def test_two_helpers_are_enough_and_one_is_not(tmp_path: Path) -> None:
    """One of two is honest. One alone may be the bad one."""
    async with three_helpers(tmp_path) as three:
        saved, batch = made(three)
        await three.stop(1)
        await three.stop(2)
        with pytest.raises(QueryFailed, match="the query is not withdrawn: helper-2 cannot be reached") as failed:
            await querier(three).withdraw(saved, three.site_key())
        assert failed.value.helpers == (1, 2)
        await three.start(1)
        await querier(three).withdraw(saved, three.site_key())
        await three.start(2)
        assert (await handed_in(three, saved))[:2] == [QueryState.WITHDRAWN] * 2
        with pytest.raises(QueryFailed):
            await three.ask(saved, batch)
        assert (await three.ask(three.query(batch), batch)).answer.counted == 4


async def test_what_is_withdrawn_stays_so_through_a_restart(tmp_path: Path) -> None:
    """Also where the query had never come: it is not taken later either."""
    async with three_helpers(tmp_path) as three:
        saved, batch = made(three)
        await querier(three).withdraw(saved, three.site_key())
        for party in range(PARTIES):
            await three.stop(party)
            await three.start(party)
        assert await handed_in(three, saved) == [QueryState.WITHDRAWN] * 3
        await querier(three).withdraw(saved, three.site_key())
        with pytest.raises(QueryFailed, match="was withdrawn"):
            await three.ask(saved, batch)


async def test_what_is_being_computed_is_freed(tmp_path: Path) -> None:
    """Reserved at all three, and the MPC has begun: nothing is voted for yet, so it can still be taken back."""
    async with three_helpers(tmp_path) as three:
        saved, batch = made(three)
        summing: Any = helper_of(three, 0)
        begun = asyncio.Event()

        async def forever(*_: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        honest = summing._sum
        summing._sum = forever
        asking = asyncio.create_task(three.ask(saved, batch))
        await begun.wait()
        await querier(three).withdraw(saved, three.site_key())
        with pytest.raises(QueryFailed, match="was withdrawn"):
            await asking
        summing._sum = honest
        assert (await three.ask(three.query(batch), batch)).answer.counted == 4


async def test_an_answer_cannot_be_withdrawn(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        saved, batch = made(three)
        first = await three.ask(saved, batch)
        with pytest.raises(QueryFailed, match="this helper has voted for the query"):
            await querier(three).withdraw(saved, three.site_key())
        assert (await three.ask(saved, batch)).answer == first.answer


async def test_a_column_that_arrives_after_the_withdrawal_is_not_kept(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        saved, batch = made(three)
        await handed_in(three, saved)
        await querier(three).withdraw(saved, three.site_key())
        for party in range(PARTIES):
            column = b"".join(batch.column(party, batch.order()))

            async def pieces(column: bytes = column) -> Any:
                yield column

            status = await three.queries[party].take_column(
                saved.query.digest, saved.permits[party], len(column), pieces()
            )
            assert status.state is QueryState.WITHDRAWN
        assert not list(three.trio.folder.glob("**/column"))


async def test_only_the_site_withdraws(tmp_path: Path) -> None:
    """Neither a stranger's signature nor one on another query, nor under another query's address."""
    async with three_helpers(tmp_path, sites={SITE: [SITE], "other.example": ["other.example"]}) as three:
        saved, batch = made(three)
        other = three.query(batch, LONG)
        with pytest.raises(QueryFailed, match=r"not signed by the key registered for shop\.example") as wrong:
            await querier(three).withdraw(saved, three.site_key("other.example"))
        assert wrong.value.retryable is None
        good = Withdrawal.sign(saved.signed, three.site_key())
        swapped = Withdrawal(other.signed, good.signature)
        async with HelperConnections(three.helper_set, 5.0) as helpers:
            for digest, body in ((other.query.digest, swapped), (other.query.digest, good)):
                with pytest.raises(QueryFailed) as refused:
                    await helpers.put(0, f"/v1/queries/{digest.hex()}/withdrawal", body.encode())
                assert refused.value.http_status in (400, 403)
        assert (await three.ask(saved, batch)).answer.counted == 4


def held(three: ThreeHelpers) -> dict[str, int]:
    """What helper 1 holds: rows of its ledger, folders on its disk, and objects in its memory."""
    folder = load_config(three.trio.config_path(0)).data / "queries"
    queries = three.queries[0]
    return {"rows": len(queries._book.all()), "folders": len(list(folder.glob("*"))), "objects": len(queries._tracked)}


def next_query(three: ThreeHelpers, saved: SavedQuery, number: int, **more: Any) -> SignedQuery:
    query = replace(saved.query, query_id=number.to_bytes(16, "big"), **more)
    return SignedQuery.sign(query, three.site_key())


async def withdraw(three: ThreeHelpers, signed: SignedQuery) -> bool:
    """Whether helper 1 takes the withdrawal."""
    body = Withdrawal.sign(signed, three.site_key()).encode()
    try:
        status = await three.queries[0].withdraw(signed.query.digest, body)
    except Refusal as refusal:
        assert refusal.kind is ErrorKind.BUSY
        return False
    assert status.state is QueryState.WITHDRAWN
    return True


FEW = {"limits": {"queries_per_site": 8}}
MOST = 8 * ENDED_PER_PLACE
# Several times what is kept; `make load` sends ten thousand.
MANY = 10_000 if os.environ.get("TREFOIL_LOAD") == "all" else 4 * MOST


@pytest.mark.parametrize("submitted_first", [False, True])
async def test_many_withdrawals_leave_as_much_as_a_few(tmp_path: Path, submitted_first: bool) -> None:
    """Of queries that never were, or that were submitted and not uploaded. Those that were accepted stay in force, also
    after a restart, until the deadline has passed."""
    ahead = 0
    async with three_helpers(tmp_path, options=FEW, start=False, clock=lambda: real_now() + ahead) as three:
        await three.start(0)
        saved, _ = made(three)
        taken: list[SignedQuery] = []
        for number in range(MANY):
            signed = next_query(three, saved, number)
            if submitted_first and len(taken) < MOST:
                await three.queries[0].submit(signed.query.digest, signed.encode())
            if await withdraw(three, signed):
                taken.append(signed)
        assert (len(taken), held(three)) == (MOST, {"rows": 0, "folders": MOST, "objects": MOST})
        await three.stop(0)
        await three.start(0)
        for signed in taken:
            status = await three.queries[0].submit(signed.query.digest, signed.encode())
            assert status.state is QueryState.WITHDRAWN
            assert await withdraw(three, signed)
        # Another site, and the site's own next query, are not concerned.
        more = next_query(three, saved, 20_000)
        assert (await three.queries[0].submit(more.query.digest, more.encode())).state is QueryState.AWAITING
        ahead = saved.query.deadline - real_now() + HOUR - 60
        await three.storage(0).forget(three.clock())
        assert len(three.queries[0]._tracked) == MOST + 1
        ahead += 120
        await three.storage(0).forget(three.clock())
        assert held(three) == {"rows": 0, "folders": 0, "objects": 0}
        with pytest.raises(Refusal) as refused:
            await three.queries[0].submit(taken[0].query.digest, taken[0].encode())
        assert refused.value.http_status == 422


async def test_queries_that_are_never_uploaded_leave_as_much_as_a_few(tmp_path: Path) -> None:
    """Each with a deadline that is soon over, so that the next is accepted. No helper restarts slower for them."""
    ahead = 0
    async with three_helpers(tmp_path, options=FEW, start=False, clock=lambda: real_now() + ahead) as three:
        await three.start(0)
        saved, _ = made(three)
        for number in range(2 * MOST):
            signed = next_query(three, saved, number, deadline=three.clock() + 30)
            await three.queries[0].submit(signed.query.digest, signed.encode())
            ahead += 31
        assert held(three) == {"rows": 0, "folders": MOST, "objects": MOST}
        await three.stop(0)
        await three.start(0)
        assert held(three) == {"rows": 0, "folders": MOST, "objects": MOST}
        await three.storage(0).tidy()
        assert three.queries[0].counts() == {"failed": MOST}


async def test_an_id_of_a_query_that_waits_means_that_query(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        await three.start(0)
        saved, _ = made(three)
        await handed_in(three, saved, (0,))
        other = SignedQuery.sign(replace(saved.query, epsilon_micros=5), three.site_key())
        for _ in range(2):
            with pytest.raises(Refusal) as refused:
                await three.queries[0].submit(other.query.digest, other.encode())
            assert refused.value.http_status == 409
            await three.stop(0)
            await three.start(0)


def test_a_withdrawal_is_of_one_query_and_one_key() -> None:

    signed = SignedQuery.sign(samples.query(), samples.QUERIER)
    good = Withdrawal.sign(signed, samples.QUERIER)
    good.verify(samples.QUERIER.public)
    assert Withdrawal.decode(good.encode()) == good
    for bad in (replace(good, signature=signed.signature), Withdrawal.sign(signed, IdentityKey.generate())):
        with pytest.raises(ProtocolError, match="not signed"):
            bad.verify(samples.QUERIER.public)
    for data in (b"", good.encode()[:-1], good.encode() + b"\0"):
        with pytest.raises(ProtocolError):
            Withdrawal.decode(data)
