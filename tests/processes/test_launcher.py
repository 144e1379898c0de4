"""Three real processes: the happy path, restarts, a killed helper, a stopped helper, a killed launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpc_helpers.local import view
from mpc_helpers.local.launcher import (
    HelperEnded,
    HelperProcess,
    Launched,
    Trio,
    health,
    launched,
    launched_helpers,
    prepare,
)
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, TrefoilError
from protocol.keys import load_identity
from protocol.noise import NoiseMode
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.shares import PARTIES
from tests.support.processes import TREFOIL, output_until, started
from tests.support.raising import raises
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder, options = tmp_path_factory.mktemp("trio"), {"processes": 0, "unchecked_histograms": True}
    with launched_helpers(folder, now=real_now(), sites={SITE: [SITE]}, options=options) as trio:
        yield trio


class LaunchedAsker:
    """A querier of the launched helpers."""

    def __init__(self, running: Launched, folder: Path) -> None:
        self.running = running
        self.folder = folder
        self.key = load_identity(running.trio.site_key_path(SITE))
        self.helper_set = running.trio.helper_set
        self._count = 0

    def batch(self, count: int, *, debug: bool = True) -> BatchReader:
        """Debug reports, so that the answer is exact: the noise of installed helpers cannot be recorded."""
        self._count += 1
        reports = seal_all([[0, 1, 0, 2]] * count, terms(4, debug=debug), self.helper_set)
        return write_batch(self.folder / f"batch-{self._count}", reports)

    def query(self, batch: BatchReader, **wishes: object) -> SavedQuery:
        options = QueryOptions(debug=batch[0].terms().debug, **wishes)  # type: ignore[arg-type] # fields by name
        return make_query(batch, options, self.helper_set, self.key, real_now())

    def ask(self, asked: SavedQuery, batch: BatchReader, patience: float = 30) -> QueryResult:
        return asyncio.run(Querier(self.helper_set, patience=patience).ask(asked, batch))


@pytest.fixture
def asking(running: Launched, tmp_path: Path) -> LaunchedAsker:
    return LaunchedAsker(running, tmp_path)


def test_a_query_over_three_processes_is_answered_once(asking: LaunchedAsker) -> None:
    batch = asking.batch(7)
    asked = asking.query(batch)
    result = asking.ask(asked, batch)
    assert result.answer.histogram == [0, 7, 0, 14]
    assert asking.ask(asked, batch).answer == result.answer
    with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
        asking.ask(asking.query(batch), batch)


@pytest.mark.parametrize("mode", list(NoiseMode))
def test_real_reports_get_real_noise(asking: LaunchedAsker, mode: NoiseMode) -> None:
    """Within 60 standard deviations: the noise has tails e^(−x·γ), so this fails by chance less than once in 10^30."""
    batch = asking.batch(5, debug=False)
    result = asking.ask(asking.query(batch, noise=mode), batch)
    assert result.answer.counted == 5
    for value, truth in zip(result.answer.histogram, [0, 5, 0, 10], strict=True):
        assert abs(value - truth) < 60 * result.noise_sd


def test_a_killed_helper_comes_back_and_gives_the_same_bytes(asking: LaunchedAsker) -> None:
    batch = asking.batch(4)
    asked = asking.query(batch)
    first = asking.ask(asked, batch)
    asking.running.helpers[1].kill()
    with raises(ErrorKind.UNREACHABLE, QueryFailed) as failed:
        asking.ask(asked, batch, patience=0.1)
    assert failed.value.helpers == (1,)
    asking.running.restart(1)
    assert asking.ask(asked, batch).answer == first.answer
    with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
        asking.ask(asking.query(batch), batch)


def test_a_stopped_helper_is_named_and_the_query_resumes(asking: LaunchedAsker) -> None:
    """SIGSTOP: connections stay open and nothing answers."""
    batch = asking.batch(3)
    asked = asking.query(batch, seconds=120)
    process = asking.running.helpers[2].process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with raises(ErrorKind.TIMEOUT, QueryFailed) as failed:
            asyncio.run(Querier(asking.helper_set, request_seconds=1).ask(asked, batch))
        assert failed.value.helpers == (2,)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert asking.ask(asked, batch).answer.histogram == [0, 3, 0, 6]


def test_a_second_launcher_does_not_touch_the_first(asking: LaunchedAsker) -> None:
    """As a command of its own: refused, with every file as it was, and the first three still answer."""
    trio = asking.running.trio
    files = [trio.helper_set_path, *(trio.config_path(party) for party in range(PARTIES))]
    before = [path.read_bytes() for path in files]
    command = [sys.executable, "-m", "trefoil", "launch", "--dir", str(trio.folder), "--site", "other.example"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "helpers are running from" in second.stderr
    assert [path.read_bytes() for path in files] == before
    assert not trio.site_key_path("other.example").exists()
    with raises(ErrorKind.BUSY), launched(trio):
        pass
    batch = asking.batch(3)
    assert asking.ask(asking.query(batch), batch).answer.counted == 3


def test_preparing_again_changes_nothing_but_what_is_asked_for(tmp_path: Path) -> None:
    first = prepare(tmp_path / "trio", now=real_now())
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    prepare(tmp_path / "trio", now=real_now() + 5)
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before
    prepare(tmp_path / "trio", now=real_now(), sites={"b.example": ["b.example"]}, ports=[1, 2, 3])
    again = first.helper_set
    assert [helper.address[-2:] for helper in again.helpers] == [":1", ":2", ":3"]
    assert again.number == 2
    # Addresses are not in the digest: no report is voided by a helper that moves.
    text = first.config_path(0).read_text()
    assert "b.example" in text
    assert SITE in text


def test_a_helper_that_cannot_start_says_why(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=real_now())
    (trio.helper_folder(1) / "identity.key").chmod(0o644)
    running = Launched(trio, [HelperProcess(trio, party) for party in range(PARTIES)])
    with raises(ErrorKind.ABORTED, TrefoilError) as caught:
        running.restart(1)
    running.helpers[1].stop()
    assert "helper-2" in str(caught.value) and "identity.key" in str(caught.value)


TRACKER = "resource_tracker: There appear to be 2 leaked semaphore objects to clean up at shutdown"


@pytest.mark.parametrize(
    ("end", "how"),
    [("exit 7", "ended with exit status 7"), ("kill -9 $$", "was ended by SIGKILL"), ("exit 0", "exit status 0")],
)
def test_a_helper_that_ends_by_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, how: str
) -> None:
    """No helper is started: a shell ends as one would. What Python adds about a killed process is no reason."""
    monkeypatch.setattr(view, "LOOK_SECONDS", 0)
    trio = prepare(tmp_path / "trio", now=real_now())
    shell = ["sh", "-c", f"echo INFO the disk is nearly full; echo '{TRACKER}'; {end}"]
    running = Launched(trio, [HelperProcess(trio, 0), HelperProcess(trio, 1, shell), HelperProcess(trio, 2)])
    running.check_running()
    running.helpers[1].start()
    process = running.helpers[1].process
    assert process is not None
    process.wait(30)
    with raises(ErrorKind.UNAVAILABLE, HelperEnded) as ended:
        view._watch_plain(running, threading.Event())
    assert str(ended.value).startswith("helper-2") and how in str(ended.value)
    assert str(ended.value).endswith("INFO the disk is nearly full")
    assert ended.value.retryable is True and str(trio.log_path(1)) in ended.value.hint
    running.helpers[1].stop()


def test_a_killed_launcher_leaves_no_helper_behind(tmp_path: Path) -> None:
    with started([*TREFOIL, "launch", "--dir", str(tmp_path / "trio")]) as launch:
        output_until(launch, "helper-1: up")
        launch.kill()
    helpers = Trio(tmp_path / "trio").helper_set.helpers
    deadline = time.monotonic() + 30
    while any(health(helper, 0.5) for helper in helpers):
        assert time.monotonic() < deadline, "a helper outlived its launcher"
        time.sleep(0.1)
