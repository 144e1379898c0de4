"""What helpers say to each other while they agree and spend: one encoding each, every message signed.

A signature binds the sender, the realm (the helper set) and the purpose, so a message cannot be passed off
as another helper's, carried over to another set of helpers, or read as another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.blocks import NO_ROOT, block_count, largest_block
from mpc_helpers.ledger.attempt import QueryName, Word
from mpc_helpers.ledger.file import LEDGER_ID_SIZE, LedgerHead
from protocol.errors import ProtocolError, Rejection
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.vote import SignedVote
from protocol.wire import HASH_SIZE, Reader, Writer

SALT_SIZE = 32
BOOT_SIZE = 16
CHALLENGE_SIZE = 16
MAX_REASON = 500
MAX_BITMAP = 2**29
# Everything in a message but the bitmap, with room to spare: the longest REFUSE has about 2,200 bytes.
MAX_REST = 4096
# How many blocks of check shares one SHOW may ask for.
MAX_SHOWN = 16
# A side query, 42 planes and three points are as many residues as a report can have.
_LARGEST_BLOCK = largest_block(3 * (1 + 1 + 42))
MAX_LIST = HASH_SIZE * block_count(2**32 - 1)
MAX_MESSAGE = MAX_LIST + MAX_REST

Mask = npt.NDArray[np.bool_]

_HEAD_SIZE = LEDGER_ID_SIZE + 8 + HASH_SIZE
_REASONS = Rejection.ascending()


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
    """Bytes of the longest message that can be meant where batches have at most `reports` reports.

    A bitmap in a PROPOSE, and in a SHOWN all hashes of blocks or some blocks.
    """
    return max((reports + 7) // 8, HASH_SIZE * block_count(reports), MAX_SHOWN * (4 + _LARGEST_BLOCK)) + MAX_REST


@dataclass(frozen=True, slots=True)
class Propose:
    """PROPOSE(query, number, salt, bitmap): what this helper would count, and why not the rest.

    `bitmap` has one bit per report of the batch in its order, most significant first: admitted here and not spent here.
    `check_root` stands for this helper's check shares of every report that it opened; zeros where nothing is checked.
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
            raise ProtocolError("an attempt's number is 1 to 2^63 - 1 and a batch has less than 2^32 reports")
        if len(self.bitmap) != (self.count + 7) // 8 or (self.count % 8 and self.bitmap[-1] & (0xFF >> self.count % 8)):
            raise ProtocolError("the bitmap has one bit for each report and zeros to the end of its last byte")
        left_out = self.count - int(np.bitwise_count(np.frombuffer(self.bitmap, dtype=np.uint8)).sum(dtype=np.int64))
        # None may censor silently.
        if len(self.rejections) != len(_REASONS) or sum(self.rejections) != left_out:
            raise ProtocolError("every report left out is counted under one reason")

    @property
    def mask(self) -> Mask:
        """The bitmap as booleans."""
        return np.unpackbits(np.frombuffer(self.bitmap, dtype=np.uint8), count=self.count).astype(np.bool_)

    @property
    def rejection_counts(self) -> dict[Rejection, int]:
        """Why this helper leaves reports out."""
        return {reason: count for reason, count in zip(_REASONS, self.rejections, strict=True) if count}

    def encode(self) -> bytes:
        """The canonical bytes; the three helpers' go into the attempt id."""
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        writer.fixed(self.parameters, HASH_SIZE).fixed(self.batch_root, HASH_SIZE).uint(self.number, 8)
        writer.fixed(self.salt, SALT_SIZE).uint(self.count, 4).blob(self.bitmap)
        writer.fixed(self.check_root, HASH_SIZE).uint(len(self.rejections), 1)
        for count in self.rejections:
            writer.uint(count, 4)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The proposal `reader` is at."""
        query = _read_name(reader)
        parameters, root = reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE)
        number, salt, count = reader.uint(8), reader.fixed(SALT_SIZE), reader.uint(4)
        bitmap, check_root = reader.blob(limit=MAX_BITMAP), reader.fixed(HASH_SIZE)
        rejections = tuple(reader.uint(4) for _ in range(reader.uint(1)))
        return cls(query, parameters, root, number, salt, count, bitmap, rejections, check_root)


def pack_mask(mask: Mask) -> bytes:
    """A mask as a bitmap."""
    return np.packbits(mask).tobytes()


def pack_rejections(counts: Mapping[Rejection, int]) -> tuple[int, ...]:
    """Counts by reason, in the order of the closed list."""
    return tuple(counts.get(reason, 0) for reason in _REASONS)


@dataclass(frozen=True, slots=True)
class Reserved:
    """RESERVED(attempt): the attempt id, on disk at the sender."""

    kind: ClassVar[MessageKind] = MessageKind.RESERVED

    query: QueryName
    number: int
    attempt_id: bytes

    def encode(self) -> bytes:
        """The canonical bytes."""
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        return writer.uint(self.number, 8).fixed(self.attempt_id, HASH_SIZE).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        return cls(_read_name(reader), reader.uint(8), reader.fixed(HASH_SIZE))


@dataclass(frozen=True, slots=True)
class StateMessage:
    """STATE(attempt, word) with the votes behind it.

    YES: the sender's YES, or all three once it has released. NO: the sender's, and where it had voted before, the
    first-hand NO that made it renounce. Working and unknown carry nothing.
    """

    kind: ClassVar[MessageKind] = MessageKind.STATE

    attempt_id: bytes
    word: Word
    votes: tuple[SignedVote, ...]

    def __post_init__(self) -> None:
        if len(self.votes) > 3 or any(vote.attempt_id != self.attempt_id for vote in self.votes):
            raise ProtocolError("the votes of a STATE are on its attempt")
        if (self.word in (Word.YES, Word.NO)) != bool(self.votes):
            raise ProtocolError("YES and NO come with votes, working and unknown without")

    def encode(self) -> bytes:
        """The canonical bytes."""
        writer = Writer().fixed(self.attempt_id, HASH_SIZE).uint(self.word.number, 1)
        writer.uint(len(self.votes), 1)
        for vote in self.votes:
            writer.blob(vote.encode(), 2)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        attempt_id, word = reader.fixed(HASH_SIZE), reader.numbered(Word)
        votes = tuple(SignedVote.decode(reader.blob(2, limit=256)) for _ in range(reader.uint(1)))
        return cls(attempt_id, word, votes)


@dataclass(frozen=True, slots=True)
class Ask:
    """ASK(attempt): answered with a STATE."""

    kind: ClassVar[MessageKind] = MessageKind.ASK

    attempt_id: bytes

    def encode(self) -> bytes:
        """The canonical bytes."""
        return Writer().fixed(self.attempt_id, HASH_SIZE).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        return cls(reader.fixed(HASH_SIZE))


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why the sender does not propose for a query at present. No effect but in what the waiting side reports."""

    kind: ClassVar[MessageKind] = MessageKind.REFUSE

    query_key: bytes
    reason: str

    def encode(self) -> bytes:
        """The canonical bytes."""
        return Writer().fixed(self.query_key, HASH_SIZE).text(self.reason[:MAX_REASON]).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        return cls(reader.fixed(HASH_SIZE), reader.text(limit=4 * MAX_REASON))


