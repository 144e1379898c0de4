"""The messages between helpers in Agree and Spend: one encoding each, every message signed.

A signature binds the sender, the realm (the helper set) and the purpose, so a message cannot be attributed
to another helper, replayed to another helper set, or parsed as another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.column import NO_ROOT, block_count, largest_block
from mpc_helpers.ledger.attempt import QueryName, VoteStatus
from mpc_helpers.ledger.engine import LEDGER_ID_SIZE, LedgerHead
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.vote import SignedVote
from protocol.wire import HASH_SIZE, Reader, Writer

SALT_SIZE = 32
BOOT_SIZE = 16
CHALLENGE_SIZE = 16
MAX_REASON = 500
MAX_BITMAP = 2**29
# Upper bound for a message without its bitmap: the longest REFUSE has about 2,200 bytes.
MAX_REST = 4096
# How many blocks of check shares one SHOW may ask for.
MAX_SHOWN = 16
# A side query, 42 planes and three points are as many residues as a report can have.
_LARGEST_BLOCK = largest_block(3 * (1 + 1 + 42))
MAX_LIST = HASH_SIZE * block_count(2**32 - 1)
MAX_MESSAGE = MAX_LIST + MAX_REST

Mask = npt.NDArray[np.bool_]

_HEAD_SIZE = LEDGER_ID_SIZE + 8 + HASH_SIZE
_REASONS = Rejection.by_number()


class MessageKind(Enum):
    """The purpose of a message, which its signature binds."""

    PROPOSE = 1
    RESERVED = 2
    STATE = 3
    ASK = 4
    REFUSE = 5
    HELLO = 6
    HEAD = 7
    SHOW = 8
    SHOWN = 9


def longest_message(reports: int) -> int:
    """Return the size limit in bytes of a message about batches of at most `reports` reports.

    The largest are a bitmap in a PROPOSE, and all block hashes or some blocks in a SHOWN.
    """
    return max((reports + 7) // 8, HASH_SIZE * block_count(reports), MAX_SHOWN * (4 + _LARGEST_BLOCK)) + MAX_REST


@dataclass(frozen=True, slots=True)
class Propose:
    """PROPOSE(query, number, salt, bitmap): the reports the sender would count, and its reasons against the rest.

    `bitmap` has one bit per report of the batch in its order, most significant first: admitted here and not spent here.
    `check_root` is the root over the sender's check shares of every report that it opened; zeros if nothing is checked.
    """

    kind: ClassVar[MessageKind] = MessageKind.PROPOSE

    query: QueryName
    parameters: bytes
    batch_root: bytes
    number: int
    salt: bytes
    count: int
    bitmap: bytes = field(repr=False)
    rejections: tuple[int, ...]
    check_root: bytes = NO_ROOT

    def __post_init__(self) -> None:
        digests = (self.parameters, self.batch_root, self.salt, self.check_root)
        if any(len(value) != HASH_SIZE for value in digests):
            raise ProtocolError("parameters, roots and salt have 32 bytes")
        if not (0 < self.number < 2**63) or not (0 <= self.count < 2**32):
            raise ProtocolError(
                "an attempt's number is 1 to 2^63 - 1 and a batch has less than 2^32 reports",
                kind=ErrorKind.OUT_OF_RANGE,
            )
        if len(self.bitmap) != (self.count + 7) // 8 or (self.count % 8 and self.bitmap[-1] & (0xFF >> self.count % 8)):
            raise ProtocolError("the bitmap has one bit for each report and zeros to the end of its last byte")
        left_out = self.count - int(np.bitwise_count(np.frombuffer(self.bitmap, dtype=np.uint8)).sum(dtype=np.int64))
        # No helper may censor silently.
        if len(self.rejections) != len(_REASONS) or sum(self.rejections) != left_out:
            raise ProtocolError("every report left out is counted under one reason", kind=ErrorKind.INCONSISTENT)

    @property
    def mask(self) -> Mask:
        return np.unpackbits(np.frombuffer(self.bitmap, dtype=np.uint8), count=self.count).astype(np.bool_)

    @property
    def rejection_counts(self) -> dict[Rejection, int]:
        return {reason: count for reason, count in zip(_REASONS, self.rejections, strict=True) if count}

    def encode(self) -> bytes:
        """Return the canonical bytes; all three helpers' are hashed into the attempt id."""
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        writer.fixed(self.parameters, HASH_SIZE).fixed(self.batch_root, HASH_SIZE).uint(self.number, 8)
        writer.fixed(self.salt, SALT_SIZE).uint(self.count, 4).blob(self.bitmap)
        writer.fixed(self.check_root, HASH_SIZE).uint(len(self.rejections), 1)
        for count in self.rejections:
            writer.uint(count, 4)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        query = _read_name(reader)
        parameters, root = reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE)
        number, salt, count = reader.uint(8), reader.fixed(SALT_SIZE), reader.uint(4)
        bitmap, check_root = reader.blob(limit=MAX_BITMAP), reader.fixed(HASH_SIZE)
        rejections = tuple(reader.uint(4) for _ in range(reader.uint(1)))
        return cls(query, parameters, root, number, salt, count, bitmap, rejections, check_root)


