"""A vote: one helper's signed YES or NO on one attempt, which anyone can check and pass on.

A helper releases its share only with the YES of all three (COMMIT.md), and hands these out with it, so that the querier
sees for herself that the attempt she opens is the one that all three have spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from protocol.errors import ProtocolError
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.numbered import Numbered
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer


class Vote(Numbered):
    """A signed word that can be passed on. The two NOs differ in whether the helper can ever have said YES before.

    ABORTED: given up before voting, so a YES by the same helper on the same attempt proves a lie.
    RENOUNCED: voted, then heard a NO; it is only believed together with the ABORTED it goes back to.
    """

    YES = 0, "yes"
    ABORTED = 1, "aborted"
    RENOUNCED = 2, "renounced"

    @property
    def is_no(self) -> bool:
        """Whether the helper promises never to release the attempt."""
        return self is not Vote.YES


@dataclass(frozen=True, slots=True)
class SignedVote:
    """One helper's YES or NO on one attempt.

    It is bound to nothing but the attempt, whose id covers the query, and with it helper set and debug flag (SPEC.md
    §8). So a vote says the same before and after a renewal of the helper set, and none has to be cast twice.
    """

    party: int
    attempt_id: bytes
    vote: Vote
    signature: bytes = field(repr=False)

    @classmethod
    def sign(cls, party: int, attempt_id: bytes, vote: Vote, key: IdentityKey) -> Self:
        """Run by the helper that votes, once the state that says so is on disk."""
        return cls(party, attempt_id, vote, key.sign("vote", _vote_bytes(party, attempt_id, vote)))

    def verify(self, key: bytes) -> None:
        """Refuse a vote that `key`'s owner did not cast."""
        if not self.is_signed(key):
            raise ProtocolError(f"a vote is not signed by helper {self.party + 1}")

    def is_signed(self, key: bytes) -> bool:
        """Whether `key`'s owner cast this vote."""
        signed = _vote_bytes(self.party, self.attempt_id, self.vote)
        return verify_signature(key, "vote", signed, self.signature)

    def encode(self) -> bytes:
        """The canonical bytes, as ledgers keep them for a dispute."""
        writer = Writer().uint(self.party, 1).fixed(self.attempt_id, HASH_SIZE)
        return writer.uint(self.vote.number, 1).fixed(self.signature, SIGNATURE_SIZE).done()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The vote in `data`."""
        reader = Reader(data)
        party, attempt_id = reader.choice(range(PARTIES)), reader.fixed(HASH_SIZE)
        vote = cls(party, attempt_id, reader.numbered(Vote), reader.fixed(SIGNATURE_SIZE))
        reader.finish()
        return vote


def check_release(votes: Sequence[SignedVote], attempt_id: bytes, keys: Sequence[bytes]) -> None:
    """Run by the querier on what came with a share of `attempt_id`: a YES of each helper, and nothing else.

    `keys` are the identity keys of the three helpers, in order.
    """
    if sorted(vote.party for vote in votes) != list(range(len(keys))):
        raise ProtocolError("the votes are not one of each helper")
    for vote in votes:
        if vote.attempt_id != attempt_id:
            raise ProtocolError(f"the vote of helper {vote.party + 1} is on another attempt")
        if vote.vote is not Vote.YES:
            raise ProtocolError(f"the vote of helper {vote.party + 1} is a NO")
        vote.verify(keys[vote.party])


def _vote_bytes(party: int, attempt_id: bytes, vote: Vote) -> bytes:
    return Writer().uint(party, 1).fixed(attempt_id, HASH_SIZE).uint(vote.number, 1).done()
