"""A noisy sum: its public terms, the program of each kind of noise, and the computation that the three helpers run.

Every party enters with its Shamir share of the sum and leaves with its Shamir share of sum + noise. Nothing is opened
among the helpers; the querier opens, and checks, all three shares.

Each kind of noise has one `NoiseProgram`, a record of functions with everything a helper needs for it. `SumTerms` is
what the rest of a helper sees. Nothing here imports MPyC, so that a daemon can reject a query that is too expensive
before anything is reserved.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, assert_never

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.noise import JointNoise, Judge, alone
from mpc_helpers.mpc.session import DIGEST_SIZE, MpcError, MpcSession, Stage, name_of
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import Vector, from_integers
from protocol.joint_scale import JointScale
from protocol.noise import NoiseMode
from protocol.query import Query
from protocol.shares import LACKING, PARTIES, to_shamir
from protocol.wire import Reader, Writer, tagged_hash

if TYPE_CHECKING:
    from mpc_helpers.mpc.runtime import Engine, Program

Entropy = Callable[[int], bytes]
NONCE_SIZE = 32


class ExactNoise:
    """The noise of `mpc_helpers.mpc.noise`. Tests may pass a subclass that records; no configuration can.

    `judge` runs this helper's check of another's proof in joint.
    """

    def __init__(self, judge: Judge = alone) -> None:
        self._judge = judge

    def local(self, rate: Fraction, buckets: int) -> list[int]:
        """Return this helper's Pólya(½) differences, from the system's randomness."""
        return noise.draw_local(rate, buckets, noise.system_coins())

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        """Return a pair's discrete Laplace vector, a function of the key."""
        return noise.draw_laplace(rate, buckets, noise.keyed_coins(key))

    async def joint(self, engine: Engine, layout: Layout) -> dict[int, Vector]:
        """Return the two components of the joint noise that this helper holds, by the party that lacks each."""
        return await JointNoise(engine, layout, self._judge).draw()


def local_sum(share: Sequence[int], drawn: Sequence[int]) -> Program[list[int]]:
    """Return the program of mode `local`. `drawn` is this helper's own noise, used for this attempt only.

    Any two helpers' parts make exactly DLap(b), so the noise is whole as long as one other helper is honest; all
    three are required, as with one missing and one corrupt half of it would be known.
    """

    async def program(engine: Engine) -> list[int]:
        total = engine.vector(share)
        for dealt in engine.deal(drawn):
            total = total + dealt
        return await engine.shares(total)

    return program


def pairwise_sum(
    share: Sequence[int], rate: Fraction, source: ExactNoise, *, seconds: float = 0.0, entropy: Entropy = os.urandom
) -> Program[list[int]]:
    """Return the program of mode `pairwise`, in which each pair's vector is a replicated component, as in reports.

    A helper that deviates from its pairs' noise releases a share that is off the line, and the querier notices.
    Drawing is padded to `seconds`.
    """

    async def program(engine: Engine) -> list[int]:
        nonce = await joint_nonce(engine, entropy)
        components = {}
        async with padded(seconds):
            for lacking in engine.session.peers:
                vector = source.pairwise(rate, engine.session.buckets, pair_noise_key(engine, lacking, nonce))
                components[lacking] = from_integers(vector)
        return await _with_noise(engine, share, components)

    return program


def joint_sum(share: Sequence[int], layout: Layout, source: ExactNoise) -> Program[list[int]]:
    """Return the program of mode `joint`, in which the three draw one vector together and prove that they did.

    Not padded: what is computed, and how much is sent, does not depend on the noise.
    """

    async def program(engine: Engine) -> list[int]:
        return await _with_noise(engine, share, await source.joint(engine, layout))

    return program