@dataclass(frozen=True, slots=True)
class Hello:
    """The first thing said to a peer that has just started: this is how far I saw your ledger; show that it is so."""

    kind: ClassVar[MessageKind] = MessageKind.HELLO

    challenge: bytes
    remembered: LedgerHead | None

    def encode(self) -> bytes:
        """The canonical bytes."""
        remembered = _head_bytes(self.remembered) if self.remembered else b""
        return Writer().fixed(self.challenge, CHALLENGE_SIZE).blob(remembered, 1).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        challenge, inner = reader.fixed(CHALLENGE_SIZE), reader.blob(1)
        if not inner:
            return cls(challenge, None)
        remembered = Reader(inner)
        head = _read_head(remembered)
        remembered.finish()
        return cls(challenge, head)


@dataclass(frozen=True, slots=True)
class Head:
    """The answer to HELLO: the sender's chain at the asked place, empty if it never came that far."""

    kind: ClassVar[MessageKind] = MessageKind.HEAD

    challenge: bytes
    at_sequence: bytes

    def encode(self) -> bytes:
        """The canonical bytes."""
        return Writer().fixed(self.challenge, CHALLENGE_SIZE).blob(self.at_sequence, 1).done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        return cls(reader.fixed(CHALLENGE_SIZE), reader.blob(1))