def pack_mask(mask: Mask) -> bytes:
    return np.packbits(mask).tobytes()


def pack_rejections(counts: Mapping[Rejection, int]) -> tuple[int, ...]:
    """Return counts by reason, in the order of `Rejection`'s numbers."""
    return tuple(counts.get(reason, 0) for reason in _REASONS)


@dataclass(frozen=True, slots=True)
class Reserved:
    """RESERVED(attempt): the sender has durably reserved the attempt."""

    kind: ClassVar[MessageKind] = MessageKind.RESERVED

    query: QueryName
    number: int
    attempt_id: bytes

    def encode(self) -> bytes:
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        return writer.uint(self.number, 8).fixed(self.attempt_id, HASH_SIZE).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(_read_name(reader), reader.uint(8), reader.fixed(HASH_SIZE))


@dataclass(frozen=True, slots=True)
class StateMessage:
    """STATE(attempt, status) with the votes that prove it.

    YES: the sender's YES, or all three once it has released. NO: the sender's, and if it had voted YES before, the
    ABORTED vote that made it renounce. WORKING and UNKNOWN carry none.
    """

    kind: ClassVar[MessageKind] = MessageKind.STATE

    attempt_id: bytes
    status: VoteStatus
    votes: tuple[SignedVote, ...]

    def __post_init__(self) -> None:
        if len(self.votes) > 3 or any(vote.attempt_id != self.attempt_id for vote in self.votes):
            raise ProtocolError("the votes of a STATE are on its attempt", kind=ErrorKind.INCONSISTENT)
        if (self.status in (VoteStatus.YES, VoteStatus.NO)) != bool(self.votes):
            raise ProtocolError("YES and NO come with votes, working and unknown without", kind=ErrorKind.INCONSISTENT)

    def encode(self) -> bytes:
        writer = Writer().fixed(self.attempt_id, HASH_SIZE).uint(self.status.number, 1)
        writer.uint(len(self.votes), 1)
        for vote in self.votes:
            writer.blob(vote.encode(), 2)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        attempt_id, status = reader.fixed(HASH_SIZE), reader.member(VoteStatus)
        votes = tuple(SignedVote.decode(reader.blob(2, limit=256)) for _ in range(reader.uint(1)))
        return cls(attempt_id, status, votes)


@dataclass(frozen=True, slots=True)
class Ask:
    """ASK(attempt): answered with a STATE."""

    kind: ClassVar[MessageKind] = MessageKind.ASK

    attempt_id: bytes

    def encode(self) -> bytes:
        return Writer().fixed(self.attempt_id, HASH_SIZE).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.fixed(HASH_SIZE))


@dataclass(frozen=True, slots=True)
class Refuse:
    """REFUSE: why the sender does not propose for a query at present. Only for the receiver's error message."""

    kind: ClassVar[MessageKind] = MessageKind.REFUSE

    query_key: bytes
    reason: str

    def encode(self) -> bytes:
        return Writer().fixed(self.query_key, HASH_SIZE).text(self.reason[:MAX_REASON]).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.fixed(HASH_SIZE), reader.text(limit=4 * MAX_REASON))


@dataclass(frozen=True, slots=True)
class Hello:
    """HELLO: challenges a peer that has just started to prove that its ledger extends the head last seen."""

    kind: ClassVar[MessageKind] = MessageKind.HELLO

    challenge: bytes
    remembered: LedgerHead | None

    def encode(self) -> bytes:
        remembered = _head_bytes(self.remembered) if self.remembered else b""
        return Writer().fixed(self.challenge, CHALLENGE_SIZE).blob(remembered, 1).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        challenge, inner = reader.fixed(CHALLENGE_SIZE), reader.blob(1)
        if not inner:
            return cls(challenge, None)
        remembered = Reader(inner)
        head = _read_head(remembered)
        remembered.finish()
        return cls(challenge, head)


@dataclass(frozen=True, slots=True)
class Head:
    """HEAD: answers HELLO with the sender's chain at that sequence number, empty if it never came that far."""

    kind: ClassVar[MessageKind] = MessageKind.HEAD

    challenge: bytes
    at_sequence: bytes

    def encode(self) -> bytes:
        return Writer().fixed(self.challenge, CHALLENGE_SIZE).blob(self.at_sequence, 1).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.fixed(CHALLENGE_SIZE), reader.blob(1))