@contextlib.asynccontextmanager
async def padded(seconds: float) -> AsyncIterator[None]:
    """Pad the time that the block takes to a whole multiple of `seconds`, nearly always to one.

    If the block overruns, an observer learns only the number of intervals.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    yield
    if seconds > 0:
        taken = loop.time() - start
        await asyncio.sleep(seconds * max(1, math.ceil(taken / seconds)) - taken)


async def _with_noise(engine: Engine, share: Sequence[int], components: dict[int, Vector]) -> list[int]:
    """Return shares of sum + noise, where the noise is replicated: a component for each party that lacks it."""
    named = {LACKING[lacking]: component for lacking, component in components.items()}
    noise_share = [int(value) for value in to_shamir(engine.party, named).tolist()]
    return await engine.shares(engine.vector(share) + engine.vector(noise_share))


def debug_sum(share: Sequence[int]) -> Program[list[int]]:
    """Return the program without noise. Every report in the sum must be a debug report."""

    async def program(engine: Engine) -> list[int]:
        return await engine.shares(engine.vector(share))

    return program


def pair_noise_key(engine: Engine, lacking: int, nonce: bytes) -> bytes:
    """Return the noise key of the two helpers other than `lacking`, bound to everything that may not vary."""
    session = engine.session
    bound = (session.attempt_id, session.parameter_digest, nonce, bytes([lacking]))
    return tagged_hash("pairwise noise", engine.pair_key(lacking), *bound)


async def joint_nonce(engine: Engine, entropy: Entropy = os.urandom) -> bytes:
    """Return a nonce that no party could choose: all commit, then all open, and all pair keys are fixed before.

    One party alone picks two of MPyC's three pair keys; without this it could try keys until it likes the noise. The
    openings repeat a hash of all commitments: a party that equivocates about its nonce would have its peers derive
    different noise for the same data, which is two looks at it.
    """
    mine = entropy(NONCE_SIZE)
    commitments = await engine.exchange(_commitment(engine, engine.party, mine))
    seen = tagged_hash("noise nonce: commitments", *commitments)
    openings = await engine.exchange(mine + seen)
    for party in range(PARTIES):
        _check_opening(engine, party, commitments[party], openings[party], seen)
    return tagged_hash("noise nonce: joint", *(opening[:NONCE_SIZE] for opening in openings))


def _commitment(engine: Engine, party: int, nonce: bytes) -> bytes:
    return tagged_hash("noise nonce: commitment", engine.session.attempt_id, bytes([party]), nonce)


def _check_opening(engine: Engine, party: int, commitment: bytes, opening: bytes, seen: bytes) -> None:
    nonce, theirs = opening[:NONCE_SIZE], opening[NONCE_SIZE:]
    if len(theirs) != DIGEST_SIZE:
        raise ProtocolError("an opening has a nonce and a digest", kind=ErrorKind.MALFORMED)
    if not hmac.compare_digest(_commitment(engine, party, nonce), commitment):
        message = f"{name_of(party)} opened a nonce it had not committed to"
        raise MpcError(Stage.COMPUTE, message, party=party, kind=ErrorKind.BAD_PROOF)
    if not hmac.compare_digest(theirs, seen):
        message = f"{name_of(party)} received other commitments than we did: one of the three equivocates"
        raise MpcError(Stage.COMPUTE, message, kind=ErrorKind.INCONSISTENT)


# In pairwise a helper knows two of the three pairs' vectors before it votes, so it could abort until it likes them.
PAIRWISE_DRAWS = 3


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
        """Return the terms of a query. Only a debug query has no noise, and it admits none but debug reports."""
        kind = SumKind.DEBUG if query.debug else SumKind.of(query.noise)
        return cls(kind, query.gamma, query.sensitivity + query.kappa, query.length)

    @property
    def scale(self) -> JointScale:
        return JointScale.of(self.rate, self.change)

    @property
    def layout(self) -> Layout:
        return Layout(circuit.build(self.scale), self.buckets)

    def check_cost(self) -> None:
        """Raise `TrefoilError` if the noise cannot be drawn. Run before anything is reserved."""
        self.kind.program.check_cost(self)

    @property
    def allowance(self) -> float:
        """Upper bound in seconds on the time that drawing takes, by public numbers alone."""
        return self.kind.program.allowance(self)

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
        """Hash of `parameters`, which helpers compare when they propose an attempt, before anything is reserved."""
        return tagged_hash("attempt parameters", self.parameters)

    def session(self, party: int, attempt_id: bytes, seconds: float) -> MpcSession:
        sizes = self.kind.program.message_sizes(self, party)
        return MpcSession(party, attempt_id, self.parameters, self.buckets, seconds, sizes)

    def write(self, writer: Writer) -> None:
        writer.text(self.kind.value).uint(self.rate.numerator, 16).uint(self.rate.denominator, 16)
        writer.uint(self.change, 8).uint(self.buckets, 4)

    @classmethod
    def read(cls, reader: Reader) -> SumTerms:
        kind, rate = SumKind(reader.text()), Fraction(reader.uint(16), reader.uint(16))
        return cls(kind, rate, reader.uint(8), reader.uint(4))


# The time bound of local and pairwise noise, by the number of buckets alone. Operations are as many whatever is drawn
# (`mpc_helpers.mpc.noise`), but a processor divides some numbers faster than others, and an event of
# probability below 2^−40 draws again. Padding, by `noisy_sum.padded`, hides both from a peer that sees when this helper
# is ready. A 3 GHz core takes 1 ms and 20 µs a bucket.
DRAWING_SECONDS, BUCKET_SECONDS = 20e-3, 200e-6


@dataclass(frozen=True, slots=True)
class PartyInput:
    """One party's input to the program of a sum: its share, and where its noise comes from.

    `predrawn` is what the kind's `predraw` returned. If `padded`, drawing in the session is padded to the time bound.
    """

    terms: SumTerms
    share: Sequence[int] = field(repr=False)
    source: ExactNoise
    predrawn: Sequence[int] = field(default=(), repr=False)
    padded: bool = True


def _agree_on_rate(terms: SumTerms) -> bytes:
    return Writer().text(f"{terms.rate.numerator}/{terms.rate.denominator}").done()


def _agree_on_sampler(terms: SumTerms) -> bytes:
    """Name the sampler beside the rate: two releases that derive other noise from one key notice before any key."""
    return Writer().text(f"{terms.rate.numerator}/{terms.rate.denominator}").uint(noise.SAMPLER, 1).done()


@dataclass(frozen=True, slots=True)
class NoiseProgram:
    """Everything a helper needs to add one kind of noise, as functions of the public terms."""

    # Raise a TrefoilError for what cannot be drawn.
    check_cost: Callable[[SumTerms], None]
    # Upper bound in seconds on drawing, by public numbers alone.
    allowance: Callable[[SumTerms], float]
    # Build one party's part of the computation.
    build: Callable[[PartyInput], Program[list[int]]]
    # Draw, before the session begins, what depends on no other party; None if nothing does.
    predraw: Callable[[SumTerms, ExactNoise], list[int]] | None = None
    # What the three must agree on about the scale: the same bytes in proposal and greeting (SPEC §8).
    agreed: Callable[[SumTerms], bytes] = _agree_on_rate
    # For each peer, the size of each message that it sends beside MPyC's own.
    message_sizes: Callable[[SumTerms, int], Mapping[int, Mapping[int, int]]] = lambda _terms, _party: {}
    # In how many draws of such noise a report may be: a limit where seeing a draw before voting is worth anything.
    most_draws: int | None = None
    # Whether helpers prove to each other what they drew: an alarm counts proofs that failed, and disables the mode.
    proves: bool = False


def _check_drawing(terms: SumTerms) -> None:
    noise.check_cost(terms.buckets, terms.rate)


def _drawing_bound(terms: SumTerms) -> float:
    return DRAWING_SECONDS + terms.buckets * BUCKET_SECONDS


def _local(party: PartyInput) -> Program[list[int]]:
    return local_sum(party.share, party.predrawn)


def _pairwise(party: PartyInput) -> Program[list[int]]:
    seconds = party.terms.allowance if party.padded else 0.0
    return pairwise_sum(party.share, party.terms.rate, party.source, seconds=seconds)


# Every helper adds its own Pólya differences. It chooses them anyway, and knows nothing of the others'.
_LOCAL = NoiseProgram(
    check_cost=_check_drawing,
    allowance=_drawing_bound,
    build=_local,
    predraw=lambda terms, source: source.local(terms.rate, terms.buckets),
)
# Every pair adds a discrete Laplace vector that both derive from a key of theirs.
_PAIRWISE = NoiseProgram(
    check_cost=_check_drawing,
    allowance=_drawing_bound,
    build=_pairwise,
    agreed=_agree_on_sampler,
    most_draws=PAIRWISE_DRAWS,
)
# The three draw one discrete Laplace vector together; none of them learns anything about it. They agree on every coin,
# so that two releases which round differently notice before a key is sent.
_JOINT = NoiseProgram(
    check_cost=lambda terms: circuit.check_size(terms.scale, terms.buckets),
    allowance=lambda terms: terms.layout.allowance,
    build=lambda party: joint_sum(party.share, party.terms.layout, party.source),
    agreed=lambda terms: terms.scale.encode(),
    message_sizes=lambda terms, party: terms.layout.message_sizes(party),
    proves=True,
)
# No noise.
_DEBUG = NoiseProgram(check_cost=lambda _: None, allowance=lambda _: 0.0, build=lambda party: debug_sum(party.share))


class SumKind(Enum):
    """What is added to the sum, by the name of its noise mode.

    The last is for debug queries over debug reports only, and no `NoiseMode` names it.
    """

    LOCAL = "local"
    PAIRWISE = "pairwise"
    JOINT = "joint"
    DEBUG = "debug"

    @classmethod
    def of(cls, mode: NoiseMode) -> SumKind:
        """Return the kind of a query's noise mode: never the un-noised one."""
        return cls(mode.value)

    @property
    def program(self) -> NoiseProgram:
        """The program of this kind. A kind without one does not pass the type check."""
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
