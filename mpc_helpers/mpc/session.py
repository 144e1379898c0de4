"""One MPC session: who takes part, what it is bound to, by when it must end, and how it can fail.

Nothing here touches MPyC, so that a daemon can describe a session and read its failure without importing the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import metadata

from protocol.errors import Blamed, ProtocolError
from protocol.field import P
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer, tagged_hash

DIGEST_SIZE = HASH_SIZE
# As many as an answer has: the buckets, and the side query.
MAX_NUMBERS = MAX_BUCKETS + 1
# Also the version of the messages between parties: a change to either must change this.
PROTOCOL_NAME = "trefoil-mpc/2"
MAX_STEP = 2**25


class Stage(Enum):
    """Where in a session something went wrong."""

    START = "starting the worker"
    CONNECT = "connecting"
    HELLO = "comparing session and parameters"
    KEYS = "exchanging pair keys"
    COMPUTE = "computing"
    PROOF = "checking a proof"
    FINISH = "finishing"


class MpcError(Blamed):
    """A session failed. Says at which stage and, where one is to blame, because of which party (0, 1, 2)."""

    def __init__(self, stage: Stage, message: str, *, party: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint, party=party)
        self.stage = stage

    def encode(self) -> bytes:
        """For the way from a worker to its daemon."""
        party = PARTIES if self.party is None else self.party
        return Writer().text(self.stage.name).uint(party, 1).text(str(self)).text(self.hint).done()

    @classmethod
    def decode(cls, data: bytes) -> MpcError:
        """The reverse of `encode`."""
        reader = Reader(data)
        try:
            stage = Stage[reader.text()]
        except KeyError:
            raise ProtocolError("unknown stage of an MPC session") from None
        party = reader.uint(1)
        error = cls(stage, reader.text(), party=None if party == PARTIES else party, hint=reader.text())
        reader.finish()
        return error


def name_of(party: int) -> str:
    """Helpers are numbered from one wherever a person reads it."""
    return f"helper {party + 1}"


@dataclass(slots=True)
class Progress:
    """Where a session stands and for whom it waits, so that a deadline can say so."""

    stage: Stage = Stage.CONNECT
    waiting: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    def enter(self, stage: Stage, waiting: Iterable[int]) -> None:
        """A stage begins; it ends when nobody is waited for."""
        self.stage = stage
        self.waiting = set(waiting)

    def remark(self, text: str) -> None:
        """Something that may explain a failure later. Strangers can cause these, so only the first few are kept."""
        if text not in self.remarks and len(self.remarks) < 4:
            self.remarks.append(text)

    def too_late(self, seconds: float) -> MpcError:
        """The error for a deadline that passed now."""
        blamed = sorted(self.waiting)
        names = " and ".join(map(name_of, blamed)) or "this helper"
        remarks = f" ({'; '.join(self.remarks)})" if self.remarks else ""
        message = f"{names} did not answer within {seconds:g} s while {self.stage.value}{remarks}"
        return MpcError(self.stage, message, party=blamed[0] if len(blamed) == 1 else None)


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach a party's worker, and the certificate (DER) it must show."""

    host: str
    port: int
    certificate: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.host or not (0 < self.port < 65536):
            raise ProtocolError(f"{self.host!r}:{self.port} is no address of a worker")


@dataclass(frozen=True, slots=True)
class MpcSession:
    """What all three parties must agree on before any key is exchanged, and this party's place in it.

    `attempt_id` covers query, number and accepted reports; `parameters` is the encoding of whatever else must be
    equal (mode, scale); the field, the number of buckets and the engine's version are added here. `seconds` bounds
    the whole session, from the first connection to the last byte. `steps` has, for a program that announces its
    messages, the size of what each peer sends in each step.
    """

    party: int
    attempt_id: bytes
    parameters: bytes
    buckets: int
    seconds: float
    steps: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.party < PARTIES):
            raise ProtocolError(f"a party is 0, 1 or 2, not {self.party}")
        if not all(size <= MAX_STEP for sizes in self.steps.values() for size in sizes.values()):
            raise ProtocolError(f"a step has at most {MAX_STEP} bytes")
        if len(self.attempt_id) != DIGEST_SIZE:
            raise ProtocolError(f"an attempt id has {DIGEST_SIZE} bytes, not {len(self.attempt_id)}")
        if not (0 < self.buckets <= MAX_NUMBERS):
            raise ProtocolError(f"a session has 1 to {MAX_NUMBERS} numbers, not {self.buckets}")
        if not (0 < self.seconds <= 86400):
            raise ProtocolError(f"a session lasts at most a day, not {self.seconds} seconds")

    @property
    def parameter_digest(self) -> bytes:
        """Compared in the handshake: MPyC gives silently wrong results when two parties use different fields.

        The width of Python's hash is in it because MPyC labels messages with hashes of tuples.
        """
        ours = Writer().text(PROTOCOL_NAME).uint(P, 8).uint(self.buckets, 4)
        ours.text(_mpyc_version()).uint(sys.hash_info.width, 2)
        return tagged_hash("mpc parameters", ours.done(), self.parameters)

    @property
    def peers(self) -> tuple[int, ...]:
        """The two other parties."""
        return tuple(party for party in range(PARTIES) if party != self.party)


@cache
def _mpyc_version() -> str:
    """Looked up once: it means reading a file."""
    return metadata.version("mpyc")
