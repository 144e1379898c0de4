"""One bad helper among three, in one process over real HTTPS: every message it sends passes through the test first.

It holds its own keys and nobody else's, and may say anything, to anyone, whenever it likes. What must hold is said over
the two honest helpers taken together: nothing is released twice, nothing is revealed, nobody is made to sum another
set; and once it behaves, or is out of the way, the query is answered. SPEC section 9 has the list with what comes of
each. Lower layers have tests of their own: the votes in `test_commit_mutants`, the querier's checks in
`test_querier` and `test_answer`, sessions and certificates in `test_runtime` and `test_channel`, pickles in
`test_channel`. A malicious helper is blamed itself, or as one of two, and never an honest helper alone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Body, Envelope, Propose
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation
from mpc_helpers.helper import AttemptFailed
from mpc_helpers.identity.config import load_config
from mpc_helpers.ledger.attempt import AttemptState, VoteStatus
from mpc_helpers.ledger.engine import LedgerHead
from mpc_helpers.ledger.reports import EVERYTHING
from mpc_helpers.mpc.channel import lost
from mpc_helpers.mpc.noisy_sum import local_sum
from mpc_helpers.mpc.session import MpcError, Stage
from mpc_helpers.service.transport import PeerError
from mpc_helpers.service.workers import Rendezvous, WorkerSession
from protocol.errors import ErrorKind, ProtocolError, Rejection, TrefoilError
from protocol.helper_set import message_realm
from protocol.keys import IdentityKey
from protocol.left_out import code_of
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed, refusal
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.status import Failure, QueryState, QueryStatus
from protocol.vote import SignedVote, Vote
from protocol.wire import Writer
from tests.support import three_helpers as harness
from tests.support.bad_helper import (
    BAD,
    HONEST,
    LONG,
    SHORT,
    BadHelper,
    agreement_of,
    answered,
    five_reports,
    heads,
    helper_of,
    honestly,
    live_states,
    never_released,
    truth_of,
)
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, three_helpers, until

# Agree.


def drop_first(proposal: Propose) -> Propose:
    """The same proposal without the first report it would count."""
    mask = proposal.mask
    mask[int(np.flatnonzero(mask)[0])] = False
    counts = (*proposal.rejections[:-1], proposal.rejections[-1] + 1)
    return replace(proposal, bitmap=messages.pack_mask(mask), rejections=counts)


async def test_different_bitmaps_to_different_peers(tmp_path: Path) -> None:
    """Unnoticed, both would sum different sets under the same noise: the difference is one person's report."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        summed: list[tuple[int, int]] = []
        three.mpc.before_add = lambda party, attempt: summed.append((party, attempt.counted))
        bad.tamper = lambda to, body: drop_first(body) if to == 0 and isinstance(body, Propose) else body
        await never_released(three, three.query(batch, SHORT), batch, "did not agree in time")
        assert summed == []
        bad.tamper = honestly
        await answered(three, batch)


