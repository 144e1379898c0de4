"""The three parties as one of them sees them: which one it is, what it signs with, and whose signatures it believes."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpc_helpers.agreement.messages import Body, Envelope
from mpc_helpers.identity.membership import Membership
from mpc_helpers.ledger.file import LedgerHead
from protocol.errors import ProtocolError
from protocol.helper_set import realm
from protocol.keys import IdentityKey
from protocol.shares import PARTIES
from protocol.vote import SignedVote, Vote


@dataclass(frozen=True, slots=True)
class Parties:
    """`keys` are the identity keys of all three, in order; `realm` is what every message is signed for."""

    party: int
    identity: IdentityKey = field(repr=False)
    keys: tuple[bytes, ...]
    realm: bytes

    def __post_init__(self) -> None:
        if len(self.keys) != PARTIES or self.party not in range(PARTIES):
            raise ProtocolError("three helpers agree, and one of them is this one")

    @classmethod
    def of(cls, membership: Membership) -> Parties:
        """As a helper's membership says."""
        keys = tuple(helper.identity_key for helper in membership.helper_set.helpers)
        return cls(membership.party, membership.identity, keys, realm(membership.helper_set.digest))

    @property
    def others(self) -> tuple[int, ...]:
        """The two peers."""
        return tuple(party for party in range(PARTIES) if party != self.party)

    def seal(self, boot: bytes, head: LedgerHead, body: Body) -> bytes:
        """`body` as this helper's signed message."""
        return Envelope(self.party, boot, head, body).seal(self.realm, self.identity)

    def open(self, sender: int, data: bytes) -> Envelope:
        """A message of `sender`, if it signed it for this set of helpers."""
        return Envelope.open(data, self.realm, sender, self.keys[sender])

    def sign_vote(self, attempt_id: bytes, vote: Vote) -> SignedVote:
        """This helper's vote. Run once the state that says so is on disk."""
        return SignedVote.sign(self.party, attempt_id, vote, self.identity)

    def verify_vote(self, vote: SignedVote) -> None:
        """Refuse a vote that its party did not cast."""
        vote.verify(self.keys[vote.party])
