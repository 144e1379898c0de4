"""Every command stops in order at Ctrl-C and at SIGTERM, also where a script started it with SIGINT ignored."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from device import agent
from mpc_helpers.local.launcher import Trio, health
from protocol.cli.stopping import STOP_SIGNALS, interrupt_when_terminated, stop_event, stop_flag
from tests.support.processes import IN_BACKGROUND, TREFOIL, output_until, started

SECONDS = 60
EITHER = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)


def stopped(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What it says after the signal, until its end."""
    process.send_signal(number)
    return process.communicate(timeout=SECONDS)[0]


@EITHER
def test_the_dashboard_stops(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "device.sqlite"
    agent.create(path)
    with started([*IN_BACKGROUND, *TREFOIL, "device", "dashboard", "--db", str(path)]) as process:
        output_until(process, "The link works once.")
        assert stopped(process, number) == ""
        assert process.returncode == 0


def test_launch_stops_and_takes_its_helpers_along(tmp_path: Path) -> None:
    """At Ctrl-C; that both signals set the flag it waits for is tested below, without three helpers."""
    folder = tmp_path / "trio"
    with started([*IN_BACKGROUND, *TREFOIL, "launch", "--dir", str(folder)]) as process:
        said = output_until(process, "helper-1: up")
        helpers = Trio(folder).helper_set.helpers
        assert all(health(helper) for helper in helpers), said
        *_, stopping, last = stopped(process, signal.SIGINT).splitlines()
        assert stopping == "stopping" and last.startswith(f"stopped; keys, ledgers and logs are kept in {folder}")
        assert process.returncode == 0
        assert not any(health(helper, 0.5) for helper in helpers)


def test_the_live_demonstration_stops(tmp_path: Path) -> None:
    """At SIGTERM; the browser tests stop theirs with Ctrl-C."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with started([*IN_BACKGROUND, *TREFOIL, "live", "--port", "0"], environment) as process:
        output_until(process, "Press Ctrl-C to stop")
        assert [path.name[:13] for path in tmp_path.iterdir()] == ["trefoil-live-"]
        assert stopped(process, signal.SIGTERM).splitlines()[-1] == "stopped"
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_command_at_work_is_interrupted_and_cleans_up(tmp_path: Path) -> None:
    """Python by itself ends at SIGTERM at once: the demo's folder with all three private keys would stay."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with started([*IN_BACKGROUND, *TREFOIL, "demo", "--reports", "100000"], environment) as process:
        while not list(tmp_path.glob("*/**/helpers.json")):
            assert process.poll() is None
        said = stopped(process, signal.SIGTERM)
        assert process.returncode == 130
        assert "error: interrupted" in said and "nothing else was kept" in said
    assert list(tmp_path.iterdir()) == []


@EITHER
async def test_an_event_is_set_in_a_running_loop(number: signal.Signals) -> None:
    stop = stop_event()
    os.kill(os.getpid(), number)
    try:
        async with asyncio.timeout(SECONDS):
            await stop.wait()
    finally:
        for each in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(each)


@EITHER
def test_a_flag_is_set_and_the_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with stop_flag() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(SECONDS)
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@EITHER
@pytest.mark.parametrize("module", ["protocol.cli.app", "protocol.noise"])
def test_a_command_that_is_still_being_imported_ends_without_a_traceback(number: signal.Signals, module: str) -> None:
    """On a busy machine that takes seconds. The second module is imported after SIGTERM has its handler."""
    program = f"""
import os, signal, sys, trefoil
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number.value})
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["trefoil", "helper", "--config", "nowhere.json"]
trefoil.main()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if (number, module) == (signal.SIGTERM, "protocol.cli.app"):
        assert ended.returncode == -signal.SIGTERM
    else:
        assert (ended.returncode, "error: interrupted" in ended.stderr) == (130, True), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("at_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_termination_is_an_interrupt(at_ctrl_c: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGINT, at_ctrl_c)
        interrupt_when_terminated()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_termination_cancels_the_work_of_an_event_loop() -> None:
    """As Ctrl-C does there: a step that has begun is done, and the next wait ends."""
    done = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("this step")
        await asyncio.sleep(SECONDS)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_when_terminated()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(work())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert done == ["this step"]


def test_no_test_waits_without_end(request: pytest.FixtureRequest) -> None:
    plugin = pytest.importorskip("pytest_timeout", reason="pytest-timeout, of the dev extra, is not installed")
    assert plugin.get_env_settings(request.config).timeout > 0
