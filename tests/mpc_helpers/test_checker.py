"""Check: right results, or the query stops with nothing reserved and nobody's report condemned. Virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpc_helpers.admission.column import BLOCK, Block, CheckResults, block_hash, check_root, preimages
from mpc_helpers.agreement.messages import Body, Envelope, Propose, Refuse, Show, Shown, pack_mask, pack_rejections
from mpc_helpers.agreement.negotiation import AdmittedBatch, AgreementError, AttemptTerms, Negotiation, TooFewReports
from mpc_helpers.ledger.attempt import QueryName
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.field import P, Vector
from tests.support.commit_world import IDENTITIES, KEYS, REALM, AskedQuery, rejected
from tests.support.raising import raises
from tests.support.three_agreements import ThreeAgreements, play

Mask = npt.NDArray[np.bool_]

RESIDUES = 4
REPORTS = 70
BAD = 66
ASKED = AskedQuery.of(7, range(REPORTS))


@dataclass
class MadeEvidence:
    """What a helper would have computed; `shares` has a row for each report of the batch."""

    shares: Vector
    summed: Mask
    check_results: CheckResults
    shown: list[int] = field(default_factory=list)
    data: list[bytes] = field(init=False)
    blocks: list[bytes] = field(init=False)
    residues: int = RESIDUES

    def __post_init__(self) -> None:
        self.rebuild(preimages(self.summed, self.shares[self.summed]))

    def rebuild(self, data: list[bytes]) -> None:
        self.data = data
        self.blocks = [block_hash(number, one) for number, one in enumerate(data)]

    @property
    def check_root(self) -> bytes:
        return check_root(self.blocks)

    def show(self, numbers: Sequence[int]) -> list[bytes] | None:
        self.shown += numbers
        return [self.data[number] for number in numbers]

    def change_row(self, row: int, change: Callable[[Vector], Vector | None]) -> None:
        """A tree that is consistent in itself, with one row changed, or left out where `change` gives nothing."""
        number, place = divmod(row, BLOCK)
        block = Block.parse(self.data[number], RESIDUES)
        shares, opened = block.shares.copy(), block.opened.copy()
        at = int(np.count_nonzero(opened[:place]))
        changed = change(shares[at])
        if changed is None:
            opened[place], shares = False, np.delete(shares, at, axis=0)
        else:
            shares[at] = changed
        data = list(self.data)
        data[number] = preimages(opened, shares)[0]
        self.rebuild(data)


def evidence_of(
    bad: Sequence[int] = (), *, seed: int = 1, unopened: dict[int, list[int]] | None = None
) -> list[MadeEvidence]:
    """Of three helpers, on residues that are zero but in the bad reports."""
    draw = np.random.default_rng(seed)
    secret = np.zeros((REPORTS, RESIDUES), dtype=object)
    secret[list(bad)] = draw.integers(1, P, size=(len(bad), RESIDUES))
    x1, x2 = (draw.integers(0, P, size=(REPORTS, RESIDUES)).astype(object) for _ in range(2))
    x3 = (secret - x1 - x2) % P
    normal = (2 * x1 + x2, -(x2 + 2 * x3), x1 - x3)
    made = []
    for party, shares in enumerate(normal):
        summed = np.ones(REPORTS, dtype=np.bool_)
        summed[(unopened or {}).get(party, [])] = False
        made.append(MadeEvidence((shares % P).astype(np.uint64), summed, CheckResults.none(REPORTS)))
    return made


def batches_of(evidence: Sequence[MadeEvidence]) -> dict[int, AdmittedBatch]:
    """The batch at each helper."""
    made = {}
    for party, one in enumerate(evidence):
        closed = np.flatnonzero(~one.summed).tolist()
        batch = rejected(ASKED.batch(), closed, Rejection.UNOPENABLE) if closed else ASKED.batch()
        made[party] = replace(batch, evidence=one)
    return made


Change = Callable[[int, Body], Body]


def listen(three: ThreeAgreements, liar: int | None = None, change: Change = lambda _, body: body) -> list[Body]:
    """Everything that is said from now on. `change` gets the receiver and what the liar would have said."""
    heard: list[Body] = []

    def carried(source: int, target: int, data: bytes) -> bytes:
        envelope = Envelope.open(data, REALM, source, KEYS[source])
        body = change(target, envelope.body) if source == liar else envelope.body
        heard.append(body)
        return replace(envelope, body=body).seal(REALM, IDENTITIES[source])

    three.carried = carried
    return heard


def shown_bytes(heard: Sequence[Body]) -> int:
    """Bytes of lists and blocks among what was said."""
    return sum(len(part) for body in heard if isinstance(body, Shown) for part in body.content)


def agree(
    three: ThreeAgreements, evidence: list[MadeEvidence], *, seconds: float = 20.0, minimum: int = 1
) -> list[Any]:
    results: list[Any] = []

    async def scenario() -> None:
        results.extend(await three.agree(ASKED, batches_of(evidence), seconds, minimum=minimum))

    play(three, scenario)
    return results


def left_out(results: list[Any]) -> list[list[int]]:
    return [np.flatnonzero(~attempt.accepted).tolist() for attempt in results]


def nothing_reserved(three: ThreeAgreements) -> bool:
    return all(ledger.attempts.live(ASKED.name.key) is None for ledger in three.ledgers)


def test_good_reports_are_confirmed_without_a_word(three: ThreeAgreements) -> None:
    evidence = evidence_of()
    heard = listen(three)
    results = agree(three, evidence)
    assert left_out(results) == [[], [], []]
    assert {attempt.number for attempt in results} == {1}
    assert not [body for body in heard if isinstance(body, (Show, Shown))]
    assert all(one.check_results.confirmed.all() and not one.check_results.invalid.any() for one in evidence)


@pytest.mark.parametrize("bad", [[BAD], [0, 63, 64, 69], list(range(0, REPORTS, 2)), list(range(64))])
def test_bad_reports_are_left_out_and_counted_by_all_three(three: ThreeAgreements, bad: list[int]) -> None:
    evidence = evidence_of(bad)
    heard = listen(three)
    results = agree(three, evidence)
    assert left_out(results) == [bad] * 3
    assert {attempt.number for attempt in results} == {2}
    assert results[0].rejections == ({Rejection.INVALID: len(bad)},) * 3
    for one in evidence:
        assert np.flatnonzero(one.check_results.invalid).tolist() == bad
        assert np.flatnonzero(~one.check_results.confirmed).tolist() == bad
    blocks = len({row // BLOCK for row in bad})
    lists, whole = 6 * 2 * 32, 6 * sum(len(evidence[0].data[number]) for number in {row // BLOCK for row in bad})
    assert shown_bytes(heard) == lists + whole
    assert len(evidence[0].shown) == 3 * blocks


@pytest.mark.parametrize("slow", range(3))
@pytest.mark.parametrize("unopened", [{}, {1: [5]}], ids=["all opened", "one did not open"])
def test_a_slow_helper_learns_what_the_others_left_out(
    three: ThreeAgreements, slow: int, unopened: dict[int, list[int]]
) -> None:
    """The others have checked and proposed again before its own check is over. All lists must name the same reports."""
    three.slow = {slow}
    results = agree(three, evidence_of([0, BAD], unopened=unopened))
    assert left_out(results) == [[0, *unopened.get(1, []), BAD]] * 3
    expected = [{Rejection.INVALID: 2} for _ in range(3)]
    for party, rows in unopened.items():
        expected[party][Rejection.UNOPENABLE] = len(rows)
    assert [attempt.rejections for attempt in results] == [tuple(expected)] * 3


@pytest.mark.parametrize("residue", range(RESIDUES))
def test_a_report_is_bad_if_a_single_residue_is_not_zero(three: ThreeAgreements, residue: int) -> None:
    evidence = evidence_of([BAD])
    zero = evidence[0].shares[BAD].copy()
    for one in evidence:
        mine = np.where(np.arange(RESIDUES) == residue, one.shares[BAD], zero)
        one.change_row(BAD, lambda _, mine=mine: mine)  # type: ignore[misc]  # a value, not a variable
    assert left_out(agree(three, evidence)) == [[BAD]] * 3


def test_all_bad_is_too_few(three: ThreeAgreements) -> None:
    results = agree(three, evidence_of(list(range(REPORTS))))
    assert all(isinstance(error, TooFewReports) for error in results)
    assert results[0].shortfall.left_out == ({Rejection.INVALID: 70},) * 3
    assert nothing_reserved(three)


def test_too_few_reports_are_said_so_before_anything_is_shown(three: ThreeAgreements) -> None:
    evidence = evidence_of([BAD], unopened={1: list(range(10))})
    heard = listen(three)
    results = agree(three, evidence, minimum=65)
    assert all(isinstance(error, TooFewReports) for error in results)
    assert not [body for body in heard if isinstance(body, Show)]


def test_helpers_that_opened_different_reports_agree(three: ThreeAgreements) -> None:
    """A report that one could not open costs itself only: blocks differ, are looked at, and all is zero."""
    evidence = evidence_of([BAD], unopened={2: [5]})
    results = agree(three, evidence)
    assert left_out(results) == [[5, BAD]] * 3
    assert results[0].rejections == (
        {Rejection.INVALID: 1},
        {Rejection.INVALID: 1},
        {Rejection.INVALID: 1, Rejection.UNOPENABLE: 1},
    )
    assert all(np.flatnonzero(one.check_results.invalid).tolist() == [BAD] for one in evidence)


def test_a_second_attempt_asks_for_nothing_again(three: ThreeAgreements) -> None:
    evidence = evidence_of([BAD])
    heard = listen(three)

    async def scenario() -> None:
        attempts = await three.agree(ASKED, batches_of(evidence))
        for agreement, attempt in zip(three.agreements, attempts, strict=True):
            await agreement.abort(attempt, "the MPC failed")
        before = shown_bytes(heard)
        again = await three.agree(ASKED, batches_of(evidence))
        assert before > 0 and shown_bytes(heard) == before
        assert left_out(again) == [[BAD]] * 3

    play(three, scenario)


def test_a_helper_that_restarted_finds_the_same_again(three: ThreeAgreements) -> None:
    """CheckResults are in memory. One that lost them asks again; the two others do not."""
    evidence = evidence_of([BAD])

    async def scenario() -> None:
        attempts = await three.agree(ASKED, batches_of(evidence))
        for agreement, attempt in zip(three.agreements, attempts, strict=True):
            await agreement.abort(attempt, "stopped")
        evidence[1] = evidence_of([BAD])[1]
        heard = listen(three)
        again = await three.agree(ASKED, batches_of(evidence))
        assert left_out(again) == [[BAD]] * 3
        assert {body.question.check_root for body in heard if isinstance(body, Shown)} == {
            evidence[0].check_root,
            evidence[2].check_root,
        }

    play(three, scenario)


def test_a_report_that_is_spent_and_invalid_is_counted_as_spent(three: ThreeAgreements) -> None:
    evidence = evidence_of([BAD])

    async def scenario() -> None:
        await three.commit(await three.agree(ASKED, batches_of(evidence_of())))
        other = replace(ASKED, name=QueryName(b"n" * 32, b"d" * 32))
        results = await three.agree(other, batches_of(evidence))
        assert all(isinstance(error, TooFewReports) for error in results)
        assert results[0].shortfall.left_out == ({Rejection.SEEN: 70},) * 3

    play(three, scenario)


# --- one bad helper ------------------------------------------------------------------------------


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def lie_about(kind: str, receivers: set[int]) -> Change:
    """One bit of one kind of message."""

    def change(receiver: int, body: Body) -> Body:
        if receiver not in receivers:
            return body
        if kind == "root" and isinstance(body, Propose):
            return replace(body, check_root=flip(body.check_root, 0))
        if kind == "list" and isinstance(body, Shown) and not body.question.blocks:
            return replace(body, content=(flip(body.content[0], 32),))
        if kind == "block" and isinstance(body, Shown) and body.question.blocks:
            return replace(body, content=(*body.content[:-1], flip(body.content[-1], len(body.content[-1]) - 1)))
        return body

    return change


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("kind", ["root", "list", "block"])
@pytest.mark.parametrize("bad", [[], [BAD]], ids=["good", "bad"])
@pytest.mark.parametrize("both", [False, True], ids=["to one", "to both"])
def test_a_lie_in_any_message_changes_no_verdict(
    three: ThreeAgreements, liar: int, kind: str, bad: list[int], both: bool
) -> None:
    evidence = evidence_of(bad)
    others = [party for party in range(3) if party != liar]
    listen(three, liar, lie_about(kind, set(others) if both else {others[0]}))
    all_results = agree(three, evidence, seconds=8.0)
    results = [all_results[party] for party in others]
    for party in others:
        assert not evidence[party].check_results.invalid[[row for row in range(REPORTS) if row not in bad]].any()
        assert not (evidence[party].check_results.confirmed[bad]).any()
    if kind == "root" or bad:
        assert all(isinstance(error, AgreementError) for error in results)
        assert nothing_reserved(three)
        # Whoever was lied to names the liar. The other waits for that one, and says what it heard from it.
        for error in results if both else results[:1]:
            # For a wrong root: the liar's own code answers to the right one alone, and refuses. So may an honest one.
            assert error.party == (None if kind == "root" else liar)
            assert f"helper {liar + 1}" in str(error)
            assert error.kind is (ErrorKind.TIMEOUT if kind == "root" else ErrorKind.INCONSISTENT)
            assert kind == "root" or kind in str(error)
        assert both or (results[1].party in (liar, None) and "helper" in str(results[1]))
    else:
        assert left_out(results) == [[], []]


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("bad", [[], [BAD]], ids=["good", "bad"])
@pytest.mark.parametrize("row", [3, BAD])
def test_a_consistent_lie_condemns_nobody_and_saves_nobody(
    three: ThreeAgreements, liar: int, bad: list[int], row: int
) -> None:
    """Wrong shares in a tree that fits them: whoever looks stops, and no report is called invalid for it."""
    evidence = evidence_of(bad)
    evidence[liar].change_row(row, lambda shares: (shares + np.uint64(12345)) % np.uint64(P))
    results = agree(three, evidence, seconds=8.0)
    for party in range(3):
        assert isinstance(results[party], AgreementError)
        assert not evidence[party].check_results.invalid[[one for one in range(REPORTS) if one not in bad]].any()
        assert not evidence[party].check_results.confirmed[row]
    assert all(results[party].kind is ErrorKind.BAD_PROOF for party in range(3) if party != liar)
    assert all(results[party].party is None for party in range(3) if party != liar)
    assert nothing_reserved(three)


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("factor", [1, -2, (P + 1) // 2])
def test_a_helper_that_knows_a_bad_reports_secrets_cannot_save_it(
    three: ThreeAgreements, liar: int, factor: int
) -> None:
    """It shifts its share by every multiple of the true residues that could make a value read zero."""
    evidence = evidence_of([BAD])
    residue = [(int(c) - int(b)) % P for b, c in zip(evidence[1].shares[BAD], evidence[2].shares[BAD], strict=True)]

    def shift(shares: Vector) -> Vector:
        moved = [(int(share) + factor * value) % P for share, value in zip(shares, residue, strict=True)]
        return np.array(moved, dtype=np.uint64)

    evidence[liar].change_row(BAD, shift)
    results = agree(three, evidence, seconds=8.0)
    assert all(results[party].kind is ErrorKind.BAD_PROOF for party in range(3) if party != liar)
    assert nothing_reserved(three)


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("both", [False, True], ids=["to one", "to both"])
def test_reflected_shares_save_nothing(three: ThreeAgreements, liar: int, both: bool) -> None:
    """The liar shows a peer that peer's own root, list and blocks."""
    evidence = evidence_of([BAD])
    others = [party for party in range(3) if party != liar]

    def reflect(receiver: int, body: Body) -> Body:
        if receiver == liar or (receiver != others[0] and not both):
            return body
        own = evidence[receiver]
        if isinstance(body, Propose):
            return replace(body, check_root=own.check_root)
        if isinstance(body, Refuse) and "otherwise" in body.reason:
            return body
        if isinstance(body, Shown):
            content = tuple(own.data[number] for number in body.question.blocks) or (b"".join(own.blocks),)
            return replace(body, content=content)
        return body

    # Asked for a root that is not its own, the honest code of the liar would refuse: let it answer to any.
    class Yielding(MadeEvidence):
        @property
        def check_root(self) -> bytes:
            return Anything(super().check_root)

    evidence[liar] = Yielding(evidence[liar].shares, evidence[liar].summed, evidence[liar].check_results)
    listen(three, liar, reflect)
    results = agree(three, evidence, seconds=8.0)
    for party in others:
        assert isinstance(results[party], AgreementError)
        assert not evidence[party].check_results.confirmed[BAD]
        assert np.flatnonzero(evidence[party].check_results.invalid).tolist() in ([], [BAD])
    assert nothing_reserved(three)


