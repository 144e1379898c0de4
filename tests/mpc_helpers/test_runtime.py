"""MPyC contained, three parties in one process: bound to one session, and failing at once and by name."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest

from mpc_helpers.mpc import channel
from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.runtime import MAX_UNREAD, Engine, Program, run_three_in_one_process
from mpc_helpers.mpc.session import MpcError, MpcSession, Stage
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P, from_integers
from protocol.shares import open_shamir
from tests.support import commit_world

Outcomes = list[list[int] | BaseException]


def session(party: int, digest: bytes = bytes(32), parameters: bytes = b"", buckets: int = 3) -> MpcSession:
    return MpcSession(party, digest, parameters, buckets, 5.0)


SESSIONS = [session(party) for party in range(3)]


async def deal_and_add(engine: Engine) -> list[int]:
    """Each party deals (party, −party, 7); the sum of the three stays shared."""
    total = engine.vector([0, 0, 0])
    for dealt in engine.deal([engine.party, -engine.party, 7]):
        total = total + dealt
    return await engine.shares(total)


async def run(
    program: Program[list[int]] = deal_and_add,
    sessions: Sequence[MpcSession] = SESSIONS,
    intercept: Intercept | None = None,
) -> Outcomes:
    return await run_three_in_one_process(sessions, [program] * 3, intercept)


def opened(outcomes: Outcomes) -> list[int]:
    shares = []
    for outcome in outcomes:
        assert isinstance(outcome, list), outcome
        shares.append(from_integers(outcome))
    return open_shamir(shares)


def errors(outcomes: Sequence[object]) -> list[MpcError]:
    failures = [outcome for outcome in outcomes if isinstance(outcome, MpcError)]
    assert len(failures) == len(outcomes), outcomes
    return failures


async def test_what_the_parties_deal_adds_up() -> None:
    assert opened(await run()) == [3, -3, 21]


async def test_sessions_run_side_by_side_without_mixing() -> None:
    results = await asyncio.gather(*(run() for _ in range(5)))
    assert [opened(outcomes) for outcomes in results] == [[3, -3, 21]] * 5


async def test_every_session_has_fresh_pair_keys_held_by_two() -> None:
    seen: list[dict[int, bytes]] = []

    async def keys(engine: Engine) -> list[int]:
        seen.append({lacking: engine.pair_key(lacking) for lacking in engine.session.peers})
        with pytest.raises(KeyError):
            engine.pair_key(engine.party)
        return [engine.party]

    assert await run(keys) == [[0], [1], [2]]
    assert await run(keys) == [[0], [1], [2]]
    first = {key for held in seen[:3] for key in held.values()}
    second = {key for held in seen[3:] for key in held.values()}
    assert len(first) == len(second) == 3
    assert not first & second


async def test_importing_the_engine_changes_nothing_around_it() -> None:
    """In a process of its own: arguments, environment, root logging and asyncio's policy stay as they were."""
    script = (
        "import sys, os, logging, asyncio\n"
        "before = (list(sys.argv), dict(os.environ), logging.root.level, list(logging.root.handlers),"
        " type(asyncio.get_event_loop_policy()))\n"
        "import mpc_helpers.mpc.runtime\n"
        "after = (list(sys.argv), dict(os.environ), logging.root.level, list(logging.root.handlers),"
        " type(asyncio.get_event_loop_policy()))\n"
        "sys.exit(before != after)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, "-M", "3", "--help", "--ssl"]
    done = subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, "MPYC_NOPRSS": "1"}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_the_loop_keeps_its_exception_handler() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    before, level = loop.get_exception_handler(), logging.root.level
    await run()
    assert loop.get_exception_handler() is before
    assert logging.root.level == level


def test_mpyc_has_no_pickle_left() -> None:
    codec = vars(sys.modules["mpyc.runtime"])["pickle"]
    assert vars(codec) == {"dumps": channel.dumps, "loads": channel.loads}


