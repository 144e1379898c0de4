"""The program of the three helpers: the answer minus the recorded noise is the plaintext sum, and nobody can steer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.identity.tls import TlsIdentity
from mpc_helpers.mpc import channel, noise
from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.joint.layout import Layout
from mpc_helpers.mpc.noisy_sum import (
    NONCE_SIZE,
    ExactNoise,
    SumKind,
    SumTerms,
    debug_sum,
    joint_nonce,
    joint_sum,
    local_sum,
    padded,
    pair_noise_key,
    pairwise_sum,
)
from mpc_helpers.mpc.runtime import Engine, Program, run_three_in_one_process
from mpc_helpers.mpc.session import MpcError, MpcSession, Stage
from mpc_helpers.mpc.worker import WorkerSetup
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import Vector, from_integers, lift
from protocol.noise import NoiseMode
from protocol.shape import MAX_BUCKETS, Shape
from protocol.shares import open_shamir, share, to_shamir
from protocol.wire import tagged_hash
from tests.support.commit_world import run

RATE = Fraction(1, 20)
Outcomes = list[list[int] | BaseException]
Run = Callable[[list[int]], Awaitable[tuple[list[int], list[int]]]]


class Recorder(ExactNoise):
    """The real noise, remembered: handed in by a test, reachable in no other way."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[bytes, list[int]] = {}

    def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
        vector = super().pairwise(rate, buckets, key)
        self.vectors[key] = vector
        return vector

    async def joint(self, engine: Engine, layout: Layout) -> dict[int, Vector]:
        components = await super().joint(engine, layout)
        for lacking, component in components.items():
            # Of the two parties that hold it, both must have the same.
            assert self.vectors.setdefault(bytes([lacking]), component.tolist()) == component.tolist()
        return components

    def total(self, buckets: int) -> list[int]:
        return [sum(vector[i] for vector in self.vectors.values()) for i in range(buckets)]


def shamir_shares(values: Sequence[int]) -> list[list[int]]:
    split = share(values)
    return [[int(v) for v in to_shamir(party, split.components(party)).tolist()] for party in range(3)]


def terms(kind: SumKind, buckets: int, rate: Fraction = RATE) -> SumTerms:
    return SumTerms(kind, rate, 20, buckets)


def sessions(kind: SumKind, buckets: int, digest: bytes = bytes(32)) -> list[MpcSession]:
    return [terms(kind, buckets).session(party, digest, 20.0) for party in range(3)]


def opened(outcomes: Outcomes) -> list[int]:
    shares = []
    for outcome in outcomes:
        assert isinstance(outcome, list), outcome
        shares.append(from_integers(outcome))
    return open_shamir(shares)


async def run_local(values: list[int]) -> tuple[list[int], list[int]]:
    """The answer and the noise that is in it."""
    drawn = [ExactNoise().local(RATE, len(values)) for _ in range(3)]
    programs = [local_sum(piece, own) for piece, own in zip(shamir_shares(values), drawn, strict=True)]
    outcomes = await run_three_in_one_process(sessions(SumKind.LOCAL, len(values)), programs)
    return opened(outcomes), [sum(column) for column in zip(*drawn, strict=True)]


async def run_pairwise(values: list[int]) -> tuple[list[int], list[int]]:
    """The answer and the noise that is in it; both of each pair must have derived the same, or it is recorded twice."""
    recorder = Recorder()
    programs = [pairwise_sum(piece, RATE, recorder) for piece in shamir_shares(values)]
    outcomes = await run_three_in_one_process(sessions(SumKind.PAIRWISE, len(values)), programs)
    assert len(recorder.vectors) == 3
    return opened(outcomes), recorder.total(len(values))


async def test_the_largest_histogram_has_room_for_its_side_query() -> None:
    """As many buckets as a report may have and the side query: a query that is accepted is also computed."""
    numbers = Shape(MAX_BUCKETS, kappa=1).length
    values, nothing = [3] * numbers, [0] * numbers
    WorkerSetup(0, TlsIdentity(Path("/a"), Path("/b")), terms(SumKind.LOCAL, numbers), Path("/alarm"))
    programs = [local_sum(piece, nothing) for piece in shamir_shares(values)]
    assert opened(await run_three_in_one_process(sessions(SumKind.LOCAL, numbers), programs)) == values