class Anything(bytes):
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("row", [3, BAD])
def test_a_report_that_is_proposed_must_be_shown(three: ThreeAgreements, liar: int, row: int) -> None:
    """Left out of the liar's tree and set in its bitmap: named, whether the report is good or bad."""
    evidence = evidence_of([BAD])
    evidence[liar].change_row(row, lambda _: None)
    results = agree(three, evidence, seconds=8.0)
    for party in range(3):
        if party != liar:
            assert (results[party].kind, results[party].party) == (ErrorKind.INCONSISTENT, liar)
    assert nothing_reserved(three)


@pytest.mark.parametrize("liar", range(3))
def test_elements_that_are_none_are_refused(three: ThreeAgreements, liar: int) -> None:
    """x + p is x to arithmetic and another number to a hash."""
    evidence = evidence_of([BAD])
    block = Block.parse(evidence[liar].data[1], RESIDUES)
    data = [evidence[liar].data[0], preimages(block.opened, block.shares + np.uint64(P))[0]]
    evidence[liar].rebuild(data)
    results = agree(three, evidence, seconds=8.0)
    for party in range(3):
        if party != liar:
            assert (results[party].kind, results[party].party) == (ErrorKind.MALFORMED, liar)


@pytest.mark.parametrize("liar", range(3))
def test_what_blocks_show_of_good_reports_the_liar_has_itself(liar: int) -> None:
    evidence = evidence_of([BAD])
    for peer in range(3):
        for number in range(2):
            own, theirs = (Block.parse(one.data[number], RESIDUES) for one in (evidence[liar], evidence[peer]))
            rows = [row for row in range(own.shares.shape[0]) if number * BLOCK + row != BAD]
            assert (own.shares[rows] == theirs.shares[rows]).all()