@pytest.mark.parametrize("odd", [0, 1, 2])
async def test_another_session_is_refused_before_any_key_is_sent(odd: int) -> None:
    frames: list[bytes] = []

    def watch(_sender: int, _receiver: int, frame: bytes) -> bytes:
        frames.append(frame)
        return frame

    sessions = [session(party, digest=bytes([party == odd]) * 32) for party in range(3)]
    failures = errors(await run(sessions=sessions, intercept=watch))
    assert all(error.stage is Stage.HELLO for error in failures)
    assert "another session" in str(failures[odd])
    assert [frame for frame in frames if len(frame) == 16] == []


@pytest.mark.parametrize("kwargs", [{"parameters": b"scale 2"}, {"buckets": 4}])
async def test_other_parameters_are_refused_and_named(kwargs: dict[str, bytes | int]) -> None:
    sessions = [session(0), session(1), session(2, **kwargs)]  # type: ignore[arg-type] # the keys fit
    failures = errors(await run(sessions=sessions))
    assert all(error.stage is Stage.HELLO for error in failures)
    assert "other parameters" in str(failures[2]) and "Compare releases" in failures[2].hint


async def test_another_engine_or_field_is_another_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = session(0).parameter_digest
    monkeypatch.setattr("mpc_helpers.mpc.session.P", P - 2)
    assert session(0).parameter_digest != ours


def swap(stage_frame: int, route: tuple[int, int], change: bytes | None) -> Intercept:
    """Replace the n-th frame of one route (0: greeting, 1 or later: keys and data)."""
    count = 0

    def intercept(sender: int, receiver: int, frame: bytes) -> bytes | None:
        nonlocal count
        if (sender, receiver) != route:
            return frame
        count += 1
        return change if count == stage_frame + 1 else frame

    return intercept


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0",
        b"\7" * 40,
        b"\0" + bytes(8) + channel.dumps(b"x" * 5)[:-1],
        b"\0" * 300,
        b"\0" + bytes(8) + pickle.dumps([1, 2, 3]),
    ],
    ids=["empty", "short", "kind", "cut", "zeros", "pickle"],
)
async def test_nonsense_from_a_peer_is_refused_by_name(frame: bytes) -> None:
    failures = errors(await run(intercept=swap(1, (2, 1), frame)))
    assert (failures[1].stage, failures[1].party) == (Stage.COMPUTE, 2)


async def test_vectors_of_another_length_are_refused() -> None:
    def shorten(sender: int, receiver: int, frame: bytes) -> bytes:
        if (sender, receiver) == (1, 0) and frame[:1] == b"\0" and len(frame) > 9 and frame[9:10] == b"\1":
            return frame[:9] + channel.dumps(channel.loads(frame[9:])[:2])
        return frame

    failures = errors(await run(intercept=shorten))
    assert failures[0].party == 1 and failures[0].kind is ErrorKind.INCONSISTENT


async def test_bytes_where_a_vector_belongs_fail_the_session() -> None:
    def replace(sender: int, receiver: int, frame: bytes) -> bytes:
        data = (sender, receiver) == (1, 0) and frame[:1] == b"\0" and len(frame) > 9 and frame[9:10] == b"\1"
        return frame[:9] + channel.dumps(b"abc") if data else frame

    failures = errors(await run(intercept=replace))
    assert failures[0].stage is Stage.COMPUTE


async def test_a_flood_is_cut_off() -> None:
    async def flood(engine: Engine) -> list[int]:
        if engine.party == 1:
            for label in range(MAX_UNREAD + 2):
                engine._runtime.parties[0].protocol.send(label, channel.dumps(b"x"))
        await asyncio.sleep(10)
        return []

    failures = errors(await run(flood))
    assert failures[0].party == 1 and failures[0].kind is ErrorKind.TOO_LARGE


async def test_a_message_twice_is_refused() -> None:
    async def twice(engine: Engine) -> list[int]:
        if engine.party == 1:
            for _ in range(2):
                engine._runtime.parties[0].protocol.send(5, channel.dumps(b"x"))
        await asyncio.sleep(10)
        return []

    assert errors(await run(twice))[0].party == 1


