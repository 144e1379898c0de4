"""Workers as real processes over TCP and TLS: the whole way, and what happens when one of them goes bad."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import pytest_asyncio

from mpc_helpers.identity.tls import TlsIdentity, make_identity
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms
from mpc_helpers.mpc.session import MpcError, Peer, Stage, name_of
from mpc_helpers.mpc.worker import Child, ForkServer, Worker, WorkerRun, WorkerSetup
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.field import from_integers
from protocol.shares import open_shamir, share, to_shamir
from tests.support.raising import raises
from tests.support.three_helpers import until

NOISY = (SumKind.LOCAL, SumKind.PAIRWISE, SumKind.JOINT)
DIGEST = bytes(range(32))


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[TlsIdentity]:
    made = []
    for party in range(3):
        directory = tmp_path_factory.mktemp(f"helper{party}")
        made.append(make_identity(directory, f"helper-{party + 1}", 1_763_000_000))
    return made


@pytest_asyncio.fixture
async def fork_server() -> AsyncIterator[ForkServer]:
    async with ForkServer() as started:
        yield started


def shamir_shares(values: Sequence[int]) -> list[list[int]]:
    split = share(values)
    return [[int(v) for v in to_shamir(party, split.components(party)).tolist()] for party in range(3)]


def alarm(identity: TlsIdentity) -> Path:
    """A helper's file of failed proofs, beside its certificate."""
    path = identity.certificate.parent / "failed-proofs"
    FailedProofs(path).prepare()
    return path


def setups(identities: list[TlsIdentity], kind: SumKind, buckets: int, rate: Fraction) -> list[WorkerSetup]:
    return [
        WorkerSetup(party, identities[party], SumTerms(kind, rate, 1, buckets), alarm(identities[party]))
        for party in range(3)
    ]


def peers_at(identities: list[TlsIdentity], ports: Sequence[int]) -> tuple[Peer, Peer, Peer]:
    first, second, third = (Peer("127.0.0.1", ports[i], identities[i].der) for i in range(3))
    return first, second, third


async def answer(
    fork_server: ForkServer, identities: list[TlsIdentity], kind: SumKind, values: list[int], rate: Fraction
) -> list[int]:
    workers = [Worker(setup, fork_server) for setup in setups(identities, kind, len(values), rate)]
    try:
        ports = await asyncio.gather(*(worker.start() for worker in workers))
        peers = peers_at(identities, ports)
        runs = [WorkerRun(DIGEST, 20.0, peers, piece) for piece in shamir_shares(values)]
        shares = await asyncio.gather(*(worker.run(run) for worker, run in zip(workers, runs, strict=True)))
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))
    return open_shamir([from_integers(piece) for piece in shares])


class BadForkServer(ForkServer):
    """Starts another program in a worker's place."""

    def __init__(self, *command: str) -> None:
        super().__init__()
        self._command = command
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    async def __aenter__(self) -> BadForkServer:
        return self

    async def fork(self) -> Child:
        pairs = [socket.socketpair() for _ in range(3)]
        stdin, stdout, stderr = (theirs for _, theirs in pairs)
        process = subprocess.Popen(self._command, stdin=stdin.fileno(), stdout=stdout.fileno(), stderr=stderr.fileno())
        self._started[process.pid] = process
        for _, theirs in pairs:
            theirs.close()
        return Child(process.pid, pairs[0][0], pairs[1][0], pairs[2][0])

    async def end(self, child: Child) -> None:
        self._started[child.process_id].kill()
        self._started[child.process_id].wait()


@pytest.mark.parametrize("kind", list(NOISY))
async def test_noisy_sum_over_tls(fork_server: ForkServer, identities: list[TlsIdentity], kind: SumKind) -> None:
    """With rate 40 (q = e^−40) noise is zero but for a probability below 300·6·e^−40 < 10^−14: exact all the same.

    Joint noise serves every rate above 16 as 16, and is above 2 in size with probability below 300·2·e^−48 < 10^−18.
    """
    values, most = list(range(-150, 150)), 2 if kind is SumKind.JOINT else 0
    noisy_sum = await answer(fork_server, identities, kind, values, Fraction(40))
    assert all(abs(noisy - value) <= most for noisy, value in zip(noisy_sum, values, strict=True))


@pytest.mark.parametrize("kind", list(NOISY))
async def test_workers_forked_from_one_fork_server_share_no_randomness(
    fork_server: ForkServer, identities: list[TlsIdentity], kind: SumKind
) -> None:
    """Noise of standard deviation above 1000 in 64 buckets comes out the same twice with probability below 10^−100."""
    rate = Fraction(1, 1000)
    assert await answer(fork_server, identities, kind, [0] * 64, rate) != await answer(
        fork_server, identities, kind, [0] * 64, rate
    )


