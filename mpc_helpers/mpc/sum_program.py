"""The program of each noise mode: everything that helpers must know to add such noise to a sum.

What takes MPyC is imported only where a program is made, so that a daemon can refuse what would take too long before
anything is spent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Protocol, assert_never

from mpc_helpers.mpc import noise, pace
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout
from protocol.joint_scale import JointScale
from protocol.noise_mode import NoiseMode
from protocol.wire import Writer

if TYPE_CHECKING:
    from mpc_helpers.mpc.noisy_sum import NoiseSource
    from mpc_helpers.mpc.runtime import Program

# In pairwise a helper knows two of three pairs' vectors before it votes: so often it may give up and see others.
PAIRWISE_DRAWS = 3


class PublicTerms(Protocol):
    """What a program is told of a sum (`terms.SumTerms`)."""

    @property
    def rate(self) -> Fraction:
        """γ = ε/Δ."""
        ...

    @property
    def buckets(self) -> int:
        """How many numbers."""
        ...

    @property
    def scale(self) -> JointScale:
        """Of joint noise."""
        ...

    @property
    def layout(self) -> Layout:
        """Of joint noise."""
        ...


class SumProgram(ABC):
    """What one kind of noise takes. All of it follows from public terms."""

    # In how many draws of such noise a report may be: a limit where seeing a draw before voting is worth anything.
    most_draws: ClassVar[int | None] = None
    # Whether something is drawn before the session begins.
    ahead: ClassVar[bool] = False
    # Whether helpers prove to each other what they drew: an alarm counts proofs that failed, and ends the mode.
    proves: ClassVar[bool] = False

    @abstractmethod
    def check_cost(self, terms: PublicTerms) -> None:
        """Refuse, as a TrefoilError, what cannot be drawn or would take minutes. Run before anything is spent."""

    @abstractmethod
    def allowance(self, terms: PublicTerms) -> float:
        """Seconds that drawing is given, by public numbers alone."""

    @abstractmethod
    def program(
        self, terms: PublicTerms, share: Sequence[int], drawn: Sequence[int], source: NoiseSource, *, paced: bool
    ) -> Program[list[int]]:
        """One party's part. `drawn` is what `draw_ahead` gave; unless `paced`, drawing takes what it takes."""

    def draw_ahead(self, terms: PublicTerms, source: NoiseSource) -> list[int]:  # noqa: ARG002 - most need the others
        """What needs nothing from anybody, if `ahead`: it is drawn while the daemons still talk."""
        return []

    def agreed(self, terms: PublicTerms) -> bytes:
        """What the three must agree on about the scale: the same bytes in proposal and greeting (SPEC §8)."""
        return Writer().text(f"{terms.rate.numerator}/{terms.rate.denominator}").done()

    def steps(self, terms: PublicTerms, party: int) -> Mapping[int, Mapping[int, int]]:  # noqa: ARG002 - most announce nothing
        """Messages whose sizes are announced before the session."""
        return {}


class LocalSum(SumProgram):
    """Every helper adds its own Pólya differences. It chooses them anyway, and knows nothing of the others'."""

    ahead = True

    def check_cost(self, terms: PublicTerms) -> None:
        """See `SumProgram`."""
        noise.check_cost(terms.buckets, terms.rate)

    def allowance(self, terms: PublicTerms) -> float:
        """See `SumProgram`."""
        return pace.allowance(terms.buckets, terms.rate)

    def draw_ahead(self, terms: PublicTerms, source: NoiseSource) -> list[int]:
        """All of it."""
        return source.local(terms.rate, terms.buckets)

    def program(
        self,
        terms: PublicTerms,  # noqa: ARG002 - all that they say is in `drawn`
        share: Sequence[int],
        drawn: Sequence[int],
        source: NoiseSource,  # noqa: ARG002 - it was drawn ahead
        *,
        paced: bool,  # noqa: ARG002 - it was drawn ahead
    ) -> Program[list[int]]:
        """See `SumProgram`."""
        from mpc_helpers.mpc.noisy_sum import local_sum

        return local_sum(share, drawn)