async def test_a_dead_peer_fails_what_is_pending_at_once() -> None:
    """The session has an hour; a party that raises takes the others down now, by name."""

    async def die(engine: Engine) -> list[int]:
        if engine.party == 1:
            raise ProtocolError("this party dies")
        return await deal_and_add(engine)

    sessions = [MpcSession(party, bytes(32), b"", 3, 3600.0) for party in range(3)]
    async with asyncio.timeout(60):
        failures = errors(await run(die, sessions))
    assert [(failures[i].stage, failures[i].party) for i in (0, 2)] == [(Stage.COMPUTE, None)] * 2
    assert "helper 2" in str(failures[0]) and "this party dies" in str(failures[0])


async def test_the_last_to_hear_of_a_failure_hears_whose_it_was() -> None:
    """Party 0 gets nonsense from party 2 and leaves; party 1 learns from party 0 why."""
    failures = errors(await run(intercept=swap(1, (2, 0), b"\7" * 20)))
    assert failures[0].party == 2
    assert "helper 3" in str(failures[1])


async def test_a_reason_that_cannot_be_shown_is_not() -> None:
    failures = errors(await run(intercept=swap(1, (2, 0), b"\2\x1b[31m" + bytes(500))))
    assert "helper 3" in str(failures[0]) and "\x1b" not in str(failures[0])


@pytest.mark.parametrize(("silent_from", "stage"), [(0, Stage.HELLO), (1, Stage.KEYS), (2, Stage.COMPUTE)])
def test_a_stalled_peer_hits_the_deadline_by_name(silent_from: int, stage: Stage) -> None:
    """Party 0 goes silent towards party 2 from its n-th frame on (greeting, key, shares). Time is virtual."""
    count = 0

    def stall(sender: int, receiver: int, frame: bytes) -> bytes | None:
        nonlocal count
        if (sender, receiver) != (0, 2):
            return frame
        count += 1
        return frame if count <= silent_from else None

    sessions = [MpcSession(party, bytes(32), b"", 3, 0.5 if party == 2 else 5.0) for party in range(3)]
    failures = errors(commit_world.run(lambda: run(sessions=sessions, intercept=stall)))
    # While computing it may wait for the third.
    assert (failures[2].stage, failures[2].party) == (stage, None if stage is Stage.COMPUTE else 0)
    assert "helper 1" in str(failures[2])
    assert failures[2].kind is ErrorKind.TIMEOUT and "0.5 s" in str(failures[2])


async def test_a_peer_that_finishes_without_its_part_is_an_error() -> None:
    async def leave(engine: Engine) -> list[int]:
        return [0] if engine.party == 1 else await deal_and_add(engine)

    outcomes = await run(leave)
    assert isinstance(outcomes[0], MpcError) and outcomes[0].party == 1
    assert "finished without sending its part" in str(outcomes[0])


async def test_a_bug_in_a_program_surfaces_as_itself() -> None:
    async def bug(engine: Engine) -> list[int]:
        raise ZeroDivisionError

    assert [type(outcome) for outcome in await run(bug)] == [ZeroDivisionError] * 3


async def test_no_task_outlives_its_session() -> None:
    await run()
    await run(intercept=swap(1, (2, 0), b"\7"))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("values", [[1, 2], [1, 2, 3, 4], [1, 2, 3.0], [1, 2, True]])
async def test_vectors_are_python_integers_of_the_right_number(values: list[int]) -> None:
    async def wrong(engine: Engine) -> list[int]:
        return await engine.shares(engine.vector(values))

    assert "Python integers" in str(errors(await run(wrong))[0])


@pytest.mark.parametrize(
    ("party", "digest", "buckets", "seconds"),
    [
        (3, 32, 1, 1.0),
        (-1, 32, 1, 1.0),
        (0, 31, 1, 1.0),
        (0, 32, 0, 1.0),
        (0, 32, 2**17, 1.0),
        (0, 32, 1, float("nan")),
    ],
)
def test_sessions_are_checked(party: int, digest: int, buckets: int, seconds: float) -> None:
    MpcSession(0, bytes(32), b"", 1, 1.0)
    with pytest.raises(ProtocolError):
        MpcSession(party, bytes(digest), b"", buckets, seconds)
