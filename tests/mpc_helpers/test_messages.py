"""The messages between helpers: one encoding each, signed for one sender, one realm and one purpose."""

from __future__ import annotations

import numpy as np
import pytest

from mpc_helpers.admission.column import largest_block
from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Body, Envelope, Head, Hello, Propose, Refuse, Reserved, Show, Shown
from mpc_helpers.ledger.attempt import QueryName, VoteStatus
from mpc_helpers.ledger.engine import LedgerHead
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.helper_set import message_realm
from protocol.vote import SignedVote, Vote
from protocol.wire import Reader
from tests.support.commit_world import IDENTITIES, KEYS, REALM
from tests.support.raising import raises

NAME = QueryName(b"q" * 32, b"d" * 32)
HEAD = LedgerHead(b"l" * 16, 3, b"h" * 32)
ATTEMPT = b"a" * 32


def proposal(mask: list[bool], **changes: object) -> Propose:
    packed = messages.pack_mask(np.array(mask, dtype=np.bool_))
    rejections = messages.pack_rejections({Rejection.EXPIRED: mask.count(False)})
    values: dict[str, object] = {"number": 4, "count": len(mask), "bitmap": packed, "rejections": rejections}
    fixed = {"query": NAME, "parameters": b"p" * 32, "batch_root": b"r" * 32, "salt": b"s" * 32}
    return Propose(**(fixed | values | changes))  # type: ignore[arg-type]  # a table of fields, some wrong on purpose


def vote(helper: int, cast: Vote) -> SignedVote:
    return SignedVote.sign(helper, ATTEMPT, cast, IDENTITIES[helper])


BODIES: list[Body] = [
    proposal([True, False, True]),
    proposal([True] * 17),
    proposal([]),
    Reserved(NAME, 4, ATTEMPT),
    messages.StateMessage(ATTEMPT, VoteStatus.YES, (vote(0, Vote.YES), vote(1, Vote.YES), vote(2, Vote.YES))),
    messages.StateMessage(ATTEMPT, VoteStatus.NO, (vote(0, Vote.RENOUNCED), vote(1, Vote.ABORTED))),
    messages.StateMessage(ATTEMPT, VoteStatus.UNKNOWN, ()),
    Ask(ATTEMPT),
    Refuse(b"q" * 32, "waiting for 3 reports that another query holds"),
    Hello(b"c" * 16, None),
    Hello(b"c" * 16, HEAD),
    Head(b"c" * 16, b"h" * 32),
    proposal([True], check_root=b"k" * 32),
    Show(NAME, b"k" * 32),
    Show(NAME, b"k" * 32, (0, 7, 2**32 - 1)),
    Shown(Show(NAME, b"k" * 32), (b"h" * 64,)),
    Shown(Show(NAME, b"k" * 32, (3, 4)), (b"first", b"")),
]


def seal(body: Body, sender: int = 0) -> bytes:
    return Envelope(sender, b"b" * 16, HEAD, body).seal(REALM, IDENTITIES[sender])


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_comes_back_as_it_was(body: Body) -> None:
    sealed = seal(body)
    opened = Envelope.open(sealed, REALM, 0, KEYS[0])
    assert opened == Envelope(0, b"b" * 16, HEAD, body)
    assert opened.seal(REALM, IDENTITIES[0]) == sealed


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_changed_byte_and_every_other_length_is_refused(body: Body) -> None:
    sealed = seal(body)
    wrong = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    for data in (*wrong, sealed[:-1], sealed + b"\0", b""):
        with pytest.raises(ProtocolError):
            Envelope.open(data, REALM, 0, KEYS[0])


