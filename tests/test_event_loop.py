"""The event loop waits for no disk: while the ledger is busy with many reports, a helper answers everybody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpc_helpers.ledger import database
from mpc_helpers.ledger.file import clear_errors
from tests.support.three_helpers import ThreeHelpers, three_helpers
from tests.test_server import send, small_batch, talking_to


@contextmanager
def ledger_calls_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What reads or writes a ledger from the thread that runs the loop, which is this one."""
    found: list[str] = []
    errors = clear_errors

    def noted(path: Path) -> object:
        if threading.current_thread() is threading.main_thread():
            found.append(path.name)
        return errors(path)

    with monkeypatch.context() as patched:
        # Every read and every transaction begins with it.
        patched.setattr(database, "clear_errors", noted)
        yield found


async def answered(three: ThreeHelpers) -> None:
    batch = small_batch(three)
    assert (await three.ask(three.query(batch), batch)).answer.counted == 5
    async with talking_to(three) as session:
        for page in ("/healthz", "/metrics", "/v1/config"):
            assert (await send(session, "GET", page))[0] == 200


async def test_nothing_that_peers_or_queriers_ask_reads_the_ledger_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers greet each other at their first message, and once more after a restart."""
    async with three_helpers(tmp_path) as three:
        with ledger_calls_in_the_loop(monkeypatch) as found:
            await answered(three)
            assert found == []
        await three.stop(0)
        await three.start(0)
        with ledger_calls_in_the_loop(monkeypatch) as found:
            await answered(three)
            assert found == []
            three.intakes[0].registry._book.all()
            assert found  # what the test looks for can be seen