@pytest.mark.parametrize("liar", range(3))
def test_a_helper_that_shows_to_nobody_stops_the_query_and_condemns_nobody(three: ThreeAgreements, liar: int) -> None:
    evidence = evidence_of([BAD])

    def mute(_: int, body: Body) -> Body:
        return Refuse(ASKED.name.key, "not today") if isinstance(body, Shown) else body

    listen(three, liar, mute)
    results = agree(three, evidence, seconds=5.0)
    assert all(isinstance(error, AgreementError) for error in results)
    honest = results[(liar + 1) % 3]
    assert "waiting for check shares that differ" in str(honest) and "not today" in str(honest)
    # An honest helper that was deceived refuses too: one of two.
    assert honest.party is None and f"helper {liar + 1}" in str(honest)
    assert nothing_reserved(three)
    for party in range(3):
        assert not evidence[party].check_results.invalid[[row for row in range(REPORTS) if row != BAD]].any()


def test_a_block_that_came_out_otherwise_is_not_shown(three: ThreeAgreements) -> None:
    evidence = evidence_of([BAD])
    evidence[2].show = lambda numbers: None  # type: ignore[method-assign]
    results = agree(three, evidence, seconds=5.0)
    assert (results[2].kind, results[2].party) == (ErrorKind.INCONSISTENT, 2)
    assert all(isinstance(error, AgreementError) for error in results)
    assert nothing_reserved(three)