class PairwiseSum(SumProgram):
    """Every pair adds a discrete Laplace vector that both derive from a key of theirs."""

    most_draws = PAIRWISE_DRAWS

    def check_cost(self, terms: PublicTerms) -> None:
        """See `SumProgram`."""
        noise.check_cost(terms.buckets, terms.rate)

    def allowance(self, terms: PublicTerms) -> float:
        """See `SumProgram`."""
        return pace.allowance(terms.buckets, terms.rate)

    def program(
        self,
        terms: PublicTerms,
        share: Sequence[int],
        drawn: Sequence[int],  # noqa: ARG002 - a pair draws together
        source: NoiseSource,
        *,
        paced: bool,
    ) -> Program[list[int]]:
        """See `SumProgram`."""
        from mpc_helpers.mpc.noisy_sum import pairwise_sum

        return pairwise_sum(share, terms.rate, source, seconds=self.allowance(terms) if paced else 0.0)


class JointSum(SumProgram):
    """The three draw one discrete Laplace vector together; nobody knows anything of it."""

    proves = True

    def check_cost(self, terms: PublicTerms) -> None:
        """See `SumProgram`."""
        circuit.check_size(terms.scale, terms.buckets)

    def allowance(self, terms: PublicTerms) -> float:
        """See `SumProgram`."""
        return terms.layout.allowance

    def agreed(self, terms: PublicTerms) -> bytes:
        """Every coin, so that two releases which round differently notice before a key is sent."""
        return terms.scale.encode()

    def steps(self, terms: PublicTerms, party: int) -> Mapping[int, Mapping[int, int]]:
        """See `SumProgram`."""
        return terms.layout.steps(party)

    def program(
        self,
        terms: PublicTerms,
        share: Sequence[int],
        drawn: Sequence[int],  # noqa: ARG002 - the three draw together
        source: NoiseSource,
        *,
        paced: bool,  # noqa: ARG002 - what is computed does not depend on the noise
    ) -> Program[list[int]]:
        """See `SumProgram`."""
        from mpc_helpers.mpc.noisy_sum import joint_sum

        return joint_sum(share, terms.layout, source)


class DebugSum(SumProgram):
    """No noise."""

    def check_cost(self, terms: PublicTerms) -> None:
        """It has none."""

    def allowance(self, terms: PublicTerms) -> float:  # noqa: ARG002 - nothing is drawn
        """None."""
        return 0.0

    def program(
        self,
        terms: PublicTerms,  # noqa: ARG002
        share: Sequence[int],
        drawn: Sequence[int],  # noqa: ARG002
        source: NoiseSource,  # noqa: ARG002
        *,
        paced: bool,  # noqa: ARG002
    ) -> Program[list[int]]:
        """See `SumProgram`."""
        from mpc_helpers.mpc.noisy_sum import debug_sum

        return debug_sum(share)


_LOCAL, _PAIRWISE, _JOINT, _DEBUG = LocalSum(), PairwiseSum(), JointSum(), DebugSum()


class SumKind(Enum):
    """What is added to the sum, by the word of its noise mode.

    The last is for debug queries over debug reports only, and no `NoiseMode` names it.
    """

    LOCAL = "local"
    PAIRWISE = "pairwise"
    JOINT = "joint"
    DEBUG = "debug"

    @classmethod
    def of(cls, mode: NoiseMode) -> SumKind:
        """The program of a query's noise mode: never the un-noised one."""
        return cls(mode.value)

    @property
    def program(self) -> SumProgram:
        """Of this kind. One without a program does not pass the type check."""
        match self:
            case SumKind.LOCAL:
                return _LOCAL
            case SumKind.PAIRWISE:
                return _PAIRWISE
            case SumKind.JOINT:
                return _JOINT
            case SumKind.DEBUG:
                return _DEBUG
            case _:
                assert_never(self)


if {mode.value for mode in NoiseMode} != {kind.value for kind in SumKind} - {SumKind.DEBUG.value}:
    raise AssertionError("SumKind has one member for every noise mode, and one for debug")
