"""Check: whether the numbers of the reports that three helpers accept are valid, before any of them is reserved.

Each helper computed check shares of every report's residues alone (`admission.residues`). Where they are equal at all
three, the residues are zero. So proposals carry one hash of all of them; where those differ, helpers show each other
the hashes of blocks, and where those differ, the blocks. A report is *confirmed* if its shares are equal, and *invalid*
if they fit together and are not. If they do not fit, somebody's share is wrong, and the query stops: nobody's report is
condemned for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from mpc_helpers.admission.blocks import BLOCK, HASH_SIZE, Block, block_hash, check_root, fit
from mpc_helpers.agreement.errors import AgreementError
from mpc_helpers.agreement.messages import MAX_SHOWN, Mask, Refuse, Show, Shown
from mpc_helpers.agreement.negotiation import Evidence, Negotiation
from mpc_helpers.agreement.surroundings import Surroundings
from protocol.errors import ProtocolError

_ASK_OPERATORS = "Ask the three operators to compare their logs for this query. Nothing was spent."


class Overtaken(Exception):
    """A peer is at a higher number: what is checked here would never be reserved."""


class Checker:
    """Run by one helper for all its queries, on proposals that no longer change."""

    def __init__(self, around: Surroundings) -> None:
        self._parties = around.parties
        self._peers = around.peers
        self._alarms = around.alarms
        self._compute = around.compute
        self._pace = around.pace

    async def check(self, negotiation: Negotiation, accepted: Mask) -> bool:
        """Whether every accepted report is confirmed; what was learnt is in the verdicts either way."""
        evidence = negotiation.batch.evidence
        if evidence is None:
            return True
        try:
            await self._confirm(negotiation, evidence, accepted)
        except Overtaken:
            return False
        return not (accepted & evidence.verdicts.invalid).any()

    async def _confirm(self, negotiation: Negotiation, evidence: Evidence, accepted: Mask) -> None:
        verdicts = evidence.verdicts
        if not (accepted & ~verdicts.confirmed).any():
            return
        roots = {negotiation.proposals[party].check_root for party in range(3)}
        # The ordinary case, in which nothing more is said.
        if len(roots) == 1:
            verdicts.confirmed |= evidence.summed
            return
        lists = await self._both(negotiation, ())
        needed = accepted & ~verdicts.confirmed
        differing = []
        for number, own in enumerate(evidence.blocks):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            if all(hashes[number] == own for hashes in lists.values()):
                verdicts.confirmed[rows] |= evidence.summed[rows]
            elif needed[rows].any():
                differing.append(number)
        for start in range(0, len(differing), MAX_SHOWN):
            numbers = differing[start : start + MAX_SHOWN]
            await self._compare(negotiation, evidence, needed, numbers, lists)

    async def _compare(
        self,
        negotiation: Negotiation,
        evidence: Evidence,
        needed: Mask,
        numbers: Sequence[int],
        lists: dict[int, list[bytes]],
    ) -> None:
        """Look at some blocks that differ, row by row."""
        own = await self._compute(lambda: evidence.show(numbers))
        if own is None:
            raise AgreementError(
                "this helper's check shares came out otherwise than before",
                "Its memory or disk may be failing.",
                party=self._parties.party,
            )
        shown = {self._parties.party: own, **await self._both(negotiation, tuple(numbers))}
        for at, number in enumerate(numbers):
            places = np.flatnonzero(needed[number * BLOCK : (number + 1) * BLOCK])
            shares = []
            for party in range(3):
                expected = lists[party][number] if party in lists else None
                block = self._believe(party, number, shown[party][at], expected, evidence.residues)
                if not block.opened[places].all():
                    raise self._blame(party, "proposes a report whose check shares it does not show")
                shares.append(block.rows(places))
            first, second, third = shares
            if not fit(first, second, third).all():
                one, other = (party + 1 for party in self._parties.others)
                raise AgreementError(f"helper {one} or helper {other} gave a wrong share in the check", _ASK_OPERATORS)
            zero = (second == third).all(axis=1)
            evidence.verdicts.confirmed[number * BLOCK + places[zero]] = True
            evidence.verdicts.invalid[number * BLOCK + places[~zero]] = True

    def _believe(self, party: int, number: int, preimage: bytes, expected: bytes | None, residues: int) -> Block:
        """A block as it was shown, if it is the one in that helper's own list."""
        if expected is not None and block_hash(number, preimage) != expected:
            raise self._blame(party, "does not show the block that its list names")
        try:
            return Block.parse(preimage, residues)
        except ProtocolError as error:
            raise self._blame(party, f"shows a block that is none: {error}") from None

    async def _both(self, negotiation: Negotiation, numbers: tuple[int, ...]) -> dict[int, list[bytes]]:
        """What both peers show: the hashes of all blocks, or these blocks."""
        parties = self._parties.others
        negotiation.waiting = "check shares that differ"
        shown = await asyncio.gather(*(self._ask(negotiation, party, numbers) for party in parties))
        return dict(zip(parties, shown, strict=True))

    async def _ask(self, negotiation: Negotiation, party: int, numbers: tuple[int, ...]) -> list[bytes]:
        """Ask until there is an answer; a helper that has restarted proposes again, under a higher number."""
        root = negotiation.proposals[party].check_root
        question = Show(negotiation.query, root, numbers)
        negotiation.showing.add(party)
        wait = self._pace.first
        while not negotiation.overtaken():
            self._alarms.heed()
            reply = await self._peers.call(party, question)
            if isinstance(reply, Shown) and reply.question == question:
                negotiation.showing.discard(party)
                return list(reply.content) if numbers else self._read_list(party, root, reply.content[0], negotiation)
            if isinstance(reply, Refuse):
                negotiation.reasons[party] = reply.reason
            await negotiation.pause(wait)
            wait = min(2 * wait, self._pace.longest_agree)
        raise Overtaken

    def _read_list(self, party: int, root: bytes, joined: bytes, negotiation: Negotiation) -> list[bytes]:
        evidence = negotiation.batch.evidence
        count = len(evidence.blocks) if evidence else 0
        hashes = [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]
        if len(joined) != HASH_SIZE * count or check_root(hashes) != root:
            raise self._blame(party, "does not show the list that its proposal names")
        return hashes

    def _blame(self, party: int, what: str) -> AgreementError:
        """Its two signatures prove it."""
        return AgreementError(f"helper {party + 1} {what}", _ASK_OPERATORS, party=party)
