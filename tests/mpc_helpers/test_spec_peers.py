"""SPEC section 8, implemented a second time from its text with nothing but hashlib, struct and Ed25519.

If these bytes and the helpers' own differ, an implementation made from SPEC would not be understood.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from fractions import Fraction
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mpc_helpers.agreement import messages
from mpc_helpers.agreement.messages import Ask, Envelope, Head, Hello, Propose, Refuse, Reserved, Show, Shown
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation
from mpc_helpers.ledger.attempt import QueryName, Reservation, VoteStatus
from mpc_helpers.ledger.engine import LedgerHead, first_head, next_head
from mpc_helpers.mpc import channel
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms, joint_nonce, pair_noise_key
from mpc_helpers.mpc.session import MpcSession
from protocol.errors import Rejection
from protocol.keys import IdentityKey
from protocol.vote import SignedVote, Vote
from tests.support import protocol_samples as samples

SET = hashlib.sha256(b"a helper set").digest()
RAW = [hashlib.sha256(b"helper %d" % helper).digest() for helper in range(3)]
IDENTITIES = [IdentityKey.from_raw(raw) for raw in RAW]
NAME = QueryName(hashlib.sha256(b"key").digest(), hashlib.sha256(b"digest").digest())
HEAD = LedgerHead(b"i" * 16, 7, b"h" * 32)
ATTEMPT = b"a" * 32
BOOT = b"b" * 16


# The text of SPEC, sections 1 and 8.


def text(value: str) -> bytes:
    return struct.pack(">H", len(value.encode())) + value.encode()


def blob32(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def h(label: str, *parts: bytes) -> bytes:
    joined = b"".join(struct.pack(">Q", len(part)) + part for part in parts)
    return hashlib.sha256(text("trefoil/1 " + label) + joined).digest()


def sign(helper: int, purpose: str, data: bytes) -> bytes:
    key = Ed25519PrivateKey.from_private_bytes(RAW[helper])
    return key.sign(text("trefoil/1 signature: " + purpose) + data)


REALM = h("helper messages", SET)
HEAD_BYTES = b"i" * 16 + struct.pack(">Q", 7) + b"h" * 32


def message(kind: int, name: str, helper: int, body: bytes) -> bytes:
    content = bytes([kind, helper]) + BOOT + HEAD_BYTES + blob32(body)
    return blob32(content) + sign(helper, "helper message " + name, REALM + content)


def vote(helper: int, code: int) -> bytes:
    signature = sign(helper, "vote", bytes([helper]) + ATTEMPT + bytes([code]))
    return bytes([helper]) + ATTEMPT + bytes([code]) + signature


def proposal(bits: list[int], salt: bytes, rejections: list[int]) -> bytes:
    packed = np.packbits(bits).tobytes()
    fixed = NAME.key + NAME.digest + b"p" * 32 + b"r" * 32 + struct.pack(">Q", 3) + salt + struct.pack(">I", len(bits))
    return fixed + blob32(packed) + bytes(32) + bytes([21]) + struct.pack(">21I", *rejections)


BITS = [[1, 1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10, [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]]
SALTS = [bytes([helper]) * 32 for helper in range(3)]
REJECTIONS = [[0] * 18 + [bits.count(0), 0, 0] for bits in BITS]
PROPOSALS = [proposal(*parts) for parts in zip(BITS, SALTS, REJECTIONS, strict=True)]


def proposals() -> list[Propose]:
    return [
        Propose(NAME, b"p" * 32, b"r" * 32, 3, salt, 10, np.packbits(bits).tobytes(), tuple(counts))
        for bits, salt, counts in zip(BITS, SALTS, REJECTIONS, strict=True)
    ]


def test_every_kind_of_message() -> None:
    votes = vote(1, 2), vote(0, 1)
    state = ATTEMPT + bytes([1, 2]) + b"".join(struct.pack(">H", len(each)) + each for each in votes)
    signed = [SignedVote.sign(1, ATTEMPT, Vote.RENOUNCED, IDENTITIES[1])]
    signed.append(SignedVote.sign(0, ATTEMPT, Vote.ABORTED, IDENTITIES[0]))
    reserved = NAME.key + NAME.digest + struct.pack(">Q", 3) + ATTEMPT
    show = NAME.key + NAME.digest + b"k" * 32 + bytes([2]) + struct.pack(">II", 2, 5)
    shown = Shown(Show(NAME, b"k" * 32, (2, 5)), (b"one", b"other"))
    spoken: list[tuple[bytes, messages.Body]] = [
        (message(1, "PROPOSE", 1, PROPOSALS[1]), proposals()[1]),
        (message(2, "RESERVED", 1, reserved), Reserved(NAME, 3, ATTEMPT)),
        (message(3, "STATE", 1, state), messages.StateMessage(ATTEMPT, VoteStatus.NO, tuple(signed))),
        (message(4, "ASK", 1, ATTEMPT), Ask(ATTEMPT)),
        (message(5, "REFUSE", 1, NAME.key + text("not yet")), Refuse(NAME.key, "not yet")),
        (message(6, "HELLO", 1, b"c" * 16 + bytes([56]) + HEAD_BYTES), Hello(b"c" * 16, HEAD)),
        (message(6, "HELLO", 1, b"c" * 16 + bytes([0])), Hello(b"c" * 16, None)),
        (message(7, "HEAD", 1, b"c" * 16 + bytes([32]) + b"h" * 32), Head(b"c" * 16, b"h" * 32)),
        (message(8, "SHOW", 1, show), Show(NAME, b"k" * 32, (2, 5))),
        (message(9, "SHOWN", 1, show + blob32(b"one") + blob32(b"other")), shown),
    ]
    assert {body.kind for _, body in spoken} == set(messages.MessageKind)
    for data, body in spoken:
        assert Envelope.open(data, REALM, 1, IDENTITIES[1].public) == Envelope(1, BOOT, HEAD, body)
        assert Envelope(1, BOOT, HEAD, body).seal(REALM, IDENTITIES[1]) == data


def test_the_attempt_id() -> None:
    digests = np.array([[index] * 32 for index in range(10)], dtype=np.uint8)
    hours = np.array([9, *range(20, 29)], dtype=np.uint32)
    batch = AdmittedBatch(
        b"r" * 32, digests, hours, np.zeros(10, dtype=np.bool_), np.ones(10, dtype=np.bool_), {}, site=""
    )
    negotiation = Negotiation(0, AttemptTerms(NAME, False, b"p" * 32), batch)
    negotiation.own = proposals()[0]
    negotiation.proposals = dict(enumerate(proposals()))
    accepted = b"".join(bytes([index] * 32) for index in (0, 3, 4, 5, 6, 7, 8, 9))
    reservation: Reservation = negotiation.reservation()
    assert reservation.attempt_id == h("attempt id", NAME.key, NAME.digest, struct.pack(">Q", 3), *PROPOSALS, accepted)
    assert (reservation.oldest, reservation.newest) == (9 * 3600, 28 * 3600)


def test_the_chain_of_a_ledger() -> None:
    first = h("ledger chain", b"i" * 16)
    assert first_head(b"i" * 16) == first
    second = h("ledger chain", first, struct.pack(">Q", 1), ATTEMPT, b"reserved")
    assert next_head(first, 1, ATTEMPT, "reserved") == second


def test_the_greeting_of_a_session() -> None:
    scale = text("pairwise") + blob32(text("1/4") + bytes([2]))
    session = SumTerms(SumKind.PAIRWISE, Fraction(1, 4), 4, 10).session(0, ATTEMPT, 60.0)
    ours = text("trefoil-mpc/2") + struct.pack(">QI", 2**61 - 1, 10)
    ours += text(metadata.version("mpyc")) + struct.pack(">H", sys.hash_info.width)
    digest = h("mpc parameters", ours, scale)
    assert channel._hello(session, 2) == text("trefoil-mpc/2") + bytes([0, 2]) + ATTEMPT + digest


def test_the_parameters_of_an_attempt_and_the_order_of_rejections() -> None:
    computed = SumTerms(SumKind.LOCAL, Fraction(1, 2), 2, 1).digest
    assert computed == h("attempt parameters", text("local") + blob32(text("1/2")))
    computed = SumTerms(SumKind.JOINT, Fraction(16), 4, 1).digest
    coins = bytes.fromhex("001e0001 79  00330001 1d  00600001 0d  001e0001 79")
    scale = text("16/1") + struct.pack(">QB", 4, 3) + coins
    assert computed == h("attempt parameters", text("joint") + blob32(scale))
    assert len(Rejection) == 21
    first, *_, last = Rejection
    assert (first, last) == (Rejection.MALFORMED, Rejection.TOO_LITTLE_LEFT)


def test_the_key_of_a_query() -> None:
    query = samples.query()
    scoped = text(query.site) + text(query.caller) + blob32(query.query_id)
    assert QueryName.of(query) == QueryName(h("query key", scoped), h("query", query.encode()))


async def test_the_joint_nonce_and_the_key_of_pairwise_noise() -> None:
    """Party 0's part, with two peers made up here."""
    session = MpcSession(0, ATTEMPT, b"", 10, 60.0)
    nonces = [bytes([party]) * 32 for party in range(3)]
    commitments = [h("noise nonce: commitment", ATTEMPT, bytes([party]), nonces[party]) for party in range(3)]
    seen = h("noise nonce: commitments", *commitments)
    rounds = iter([commitments, [nonce + seen for nonce in nonces]])
    sent: list[bytes] = []

    async def exchange(mine: bytes) -> list[bytes]:
        sent.append(mine)
        return next(rounds)

    engine: Any = SimpleNamespace(party=0, session=session, exchange=exchange, pair_key=lambda lacking: b"k" * 16)
    joint = await joint_nonce(engine, lambda _: nonces[0])
    assert sent == [commitments[0], nonces[0] + seen]
    assert joint == h("noise nonce: joint", *nonces)
    key = h("pairwise noise", b"k" * 16, ATTEMPT, session.parameter_digest, joint, bytes([2]))
    assert pair_noise_key(engine, 2, joint) == key