@dataclass(frozen=True, slots=True)
class Show:
    """SHOW(query, check root, blocks): show the hashes of all blocks under that root, or some of the blocks."""

    kind: ClassVar[MessageKind] = MessageKind.SHOW

    query: QueryName
    check_root: bytes
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.check_root) != HASH_SIZE or len(self.blocks) > MAX_SHOWN:
            raise ProtocolError(f"a SHOW names a root of 32 bytes and at most {MAX_SHOWN} blocks")
        if any(not (0 <= block < 2**32) for block in self.blocks) or list(self.blocks) != sorted(set(self.blocks)):
            raise ProtocolError("the blocks of a SHOW ascend")

    def encode(self) -> bytes:
        """The canonical bytes."""
        writer = Writer().fixed(self.query.key, HASH_SIZE).fixed(self.query.digest, HASH_SIZE)
        writer.fixed(self.check_root, HASH_SIZE).uint(len(self.blocks), 1)
        for block in self.blocks:
            writer.uint(block, 4)
        return writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
        query, root = _read_name(reader), reader.fixed(HASH_SIZE)
        return cls(query, root, tuple(reader.uint(4) for _ in range(reader.uint(1))))


@dataclass(frozen=True, slots=True)
class Shown:
    """SHOWN: what a SHOW asked for, and the question again. The hashes joined, or one preimage for each block."""

    kind: ClassVar[MessageKind] = MessageKind.SHOWN

    question: Show
    content: tuple[bytes, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.content) != max(1, len(self.question.blocks)):
            raise ProtocolError("a SHOWN has the hashes, or as many blocks as were asked for")

    def encode(self) -> bytes:
        """The canonical bytes."""
        writer = Writer()
        for part in self.content:
            writer.blob(part)
        return self.question.encode() + writer.done()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The message `reader` is at."""
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
    """A message with who sent it, in which run of its daemon, and how far its ledger had come."""

    sender: int
    boot: bytes
    head: LedgerHead
    body: Body

    def seal(self, realm_: bytes, key: IdentityKey) -> bytes:
        """Run by the sender: the signed bytes."""
        writer = Writer().uint(self.body.kind.value, 1).uint(self.sender, 1).fixed(self.boot, BOOT_SIZE)
        content = writer.fixed(_head_bytes(self.head), _HEAD_SIZE).blob(self.body.encode()).done()
        return Writer().blob(content).fixed(key.sign(_label(self.body.kind), realm_ + content), SIGNATURE_SIZE).done()

    @classmethod
    def open(cls, data: bytes, realm_: bytes, sender: int, key: bytes) -> Self:
        """Run by the receiver, who knows from TLS that `sender` sent it: the message, if that helper signed it."""
        outer = Reader(data)
        content, signature = outer.blob(limit=MAX_MESSAGE), outer.fixed(SIGNATURE_SIZE)
        outer.finish()
        reader = Reader(content)
        kind, claimed, boot = _kind(reader.uint(1)), _read_party(reader), reader.fixed(BOOT_SIZE)
        if claimed != sender or not verify_signature(key, _label(kind), realm_ + content, signature):
            raise ProtocolError(f"a message is not signed by helper {sender + 1} for this helper set")
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
        raise ProtocolError(f"unknown kind of message {code}") from None


def _read_name(reader: Reader) -> QueryName:
    return QueryName(reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE))


def _read_party(reader: Reader) -> int:
    return reader.choice((0, 1, 2))


def _head_bytes(head: LedgerHead) -> bytes:
    return Writer().fixed(head.ledger_id, LEDGER_ID_SIZE).uint(head.sequence, 8).fixed(head.digest, HASH_SIZE).done()


def _read_head(reader: Reader) -> LedgerHead:
    return LedgerHead(reader.fixed(LEDGER_ID_SIZE), reader.uint(8), reader.fixed(HASH_SIZE))
