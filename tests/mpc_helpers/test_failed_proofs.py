"""The alarm of joint noise: a proof that fails is on disk, ends the query, and after eight ends joint noise here."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mpc_helpers.identity.tls import TlsIdentity, make_identity
from mpc_helpers.mpc.failed_proofs import CAPACITY, FailedProofs
from mpc_helpers.mpc.joint.noise import alone
from mpc_helpers.mpc.links import listen
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms
from mpc_helpers.mpc.runtime import Engine, run_party
from mpc_helpers.mpc.session import MpcError, Peer, Stage
from mpc_helpers.mpc.worker import ForkServer, Worker, WorkerRun, WorkerSetup
from protocol.cli.app import app
from protocol.errors import ErrorKind, TrefoilError
from protocol.field import Vector
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions
from tests.support.bad_helper import BAD, BUCKETS, five_reports, live_states, truth_of
from tests.support.joint_trio import cheating
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, terms, three_helpers

JOINT = QueryOptions(noise=NoiseMode.JOINT, tolerated_bad_permille=1000, seconds=20)
# The helper after the bad one checks its proof.
CHECKER = (BAD + 1) % 3


@pytest.fixture
def proofs(tmp_path: Path) -> FailedProofs:
    made = FailedProofs(tmp_path / "failed-proofs")
    made.prepare()
    return made


def wrong_gate(words: Vector) -> None:
    words[0, 0] ^= np.uint64(1)


# The file.


def test_a_check_that_holds_leaves_nothing_behind(proofs: FailedProofs, tmp_path: Path) -> None:
    before = (tmp_path / "failed-proofs").read_bytes()
    assert proofs.judge(lambda: True, "fine")
    assert (tmp_path / "failed-proofs").read_bytes() == before and proofs.failures() == []


def test_failures_are_durable_and_in_order(proofs: FailedProofs, tmp_path: Path) -> None:
    size = (tmp_path / "failed-proofs").stat().st_size
    assert not proofs.judge(lambda: False, "the proof of helper 1")
    assert not proofs.judge(lambda: False, "ü" * 500)
    again = FailedProofs(tmp_path / "failed-proofs")
    again.prepare()
    assert again.failures()[0] == "the proof of helper 1" and len(again.failures()) == 2
    # Written in place: a full disk has nothing to say against it.
    assert (tmp_path / "failed-proofs").stat().st_size == size


def test_no_check_is_run_once_eight_have_failed(proofs: FailedProofs) -> None:
    for number in range(CAPACITY):
        proofs.check_not_full()
        assert not proofs.judge(lambda: False, f"failure {number}")
    ran: list[int] = []

    def check() -> bool:
        ran.append(1)
        return False

    with raises(ErrorKind.DISABLED, MpcError) as caught:
        proofs.judge(check, "one more")
    assert caught.value.stage is Stage.PROOF and "trefoil alarm clear" in caught.value.hint
    assert ran == [] and len(proofs.failures()) == CAPACITY
    with raises(ErrorKind.DISABLED, MpcError):
        proofs.check_not_full()
    assert len(proofs.clear()) == CAPACITY
    proofs.check_not_full()
    assert proofs.failures() == []


def test_however_many_sessions_are_under_way_no_more_than_eight_checks_fail(proofs: FailedProofs) -> None:
    ran: list[int] = []

    def check() -> bool:
        ran.append(1)
        time.sleep(0.01)  # long enough for all the others to have looked how many there are
        return False

    def session() -> None:
        for _ in range(4):
            try:
                proofs.judge(check, "cheat")
            except MpcError:
                return

    threads = [threading.Thread(target=session) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == CAPACITY == len(proofs.failures())


def test_without_its_file_nothing_is_checked(tmp_path: Path) -> None:
    missing = FailedProofs(tmp_path / "nowhere")
    for call in (missing.check_not_full, missing.clear, lambda: missing.judge(lambda: True, "")):
        with raises(ErrorKind.FILE_UNREADABLE, MpcError) as caught:
            call()
        assert caught.value.stage is Stage.PROOF


# Real workers.


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[TlsIdentity]:
    folders = [tmp_path_factory.mktemp(f"helper{party}") for party in range(3)]
    return [make_identity(folder, f"helper-{party + 1}", 1_763_000_000) for party, folder in enumerate(folders)]


async def test_a_real_worker_counts_what_it_caught(identities: list[TlsIdentity], tmp_path: Path) -> None:
    """Parties 0 and 1 are worker processes; party 2, which cheats, speaks to them over TLS from here."""
    of = SumTerms(SumKind.JOINT, Fraction(1, 2), 2, 20)
    files = [FailedProofs(tmp_path / str(party)) for party in range(3)]
    for file in files:
        file.prepare()
    async with ForkServer() as fork_server:
        setups = [WorkerSetup(party, identities[party], of, tmp_path / str(party)) for party in (0, 1)]
        workers = [Worker(setup, fork_server) for setup in setups]
        listener = listen("127.0.0.1")
        ports = [*await asyncio.gather(*(worker.start() for worker in workers)), listener.getsockname()[1]]
        first, second, third = (Peer("127.0.0.1", port, identities[i].der) for i, port in enumerate(ports))
        peers, digest = (first, second, third), b"a" * 32
        runs = [worker.run(WorkerRun(digest, 20.0, peers, [0] * 20)) for worker in workers]

        async def cheat(engine: Engine) -> object:
            return await cheating(1, 1, wrong_gate)(engine, of.layout, alone).draw()

        bad = run_party(of.session(2, digest, 20.0), peers, identities[2], listener, cheat)
        outcomes = await asyncio.gather(*runs, bad, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in workers))
    caught = outcomes[0]
    assert isinstance(caught, MpcError) and caught.stage is Stage.PROOF
    assert "helper 3, or helper 2's part" in str(caught)
    assert isinstance(outcomes[1], MpcError) and outcomes[1].stage is not Stage.PROOF
    assert [len(file.failures()) for file in files] == [1, 0, 0]
    assert digest.hex()[:16] in files[0].failures()[0]


# Three helpers.


def alarms_of(three: ThreeHelpers) -> list[int]:
    return [
        len(FailedProofs(three.trio.helper_folder(party) / "data" / "failed-proofs").failures()) for party in range(3)
    ]


async def test_a_failed_proof_ends_the_query_at_once_and_spends_nothing(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        three.mpc.joint_parties[BAD] = cheating(1, 1, wrong_gate)
        tried: list[int] = []
        three.mpc.before_add = lambda party, _: tried.append(party)
        query = three.query(batch, JOINT)
        with pytest.raises(QueryFailed, match="helper 3, or helper 2's part"):
            await three.ask(query, batch)
        # No second attempt at the one that checked, though the deadline is far.
        assert tried.count(CHECKER) == 1
        assert alarms_of(three) == [1, 0, 0] and live_states(three, query) == [None, None]
        # Honest again, the same reports are answered.
        three.mpc.joint_parties.clear()
        again = three.query(batch, JOINT)
        result = await three.ask(again, batch)
        assert truth_of(three, result) == [1] * 5 + [0] * (BUCKETS - 5)
        assert alarms_of(three) == [1, 0, 0]


async def test_after_eight_failures_joint_noise_is_refused_until_it_is_cleared(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        config = three.trio.config_path(CHECKER)
        alarm = FailedProofs(three.trio.helper_folder(CHECKER) / "data" / "failed-proofs")
        for number in range(CAPACITY):
            alarm.judge(lambda: False, f"failure {number}")
        with pytest.raises(TrefoilError, match="8 proofs") as caught:
            await three.ask(three.query(batch, JOINT), batch)
        assert "--noise local" in caught.value.hint
        # Other modes go on, and so does joint once the operator has looked.
        await three.ask(three.query(batch, QueryOptions(seconds=20)), batch)
        listed = CliRunner().invoke(app, ["alarm", "show", "--config", str(config)], catch_exceptions=False)
        assert "failure 7" in listed.output and "8 of 8" in listed.output
        cleared = CliRunner().invoke(app, ["alarm", "clear", "--config", str(config)], catch_exceptions=False)
        assert "cleared 8 failed proofs" in cleared.output
        other = five_reports(three)
        await three.ask(three.query(other, JOINT), other)


async def test_a_query_taken_before_the_alarm_was_full_is_not_computed_after_it(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = five_reports(three)
        alarm = FailedProofs(three.trio.helper_folder(CHECKER) / "data" / "failed-proofs")

        def fill(party: int, _: object) -> None:
            while party == CHECKER and len(alarm.failures()) < CAPACITY:
                alarm.judge(lambda: False, "another query's")

        three.mpc.before_add = fill
        with pytest.raises(QueryFailed, match="8 proofs"):
            await three.ask(three.query(batch, JOINT), batch)


@pytest.mark.parametrize("unwilling", range(3))
async def test_a_helper_runs_only_the_modes_that_its_operator_lists(tmp_path: Path, unwilling: int) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        path = three.trio.config_path(unwilling)
        stored = json.loads(path.read_text())
        # As an operator has it who says nothing about noise.
        del stored["noise_modes"]
        path.write_text(json.dumps(stored))
        await asyncio.gather(*(three.start(party) for party in range(3)))
        batch = five_reports(three)
        with pytest.raises(TrefoilError, match="noise mode joint") as caught:
            await three.ask(three.query(batch, JOINT), batch)
        assert "--noise local or pairwise" in caught.value.hint
        await three.ask(three.query(batch, QueryOptions(seconds=20)), batch)


@pytest.mark.parametrize(
    ("micros", "sensitivity", "buckets", "why"),
    [
        (64_000_001, 1, 2, r"at most 64, side query included, not 64\.000001"),
        (2, 2**40, 2, "takes 65 binary digits"),
        (1_000_000, 2**30, 2**16, "words of gates; 1048576 is the most"),
    ],
)
async def test_what_joint_noise_cannot_do_is_refused_before_anything_is_spent(
    tmp_path: Path, micros: int, sensitivity: int, buckets: int, why: str
) -> None:
    async with three_helpers(tmp_path) as three:
        of = terms(buckets, epsilon_micros=micros, sensitivity=sensitivity)
        batch = three.batch(three.seal([[1] + [0] * (buckets - 1)], of))
        query = three.query(batch, JOINT)
        with pytest.raises(TrefoilError, match=why) as caught:
            await three.ask(query, batch)
        assert "--noise local" in caught.value.hint or "coarser unit" in caught.value.hint
        assert live_states(three, query) == [None, None]
