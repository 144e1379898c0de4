"""The computation that the three helpers run together: add noise to a shared sum, and keep the result shared.

Every party enters with its Shamir share of the sum and leaves with its Shamir share of sum + noise. Nothing is opened
among the helpers; the querier opens, and checks, all three shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from mpc_helpers.mpc import noise
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.joint.noise import JointNoise, Judge, alone
from mpc_helpers.mpc.session import DIGEST_SIZE, MpcError, Stage, name_of
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import Vector, from_integers
from protocol.shares import LACKING, PARTIES, to_shamir
from protocol.wire import tagged_hash

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
