"""One MPC session: who takes part, what it is bound to, its deadline, and how it can fail.

Nothing here touches MPyC, so that a daemon can set up a session and decode its failure without importing the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import metadata

from protocol.errors import ErrorKind, HelperError, ProtocolError
from protocol.field import P
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE, Reader, Writer, tagged_hash

DIGEST_SIZE = HASH_SIZE
# As many as an answer has: the buckets, and the side query.
MAX_NUMBERS = MAX_BUCKETS + 1
# Also the version of the messages between parties: a change to either must change this.
PROTOCOL_NAME = "trefoil-mpc/2"
MAX_STEP_SIZE = 2**25


class Stage(Enum):
    """Where in a session something went wrong, and the usual kind of error there."""

    START = "starting the worker", ErrorKind.UNAVAILABLE
    PORT = "reaching a worker's port", ErrorKind.UNREACHABLE
    CONNECT = "connecting", ErrorKind.UNREACHABLE
    HELLO = "comparing session and parameters", ErrorKind.INCONSISTENT
    KEYS = "exchanging pair keys", ErrorKind.MALFORMED
    COMPUTE = "computing", ErrorKind.ABORTED
    PROOF = "checking a proof", ErrorKind.BAD_PROOF
    FINISH = "finishing", ErrorKind.ABORTED

    def __init__(self, text: str, kind: ErrorKind) -> None:
        self.text = text
        self.kind = kind


class MpcError(HelperError):
    """A failed session: at which stage and, where one is to blame, because of which party (0, 1, 2)."""

    def __init__(
        self, stage: Stage, message: str, *, party: int | None = None, hint: str = "", kind: ErrorKind | None = None
    ) -> None:
        super().__init__(message, hint, party=party, kind=kind or stage.kind)
        self.stage = stage

    def encode(self) -> bytes:
        """Encode the error for a worker to send to its daemon. `decode` derives the kind from the stage."""
        party = PARTIES if self.party is None else self.party
        return Writer().text(self.stage.name).uint(party, 1).text(str(self)).text(self.hint).done()

    @classmethod
    def decode(cls, data: bytes) -> MpcError:
        reader = Reader(data)
        try:
            stage = Stage[reader.text()]
        except KeyError:
            raise ProtocolError("unknown stage of an MPC session", kind=ErrorKind.UNKNOWN_NAME) from None
        party = reader.uint(1)
        error = cls(stage, reader.text(), party=None if party == PARTIES else party, hint=reader.text())
        reader.finish()
        return error


def name_of(party: int) -> str:
    return f"helper {party + 1}"


@dataclass(slots=True)
class Progress:
    """The stage of a session and the peers it waits for, so that a timeout can name them."""

    stage: Stage = Stage.CONNECT
    waiting: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    def enter(self, stage: Stage, waiting: Iterable[int]) -> None:
        self.stage = stage
        self.waiting = set(waiting)

    def remark(self, text: str) -> None:
        """Keep a remark that may explain a failure later. Strangers can cause these, so only the first few are kept."""
        if text not in self.remarks and len(self.remarks) < 4:
            self.remarks.append(text)

    def timed_out(self, seconds: float) -> MpcError:
        blamed = sorted(self.waiting)
        names = " and ".join(map(name_of, blamed)) or "this helper"
        remarks = f" ({'; '.join(self.remarks)})" if self.remarks else ""
        message = f"{names} did not answer within {seconds:g} s while {self.stage.text}{remarks}"
        # While computing, an honest peer may be waiting for the third: its silence is no evidence against it.
        if self.stage is Stage.COMPUTE and blamed:
            return MpcError(self.stage, f"{message}; or waits for one that does not", kind=ErrorKind.TIMEOUT)
        party = blamed[0] if len(blamed) == 1 else None
        return MpcError(self.stage, message, party=party, kind=ErrorKind.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a party's worker, and the certificate (DER) it must present."""

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
    the whole session, from the first connection to the last byte. `message_sizes` has the size of each
    message that a peer sends beside MPyC's own, by peer and step.
    """

    party: int
    attempt_id: bytes
    parameters: bytes
    buckets: int
    seconds: float
    message_sizes: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.party < PARTIES):
            raise ProtocolError(f"a party is 0, 1 or 2, not {self.party}", kind=ErrorKind.OUT_OF_RANGE)
        if not all(size <= MAX_STEP_SIZE for sizes in self.message_sizes.values() for size in sizes.values()):
            raise ProtocolError(f"a step has at most {MAX_STEP_SIZE} bytes", kind=ErrorKind.TOO_LARGE)
        if len(self.attempt_id) != DIGEST_SIZE:
            raise ProtocolError(f"an attempt id has {DIGEST_SIZE} bytes, not {len(self.attempt_id)}")
        if not (0 < self.buckets <= MAX_NUMBERS):
            message = f"a session has 1 to {MAX_NUMBERS} numbers, not {self.buckets}"
            raise ProtocolError(message, kind=ErrorKind.OUT_OF_RANGE)
        if not (0 < self.seconds <= 86400):
            message = f"a session lasts at most a day, not {self.seconds} seconds"
            raise ProtocolError(message, kind=ErrorKind.OUT_OF_RANGE)

    @property
    def parameter_digest(self) -> bytes:
        """Hash compared in the handshake: MPyC returns silently wrong results if two parties use different fields.

        The width of Python's hash is in it because MPyC labels messages with hashes of tuples.
        """
        ours = Writer().text(PROTOCOL_NAME).uint(P, 8).uint(self.buckets, 4)
        ours.text(_mpyc_version()).uint(sys.hash_info.width, 2)
        return tagged_hash("mpc parameters", ours.done(), self.parameters)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(party for party in range(PARTIES) if party != self.party)


@cache
def _mpyc_version() -> str:
    """Return MPyC's version; cached, as it is read from a file."""
    return metadata.version("mpyc")
