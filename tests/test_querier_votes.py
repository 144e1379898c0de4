"""The querier and the votes: she believes an answer only if each helper shows that all three voted for its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from protocol.answer import Answer, AnswerShare
from protocol.left_out import digest_of
from protocol.querier.ask import Querier
from protocol.querier.connections import HelperConnections
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import SavedQuery
from protocol.query import Query, SignedQuery
from protocol.shares import PARTIES, share, to_shamir
from protocol.vote import SignedVote, Vote
from tests.support import protocol_samples as samples
from tests.support.renewal import renew
from tests.support.three_helpers import terms, three_helpers

ATTEMPT = b"\x07" * 32
ASKED = samples.query(batch_size=20)
NUMBERS = [3, -1, 0, 7, -250, 10**12, 1, 0]


def vote(
    helper: int,
    cast: Vote = Vote.YES,
    *,
    attempt: bytes = ATTEMPT,
    signer: int | None = None,
) -> str:
    """A vote as it stands in an answer, right but for what is asked otherwise."""
    key = samples.IDENTITIES[helper if signer is None else signer]
    return SignedVote.sign(helper, attempt, cast, key).encode().hex()


def answer_of(party: int, query: Query, votes: object) -> dict[str, object]:
    """What helper `party` answers: a good share, and these votes."""
    components = share(NUMBERS, entropy=samples.entropy("answer")).components(party)
    noise = (query.noise, query.epsilon_micros, query.sensitivity)
    proposed = (digest_of(np.zeros(20, dtype=np.uint8)),) * 3
    vector = to_shamir(party, components)
    mine = AnswerShare(query.digest, 4, ATTEMPT, 20, 20, ({}, {}, {}), *noise, proposed, b"", vector)
    return {"share": mine.seal(party, query, samples.IDENTITIES[party]).hex(), "votes": votes}


async def collected(monkeypatch: pytest.MonkeyPatch, votes: Mapping[int, object], query: Query = ASKED) -> Answer:
    """What the querier makes of three good shares that come with these votes."""

    async def served(_self: HelperConnections, party: int, _path: str) -> object:
        return answer_of(party, query, votes[party])

    monkeypatch.setattr(HelperConnections, "get", served)
    querier = Querier(samples.HELPER_SET)
    asked = SavedQuery(SignedQuery.sign(query, samples.QUERIER), samples.ANSWER_KEY, samples.NOW)
    async with HelperConnections(samples.HELPER_SET, 1.0) as helpers:
        return await querier._collect(helpers, asked)


YES = [vote(helper) for helper in range(PARTIES)]
WRONG_VOTES: dict[str, tuple[object, str]] = {
    "none": ([], "not one of each"),
    "one missing": (YES[:2], "not one of each"),
    "two of the same helper": ([YES[0], YES[1], YES[1]], "not one of each"),
    "one twice besides": ([*YES, YES[0]], "not one of each"),
    "all on another attempt": ([vote(each, attempt=bytes(32)) for each in range(3)], "helper 1 is on another attempt"),
    "one on another attempt": ([YES[0], vote(1, attempt=bytes(32)), YES[2]], "helper 2 is on another attempt"),
    "a NO from before voting": ([*YES[:2], vote(2, Vote.ABORTED)], "helper 3 is a NO"),
    "a NO from after voting": ([*YES[:2], vote(2, Vote.RENOUNCED)], "helper 3 is a NO"),
    "one that another helper signed": ([YES[0], vote(1, signer=0), YES[2]], "not signed by helper 2"),
    "one with a changed signature": ([YES[0], YES[1][:-2] + "ff", YES[2]], "not signed by helper 2"),
    "garbage": ([*YES[:2], "garbage"], "not hexadecimal"),
    "a number": ([*YES[:2], 7], "not hexadecimal"),
    "bytes that are no vote": ([*YES[:2], "00"], "message ends after 1 bytes"),
    "a vote and more": ([*YES[:2], YES[2] + "00"], "1 bytes left over"),
    "no list but a table": (dict(enumerate(YES)), "no list of votes"),
    "no list but a text": ("".join(YES), "no list of votes"),
    "nothing": (None, "no list of votes"),
}


@pytest.mark.parametrize("party", range(PARTIES))
@pytest.mark.parametrize("wrong", WRONG_VOTES)
async def test_an_answer_that_not_all_three_voted_for_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, wrong: str, party: int
) -> None:
    votes, reason = WRONG_VOTES[wrong]
    with pytest.raises(QueryFailed, match=reason) as failed:
        await collected(monkeypatch, {each: votes if each == party else YES for each in range(PARTIES)})
    assert (failed.value.stage, failed.value.helpers) == ("opening", (party,))
    assert samples.HELPER_NAMES[party] in str(failed.value)
    assert "Do not use this answer" in failed.value.hint


async def test_three_yes_in_any_order_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await collected(monkeypatch, {0: YES, 1: YES[::-1], 2: [YES[1], YES[2], YES[0]]})
    assert answer.histogram == NUMBERS


async def test_a_debug_answer_is_voted_for_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt id covers the query's digest and so its debug flag: votes on a real attempt are on another one."""
    query = samples.query(batch_size=20, debug=True)
    assert (await collected(monkeypatch, dict.fromkeys(range(PARTIES), YES), query)).histogram == NUMBERS
    other = [vote(each, attempt=b"r" * 32) for each in range(PARTIES)]
    with pytest.raises(QueryFailed, match="helper 1 is on another attempt"):
        await collected(monkeypatch, dict.fromkeys(range(PARTIES), other), query)


async def test_a_helper_that_hides_the_votes_is_named_and_the_answer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helper 3 over HTTPS: with no votes, then with the good votes of an older query. Nothing is lost by it."""
    async with three_helpers(tmp_path) as three:
        older, batch = (three.batch(three.seal([[1, 0]] * 3, terms(2))) for _ in range(2))
        before, asked = three.query(older), three.query(batch)
        await three.ask(before, older)
        helper = three.intakes[2]._helper
        honest = helper.stored_answer
        of_older = await honest(before.query)
        assert of_older is not None
        for votes, reason in (((), "not one of each helper"), (of_older[1], "on another attempt")):

            async def hidden(query: Query, votes: tuple[bytes, ...] = votes) -> tuple[bytes, tuple[bytes, ...]] | None:
                released = await honest(query)
                return released and (released[0], votes)

            monkeypatch.setattr(helper, "stored_answer", hidden)
            with pytest.raises(QueryFailed, match=f"helper-3 does not show .* {reason}") as failed:
                await three.ask(asked, batch)
            assert (failed.value.stage, failed.value.helpers) == ("opening", (2,))
        monkeypatch.setattr(helper, "stored_answer", honest)
        assert (await three.ask(asked, batch)).answer.counted == 3


async def test_an_answer_outlives_the_helper_set_that_was_asked(tmp_path: Path) -> None:
    """A vote is bound to its attempt alone: with the old set or the new one, a querier gets what was released."""
    async with three_helpers(tmp_path) as three:
        old = three.helper_set
        before = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        after = three.batch(three.seal([[0, 1]] * 3, terms(2)))
        asked, late = three.query(before), three.query(after)
        first = await three.ask(asked, before)
        for party in range(PARTIES):
            await three.stop(party)
        new = renew(three.trio)
        assert new.digest != old.digest
        await asyncio.gather(*(three.start(party) for party in range(PARTIES)))
        assert (await three.ask(asked, before)).answer == first.answer
        second = await Querier(old).ask(late, after)
        assert second.answer.counted == 3
        assert (await three.ask(late, after)).answer == second.answer