async def test_a_wrong_root(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        bad.tamper = lambda _, body: replace(body, batch_root=bytes(32)) if isinstance(body, Propose) else body
        # Not longer: the bad helper has reserved the reports in its own ledger, and holds them until then.
        asked = three.query(batch, QueryOptions(seconds=8))
        error = await never_released(three, asked, batch, "helper 3 has other reports")
        assert BAD in error.helpers
        bad.tamper = honestly
        await answered(three, batch)


async def test_a_wrong_attempt_id(tmp_path: Path) -> None:
    """RESERVED for another attempt than the one all three proposals lead to: the honest helpers compute nothing."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        computing: set[int] = set()
        three.mpc.before_add = lambda party, _: computing.add(party)

        def other_attempt(_: int, body: Body) -> Body:
            return replace(body, attempt_id=bytes(32)) if isinstance(body, messages.Reserved) else body

        bad.tamper = other_attempt
        await never_released(three, three.query(batch, SHORT), batch, "failed")
        assert computing <= {BAD}
        bad.tamper = honestly
        await answered(three, batch)


def veto(three: ThreeHelpers, which: slice) -> Callable[[], None]:
    """Helper 3 leaves reports out for no good reason, under one that sounds good. Returns how to make it stop."""
    agreement: Any = agreement_of(three, BAD)
    honest = agreement.agree

    async def less(terms: AttemptTerms, batch: AdmittedBatch, deadline: float) -> Negotiation:
        mask = batch.admitted.copy()
        mask[which] = False
        left_out = {Rejection.UNOPENABLE: int(np.count_nonzero(~mask))}
        codes = np.where(mask, 0, code_of(Rejection.UNOPENABLE)).astype(np.uint8)
        lied = replace(batch, admitted=mask, rejections=left_out, codes=codes)
        negotiation: Negotiation = await honest(terms, lied, deadline)
        return negotiation

    agreement.agree = less
    return lambda: delattr(agreement, "agree")


async def test_vetoing_some_reports_is_visible_in_the_answer(tmp_path: Path) -> None:
    """It must seal the counts it told the others, or the three shares disagree: it can censor, but not in secret."""
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        veto(three, slice(0, 2))
        result = await three.ask(three.query(batch, LONG), batch)
        assert result.answer.counted == 3
        assert [dict(counts) for counts in result.answer.rejections] == [{}, {}, {Rejection.UNOPENABLE: 2}]


async def test_vetoing_everything_is_visible_at_the_honest_helpers(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        behave = veto(three, slice(None))
        alone = "helper-3 alone leaves out 5 of 5 reports; 0 can be counted"
        error = await never_released(three, three.query(batch, LONG), batch, alone)
        assert isinstance(error, QueryFailed)
        assert error.helpers == (BAD,)
        assert f"helper-3 left out: 5 {Rejection.UNOPENABLE.value}" in error.details
        behave()
        await answered(three, batch)


# Spend.


async def test_a_vote_given_to_one_peer_and_withheld_from_the_other(tmp_path: Path) -> None:
    """Harmless: the peer that has the vote passes it on, signed, with its own."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        bad.tamper = lambda to, body: None if to == 1 and isinstance(body, messages.StateMessage) else body
        asked = three.query(batch, LONG)
        result = await three.ask(asked, batch)
        assert live_states(three, asked) == [AttemptState.RELEASED, AttemptState.RELEASED]
        assert truth_of(three, result) == [1, 1, 1, 1, 1, 0]


async def stay_voted(three: ThreeHelpers, asked: SavedQuery) -> None:
    """Wait until both honest helpers have voted; they release nothing."""
    voted = [AttemptState.VOTED, AttemptState.VOTED]
    await until(lambda: live_states(three, asked) == voted)
    await asyncio.sleep(0.5)
    assert live_states(three, asked) == voted


async def test_a_vote_withheld_from_both_locks_the_reports_and_releases_nothing(tmp_path: Path) -> None:
    """Its own share alone opens nothing; the honest helpers hold theirs until it votes, and then all is answered."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        bad.tamper = lambda _, body: None if isinstance(body, messages.StateMessage) else body
        asked = three.query(batch, QueryOptions(seconds=30))
        asking = asyncio.create_task(three.ask(asked, batch))
        await stay_voted(three, asked)
        bad.tamper = honestly
        assert truth_of(three, await asking) == [1, 1, 1, 1, 1, 0]


async def test_yes_to_one_and_no_to_the_other_is_disputed(tmp_path: Path) -> None:
    """Its two signatures show who lied. If its NO comes after the votes, one honest helper releases and the other
    renounces, and the reports stay locked: that is what remains. If it comes before, the reports are free again.
    """
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)

        def two_faced(to: int, body: Body) -> Body:
            if not isinstance(body, messages.StateMessage):
                return body
            return bad.vote(body.attempt_id, VoteStatus.YES if to == 0 else VoteStatus.NO)

        bad.tamper = two_faced
        asked = three.query(batch, QueryOptions(seconds=600))
        with pytest.raises(QueryFailed, match="voted both YES and NO") as refused:
            async with asyncio.timeout(60):  # long before the query's own deadline: waiting changes nothing
                await three.ask(asked, batch)
        assert refused.value.helpers == (BAD,)
        assert "disputed" in str(refused.value)
        locked = [AttemptState.RELEASED, AttemptState.RENOUNCED]
        await until(lambda: live_states(three, asked) in (locked, [None, None]))
        bad.tamper = honestly
        if live_states(three, asked) != locked:
            await answered(three, batch)
            return
        # Another query cannot have them, whatever the bad helper says.
        again = three.query(batch, QueryOptions(seconds=2))
        with pytest.raises(QueryFailed):
            await three.ask(again, batch)
        assert live_states(three, again) == [None, None]


async def test_no_to_both_gives_the_reports_back(tmp_path: Path) -> None:
    """A NO after the others have voted: both renounce, hear each other's NO, and free the reports."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)

        def always_no(_: int, body: Body) -> Body:
            return bad.vote(body.attempt_id, VoteStatus.NO) if isinstance(body, messages.StateMessage) else body

        bad.tamper = always_no
        await never_released(three, three.query(batch, SHORT), batch, "failed")
        for party in HONEST:
            reports = agreement_of(three, party).ledger.reports
            found = reports.export()
            assert (reports.count(), len(found.digests)) == (5, 5)
            # All that was paid, which a ledger knows as a number once the reports are in a second attempt.
            assert set(found.left.tolist()) <= {EVERYTHING, 1_000_000}, "recorded, and free"
            # One for each attempt that the query's time allowed, the same for all.
            assert len(set(found.draws.tolist())) == 1 and found.draws[0] >= 1


async def test_a_new_attempt_after_a_release_is_answered_with_the_release(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        proposals: list[Propose] = []

        def remember(_: int, body: Body) -> Body:
            if isinstance(body, Propose):
                proposals.append(body)
            return body

        bad.tamper = remember
        asked = three.query(batch, LONG)
        first = await three.ask(asked, batch)
        before = heads(three)
        again = replace(proposals[-1], number=proposals[-1].number + 1, salt=os.urandom(32))
        for party in HONEST:
            reply = await agreement_of(three, BAD).peers.call(party, again)
            assert isinstance(reply, messages.StateMessage)
            assert (reply.attempt_id, reply.status) == (first.answer.attempt_id, VoteStatus.YES)
        assert heads(three) == before
        assert (await three.ask(asked, batch)).answer == first.answer


# Old and borrowed messages.


async def test_everything_it_ever_said_said_again(tmp_path: Path) -> None:
    """An old session replayed, byte by byte, to both peers: while another query runs, and after."""
    async with three_helpers(tmp_path) as three:
        bad, batch, other = BadHelper(three), five_reports(three), five_reports(three)
        first = three.query(batch, LONG)
        one = await three.ask(first, batch)
        old = list(bad.sent)
        asking = asyncio.create_task(three.ask(three.query(other, LONG), other))
        for target, data in old:
            await bad.carry(target, data)
        assert truth_of(three, await asking) == [1, 1, 1, 1, 1, 0]
        before = heads(three)
        for target, data in [*bad.sent]:
            await bad.carry(target, data)
            await bad.carry(1 - target, data)
        assert heads(three) == before
        assert (await three.ask(first, batch)).answer == one.answer


def forgeries(bad: BadHelper, three: ThreeHelpers) -> Iterator[tuple[str, bytes]]:
    """Messages that are not helper 3's to send, or not here; all else about them is right."""
    vote = bad.vote(next(iter(three.mpc.records)), VoteStatus.NO)
    boot, head, identity = bad.peers._boot, agreement_of(three, BAD).ledger.chain.head, bad.parties.identity
    for claimed in HONEST:
        yield f"posing as helper {claimed + 1}", Envelope(claimed, boot, head, vote).seal(bad.parties.realm, identity)
    others = {
        "signed for another helper set": message_realm(bytes(32)),
    }
    for what, foreign in others.items():
        yield what, Envelope(BAD, boot, head, vote).seal(foreign, identity)
    yield "signed by nobody it knows", Envelope(BAD, boot, head, vote).seal(bad.parties.realm, IdentityKey.generate())
    yield "a pickle", pickle.dumps(vote.encode())
    yield "nothing", b""


async def test_borrowed_names_and_foreign_realms_get_no_answer(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        asked = three.query(batch, LONG)
        await three.ask(asked, batch)
        before = heads(three)
        for what, data in forgeries(bad, three):
            for party in HONEST:
                try:
                    reply = await bad.carry(party, data)
                except PeerError:
                    reply = None
                assert not reply, what
        assert heads(three) == before
        assert live_states(three, asked) == [AttemptState.RELEASED, AttemptState.RELEASED]
        assert all(not agreement_of(three, party).alarms.texts for party in HONEST)


async def test_another_helpers_vote_cannot_be_made_up(tmp_path: Path) -> None:
    """A YES that claims to come with helper 2's vote, signed by helper 3: refused whole."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)

        def forged(_: int, body: Body) -> Body:
            if not isinstance(body, messages.StateMessage) or body.status is not VoteStatus.YES:
                return body
            false = SignedVote.sign(1, body.attempt_id, Vote.YES, bad.parties.identity)
            return replace(body, votes=(*body.votes[:1], false))

        bad.tamper = forged
        asked = three.query(batch, QueryOptions(seconds=30))
        asking = asyncio.create_task(three.ask(asked, batch))
        await stay_voted(three, asked)
        bad.tamper = honestly
        await asking


async def test_a_ledger_that_went_back(tmp_path: Path) -> None:
    """Restored from a backup, it would count its reports again: both peers know better and name it."""
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        path = load_config(three.trio.config_path(BAD)).ledger_file
        await three.stop(BAD)
        backup = path.read_bytes()
        await three.start(BAD)
        await three.ask(three.query(batch, LONG), batch)
        await three.stop(BAD)
        for file in path.parent.glob(path.name + "-*"):
            file.unlink()
        path.write_bytes(backup)
        shutil.rmtree(load_config(three.trio.config_path(BAD)).data / "queries")
        await three.start(BAD)
        fresh = five_reports(three)
        # Whoever notices first says so, the restored helper itself among them.
        noticed = (
            r"helper 3 has (a ledger that went back|another ledger|a ledger that helper . knows to have been further)"
        )
        with pytest.raises(QueryFailed, match=noticed) as refused:
            await three.ask(three.query(fresh, LONG), fresh)
        assert refused.value.helpers == (BAD,)
        # Once one has noticed, the query is over; the others learn of it with the next.
        assert any(BAD in agreement_of(three, party).alarms.texts for party in (*HONEST, BAD))


async def test_a_lie_about_how_far_a_peers_ledger_had_been(tmp_path: Path) -> None:
    """A HELLO that remembers what never was: the peer starts nothing new, says who claims so, and loses nothing."""
    async with three_helpers(tmp_path) as three:
        batch, fresh = five_reports(three), five_reports(three)
        asked = three.query(batch, LONG)
        first = await three.ask(asked, batch)
        ledger = agreement_of(three, 0).ledger
        false = LedgerHead(ledger.chain.ledger_id, ledger.chain.head.sequence + 100, bytes(32))
        await agreement_of(three, BAD).peers.call(0, messages.Hello(bytes(16), false))
        with pytest.raises(QueryFailed, match="a ledger that helper 3 knows to have been further"):
            await three.ask(three.query(fresh, LONG), fresh)
        assert (await three.ask(asked, batch)).answer == first.answer
        await three.stop(0)
        await three.start(0)
        await answered(three, fresh)


# Noise and Open: inside the MPC.


# These are about what `local` sends; the same for `joint` is in test_joint_noise and test_failed_proofs.
LOCAL = replace(LONG, noise=NoiseMode.LOCAL)


def data_frames(sender: int, receiver: int, change: Callable[[bytes], bytes]) -> Callable[[int, int, bytes], bytes]:
    """Changes what one party sends another in the program itself: data frames begin with a zero byte and a label."""

    def intercept(source: int, target: int, frame: bytes) -> bytes:
        is_data = frame[:1] == b"\x00" and len(frame) > 30 and frame[9:10] in (b"\x01", b"\x02")
        return change(frame) if (source, target) == (sender, receiver) and is_data else frame

    return intercept


@pytest.mark.parametrize("receiver", HONEST)
async def test_different_shares_of_its_noise_to_different_peers(tmp_path: Path, receiver: int) -> None:
    """Dealt off the line by one in one bucket: all three release, and the querier believes none of it."""

    def off_by_one(frame: bytes) -> bytes:
        return frame[:-8] + bytes([frame[-8] ^ 1]) + frame[-7:]

    async with three_helpers(tmp_path, intercept=data_frames(BAD, receiver, off_by_one)) as three:
        batch = five_reports(three)
        with pytest.raises(TrefoilError, match="do not fit together"):
            await three.ask(three.query(batch, LOCAL), batch)


async def test_its_own_local_noise_may_shift_the_answer_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `local` leaves open: noise that nobody else knows may be anything. `pairwise` leaves no such choice."""
    computing: list[int] = []

    def shifted(share: Sequence[int], drawn: Sequence[int]) -> Any:
        return local_sum(share, [drawn[0] + 1000 * (computing[-1] == BAD), *drawn[1:]])

    monkeypatch.setattr(harness, "local_sum", shifted)
    async with three_helpers(tmp_path) as three:
        # Told right before the same party's program is made.
        three.mpc.before_add = lambda party, _: computing.append(party)
        batch = five_reports(three)
        result = await three.ask(three.query(batch, LOCAL), batch)
        assert truth_of(three, result) == [1001, 1, 1, 1, 1, 0]


async def test_a_pickle_inside_the_mpc_fails_the_attempt_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "the pickle ran"
    attempts: list[int] = []

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    def bomb_once(frame: bytes) -> bytes:
        attempts.append(1)
        return frame[:9] + pickle.dumps(Bomb()) if len(attempts) == 1 else frame

    async with three_helpers(tmp_path, intercept=data_frames(BAD, 0, bomb_once)) as three:
        batch = five_reports(three)
        result = await three.ask(three.query(batch, LOCAL), batch)
        assert truth_of(three, result) == [1, 1, 1, 1, 1, 0]
    assert attempts
    assert not marker.exists()


async def test_a_wrong_share_to_the_querier(tmp_path: Path) -> None:
    """Here through the whole stack; every field and number of it in `test_answer`."""
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        liar: Any = helper_of(three, BAD)
        seal = liar._seal
        liar._seal = lambda query, attempt, noisy: seal(query, attempt, noisy + np.uint64(1))
        asked = three.query(batch, LONG)
        with pytest.raises(TrefoilError, match="do not fit together"):
            await three.ask(asked, batch)
        # It is spent all the same: two honest shares are out, and a bad helper and the querier could open them.
        # A long deadline: the refusal comes as soon as all three have said so, however busy the machine is.
        with pytest.raises(QueryFailed, match="were counted before"):
            await three.ask(three.query(batch, LONG), batch)


async def test_the_site_is_the_one_that_signed(tmp_path: Path) -> None:
    """A helper cannot ask on a site's behalf: it has no site's key, and honest helpers check for themselves."""
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        asked = three.query(batch, LONG)
        identity = agreement_of(three, BAD).parties.identity
        forged = replace(asked, signed=type(asked.signed).sign(asked.query, identity))
        with pytest.raises(QueryFailed, match=f"not signed by the key registered for {SITE}"):
            await three.ask(forged, batch)


NAMES = ("north", "south", "west")


def failures_of(three: ThreeHelpers) -> list[Failure]:
    """What the honest helpers say of their only query."""
    found = []
    for party in HONEST:
        (tracked,) = three.queries[party]._tracked.values()
        assert tracked.record.failure is not None
        found.append(tracked.record.failure)
    return found


async def test_a_number_raised_in_every_proposal_is_one_of_two(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)

        def raised(_: int, body: Body) -> Body:
            return replace(body, number=body.number + 1) if isinstance(body, Propose) else body

        bad.tamper = raised
        # Long enough for three raises on a busy machine.
        error = await never_released(
            three, three.query(batch, replace(SHORT, seconds=12)), batch, "raised the attempt number"
        )
        assert BAD in error.helpers or set(error.helpers) >= set(HONEST)
        for party, failure in zip(HONEST, failures_of(three), strict=True):
            assert failure.party in (None, BAD)
            assert f"helper {2 - party} or helper 3 raised the attempt number" in failure.reason
        bad.tamper = honestly
        await answered(three, batch)


async def test_a_proposal_for_one_peer_alone_blames_no_honest_helper(tmp_path: Path) -> None:
    """Helper 1 has all three and reserves; helper 2 waits for a proposal, and is not what holds it up."""
    async with three_helpers(tmp_path) as three:
        bad, batch = BadHelper(three), five_reports(three)
        bad.tamper = lambda to, body: None if to == 1 and isinstance(body, Propose) else body
        await never_released(three, three.query(batch, SHORT), batch, "did not agree in time")
        assert all(failure.party in (None, BAD) for failure in failures_of(three))


class _Membership:
    party = 0
    helper_set: Any = None

    def name(self, party: int) -> str:
        return NAMES[party]


async def test_a_port_that_is_none_names_its_sender() -> None:
    meetings = Rendezvous([1, 2], lambda *_: _nothing())
    for peer, port in ((1, 4000), (2, 0)):
        await meetings.receive(peer, Writer().fixed(bytes(32), 32).uint(port, 2).done())
    membership: Any = _Membership()
    membership.helper_set = type("Set", (), {"helpers": [type("Entry", (), {"endpoint": ("host", 1)})] * 3})
    certificates: Any = type("Certificates", (), {"of": staticmethod(lambda _: _nothing())})
    session: Any = WorkerSession(None, None, membership, certificates, meetings)  # type: ignore[arg-type]
    with raises(ErrorKind.INVALID_VALUE, MpcError) as failed:
        await session._find_peers(bytes(32), 4001, 5.0)
    assert failed.value.party == 2 and "west" in str(failed.value)


async def _nothing() -> bytes:
    return b""


async def test_a_helper_that_aborts_for_a_cause_is_not_blamed(tmp_path: Path) -> None:
    """Its signed NO says that it aborted. The third may have made it: one of two."""
    async with three_helpers(tmp_path) as three:
        helper: Any = helper_of(three, 1)

        async def by_helper_1(_: object) -> int:
            return 0

        helper._agreement.aborted_by = by_helper_1
        error = await helper._abort_error(None, "aborted the attempt")
        assert isinstance(error, AttemptFailed) and error.party is None
        assert str(error) == "helper 1 aborted the attempt: it is at fault, or helper 3"


async def test_a_proof_that_fails_at_one_helper_is_not_blamed_on_it(tmp_path: Path) -> None:
    """Helper 1 finds a false proof and leaves for good; helper 2 waits for it and blames nobody."""
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)

        def fails(party: int, _: object) -> None:
            if party == 0:
                raise MpcError(Stage.PROOF, "the proof of helper 3, or helper 2's part of it, does not hold")

        three.mpc.before_add = fails
        await never_released(three, three.query(batch, SHORT), batch, "does not hold")
        await until(lambda: all(tracked.record.failure for tracked in three.queries[1]._tracked.values()))
        assert [failure.party for failure in failures_of(three)] == [None, None]


@pytest.mark.parametrize(("error", "party"), [(ConnectionError("left"), None), (ProtocolError("nonsense"), 1)])
def test_a_peer_that_leaves_is_not_blamed_and_one_that_sends_nonsense_is(error: Exception, party: int | None) -> None:
    assert lost(Stage.COMPUTE, 1, error).party == party


def said(blamed: Iterable[int | None]) -> tuple[int, ...]:
    """Whom the querier suspects, if helpers 1, 2, … blame these."""
    statuses = {
        party: QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, other, f"because {party}"))
        for party, other in enumerate(blamed)
    }
    return refusal(statuses, NAMES).helpers


def test_a_helpers_word_alone_identifies_nobody() -> None:
    assert said([2, 2, 0]) == (2,)
    assert said([2, 2, None]) == (2,)
    # Helper 3 blames helper 1, of which helper 2 knows nothing: one of the two.
    assert said([None, None, 0]) == (0, 2)
    assert said([2, None, 0]) == (0, 2)
    assert said([None, None, None]) == (0, 1, 2)