async def run_joint(values: list[int]) -> tuple[list[int], list[int]]:
    """The answer and the noise that is in it, as the three components determine it."""
    recorder, wanted = Recorder(), terms(SumKind.JOINT, len(values))
    programs = [joint_sum(piece, wanted.layout, recorder) for piece in shamir_shares(values)]
    outcomes = await run_three_in_one_process(sessions(SumKind.JOINT, len(values)), programs)
    assert len(recorder.vectors) == 3
    return opened(outcomes), lift(from_integers(recorder.total(len(values))))


@pytest.mark.parametrize("run", [run_local, run_pairwise, run_joint])
@pytest.mark.parametrize("buckets", [1, 2, 3, 17, 128, 1024])
async def test_answer_minus_noise_is_the_sum(run: Run, buckets: int) -> None:
    """Random sums of either sign, seeded by the number of buckets; equality is exact in every bucket."""
    values = [int(v) for v in np.random.default_rng(buckets).integers(-(2**45), 2**45, buckets)]
    answer, added = await run(values)
    assert [a - n for a, n in zip(answer, added, strict=True)] == values


async def test_a_debug_sum_has_no_noise() -> None:
    values = [5, -6, 0]
    programs = [debug_sum(piece) for piece in shamir_shares(values)]
    assert opened(await run_three_in_one_process(sessions(SumKind.DEBUG, 3), programs)) == values


def test_no_noise_mode_leads_to_the_debug_sum() -> None:
    assert {SumKind.of(mode) for mode in NoiseMode} == set(SumKind) - {SumKind.DEBUG}


@pytest.mark.parametrize("kind", [SumKind.LOCAL, SumKind.PAIRWISE, SumKind.JOINT])
async def test_kind_and_scale_are_compared_before_anything(kind: SumKind) -> None:
    """A helper that takes a real query for a debug one, and would add no noise, computes with nobody."""
    mixed = [
        terms(kind, 1).session(0, bytes(32), 5.0),
        terms(SumKind.DEBUG, 1).session(1, bytes(32), 5.0),
        terms(kind, 1, 2 * RATE).session(2, bytes(32), 5.0),
    ]
    for outcome in await run_three_in_one_process(mixed, [debug_sum([0])] * 3):
        assert isinstance(outcome, MpcError) and outcome.stage is Stage.HELLO


async def test_one_wrong_share_is_off_the_line() -> None:
    """A helper that leaves its pairs' noise out, or adds its own, is noticed by the querier."""
    programs: list[Program[list[int]]] = [pairwise_sum(piece, RATE, ExactNoise()) for piece in shamir_shares([1] * 40)]

    class Shifted(ExactNoise):
        def pairwise(self, rate: Fraction, buckets: int, key: bytes) -> list[int]:
            return [value + 1 for value in super().pairwise(rate, buckets, key)]

    programs[1] = pairwise_sum(shamir_shares([1] * 40)[1], RATE, Shifted())
    outcomes = await run_three_in_one_process(sessions(SumKind.PAIRWISE, 40), programs)
    with pytest.raises(ProtocolError, match="do not fit together"):
        opened(outcomes)


async def pair_keys(engine: Engine) -> list[bytes]:
    nonce = await joint_nonce(engine)
    return [nonce, *(b"" if k == engine.party else pair_noise_key(engine, k, nonce) for k in range(3))]


async def derived(intercept: Intercept | None = None, digest: bytes = bytes(32)) -> list[list[bytes] | BaseException]:
    return await run_three_in_one_process(sessions(SumKind.PAIRWISE, 1, digest), [pair_keys] * 3, intercept)


async def test_pairs_agree_and_differ_from_each_other() -> None:
    outcomes = await derived()
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    zero, one, two = (outcome for outcome in outcomes if isinstance(outcome, list))
    assert zero[0] == one[0] == two[0]
    assert zero[3] == one[3] and zero[2] == two[2] and one[1] == two[1]
    assert len({zero[3], zero[2], one[1]}) == 3


