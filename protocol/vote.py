"""A vote: one helper's signed YES or NO on one attempt, transferable and publicly verifiable (SPEC.md §8).

A helper releases its share only with the YES of all three (COMMIT.md), and attaches them to it, so that the querier
verifies herself that the attempt she opens is the one that all three have committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from protocol.errors import ErrorKind, Inconsistent, InvalidValue, ProtocolError, WireEnum
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer


class Vote(WireEnum):
    """YES or NO. The two NOs differ in whether the helper may have voted YES before.

    ABORTED: aborted before voting, so a YES by the same helper on the same attempt proves equivocation.
    RENOUNCED: voted YES, then received a NO; valid only together with the ABORTED that caused it.
    """

    YES = 0, "yes"
    ABORTED = 1, "aborted"
    RENOUNCED = 2, "renounced"

    @property
    def is_no(self) -> bool:
        """Return whether the helper commits to never releasing the attempt."""
        return self is not Vote.YES


@dataclass(frozen=True, slots=True)
class SignedVote:
    """One helper's YES or NO on one attempt.

    It is bound to nothing but the attempt, whose id covers the query, and with it helper set and debug flag (SPEC.md
    §8). So a vote stays valid when the helper set is renewed, and none has to be cast twice.
    """

    party: int
    attempt_id: bytes
    vote: Vote
    signature: bytes = field(repr=False)

    @classmethod
    def sign(cls, party: int, attempt_id: bytes, vote: Vote, key: IdentityKey) -> Self:
        """Run by the voting helper, after its ledger has made the state durable."""
        return cls(party, attempt_id, vote, key.sign("vote", _vote_bytes(party, attempt_id, vote)))

    def verify(self, key: bytes) -> None:
        if not self.is_signed(key):
            raise ProtocolError(f"a vote is not signed by helper {self.party + 1}", kind=ErrorKind.BAD_SIGNATURE)

    def is_signed(self, key: bytes) -> bool:
        signed = _vote_bytes(self.party, self.attempt_id, self.vote)
        return verify_signature(key, "vote", signed, self.signature)

    def encode(self) -> bytes:
        """Return the canonical bytes, which ledgers keep as evidence for a dispute."""
        writer = Writer().uint(self.party, 1).fixed(self.attempt_id, HASH_SIZE)
        return writer.uint(self.vote.number, 1).fixed(self.signature, SIGNATURE_SIZE).done()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse a vote; `verify` checks the signature."""
        reader = Reader(data)
        party, attempt_id = reader.choice(range(PARTIES)), reader.fixed(HASH_SIZE)
        vote = cls(party, attempt_id, reader.member(Vote), reader.fixed(SIGNATURE_SIZE))
        reader.finish()
        return vote


def check_release(votes: Sequence[SignedVote], attempt_id: bytes, keys: Sequence[bytes]) -> None:
    """Run by the querier on the votes attached to a share of `attempt_id`: require exactly one YES of each helper.

    `keys` are the identity keys of the three helpers, in order.
    """
    if sorted(vote.party for vote in votes) != list(range(len(keys))):
        raise InvalidValue("the votes are not one of each helper")
    for vote in votes:
        if vote.attempt_id != attempt_id:
            raise Inconsistent(f"the vote of helper {vote.party + 1} is on another attempt")
        if vote.vote is not Vote.YES:
            raise ProtocolError(f"the vote of helper {vote.party + 1} is a NO", kind=ErrorKind.ABORTED)
        vote.verify(keys[vote.party])


def _vote_bytes(party: int, attempt_id: bytes, vote: Vote) -> bytes:
    return Writer().uint(party, 1).fixed(attempt_id, HASH_SIZE).uint(vote.number, 1).done()
