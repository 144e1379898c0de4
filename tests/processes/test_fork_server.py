"""The fork server: no threads in it, replaced when it dies, nothing left behind, no randomness shared by its forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mpc_helpers.mpc import fork_server_main
from mpc_helpers.mpc.noise import system_coins
from mpc_helpers.mpc.runtime import _Runtime
from mpc_helpers.mpc.session import MpcError
from mpc_helpers.mpc.worker import Child, ForkServer, WorkerMessage
from protocol.shares import PARTIES
from tests.support.three_helpers import until


@pytest_asyncio.fixture
async def fork_server() -> AsyncIterator[ForkServer]:
    async with ForkServer() as started:
        yield started


def alive(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def process_of(fork_server: ForkServer) -> int:
    assert fork_server._process is not None
    return fork_server._process.pid


def sockets_of(child: Child) -> set[str]:
    links = []
    for entry in Path(f"/proc/{child.process_id}/fd").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # closed since it was listed: a new worker closes what is not its own
            links.append(str(entry.readlink()))
    return {link for link in links if link.startswith("socket:")}


async def end(fork_server: ForkServer, *children: Child) -> None:
    for child in children:
        await fork_server.end(child)
        child.close()


async def test_workers_are_processes_of_their_own_and_end_when_told(fork_server: ForkServer) -> None:
    first, second = await fork_server.fork(), await fork_server.fork()
    assert first.process_id != second.process_id
    # Ctrl-C at the daemon's terminal does not reach it; until it has a session of its own, it is in the fork server's.
    await until(lambda: os.getsid(first.process_id) == first.process_id)
    await end(fork_server, first)
    assert not Path(f"/proc/{first.process_id}").exists()
    assert alive(second.process_id)
    await end(fork_server, second)


async def test_a_stopped_worker_is_ended_too(fork_server: ForkServer) -> None:
    child = await fork_server.fork()
    os.kill(child.process_id, signal.SIGSTOP)
    await end(fork_server, child)
    assert not Path(f"/proc/{child.process_id}").exists()


async def test_no_thread_runs_in_the_process_that_forks(fork_server: ForkServer) -> None:
    """A thread that holds a lock at the moment of the fork would leave it locked in the worker for ever."""
    forking = asyncio.create_task(fork_server.fork())
    await until(lambda: fork_server._process is not None)
    tasks = Path(f"/proc/{process_of(fork_server)}/task")
    seen = set()
    while not forking.done():
        seen.add(len(list(tasks.iterdir())))
        await asyncio.sleep(0.002)
    assert seen == {1}
    await end(fork_server, await forking)


async def test_a_worker_has_its_own_three_streams_and_no_other_worker_s(fork_server: ForkServer) -> None:
    """None in common, and what each worker says is heard at its own daemon's end alone."""
    first, second = await fork_server.fork(), await fork_server.fork()
    # Three each, and the pair with which its event loop wakes itself. With no stream at all, two would be disjoint too.
    await until(lambda: [len(sockets_of(child)) for child in (first, second)] == [3 + 2, 3 + 2])
    assert not sockets_of(first) & sockets_of(second)
    first.stdin.sendall(bytes(4))
    second.stdin.close()
    assert (await heard(first.stdout))[4:5] == bytes([WorkerMessage.FAILED.value])
    assert await heard(second.stderr) == b"the daemon is gone\n"
    assert (await heard(first.stderr), await heard(second.stdout)) == (b"", b"")
    await end(fork_server, first, second)


async def heard(stream: socket.socket) -> bytes:
    """All that a worker writes to one of its streams until it has ended."""

    def read() -> bytes:
        stream.settimeout(20)
        with stream.makefile("rb") as file:
            return file.read()

    return await asyncio.to_thread(read)


async def test_a_fork_server_that_was_killed_is_replaced(fork_server: ForkServer) -> None:
    child = await fork_server.fork()
    killed = process_of(fork_server)
    os.kill(killed, signal.SIGKILL)
    another = await fork_server.fork()
    assert process_of(fork_server) != killed
    await end(fork_server, child, another)
    await until(lambda: not alive(child.process_id))  # its input has ended


async def test_a_fork_server_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with ForkServer() as broken:
        with pytest.raises(MpcError, match="no worker can be started"):
            await broken.fork()


async def test_a_fork_nobody_waits_for_leaves_no_worker(fork_server: ForkServer) -> None:
    await end(fork_server, await fork_server.fork())
    forking = asyncio.create_task(fork_server.fork())
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    children = Path(f"/proc/{process_of(fork_server)}/task/{process_of(fork_server)}/children")
    await end(fork_server, await fork_server.fork())  # by now the forgotten one is ended as well
    await until(lambda: not children.read_text().split())


async def test_all_workers_end_with_the_fork_server_s_daemon() -> None:
    fork_server = ForkServer()
    async with fork_server:
        child = await fork_server.fork()
        os.kill(child.process_id, signal.SIGSTOP)  # one that would not notice that its input ended
        process = process_of(fork_server)
        assert fork_server._connection is not None
        fork_server._connection.close()  # as the kernel does when a daemon is killed
        await until(lambda: not alive(process))
        assert not alive(child.process_id)
        child.close()


def test_a_worker_that_is_not_its_own_is_never_killed() -> None:
    """A daemon can only have its own fork server's workers ended, however confused it is about their numbers."""
    bystander = subprocess.Popen(("sleep", "60"))
    try:

        async def confused() -> None:
            async with ForkServer() as fork_server:
                child = await fork_server.fork()
                wrong = Child(bystander.pid, child.stdin, child.stdout, child.stderr)
                await fork_server.end(wrong)
                await end(fork_server, child)

        asyncio.run(confused())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


KEY_SIZE = 16


async def pair_keys(party: int) -> list[bytes]:
    """As a worker draws them when its session begins."""
    return list(_Runtime(party, lambda _: None).pair_keys.values())


def drawn() -> list[bytes]:
    """Something from every source of randomness that a worker has, or that a library in it could use."""
    return [
        os.urandom(KEY_SIZE),
        secrets.token_bytes(KEY_SIZE),
        ssl.RAND_bytes(KEY_SIZE),
        X25519PrivateKey.generate().private_bytes_raw()[:KEY_SIZE],
        sha256(system_coins().flips(8 * KEY_SIZE)).digest()[:KEY_SIZE],
        random.randbytes(KEY_SIZE),
        *(key for party in range(PARTIES) for key in asyncio.run(pair_keys(party))),
    ]


def drawn_by_a_fork() -> list[bytes]:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, b"".join(drawn()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    return [data[at : at + KEY_SIZE] for at in range(0, len(data), KEY_SIZE)]


def forks_draw_alike() -> bool:
    """Whether any two of two forks and the process that they were forked from have anything in common."""
    # First here: a generator that has no state yet could not be copied.
    everything = [*drawn(), *drawn_by_a_fork(), *drawn_by_a_fork()]
    assert len(everything) == 3 * len(drawn())
    return len(set(everything)) < len(everything)


def test_two_forks_draw_different_keys_after_the_warm_up() -> None:
    fork_server_main.warm_up()
    assert not forks_draw_alike()


def test_forks_that_shared_a_generator_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = random.Random(1)
    monkeypatch.setattr(secrets, "token_bytes", shared.randbytes)
    assert forks_draw_alike()


def test_a_warm_up_that_fails_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpc_helpers.mpc.joint.noise.JointNoise._commit", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fork_server_main.warm_up()
