"""What a helper says about an attempt, with the votes that prove it; and what it believes of a peer's word."""

from __future__ import annotations

from collections.abc import Iterable

from mpc_helpers.agreement.messages import StateMessage
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.ledger.attempt import AttemptRecord, AttemptState, HeardVote, Word, word_about
from protocol.errors import ProtocolError
from protocol.vote import SignedVote, Vote


def state_of(parties: Parties, attempt_id: bytes, record: AttemptRecord | None) -> StateMessage:
    """STATE: what this helper answers about an attempt, with the votes behind it."""
    word = word_about(record.state if record else None)
    if record is None or word in (Word.WORKING, Word.UNKNOWN):
        return StateMessage(attempt_id, word, ())
    return StateMessage(attempt_id, word, (_own_vote(parties, record), *_supporting(record)))


def _own_vote(parties: Parties, record: AttemptRecord) -> SignedVote:
    # The two NOs differ: only ABORTED says that this helper never said YES, and so can prove a lie.
    no = Vote.RENOUNCED if record.voted_once else Vote.ABORTED
    return parties.sign_vote(record.attempt_id, Vote.YES if word_about(record.state) is Word.YES else no)


def _supporting(record: AttemptRecord) -> list[SignedVote]:
    """A released helper hands its three YES out with its share; one that says NO shows the first-hand NO it heard.

    A renounced one must, to be believed. An aborted one does so because the third helper may have been told YES
    instead: it could not know otherwise that there is nothing left to wait for.
    """
    if record.state is AttemptState.RELEASED:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.YES]
    if word_about(record.state) is Word.NO:
        return [SignedVote.decode(vote.message) for vote in record.votes if vote.vote is Vote.ABORTED][:1]
    return []


def checked_votes(parties: Parties, sender: int, state: StateMessage) -> list[HeardVote]:
    """The peers' votes in a STATE, if they are what its word says. A renounced NO needs the NO it goes back to."""
    for vote in state.votes:
        parties.verify_vote(vote)
    own = [vote.vote for vote in state.votes if vote.party == sender]
    first_hand = {vote.party for vote in state.votes if vote.vote is Vote.ABORTED}
    if state.word is Word.YES and own != [Vote.YES]:
        raise ProtocolError("a YES without the sender's own vote")
    if state.word is Word.NO and not (first_hand and len(own) == 1 and own[0].is_no):
        raise ProtocolError("a NO without the first-hand NO behind it")
    if parties.party in first_hand:
        return []  # An echo of this helper's own NO: its ledger knows better.
    others = (vote for vote in state.votes if vote.party != parties.party)
    return [HeardVote(vote.party, vote.vote, vote.encode()) for vote in others]


def blame(nos: Iterable[HeardVote]) -> str:
    """Who gave an attempt up, for its record."""
    parties = sorted({vote.party + 1 for vote in nos if vote.vote is Vote.ABORTED})
    return f"helper {' and '.join(map(str, parties))} gave it up" if parties else ""