def test_selective_failure_tells_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A shifted share of a good report is seen with certainty: the outcome does not depend on the report."""
    outcomes = set()
    for seed in range(2):
        for shift in (1, 12345):
            three = ThreeAgreements(tmp_path_factory.mktemp("three"))
            evidence = evidence_of(seed=seed)
            moved = np.uint64(shift)
            evidence[1].change_row(3, lambda shares, by=moved: (shares + by) % np.uint64(P))  # type: ignore[misc]
            outcomes.add(tuple(str(error) for error in agree(three, evidence, seconds=8.0)))
            for ledger in three.ledgers:
                ledger.close()
    assert len(outcomes) == 1


# --- the place of Check in Agree -----------------------------------------------------------------


def negotiation(evidence: MadeEvidence) -> Negotiation:
    return Negotiation(0, AttemptTerms(ASKED.name, False, b"p" * 32), batches_of([evidence])[0])


def proposal(of: Negotiation, mask: list[bool], number: int = 1, root: bytes = b"k" * 32) -> Propose:
    out = pack_rejections({Rejection.SEEN: mask.count(False)})
    packed = pack_mask(np.array(mask))
    return Propose(of.query, b"p" * 32, of.batch.root, number, b"s" * 32, REPORTS, packed, out, root)


def test_a_proposal_that_changes_after_the_check_began_is_not_reserved() -> None:
    one = negotiation(evidence_of()[0])
    whole = [True] * REPORTS
    few = [row != BAD for row in range(REPORTS)]
    one.propose(1, np.array(whole), b"s" * 32)
    one.receive_proposal(1, proposal(one, whole))
    one.receive_proposal(2, proposal(one, few))
    assert one.complete()
    one.frozen = True
    one.receive_proposal(2, proposal(one, whole))
    assert not one.accepted_by_all()[BAD]


def test_what_was_not_confirmed_is_not_reserved() -> None:
    """A second lock on the door, whatever went wrong before it."""
    evidence = evidence_of()[0]
    one = negotiation(evidence)
    one.propose(1, np.ones(REPORTS, dtype=np.bool_), b"s" * 32)
    for party in (1, 2):
        one.receive_proposal(party, proposal(one, [True] * REPORTS))
    evidence.check_results.confirmed[:] = True
    evidence.check_results.confirmed[BAD] = False
    with raises(ErrorKind.BAD_PROOF, ProtocolError):
        one.reservation()
    evidence.check_results.confirmed[BAD] = True
    assert len(one.reservation().digests) == REPORTS


@pytest.mark.parametrize(("root", "checked"), [(bytes(32), True), (b"k" * 32, False)])
def test_a_peer_that_checks_other_numbers_is_named(root: bytes, checked: bool) -> None:
    one = negotiation(evidence_of()[0])
    if not checked:
        one.batch = replace(one.batch, evidence=None)
    one.receive_proposal(2, proposal(one, [True] * REPORTS, root=root))
    assert one.failure is not None
    assert (one.failure.kind, one.failure.party) == (ErrorKind.INCONSISTENT, 2)
