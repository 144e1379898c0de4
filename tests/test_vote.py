"""A vote: of one helper, on one attempt, of one word; in one encoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import ProtocolError
from protocol.shares import PARTIES
from protocol.vote import SignedVote, Vote
from tests.support import protocol_samples as samples

ATTEMPT = b"a" * 32
KEYS = [helper.identity_key for helper in samples.HELPER_SET.helpers]


def vote(helper: int, cast: Vote = Vote.YES) -> SignedVote:
    return SignedVote.sign(helper, ATTEMPT, cast, samples.IDENTITIES[helper])


def test_a_vote_is_of_one_helper_one_attempt_and_one_word() -> None:
    cast = vote(0)
    cast.verify(KEYS[0])
    for changed in (replace(cast, party=1), replace(cast, attempt_id=b"b" * 32), replace(cast, vote=Vote.ABORTED)):
        with pytest.raises(ProtocolError, match="not signed by helper"):
            changed.verify(KEYS[0])
    with pytest.raises(ProtocolError, match="not signed by helper 1"):
        cast.verify(KEYS[1])


@pytest.mark.parametrize("cast", Vote)
@pytest.mark.parametrize("helper", range(PARTIES))
def test_a_vote_comes_back_as_it_was(helper: int, cast: Vote) -> None:
    encoded = vote(helper, cast).encode()
    code = {Vote.YES: 0, Vote.ABORTED: 1, Vote.RENOUNCED: 2}[cast]
    assert encoded[:-64] == bytes([helper]) + ATTEMPT + bytes([code])
    assert SignedVote.decode(encoded) == vote(helper, cast)


def test_bytes_that_are_no_vote_are_refused() -> None:
    encoded = vote(0).encode()
    unknown = (bytes([PARTIES]) + encoded[1:], encoded[:33] + bytes([len(Vote)]) + encoded[34:])
    for data in (b"", encoded[:-1], encoded + b"\0", *unknown):
        with pytest.raises(ProtocolError):
            SignedVote.decode(data)