@dataclass(frozen=True, slots=True)
class Show:
    """SHOW(query, check root, blocks): requests the hashes of all blocks under that root, or some of the blocks."""

    kind: ClassVar[MessageKind] = MessageKind.SHOW

    query: QueryName
    check_root: bytes
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.check_root) != HASH_SIZE or len(self.blocks) > MAX_SHOWN:
            raise ProtocolError(
                f"a SHOW names a root of 32 bytes and at most {MAX_SHOWN} blocks", kind=ErrorKind.OUT_OF_RANGE
            )
        if any(not (0 <= block < 2**32) for block in self.blocks) or list(self.blocks) != sorted(set(self.blocks)):
            raise ProtocolError("the blocks of a SHOW ascend")

    def encode(self) -> bytes:
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        writer.fixed(self.check_root, HASH_SIZE).uint(len(self.blocks), 1)
        for block in self.blocks:
            writer.uint(block, 4)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        query, root = _read_name(reader), reader.fixed(HASH_SIZE)
        return cls(query, root, tuple(reader.uint(4) for _ in range(reader.uint(1))))


@dataclass(frozen=True, slots=True)
class Shown:
    """SHOWN: answers a SHOW, which it repeats. The concatenated hashes, or one preimage for each block."""

    kind: ClassVar[MessageKind] = MessageKind.SHOWN

    question: Show
    content: tuple[bytes, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.content) != max(1, len(self.question.blocks)):
            raise ProtocolError(
                "a SHOWN has the hashes, or as many blocks as were asked for", kind=ErrorKind.INCONSISTENT
            )

    def encode(self) -> bytes:
        writer = Writer()
        for part in self.content:
            writer.blob(part)
        return self.question.encode() + writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        question = Show.read(reader)
        if not question.blocks:
            return cls(question, (reader.blob(limit=MAX_LIST),))
        return cls(question, tuple(reader.blob(limit=_LARGEST_BLOCK) for _ in question.blocks))


Body = Propose | Reserved | StateMessage | Ask | Refuse | Hello | Head | Show | Shown
_BODIES: dict[MessageKind, type[Body]] = {
    body.kind: body for body in (Propose, Reserved, StateMessage, Ask, Refuse, Hello, Head, Show, Shown)
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender, the sender's boot id, and the head of the sender's ledger."""

    sender: int
    boot: bytes
    head: LedgerHead
    body: Body

    def seal(self, realm: bytes, key: IdentityKey) -> bytes:
        """Return the signed bytes. Run by the sender."""
        writer = Writer().uint(self.body.kind.value, 1).uint(self.sender, 1).fixed(self.boot, BOOT_SIZE)
        content = writer.fixed(_head_bytes(self.head), _HEAD_SIZE).blob(self.body.encode()).done()
        return Writer().blob(content).fixed(key.sign(_label(self.body.kind), realm + content), SIGNATURE_SIZE).done()

    @classmethod
    def open(cls, data: bytes, realm: bytes, sender: int, key: bytes) -> Self:
        """Return the message, if `sender` signed it. Run by the receiver, which knows the sender from TLS."""
        outer = Reader(data)
        content, signature = outer.blob(limit=MAX_MESSAGE), outer.fixed(SIGNATURE_SIZE)
        outer.finish()
        reader = Reader(content)
        kind, claimed, boot = _kind(reader.uint(1)), reader.choice((0, 1, 2)), reader.fixed(BOOT_SIZE)
        if claimed != sender or not verify_signature(key, _label(kind), realm + content, signature):
            raise ProtocolError(
                f"a message is not signed by helper {sender + 1} for this helper set", kind=ErrorKind.BAD_SIGNATURE
            )
        head = _read_head(reader)
        inner = Reader(reader.blob(limit=MAX_MESSAGE))
        reader.finish()
        body = _BODIES[kind].read(inner)
        inner.finish()
        return cls(claimed, boot, head, body)


def _label(kind: MessageKind) -> str:
    return f"helper message {kind.name}"


def _kind(code: int) -> MessageKind:
    try:
        return MessageKind(code)
    except ValueError:
        raise ProtocolError(f"unknown kind of message {code}", kind=ErrorKind.UNKNOWN_NAME) from None


def _read_name(reader: Reader) -> QueryName:
    return QueryName(reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE))


def _head_bytes(head: LedgerHead) -> bytes:
    return Writer().fixed(head.ledger_id, LEDGER_ID_SIZE).uint(head.sequence, 8).fixed(head.digest, HASH_SIZE).done()


def _read_head(reader: Reader) -> LedgerHead:
    return LedgerHead(reader.fixed(LEDGER_ID_SIZE), reader.uint(8), reader.fixed(HASH_SIZE))