@pytest.mark.parametrize("reports", [0, 1, 8, 9, 100_000])
def test_nothing_that_can_be_meant_is_longer_than_the_longest_message(reports: int) -> None:
    limit = messages.longest_message(reports)
    longest: list[Body] = [
        proposal([True] * reports),
        Reserved(NAME, 2**63 - 1, ATTEMPT),
        Refuse(b"q" * 32, "\U0001f340" * messages.MAX_REASON),
        Shown(Show(NAME, b"k" * 32), (bytes(32 * ((reports + 63) // 64)),)),
        Shown(Show(NAME, b"k" * 32, tuple(range(16))), (bytes(largest_block(132)),) * 16),
        *BODIES[3:],
    ]
    assert all(len(seal(body)) <= limit for body in longest)
    assert limit <= max(reports // 2 + 32, 16 * 67_596) + messages.MAX_REST
    assert messages.longest_message(2**32 - 1) == messages.MAX_MESSAGE


@pytest.mark.parametrize(
    ("root", "blocks"),
    [(b"k" * 31, ()), (b"k" * 32, tuple(range(17))), (b"k" * 32, (2, 1)), (b"k" * 32, (1, 1)), (b"k" * 32, (2**32,))],
)
def test_a_show_names_few_blocks_in_order(root: bytes, blocks: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        Show(NAME, root, blocks)
    if len(root) == 32 and all(block < 2**32 for block in blocks):
        forged = NAME.key + NAME.digest + root + bytes([len(blocks)])
        forged += b"".join(block.to_bytes(4, "big") for block in blocks)
        with pytest.raises(ProtocolError):
            Show.read(Reader(forged))


def test_a_shown_has_what_was_asked_for() -> None:
    for blocks, content in (((), ()), ((), (b"", b"")), ((1,), ()), ((1,), (b"", b""))):
        with raises(ErrorKind.INCONSISTENT, ProtocolError):
            Shown(Show(NAME, b"k" * 32, blocks), content)
    endless = Show(NAME, b"k" * 32, (1,)).encode() + (2**31).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="over the limit"):
        Shown.read(Reader(endless))


def test_a_message_is_of_one_sender_one_realm_and_one_purpose() -> None:
    sealed = seal(Ask(ATTEMPT))
    for bound, sender, key in (
        (message_realm(b"x" * 32), 0, KEYS[0]),
        (REALM, 1, KEYS[1]),
        (REALM, 1, KEYS[0]),
        (REALM, 0, KEYS[1]),
    ):
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
            Envelope.open(sealed, bound, sender, key)
    # ASK and STATE(unknown) begin alike; only the signed purpose tells them apart.
    assert messages.StateMessage(ATTEMPT, VoteStatus.UNKNOWN, ()).encode().startswith(Ask(ATTEMPT).encode())
    relabelled = bytearray(sealed)
    relabelled[4] = messages.MessageKind.STATE.value
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
        Envelope.open(bytes(relabelled), REALM, 0, KEYS[0])


def test_a_bitmap_is_what_it_seems() -> None:
    mask = [True, False, True, True, False, False, True, True, False, True]
    assert proposal(mask).mask.tolist() == mask
    assert proposal(mask).rejection_counts == {Rejection.EXPIRED: 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 0},
        {"number": 2**63},
        {"salt": b"short"},
        {"count": 4},
        {"count": 9},
        {"bitmap": b"\xa1"},
        {"rejections": messages.pack_rejections({})},
        {"rejections": (1,)},
    ],
)
def test_a_proposal_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        proposal([True, False, True], **changes)


@pytest.mark.parametrize("expired", [0, 1, 3])
def test_every_report_left_out_is_counted_under_one_reason(expired: int) -> None:
    """None censors silently, and none makes reasons up."""
    counted = messages.pack_rejections({Rejection.EXPIRED: 1, Rejection.DUPLICATE: 1})
    assert proposal([True, False, False], rejections=counted).rejection_counts[Rejection.DUPLICATE] == 1
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        proposal([True, False, False], rejections=messages.pack_rejections({Rejection.EXPIRED: expired}))


def test_a_state_comes_with_votes_on_its_own_attempt() -> None:
    with pytest.raises(ProtocolError):
        messages.StateMessage(b"b" * 32, VoteStatus.YES, (vote(0, Vote.YES),))
    with pytest.raises(ProtocolError):
        messages.StateMessage(ATTEMPT, VoteStatus.YES, ())
    with pytest.raises(ProtocolError):
        messages.StateMessage(ATTEMPT, VoteStatus.WORKING, (vote(0, Vote.YES),))
