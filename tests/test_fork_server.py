"""The process that forks workers: no threads in it, replaced when it dies, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from mpc_helpers.mpc.fork_server import Child, ForkServer, Request
from mpc_helpers.mpc.session import MpcError


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


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happens():
            await asyncio.sleep(0.02)


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
        child.hang_up()


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
    first, second = await fork_server.fork(), await fork_server.fork()
    await until(lambda: not sockets_of(first) & sockets_of(second))
    await end(fork_server, first, second)


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
        assert fork_server._line is not None
        fork_server._line.close()  # as the kernel does when a daemon is killed
        await until(lambda: not alive(process))
        assert not alive(child.process_id)
        child.hang_up()


def test_a_worker_that_is_not_its_own_is_never_killed() -> None:
    """A daemon can only have its own fork server's workers ended, however confused it is about their numbers."""
    bystander = subprocess.Popen(("sleep", "60"))
    try:

        async def confused() -> None:
            async with ForkServer() as fork_server:
                child = await fork_server.fork()
                wrong = Child(bystander.pid, child.orders, child.reports, child.complaints)
                await fork_server.end(wrong)
                await end(fork_server, child)

        asyncio.run(confused())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_requests_have_one_encoding() -> None:
    assert Request.decode(Request.END.encode(7)) == (Request.END, 7)
    assert Request.decode(Request.FORK.encode()) == (Request.FORK, 0)