async def test_pairs_differ_even_when_one_party_gives_both_the_same_key() -> None:
    """Party 0 picks two of the three keys. If equal keys made equal noise, it could double one draw of its choice."""
    _, one, two = await derived(same_keys)
    assert isinstance(one, list) and isinstance(two, list)
    assert one[3] != two[2]


def same_keys(sender: int, receiver: int, frame: bytes) -> bytes:
    """A bad party 0 (and 1) sends the same well-chosen pair keys in every session."""
    return bytes([sender + 1]) * 16 if len(frame) == 16 else frame


async def test_the_nonce_binds_noise_after_the_keys_are_fixed() -> None:
    """Grinding: party 0 tries 1,000 keys against the nonce of an earlier session and sends the best. In MPyC alone
    the noise would be the one it chose; here the joint nonce is opened later, and the noise is another draw.
    """
    first = await derived(same_keys)
    assert isinstance(first[2], list)
    old_nonce = first[2][0]
    session = sessions(SumKind.PAIRWISE, 1)[2]
    engine = Engine.__new__(Engine)
    engine.session = session
    chosen = max(range(1000), key=lambda guess: ground_noise(engine, guess, old_nonce))
    target = ground_noise(engine, chosen, old_nonce)
    assert target > 60  # grinding works: three times the scale. Not reached by chance in (1 − e^−3/2)^1000 < 10^−10.

    def grind(sender: int, receiver: int, frame: bytes) -> bytes:
        return chosen.to_bytes(16, "big") if (sender, receiver, len(frame)) == (0, 2, 16) else frame

    noises = []
    for _ in range(5):
        outcomes = await derived(grind)
        assert isinstance(outcomes[2], list)
        noises.append(ExactNoise().pairwise(RATE, 1, outcomes[2][2])[0])
    # By chance each equals the target with probability at most γ/2·e^−3 < 0.002, all five below 10^−13.
    assert noises != [target] * 5


def ground_noise(engine: Engine, guess: int, nonce: bytes) -> int:
    """The noise of the pair (0, 2) if its key were `guess` and the nonce an old one."""
    engine.pair_key = lambda lacking: guess.to_bytes(16, "big")  # type: ignore[method-assign] # a stand-in engine
    return ExactNoise().pairwise(RATE, 1, pair_noise_key(engine, 1, nonce))[0]


async def test_commitments_come_after_keys_and_openings_after_all_commitments() -> None:
    """What makes the nonce binding: the order in which frames leave every party, in every run."""
    log: list[tuple[int, int, str]] = []

    def watch(sender: int, receiver: int, frame: bytes) -> bytes:
        kinds = {16: "key", 1 + 8 + 5 + 32: "commit", 1 + 8 + 5 + 64: "open"}
        log.append((sender, receiver, kinds.get(len(frame), "other")))
        return frame

    assert all(isinstance(outcome, list) for outcome in await derived(watch))
    for party in range(3):
        sent = [i for i, (sender, _, kind) in enumerate(log) if sender == party and kind == "commit"]
        keys = [i for i, (_, receiver, kind) in enumerate(log) if receiver == party and kind == "key"]
        heard = [i for i, (_, receiver, kind) in enumerate(log) if receiver == party and kind == "commit"]
        opened_at = [i for i, (sender, _, kind) in enumerate(log) if sender == party and kind == "open"]
        assert len(sent) == len(heard) == len(opened_at) == 2
        assert max(keys, default=-1) < min(sent)
        assert max(heard) < min(opened_at)


def on_bytes(route: tuple[int, int], size: int, change: Callable[[bytes], bytes]) -> Intercept:
    """Change the byte string of one size that goes one way."""

    def intercept(sender: int, receiver: int, frame: bytes) -> bytes:
        if (sender, receiver) == route and len(frame) == 1 + 8 + 5 + size:
            return frame[:9] + channel.dumps(change(channel.loads(frame[9:])))
        return frame

    return intercept


async def test_another_opening_than_the_committed_one_aborts() -> None:
    swap = on_bytes((1, 0), 64, lambda opening: bytes(NONCE_SIZE) + opening[NONCE_SIZE:])
    outcome = (await derived(swap))[0]
    assert isinstance(outcome, MpcError) and outcome.party == 1 and outcome.kind is ErrorKind.BAD_PROOF


