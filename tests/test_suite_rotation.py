"""From suite 1 to suite 2 as DEPLOY describes it, on three running helpers, with their own commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trefoil
from device import services
from device.service_store import ServiceList
from mpc_helpers.local.launcher import Trio
from protocol.errors import TrefoilError
from protocol.header import Header, ReportTerms, coarse_time
from protocol.helper_set import HelperSet, entry_to_json
from protocol.hpke import CLASSICAL, POST_QUANTUM, Suite
from protocol.report import SealedReport, seal_report
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, three_helpers

BUCKETS = 4


def run(*arguments: str | Path) -> None:
    result = CliRunner().invoke(trefoil.app, [str(argument) for argument in arguments])
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
        before = reports_to(services.held(device)["trefoil"], 5)
        assert suites_of(before) == {CLASSICAL}
        assert await counted(three, before[:2]) == 2
        renewed = rotate(three.trio)
        for party in range(3):
            await three.stop(party)
        renewed.replace(three.trio.helper_set_path)
        for party in range(3):
            await three.start(party)
        # A device renews by its own chain; until it does, it goes on as before.
        late = reports_to(services.held(device)["trefoil"], 1)
        assert services.renew(device, "trefoil", three.helper_set, real_now())
        after = reports_to(services.held(device)["trefoil"], 3)
        assert (suites_of(late), suites_of(after)) == ({CLASSICAL}, {POST_QUANTUM})
        with pytest.raises(TrefoilError, match="another shape"):
            three.batch([*late, *after])
        # What waited is answered, what was counted is not counted again, and neither suite is in the other's way.
        assert await counted(three, after) == 3
        assert await counted(three, [*before[2:], *late]) == 4
        again = three.batch(before)
        with pytest.raises(TrefoilError):
            await three.ask(three.query(again), again)
