"""A running helper reads its configuration again: sites and sets; what cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import Launched, health, launched_helpers
from mpc_helpers.service.reloading import PROCESS_FILE, ask_to_reload
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey, load_identity
from protocol.querier.ask import Querier
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.set_files import write_set
from protocol.shares import PARTIES
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch
from trefoil import app

NEW_SITE = "new.example"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    options = {"processes": 0, "unchecked_histograms": True}
    folder = tmp_path_factory.mktemp("reloading")
    with launched_helpers(folder / "trio", now=real_now(), sites={SITE: [SITE]}, options=options) as trio:
        yield trio


def trefoil(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    return done.exit_code, done.output + (str(done.exception) if isinstance(done.exception, TrefoilError) else "")


def ask(running: Launched, folder: Path, site: str, key: IdentityKey) -> int:
    helper_set = running.trio.helper_set
    batch = write_batch(
        folder / os.urandom(4).hex(), seal_all([[1, 0]] * 4, terms(2, site=site, caller=site), helper_set)
    )
    asked = make_query(batch, QueryOptions(seconds=60), helper_set, key, real_now())
    return asyncio.run(Querier(helper_set).ask(asked, batch)).answer.counted


def reloads(running: Launched, party: int = 0) -> Any:
    """How often a helper has; None while its doors are closed, which they are for a moment when a set is taken up."""
    page = health(running.trio.helper_set.helpers[party])
    return page["reloads"] if page else None


def test_a_site_is_added_without_a_restart(running: Launched, tmp_path: Path) -> None:
    key = IdentityKey.generate()
    pids = [helper.process.pid for helper in running.helpers if helper.process]
    with pytest.raises(QueryFailed, match="answers no queries of new"):
        ask(running, tmp_path, NEW_SITE, key)
    for party in range(PARTIES):
        config = running.trio.config_path(party)
        code, said = trefoil("site", "add", NEW_SITE, "--key", key.public.hex(), "--config", config)
        assert (code, said.startswith(f"registered {NEW_SITE}")) == (0, True)
        code, said = trefoil("helper", "reload", "--config", config)
        assert (code, said) == (0, f"helper-{party + 1} has read its configuration again\n")
    assert ask(running, tmp_path, NEW_SITE, key) == 4
    for party in range(PARTIES):
        assert trefoil("site", "remove", NEW_SITE, "--config", running.trio.config_path(party))[0] == 0
        assert trefoil("helper", "reload", "--config", running.trio.config_path(party))[0] == 0
    with pytest.raises(QueryFailed, match="answers no queries of new"):
        ask(running, tmp_path, NEW_SITE, key)
    assert [helper.process.pid for helper in running.helpers if helper.process] == pids


def test_a_file_that_cannot_be_used_changes_nothing(running: Launched, tmp_path: Path) -> None:
    config = running.trio.config_path(0)
    good = config.read_text()
    before = reloads(running)
    try:
        config.write_text(good.replace('"sites"', '"sights"'))
        code, said = trefoil("helper", "reload", "--config", config)
        assert (code, "unknown field 'sights'" in said) == (1, True)  # the command looks first
        assert reloads(running) == before
        process = running.helpers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGHUP)
        wait_for(lambda: reloads(running) == before + 1)
        page = health(running.trio.helper_set.helpers[0]) or {}
        assert [reason["concern"] for reason in page["reasons"]] == ["configuration"]  # type: ignore[attr-defined]
        assert "unknown field 'sights'" in running.trio.log_path(0).read_text()
        # Readable, and of no use: another program has the port. The helper is there again with what it had.
        taken = json.loads(running.trio.config_path(1).read_text())["port"]
        config.write_text(json.dumps({**json.loads(good), "port": taken}))
        code, said = trefoil("helper", "reload", "--config", config)
        assert (code, "goes on with what it used before" in said) == (1, True)
        assert ask(running, tmp_path, SITE, running.site_key(SITE)) == 4
    finally:
        config.write_text(good)
    assert trefoil("helper", "reload", "--config", config)[0] == 0
    assert (health(running.trio.helper_set.helpers[0]) or {})["reasons"] == []


def wait_for(condition: Any) -> None:
    async def wait() -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.05)

    asyncio.run(wait())


def test_a_new_set_is_taken_up_while_a_query_runs(running: Launched, tmp_path: Path) -> None:
    """Asked under the old set and answered under the new one, by processes that were never stopped."""
    old = running.trio.helper_set
    batch = write_batch(tmp_path / "batch", seal_all([[1, 0]] * 400, terms(2), old))
    asked = make_query(batch, QueryOptions(seconds=60), old, running.site_key(SITE), real_now())
    renewed = HelperSet(old.number + 1, old.helpers)
    for party in range(PARTIES):
        renewed = renewed.signed_by(load_identity(running.trio.helper_folder(party) / "identity.key"))

    async def ask_and_renew() -> int:
        taken = asyncio.Event()
        asking = asyncio.create_task(Querier(old).ask(asked, batch, lambda _: taken.set()))
        await taken.wait()
        write_set(running.trio.helper_set_path, renewed)
        for party in range(PARTIES):
            ask_to_reload(load_config(running.trio.config_path(party)))
        # Whoever finds a door closed knocks again.
        async with asyncio.timeout(60):
            return (await asking).answer.counted

    before = [reloads(running, party) for party in range(PARTIES)]
    assert asyncio.run(ask_and_renew()) == 400
    wait_for(lambda: all(reloads(running, party) == before[party] + 1 for party in range(PARTIES)))
    assert ask(running, tmp_path, SITE, running.site_key(SITE)) == 4


def test_only_a_running_helper_is_told(tmp_path: Path, running: Launched) -> None:
    config = load_config(running.trio.config_path(0))
    stored = (config.data / PROCESS_FILE).read_text()
    pid = stored.split()[0]
    try:
        for wrong, said in (("", "no helper has run"), (f"{pid} 1", "does not run"), ("999999999 5", "does not run")):
            (config.data / PROCESS_FILE).write_text(wrong)
            with pytest.raises(TrefoilError, match=said):
                ask_to_reload(config)
    finally:
        (config.data / PROCESS_FILE).write_text(stored)


def test_status_shows_all_three_and_says_so_by_its_exit_code(running: Launched, tmp_path: Path) -> None:
    helper_set = running.trio.helper_set_path
    wait_for(lambda: trefoil("helper", "status", "--set", helper_set)[0] == 0)
    code, said = trefoil("helper", "status", "--set", helper_set)
    assert all(helper.name in said for helper in running.trio.helper_set.helpers)
    code, said = trefoil("helper", "status", "--config", running.trio.config_path(0), "--json", "-", "--helper", 2)
    (only,) = json.loads(said)
    assert (code, only["name"], only["ready"], only["health"]["status"]) == (0, "helper-2", True, "ok")
    assert trefoil("helper", "status")[0] == 2
    assert "there is no helper 4" in trefoil("helper", "status", "--set", helper_set, "--helper", 4)[1]
    running.helpers[2].stop()
    code, said = trefoil("helper", "status", "--set", helper_set)
    assert (code, "does not answer" in said) == (75, True)
    running.restart(2)
