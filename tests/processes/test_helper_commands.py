"""Operators' commands: three helpers set up, queried, and moved from suite 1 to suite 2 as DEPLOY describes it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from device import services
from device.stores.memory_store import ServiceList
from mpc_helpers.identity.keygen import MPC_PORTS
from mpc_helpers.local.launcher import Trio, health
from protocol.cli import app as cli
from protocol.cli.app import app
from protocol.errors import ErrorKind, TrefoilError
from protocol.header import Header, ReportTerms, coarse_time
from protocol.helper_set import HelperSet, entry_to_json
from protocol.hpke import CLASSICAL, POST_QUANTUM, Suite
from protocol.report import SealedReport, seal_report
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, seal_all, terms, three_helpers, write_batch

NAMES = ("north", "south", "west")
ROOT = Path(__file__).resolve().parents[2]


def trefoil(*arguments: str | Path, fails: bool = False) -> str:
    """Run a command in this process; returns what it printed, and the error as the front door would print it."""
    ran = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    failure = ran.exception if isinstance(ran.exception, TrefoilError) else None
    if ran.exception is not None and failure is None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert (ran.exit_code != 0) == fails, ran.output
    return ran.output + (f"error: {failure}\nhint: {failure.hint}" if failure else "")


def free_port() -> int:
    """Return a port that is free with the MPC ports above it, below those that the system gives to connections."""
    for first in random.SystemRandom().sample(range(20_000, 32_000, MPC_PORTS + 1), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + MPC_PORTS + 1):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")


def set_up(folder: Path) -> Path:
    """Three operators, each in a directory of its own, as README tells them. Returns the signed set."""
    for name in NAMES:
        address = f"https://127.0.0.1:{free_port()}"
        said = trefoil("keygen", "helper", "--name", name, "--address", address, "--dir", folder / name)
        assert str(folder / name / "entry.json") in said
    draft = folder / "draft.json"
    entries = [argument for name in NAMES for argument in ("--entry", str(folder / name / "entry.json"))]
    digest = trefoil("helper-set", "new", draft, *entries).split()[1]
    assert "no" in trefoil("helper-set", "verify", draft, fails=True)
    for name in NAMES:
        copy = folder / name / "signed.json"
        copy.write_bytes(draft.read_bytes())
        assert digest in trefoil("helper-set", "sign", copy, "--key", folder / name / "identity.key")
    helpers = folder / "helpers.json"
    copies = [argument for name in NAMES for argument in ("--copy", str(folder / name / "signed.json"))]
    trefoil("helper-set", "join", helpers, *copies)
    trefoil("helper-set", "verify", helpers)
    return helpers


def configure(folder: Path, helpers: Path, public_key: str) -> None:
    for name in NAMES:
        path = folder / name / "config.json"
        stored = json.loads(path.read_text())
        stored.update(host="127.0.0.1", processes=0, sites={SITE: {"key": public_key, "callers": [SITE]}})
        path.write_text(json.dumps(stored))
        (folder / name / "helpers.json").write_bytes(helpers.read_bytes())


@contextlib.contextmanager
def started(folder: Path, helpers: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "trefoil", "helper", "--stop-with-stdin", "--config"]
    processes = [
        subprocess.Popen([*command, str(folder / name / "config.json")], stdin=subprocess.PIPE, cwd=ROOT)
        for name in NAMES
    ]
    try:
        deadline = time.monotonic() + 60
        for helper in HelperSet.load(helpers).helpers:
            while not health(helper):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            assert process.wait(30) == 0


def test_three_operators_and_a_site(tmp_path: Path) -> None:
    helpers = set_up(tmp_path)
    public_key = trefoil("keygen", "site", tmp_path / "shop.key").split()[-1]
    assert "exists already" in trefoil("keygen", "site", tmp_path / "shop.key", fails=True)
    configure(tmp_path, helpers, public_key)
    assert "there is no ledger" in trefoil("helper", "--config", tmp_path / "north" / "config.json", fails=True)
    for name in NAMES:
        trefoil("ledger", "create", "--config", tmp_path / name / "config.json")
    assert "not replaced" in trefoil("ledger", "create", "--config", tmp_path / "north" / "config.json", fails=True)
    write_batch(tmp_path / "batch", seal_all([[3, 4]] * 5, terms(2, debug=True), HelperSet.load(helpers)))
    ask: list[str | Path] = [
        "query",
        "--debug",
        "--reports",
        tmp_path / "batch",
        "--helpers",
        helpers,
        "--site-key",
        tmp_path / "shop.key",
    ]
    with started(tmp_path, helpers):
        said = trefoil(*ask, "--json", tmp_path / "answer.json", "--plot", tmp_path / "answer.png")
        assert "5 of 5 reports counted" in said
        stored = json.loads((tmp_path / "answer.json").read_text())
        assert stored["answer"] == [15, 20]
        assert (tmp_path / "answer.png").stat().st_size > 1000
        trefoil(*ask, "--json", tmp_path / "again.json")
        again = json.loads((tmp_path / "again.json").read_text())
        assert (again["answer"], again["query_id"]) == (stored["answer"], stored["query_id"])
        refused = trefoil(*ask, "--new", fails=True)
        assert "error: Refused: all 5 reports were counted before. Nothing was spent.\n" in refused
        assert "already spent" not in refused
        told = trefoil(*ask, "--new", "--details", fails=True)
        assert [f"{name} left out: 5 already spent" in told for name in ("north", "south", "west")] == [True] * 3
    said = trefoil(*ask, fails=True)
    assert "error: submitting: north cannot be reached" in said
    assert "Check that the helper runs" in said


def test_a_renewed_key_joins_the_old_one_in_the_next_set(tmp_path: Path) -> None:
    first = HelperSet.load(set_up(tmp_path))
    trefoil("keygen", "hpke", "--dir", tmp_path / "north", "--days", "30")
    assert "greater than or equal to 1" in trefoil(
        "keygen", "hpke", "--dir", tmp_path / "north", "--days", "0", fails=True
    )
    entries = [argument for name in NAMES for argument in ("--entry", str(tmp_path / name / "entry.json"))]
    trefoil("helper-set", "new", tmp_path / "next.json", *entries, "--number", "2")
    for name in NAMES:
        trefoil("helper-set", "sign", tmp_path / "next.json", "--key", tmp_path / name / "identity.key")
    renewed = HelperSet.load(tmp_path / "next.json")
    assert renewed.helpers[0].hpke_keys[0] == first.helpers[0].hpke_keys[0]
    assert len(renewed.helpers[0].hpke_keys) == len(list((tmp_path / "north" / "hpke").iterdir())) == 2
    assert renewed.helpers[1:] == first.helpers[1:]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["helper", "--config", "nothing.json"], "cannot read the configuration"),
        (["query", "--reports", "x", "--helpers", "nothing.json", "--site-key", "y"], "there is no helper set"),
        (["helper-set", "verify", "nothing.json"], "there is no helper set"),
        (["helper-set", "new", "out.json", "--entry", "a"], "three entries"),
        (["launch", "--dir", "/proc/nowhere"], "error:"),
        (["launch", "--dir", "/proc/nowhere", "--port", "1"], "three ports"),
    ],
)
def test_a_mistake_gets_an_error_not_a_traceback(arguments: list[str], complaint: str) -> None:
    assert complaint in trefoil(*arguments, fails=True)


@pytest.mark.parametrize(
    "command",
    ["helper", "launch", "query", "demo", "keygen helper", "keygen hpke", "keygen site", "keygen tls"]
    + ["helper status", "helper reload", "site add", "site remove", "site list"]
    + [f"ledger {verb}" for verb in ("create", "export", "rebuild", "accept-peer")]
    + [f"helper-set {verb}" for verb in ("new", "sign", "join", "verify")],
)
def test_every_command_has_an_example(command: str) -> None:
    assert f"Example: trefoil {command}" in trefoil(*command.split(), "--help")


BUCKETS = 4


def run(*arguments: str | Path) -> None:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


def rotate(trio: Trio) -> Path:
    """What the three operators do; the new set, signed by all."""
    old, folder = trio.helper_set, trio.folder
    kept = folder / f"set-{old.number}.json"
    kept.write_text(json.dumps(old.to_json()))
    renewed = folder / f"set-{old.number + 1}.json"
    helpers = [trio.helper_folder(party) for party in range(3)]
    for helper, entry in zip(helpers, old.helpers, strict=True):
        # The launcher keeps no entries; an operator has had one since `trefoil keygen helper`.
        (helper / "entry.json").write_text(json.dumps(entry_to_json(entry)))
        run("keygen", "hpke", "--suite", "2", "--dir", helper)
    entries = [part for helper in helpers for part in ("--entry", str(helper / "entry.json"))]
    run("helper-set", "new", renewed, *entries, "--number", str(old.number + 1))
    for party, helper in enumerate(helpers):
        run("helper-set", "sign", renewed, "--key", helper / "identity.key")
        config = trio.config_path(party)
        stored = json.loads(config.read_text())
        stored["previous_helper_sets"] = [f"../{kept.name}"]
        config.write_text(json.dumps(stored))
    run("helper-set", "verify", renewed)
    return renewed


def reports_to(helper_set: HelperSet, count: int) -> list[SealedReport]:
    """Of devices that hold this set."""
    of = ReportTerms(SITE, SITE, coarse_time(real_now()), 1_000_000, 4, BUCKETS, cap=2, spread=1)
    return [seal_report([0, 1, 0, 0], of, helper_set) for _ in range(count)]


def suites_of(reports: list[SealedReport]) -> set[Suite]:
    return {Header.decode(report.header).suite for report in reports}


async def counted(three: ThreeHelpers, reports: list[SealedReport]) -> int:
    batch = three.batch(reports)
    return (await three.ask(three.query(batch), batch)).answer.counted


async def test_helpers_go_over_to_suite_two_and_reports_of_before_still_count(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        device = ServiceList()
        services.add(device, "trefoil", three.helper_set, real_now())
        before = reports_to(services.trusted_sets(device)["trefoil"], 5)
        assert suites_of(before) == {CLASSICAL}
        assert await counted(three, before[:2]) == 2
        renewed = rotate(three.trio)
        for party in range(3):
            await three.stop(party)
        renewed.replace(three.trio.helper_set_path)
        for party in range(3):
            await three.start(party)
        # A device renews by its own chain; until it does, it goes on as before.
        late = reports_to(services.trusted_sets(device)["trefoil"], 1)
        assert services.renew(device, "trefoil", three.helper_set, real_now())
        after = reports_to(services.trusted_sets(device)["trefoil"], 3)
        assert (suites_of(late), suites_of(after)) == ({CLASSICAL}, {POST_QUANTUM})
        with raises(ErrorKind.INCONSISTENT):
            three.batch([*late, *after])
        # What waited is answered, what was counted is not counted again, and neither suite is in the other's way.
        assert await counted(three, after) == 3
        assert await counted(three, [*before[2:], *late]) == 4
        again = three.batch(before)
        with pytest.raises(TrefoilError):
            await three.ask(three.query(again), again)
