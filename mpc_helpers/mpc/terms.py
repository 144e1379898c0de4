"""What is added to a sum: the kind of noise, its scale, what it costs, and what the three must agree on about it.

Nothing here touches MPyC, so that a daemon can refuse what would take too long before anything is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import assert_never

from mpc_helpers.mpc import noise, pace
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.session import MpcSession
from protocol.joint_scale import JointScale
from protocol.query import NoiseMode, Query
from protocol.wire import Reader, Writer, tagged_hash

# In pairwise a helper knows two of three pairs' vectors before it votes: so often it may give up and see others.
PAIRWISE_DRAWS = 3


class SumKind(Enum):
    """What is added to the sum. The last is for debug queries over debug reports only, and no `NoiseMode` names it."""

    LOCAL = "local"
    PAIRWISE = "pairwise"
    JOINT = "joint"
    DEBUG = "debug"

    @classmethod
    def of(cls, mode: NoiseMode) -> SumKind:
        """The program of a query's noise mode: never the un-noised one."""
        match mode:
            case NoiseMode.LOCAL:
                return cls.LOCAL
            case NoiseMode.PAIRWISE:
                return cls.PAIRWISE
            case NoiseMode.JOINT:
                return cls.JOINT
            case _:
                assert_never(mode)


@dataclass(frozen=True, slots=True)
class SumTerms:
    """Kind and scale of the noise in a sum of `buckets` numbers.

    `rate` is γ = ε/Δ. `change` is what one report can change the sum by: Δ + κ.
    """

    kind: SumKind
    rate: Fraction
    change: int
    buckets: int

    @classmethod
    def of(cls, query: Query) -> SumTerms:
        """Only a debug query is answered without noise, and it admits none but debug reports."""
        kind = SumKind.DEBUG if query.debug else SumKind.of(query.noise)
        return cls(kind, query.gamma, query.sensitivity + query.kappa, query.length)

    @property
    def scale(self) -> JointScale:
        """Of joint noise; `TrefoilError` where there is none."""
        return JointScale.of(self.rate, self.change)

    @property
    def layout(self) -> Layout:
        """Of joint noise."""
        return Layout(circuit.build(self.scale), self.buckets)

    def check_cost(self) -> None:
        """Refuse what cannot be drawn, or would take minutes. Run before anything is spent."""
        match self.kind:
            case SumKind.LOCAL | SumKind.PAIRWISE:
                noise.check_cost(self.buckets, self.rate)
            case SumKind.JOINT:
                circuit.check_size(self.scale, self.buckets)
            case SumKind.DEBUG:
                pass
            case _:
                assert_never(self.kind)

    @property
    def allowance(self) -> float:
        """Seconds that drawing is given, by public numbers alone."""
        match self.kind:
            case SumKind.LOCAL | SumKind.PAIRWISE:
                return pace.allowance(self.buckets, self.rate)
            case SumKind.JOINT:
                return self.layout.allowance
            case SumKind.DEBUG:
                return 0.0
            case _:
                assert_never(self.kind)

    @property
    def most_draws(self) -> int | None:
        """In how many draws of such noise a report may be: a limit where seeing a draw before voting is worth anything.

        In local a helper chooses its own part anyway and knows nothing of the others'; in joint nobody knows anything.
        """
        return PAIRWISE_DRAWS if self.kind is SumKind.PAIRWISE else None

    @property
    def parameters(self) -> bytes:
        """What the three must agree on beside query and reports (SPEC §8, "noise").

        The same bytes are in the attempt's proposal and in the session's greeting. For joint noise they name every
        coin, so that two releases which round differently notice before a key is sent.
        """
        if self.kind is SumKind.JOINT:
            scale = self.scale.encode()
        else:
            scale = Writer().text(f"{self.rate.numerator}/{self.rate.denominator}").done()
        return Writer().text(self.kind.value).blob(scale).done()

    @property
    def digest(self) -> bytes:
        """As helpers compare it when they propose an attempt: before anything is reserved."""
        return tagged_hash("attempt parameters", self.parameters)

    def session(self, party: int, attempt_id: bytes, seconds: float) -> MpcSession:
        """A session in which such a sum is computed."""
        steps = self.layout.steps(party) if self.kind is SumKind.JOINT else {}
        return MpcSession(party, attempt_id, self.parameters, self.buckets, seconds, steps)

    def write(self, writer: Writer) -> None:
        """For the way from a daemon to its worker."""
        writer.text(self.kind.value).uint(self.rate.numerator, 16).uint(self.rate.denominator, 16)
        writer.uint(self.change, 8).uint(self.buckets, 4)

    @classmethod
    def read(cls, reader: Reader) -> SumTerms:
        """The reverse of `write`."""
        kind, rate = SumKind(reader.text()), Fraction(reader.uint(16), reader.uint(16))
        return cls(kind, rate, reader.uint(8), reader.uint(4))
