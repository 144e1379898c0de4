"""The processes in which reports are opened: replaced when killed, gone when their daemon is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from mpc_helpers.admission.pool import Pool


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
        "import sys; sys.path.insert(0, 'tests')\n"
        "from mpc_helpers.admission.pool import Pool\n"
        "from test_pool import own_id\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    print(Pool(1).submit(own_id).result(60), flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = tmp_path / "daemon.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests")])}
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