async def test_the_workers_of_one_session_draw_different_noise(
    fork_server: ForkServer, identities: list[TlsIdentity]
) -> None:
    """Pólya halves of three forks that drew alike would differ by nothing, and their sum be three times one draw."""
    noisy_sum = await answer(fork_server, identities, SumKind.LOCAL, [0] * 64, Fraction(1, 1000))
    assert any(value % 3 for value in noisy_sum)


class WorkerTrio:
    """Three started workers, ready to run, all stopped at the end."""

    def __init__(
        self,
        fork_server: ForkServer,
        identities: list[TlsIdentity],
        kind: SumKind = SumKind.LOCAL,
        buckets: int = 4,
        rates: tuple[Fraction, Fraction, Fraction] = (Fraction(1), Fraction(1), Fraction(1)),
    ) -> None:
        self.identities = identities
        places = [setups(identities, kind, buckets, rate)[party] for party, rate in enumerate(rates)]
        self.workers = [Worker(setup, fork_server) for setup in places]
        self.pieces = shamir_shares([7] * buckets)
        self.peers = peers_at(identities, (1, 1, 1))

    async def __aenter__(self) -> WorkerTrio:
        self.peers = peers_at(self.identities, await asyncio.gather(*(worker.start() for worker in self.workers)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def run(self, party: int, seconds: float = 20.0, digest: bytes = DIGEST) -> list[int]:
        return await self.workers[party].run(WorkerRun(digest, seconds, self.peers, self.pieces[party]))

    def process(self, party: int) -> int:
        child = self.workers[party]._child
        assert child is not None
        return child.process_id


def failure(outcome: object) -> MpcError:
    assert isinstance(outcome, MpcError), outcome
    return outcome


@pytest.mark.parametrize("dead", [0, 2])
async def test_a_worker_killed_before_its_turn_fails_the_others_by_name(
    fork_server: ForkServer, identities: list[TlsIdentity], dead: int
) -> None:
    """One that is dialled (2) is missed because its port refuses, one that dials (0) at the deadline.

    A refused port is no proof of fault: the error names the helper, and blames nobody.
    """
    async with WorkerTrio(fork_server, identities) as trio:
        await trio.workers[dead].stop()
        seconds = 600.0 if dead == 2 else 1.5
        others = [trio.run(party, seconds) for party in range(3) if party != dead]
        outcomes = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 60)
    assert [(failure(o).stage, failure(o).party) for o in outcomes] == [(Stage.CONNECT, None if dead == 2 else 0)] * 2
    assert all(name_of(dead) in str(o) for o in outcomes)


async def test_a_worker_killed_while_computing_fails_the_others_at_once(
    fork_server: ForkServer, identities: list[TlsIdentity]
) -> None:
    """Pairwise noise for 2^14 buckets takes three seconds by allowance; the kill comes in between, the deadline would
    come after ten minutes.
    """
    async with WorkerTrio(fork_server, identities, SumKind.PAIRWISE, 2**14) as trio:
        runs = [asyncio.create_task(trio.run(party, 600.0)) for party in range(3)]
        await asyncio.sleep(2)
        os.kill(trio.process(1), signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 60)
    assert "the worker died" in str(failure(outcomes[1]))
    for party in (0, 2):
        assert "lost helper 2" in str(failure(outcomes[party]))


async def test_a_stopped_worker_runs_into_the_deadline_of_the_others(
    fork_server: ForkServer, identities: list[TlsIdentity]
) -> None:
    async with WorkerTrio(fork_server, identities) as trio:
        os.kill(trio.process(1), signal.SIGSTOP)
        outcomes = await asyncio.gather(trio.run(0, 1.5), trio.run(2, 1.5), return_exceptions=True)
    assert [failure(outcome).party for outcome in outcomes] == [1, 1]


async def test_the_daemon_kills_a_worker_that_does_not_answer(identities: list[TlsIdentity]) -> None:
    setup = setups(identities, SumKind.LOCAL, 1, Fraction(1))[0]
    async with Worker(setup, BadForkServer("sleep", "60")) as worker:
        with raises(ErrorKind.TIMEOUT, MpcError) as caught:
            await worker.start(0.2)
        assert caught.value.stage is Stage.START
        assert worker._child is None


async def test_a_worker_that_dies_leaves_its_last_words(identities: list[TlsIdentity]) -> None:
    setup = setups(identities, SumKind.LOCAL, 1, Fraction(1))[0]
    async with Worker(setup, BadForkServer("sh", "-c", "head -c1 >/dev/null; echo no such luck >&2")) as worker:
        with pytest.raises(MpcError, match="no such luck"):
            await worker.start()


async def test_different_sessions_and_parameters_are_named(
    fork_server: ForkServer, identities: list[TlsIdentity]
) -> None:
    async with WorkerTrio(fork_server, identities) as trio:
        runs = (trio.run(0), trio.run(1), trio.run(2, digest=bytes(32)))
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert "another session" in str(failure(outcomes[2]))
    assert failure(outcomes[2]).stage is Stage.HELLO
    async with WorkerTrio(fork_server, identities, rates=(Fraction(1), Fraction(2), Fraction(1))) as trio:
        outcomes = await asyncio.gather(trio.run(0), trio.run(1), trio.run(2), return_exceptions=True)
    assert "other parameters" in str(failure(outcomes[1]))


def hang_up(worker: Worker) -> None:
    """End the worker's input, as the death of its daemon does."""
    assert worker._stdin is not None
    worker._stdin.write_eof()


def is_zombie(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


async def test_a_worker_ends_with_its_daemon(fork_server: ForkServer, identities: list[TlsIdentity]) -> None:
    """A daemon killed outright leaves no worker behind: the worker's input ends, and it sees that while it waits."""
    async with WorkerTrio(fork_server, identities) as trio:
        hang_up(trio.workers[0])
        await until(lambda: not Path(f"/proc/{trio.process(0)}").exists() or is_zombie(trio.process(0)))
    async with WorkerTrio(fork_server, identities) as trio:
        running = asyncio.create_task(trio.run(0, 60.0))
        await asyncio.sleep(0.5)
        hang_up(trio.workers[0])
        with pytest.raises(MpcError, match="daemon is gone"):
            await asyncio.wait_for(running, 10)


async def test_nothing_secret_in_arguments_environment_or_repr(
    fork_server: ForkServer, identities: list[TlsIdentity]
) -> None:
    run = WorkerRun(DIGEST, 1.0, peers_at(identities, (1, 2, 3)), [123456789])
    assert "123456789" not in repr(run)
    async with WorkerTrio(fork_server, identities) as trio:
        process = Path(f"/proc/{trio.process(0)}")
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        assert arguments[1:] == [b"-m", b"mpc_helpers.mpc.fork_server_main", b""]
        assert str(identities[0].key).encode() not in (process / "environ").read_bytes()


def test_messages_have_one_encoding(identities: list[TlsIdentity]) -> None:
    setup = WorkerSetup(
        2, identities[2], SumTerms(SumKind.PAIRWISE, Fraction(3, 70), 7, 9), Path("/alarm"), "0.0.0.0", 5000
    )
    assert WorkerSetup.decode(setup.encode()) == setup
    run = WorkerRun(DIGEST, 12.5, peers_at(identities, (1, 2, 3)), [1, 2, 3])
    assert WorkerRun.decode(run.encode()) == run
    for message, kind in ((setup.encode(), WorkerSetup), (run.encode(), WorkerRun)):
        with raises(ErrorKind.TRAILING_BYTES, ProtocolError):
            kind.decode(message + b"\0")
        with raises(ErrorKind.TRUNCATED, ProtocolError):
            kind.decode(message[:-1])
    error = MpcError(Stage.KEYS, "lost", party=1, hint="look")
    back = MpcError.decode(error.encode())
    assert (back.stage, str(back), back.party, back.hint) == (Stage.KEYS, "lost", 1, "look")


def test_too_much_noise_is_refused_before_anything_starts(identities: list[TlsIdentity]) -> None:
    with raises(ErrorKind.TOO_LARGE, TrefoilError):
        WorkerSetup(0, identities[0], SumTerms(SumKind.LOCAL, Fraction(1, 2**41), 1, 1), Path("/alarm"))


def test_an_unusable_port_is_an_error_for_a_person(identities: list[TlsIdentity], tmp_path: Path) -> None:
    async def start() -> None:
        setup = WorkerSetup(
            0, identities[0], SumTerms(SumKind.LOCAL, Fraction(1), 1, 1), Path("/alarm"), "203.0.113.1", 9
        )
        async with ForkServer() as fork_server, Worker(setup, fork_server) as worker:
            await worker.start()

    with pytest.raises(MpcError, match=r"203\.0\.113\.1"):
        asyncio.run(start())