async def test_equivocation_about_the_nonce_aborts_both() -> None:
    """Party 1 commits to and opens one nonce towards party 0 and another towards party 2, both consistently. Unnoticed,
    the honest pair would derive different noise on the same sum: two looks at it.
    """
    lie = b"\x07" * NONCE_SIZE
    false_commitment = tagged_hash("noise nonce: commitment", bytes(32), b"\1", lie)
    commit = on_bytes((1, 0), 32, lambda _: false_commitment)
    reveal = on_bytes((1, 0), 64, lambda opening: lie + opening[NONCE_SIZE:])

    def both(sender: int, receiver: int, frame: bytes) -> bytes:
        once = commit(sender, receiver, frame)
        assert once is not None
        twice = reveal(sender, receiver, once)
        assert twice is not None
        return twice

    outcomes = await derived(both)
    failures = [outcome for outcome in (outcomes[0], outcomes[2]) if isinstance(outcome, MpcError)]
    assert len(failures) == 2 and ErrorKind.INCONSISTENT in {failure.kind for failure in failures}


async def test_a_copied_commitment_cannot_be_opened() -> None:
    """Party 2 repeats party 0's commitment and opening, hoping to cancel its nonce out: the party is in the hash."""
    heard: dict[int, bytes] = {}

    def copy(sender: int, receiver: int, frame: bytes) -> bytes:
        if sender == 0 and len(frame) in (46, 78):
            heard[len(frame)] = frame
        if sender == 2 and len(frame) in heard:
            return frame[:9] + heard[len(frame)][9:]
        return frame

    outcome = (await derived(copy))[1]
    assert isinstance(outcome, MpcError) and outcome.stage is Stage.COMPUTE


async def test_short_openings_and_vectors_for_bytes_are_refused() -> None:
    for size, change in ((64, lambda _: b"short"), (32, lambda _: b"")):
        outcome = (await derived(on_bytes((2, 1), size, change)))[1]
        assert isinstance(outcome, MpcError), outcome


async def test_noise_changes_with_session_and_nonce_but_not_with_the_clock() -> None:
    """Same pair keys: another nonce or another attempt id gives other noise keys; the same all, the same key."""
    one, two, other = await derived(same_keys), await derived(same_keys), await derived(same_keys, b"\1" * 32)
    keys = [outcome[2][1] for outcome in (one, two, other) if isinstance(outcome[2], list)]
    assert len(set(keys)) == 3
    coins = noise.keyed_coins(bytes(32)), noise.keyed_coins(bytes(32))
    assert noise.draw_laplace(RATE, 50, coins[0]) == noise.draw_laplace(RATE, 50, coins[1])


# Drawing takes a time that reveals nothing: its work is the same for all noise (`test_noise`), and it is padded.


@pytest.mark.parametrize("kind", [SumKind.LOCAL, SumKind.PAIRWISE])
def test_the_time_of_drawing_is_padded_to_follows_from_the_buckets_alone(kind: SumKind) -> None:
    times = {SumTerms(kind, Fraction(1, scale), scale, 16).allowance for scale in (1, 100, 2**28)}
    assert len(times) == 1
    short, long = (SumTerms(kind, Fraction(1), 1, buckets).allowance for buckets in (1, 2**16))
    assert short < times.pop() < long < 60


@pytest.mark.parametrize(("takes", "ends"), [(0.0, 2.0), (1.9, 2.0), (2.1, 4.0), (7.0, 8.0)])
def test_time_is_padded_to_the_next_multiple(takes: float, ends: float) -> None:
    async def ended() -> float:
        start = asyncio.get_running_loop().time()
        async with padded(2.0):
            await asyncio.sleep(takes)
        return asyncio.get_running_loop().time() - start

    assert run(ended) == pytest.approx(ends)


def test_nothing_is_padded_to_zero_seconds() -> None:
    async def ended() -> float:
        async with padded(0.0):
            pass
        return asyncio.get_running_loop().time()

    assert run(ended) == 0
