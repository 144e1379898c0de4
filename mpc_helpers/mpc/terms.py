"""What is added to a sum: the kind of noise, its scale, what it costs, and what the three must agree on about it.

Nothing here touches MPyC, so that a daemon can refuse what would take too long before anything is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.session import MpcSession
from mpc_helpers.mpc.sum_program import SumKind as SumKind
from protocol.joint_scale import JointScale
from protocol.query import Query
from protocol.wire import Reader, Writer, tagged_hash


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
        self.kind.program.check_cost(self)

    @property
    def allowance(self) -> float:
        """Seconds that drawing is given, by public numbers alone."""
        return self.kind.program.allowance(self)

    @property
    def draws_ahead(self) -> bool:
        """Whether noise is drawn before the session begins."""
        return self.kind.program.ahead

    @property
    def most_draws(self) -> int | None:
        """In how many draws of such noise a report may be; None where there is no limit."""
        return self.kind.program.most_draws

    @property
    def parameters(self) -> bytes:
        """What the three must agree on beside query and reports (SPEC §8, "noise").

        The same bytes are in the attempt's proposal and in the session's greeting.
        """
        return Writer().text(self.kind.value).blob(self.kind.program.agreed(self)).done()

    @property
    def digest(self) -> bytes:
        """As helpers compare it when they propose an attempt: before anything is reserved."""
        return tagged_hash("attempt parameters", self.parameters)

    def session(self, party: int, attempt_id: bytes, seconds: float) -> MpcSession:
        """A session in which such a sum is computed."""
        steps = self.kind.program.steps(self, party)
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
