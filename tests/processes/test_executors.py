"""Where reports are opened: processes that are replaced when killed and end with their daemon; a dask cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from mpc_helpers.admission import executors
from mpc_helpers.admission import ingest as aggregation
from mpc_helpers.admission.executors import Pool, ReportExecutor, report_executor
from mpc_helpers.admission.ingest import ingest
from mpc_helpers.identity.tls import make_identity
from protocol.batch import ColumnReader
from protocol.errors import ErrorKind
from protocol.query import Query
from tests.support import protocol_samples as samples
from tests.support.raising import raises
from tests.support.three_helpers import wait_until


def own_id() -> int:
    return os.getpid()


def test_a_killed_process_fails_the_work_at_hand_and_is_replaced() -> None:
    pool = Pool(1)
    try:
        first = pool.submit(own_id).result(60)
        assert first != os.getpid()
        waiting = pool.submit(time.sleep, 60)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            waiting.result(60)
        assert pool.submit(own_id).result(60) != first
    finally:
        pool.shutdown()


def test_without_processes_the_work_is_done_here() -> None:
    pool = Pool(0)
    assert pool.submit(own_id).result(10) == os.getpid()
    pool.shutdown()


def test_a_killed_daemon_leaves_no_process_behind(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests/processes')\n"
        "from mpc_helpers.admission.executors import Pool\n"
        "from test_executors import own_id\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    print(Pool(1).submit(own_id).result(60), flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = tmp_path / "daemon.py"
    script.write_text(program)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests" / "processes")]),
    }
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as daemon:
        assert daemon.stdout is not None
        child = int(daemon.stdout.readline())
        daemon.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "the pool's process outlived its daemon"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# A dask cluster.


dask = pytest.importorskip("dask", reason="the extra 'cluster' (dask, distributed) is not installed")
distributed = pytest.importorskip("distributed", reason="the extra 'cluster' (dask, distributed) is not installed")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "DASK_DISTRIBUTED__DASHBOARD__LINK": ""}
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "distributed.cli." + name.split("-")[0], *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


@contextlib.contextmanager
def cluster(folder: Path, *security: str) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, three processes that talk on loopback, in the clear unless `security` is given."""
    ready = folder / "scheduler.json"
    here = ("--host", "127.0.0.1", "--no-dashboard", *security)
    processes = [start(folder, "dask_scheduler", "--port", "0", "--scheduler-file", str(ready), *here)]
    try:
        wait_until(ready.exists)
        for number in range(2):
            more = ("--nworkers", "1", "--nthreads", "1", "--no-nanny", "--scheduler-file", str(ready), *here)
            processes.append(start(folder, f"dask_worker-{number}", *more))
        with distributed.Client(scheduler_file=str(ready), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=SECONDS)
            address = client.scheduler.address.replace("tcp://", "dask://")
        yield address, processes[1:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def column(tmp_path: Path) -> tuple[Path, Query]:
    """Helper 2's column of reports that are worth 1, 2, 3, … in one bucket, so that every one shows in the sum."""
    reports = [samples.report(f"cluster {number}", [number, *[0] * 7]) for number in range(800)]
    return samples.write_columns(tmp_path, reports)[1], samples.query_for(reports)


def sums_on(
    executor: ReportExecutor, column: tuple[Path, Query], progress: Callable[[int], None] = lambda _: None
) -> tuple[list[list[int]], int]:
    path, query = column
    reader = ColumnReader(path)
    ingested = ingest(reader, reader.digests(), samples.rules(1, query), executor, progress)
    total = ingested.total(ingested.admitted)
    return [total[index].tolist() for index in sorted(total)], int(ingested.admitted.sum())


@pytest.mark.parametrize("processes", [0, 2])
def test_own_processes_give_the_inline_result(processes: int, column: tuple[Path, Query]) -> None:
    expected = sums_on(ReportExecutor(samples.InlineExecutor(), 1, True), column)
    with report_executor("", processes) as executor:
        assert sums_on(executor, column) == expected


def test_a_cluster_counts_every_chunk_once_though_a_worker_is_killed(
    tmp_path: Path, column: tuple[Path, Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "CHUNK_BYTES", 1)  # chunks of the least size, so that many are under way
    expected = sums_on(ReportExecutor(samples.InlineExecutor(), 1, True), column)
    with cluster(tmp_path) as (address, workers), report_executor(address, 0) as executor:
        assert not executor.shared_disk
        assert sums_on(executor, column) == expected
        finished: list[int] = []

        def kill_after_the_first(count: int) -> None:
            finished.append(count)
            if len(finished) == 1:
                workers[0].kill()

        # All chunks are handed out by now, half of them to the worker that dies.
        assert sums_on(executor, column, kill_after_the_first) == expected
        assert len(finished) > 8
        assert sum(finished) == 800
        assert workers[0].wait(SECONDS) == -signal.SIGKILL
        assert sums_on(executor, column) == expected


def certified(folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """A certificate that is its own authority, as dask's configuration names it and as its commands take it."""
    folder.mkdir()
    made = make_identity(folder, "cluster", int(time.time()))
    certificate, key = str(made.certificate), str(made.key)
    settings = {"ca-file": certificate, "client.cert": certificate, "client.key": key}
    named = {f"distributed.comm.tls.{name}": value for name, value in settings.items()}
    return named, ("--protocol", "tls", "--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key)


def test_a_cluster_over_tls_knows_its_helper_by_certificate(
    tmp_path: Path, column: tuple[Path, Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sums_on(ReportExecutor(samples.InlineExecutor(), 1, True), column)
    own, commands = certified(tmp_path / "own")
    with dask.config.set(own), cluster(tmp_path, *commands) as (address, _):
        assert address.startswith("tls://127.0.0.1:")
        with report_executor(address, 0) as executor:
            assert sums_on(executor, column) == expected
        monkeypatch.setattr(executors, "CONNECT_SECONDS", 2)
        # Nobody else gets in: not in the clear, and not with a certificate of another authority.
        plain = address.replace("tls://", "dask://")
        with raises(ErrorKind.UNREACHABLE), report_executor(plain, 0):
            pass
        strange, _ = certified(tmp_path / "strange")
        with (
            dask.config.set(strange),
            raises(ErrorKind.UNREACHABLE),
            report_executor(address, 0),
        ):
            pass


def test_private_keys_leave_this_machine_under_tls_only() -> None:
    with raises(ErrorKind.FORBIDDEN), report_executor("dask://192.0.2.1:8786", 0):
        pass
    with (
        raises(ErrorKind.FORBIDDEN),
        report_executor("dask://nowhere.invalid:8786", 0),
    ):
        pass
    with raises(ErrorKind.MISSING_OPTION), report_executor("tls://127.0.0.1:8786", 0):
        pass


NO_ADDRESSES = ["dask://", "dask://host", "tls://host", "tcp://127.0.0.1:1", "dask://localhost:x", "nonsense"]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_an_address_that_is_none_is_an_error_for_a_person(address: str) -> None:
    with raises(ErrorKind.MALFORMED), report_executor(address, 0):
        pass


def test_a_scheduler_that_is_not_there_is_an_error_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 1)
    with raises(ErrorKind.UNREACHABLE), report_executor("dask://127.0.0.1:9", 0):
        pass
