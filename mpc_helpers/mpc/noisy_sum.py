"""The one program the three helpers run together: add noise to a shared sum, and keep the result shared.

Every party brings its Shamir share of the sum and leaves with its Shamir share of sum + noise. Nothing is ever opened
among the helpers; the querier does that, from all three shares, checked.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.noise import JointNoise, Judge, alone
from mpc_helpers.mpc.pace import paced
from mpc_helpers.mpc.session import DIGEST_SIZE, MpcError, Stage, name_of
from protocol.errors import ProtocolError
from protocol.field import Vector, from_integers
from protocol.shares import LACKING, PARTIES, to_shamir
from protocol.wire import tagged_hash

if TYPE_CHECKING:
    from mpc_helpers.mpc.runtime import Engine, Program

Entropy = Callable[[int], bytes]
NONCE_SIZE = 32


class NoiseSource(Protocol):
    """Where noise comes from. A test may pass one that records; nothing that can be configured does."""

    def local(self, rate: Fraction, buckets: int) -> list[int]:
        """This helper's Pólya(½) differences."""
        ...

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        """A pair's discrete Laplace vector, a function of the key."""
        ...

    async def joint(self, engine: Engine, layout: Layout) -> dict[int, Vector]:
        """The two components of the joint noise that this helper holds, by the party that lacks each."""
        ...


class ExactNoise:
    """The noise of `mpc_helpers.mpc.noise`: system randomness for local, the key's coins for pairwise.

    `judge` runs this helper's check of another's proof in joint.
    """

    def __init__(self, judge: Judge = alone) -> None:
        self._judge = judge

    def local(self, rate: Fraction, buckets: int) -> list[int]:
        """See `NoiseSource`."""
        return noise.draw_local(rate, buckets, noise.system_coins())

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        """See `NoiseSource`."""
        return noise.draw_laplace(rate, buckets, noise.keyed_coins(key))

    async def joint(self, engine: Engine, layout: Layout) -> dict[int, Vector]:
        """See `NoiseSource`."""
        return await JointNoise(engine, layout, self._judge).draw()


def local_sum(share: Sequence[int], drawn: Sequence[int]) -> Program[list[int]]:
    """Mode `local`. `drawn` is this helper's own noise, drawn for this attempt and used for no other.

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
    share: Sequence[int], rate: Fraction, source: NoiseSource, *, seconds: float = 0.0, entropy: Entropy = os.urandom
) -> Program[list[int]]:
    """Mode `pairwise`. Each pair's vector is a replicated component, turned into Shamir shares as those of reports.

    A helper that deviates from its pairs' noise hands out a share that is off the line, and the querier notices.
    Drawing is given `seconds`, whatever it takes.
    """

    async def program(engine: Engine) -> list[int]:
        nonce = await joint_nonce(engine, entropy)
        components = {}
        async with paced(seconds):
            for lacking in engine.session.peers:
                vector = source.pairwise(rate, engine.session.buckets, pair_noise_key(engine, lacking, nonce))
                components[lacking] = from_integers(vector)
        return await _with_noise(engine, share, components)

    return program


def joint_sum(share: Sequence[int], layout: Layout, source: NoiseSource) -> Program[list[int]]:
    """Mode `joint`. The three draw one discrete Laplace vector together, and prove to each other that they did.

    Not paced: what is computed, and how much is sent, does not depend on the noise.
    """

    async def program(engine: Engine) -> list[int]:
        return await _with_noise(engine, share, await source.joint(engine, layout))

    return program


async def _with_noise(engine: Engine, share: Sequence[int], components: dict[int, Vector]) -> list[int]:
    """Sum and noise, where the noise is replicated: a component for each party that lacks it."""
    named = {LACKING[lacking]: component for lacking, component in components.items()}
    noise_share = [int(value) for value in to_shamir(engine.party, named).tolist()]
    return await engine.shares(engine.vector(share) + engine.vector(noise_share))


def debug_sum(share: Sequence[int]) -> Program[list[int]]:
    """No noise at all. The caller has made sure that every report in the sum is a debug report."""

    async def program(engine: Engine) -> list[int]:
        return await engine.shares(engine.vector(share))

    return program


def pair_noise_key(engine: Engine, lacking: int, nonce: bytes) -> bytes:
    """The key of the noise that the two helpers other than `lacking` share, bound to all that may not vary."""
    session = engine.session
    bound = (session.attempt_id, session.parameter_digest, nonce, bytes([lacking]))
    return tagged_hash("pairwise noise", engine.pair_key(lacking), *bound)


async def joint_nonce(engine: Engine, entropy: Entropy = os.urandom) -> bytes:
    """A nonce no party could choose: all commit, then all open, and all pair keys are fixed before the first commits.

    One party alone picks two of MPyC's three pair keys; without this it tries keys until it likes the noise. The
    openings repeat what was seen of the commitments: a party that tells its peers different nonces would have them
    derive different noise on the same data, which is two looks at it.
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
        raise ProtocolError("an opening has a nonce and a digest")
    if not hmac.compare_digest(_commitment(engine, party, nonce), commitment):
        raise MpcError(Stage.COMPUTE, f"{name_of(party)} opened a nonce it had not committed to", party=party)
    if not hmac.compare_digest(theirs, seen):
        message = f"{name_of(party)} has seen other commitments than we have: one of the three told different stories"
        raise MpcError(Stage.COMPUTE, message)
