"""After each alert, what DEPLOY.md tells the operator to do: tried once, until the alert's reason has gone.

`REMEDIES` names the test of each alert. Remedies that other files try are named with their file.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity.config import load_config
from mpc_helpers.local.view import look_at
from mpc_helpers.mpc.links import listen
from mpc_helpers.service import health
from mpc_helpers.service import workers as workers_module
from protocol.cli.app import app
from protocol.helper_set import entry_to_json
from protocol.units import DAY
from tests.mpc_helpers.test_monitoring import asked, concerns, roll_back_file, until_both_peers_notice, until_page
from tests.mpc_helpers.test_ports import HOST, black_hole, start_behind
from tests.mpc_helpers.test_server import small_batch
from tests.support.exposition import read_exposition
from tests.support.ledger_places import put_in_postgres
from tests.support.private_postgres import PrivatePostgres, why_not
from tests.support.three_helpers import ThreeHelpers, three_helpers

ROOT = Path(__file__).resolve().parents[2]
# By alert: the test that ends it as DEPLOY.md says.
REMEDIES = {
    "TrefoilHelperDown": "test_monitoring::test_a_peer_that_is_down_is_on_the_page_and_back_again",
    "TrefoilPeerDown": "test_monitoring::test_a_peer_that_is_down_is_on_the_page_and_back_again",
    "TrefoilPortBlocked": "test_remedies::test_a_port_is_opened",
    "TrefoilLedgerRefused": "test_remedies::test_a_ledger_is_rebuilt_and_accepted",
    "TrefoilDatabaseDown": "test_remedies::test_a_database_comes_back",
    "TrefoilDisputed": "test_monitoring::test_disk_clock_proofs_and_disputes_are_on_the_page",
    "TrefoilDiskNearlyFull": "test_monitoring::test_disk_clock_proofs_and_disputes_are_on_the_page",
    "TrefoilFailedProof": "test_monitoring::test_disk_clock_proofs_and_disputes_are_on_the_page",
    "TrefoilClockHeld": "test_monitoring::test_disk_clock_proofs_and_disputes_are_on_the_page",
    "TrefoilKeyEnds": "test_remedies::test_keys_and_certificates_are_renewed",
    "TrefoilCertificateEnds": "test_remedies::test_keys_and_certificates_are_renewed",
    "TrefoilHousekeepingFails": "test_housekeeping::test_no_fault_ends_the_rounds",
    "TrefoilConfigurationRefused": "test_config::test_a_file_that_cannot_be_used_changes_nothing",
    # An hour without them, by the rules' own test: operations/alerts_test.yml.
    "TrefoilReplays": "",
    "TrefoilQueriesFail": "",
}


def test_every_alert_has_a_remedy_that_was_tried() -> None:
    operations = ROOT / "mpc_helpers" / "operations"
    assert set(re.findall(r"- alert: (\w+)", (operations / "alerts.yml").read_text())) == set(REMEDIES)
    for alert, name in REMEDIES.items():
        file, _, test = name.partition("::")
        if file:
            assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(), alert
        else:
            assert f"alertname: {alert}, exp_alerts: []" in (operations / "alerts_test.yml").read_text()


def trefoil(*arguments: object) -> None:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, (done.output, done.exception)


async def run(*arguments: object) -> None:
    """Run a command while helpers go on in this process."""
    await asyncio.to_thread(trefoil, *arguments)


async def restart(three: ThreeHelpers, parties: Sequence[int] = (0, 1, 2)) -> None:
    for party in parties:
        await three.stop(party)
    await asyncio.gather(*(three.start(party) for party in parties))


async def until_well(three: ThreeHelpers) -> None:
    """Until no helper names a reason, and a query is answered."""
    for party in range(3):
        await until_page(three, lambda reply: concerns(reply) == [], party)
    batch = small_batch(three)
    assert (await three.ask(three.query(batch), batch)).answer.counted == 5


async def test_a_port_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 3's port is first behind a firewall, which drops what comes, and then not."""
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(workers_module.probe, "__defaults__", (0.2,))
    async with three_helpers(tmp_path, start=False) as three:
        with black_hole() as port:
            await start_behind(three, port)
        with listen(HOST, port):
            await until_well(three)


async def test_a_ledger_is_rebuilt_and_accepted(tmp_path: Path) -> None:
    """Helper 2 came back with a copy from before the last query: the commands of all three operators, in order."""
    async with three_helpers(tmp_path) as three:
        configs = [three.trio.config_path(party) for party in range(3)]
        ledger = load_config(configs[1]).ledger_file
        asking = await roll_back_file(three, tmp_path / "backup")
        await until_both_peers_notice(three)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for party in range(3):
            await three.stop(party)
        for party in (0, 2):
            out = tmp_path / f"from-{party + 1}"
            await run("ledger", "export", "--config", configs[party], "--lost-by", 2, "--out", out)
        for leftover in ledger.parent.glob(f"{ledger.name}*"):
            leftover.rename(tmp_path / leftover.name)
        entries = ("--entries", tmp_path / "from-1", "--entries", tmp_path / "from-3")
        await run("ledger", "rebuild", "--config", configs[1], *entries)
        for party in (0, 2):
            await run("ledger", "accept-peer", "--config", configs[party], "--helper", 2)
        await restart(three)
        await until_well(three)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_database_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 1's database stops as in a power cut, and starts again. The helper is left alone."""
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    private = PrivatePostgres()
    try:
        async with three_helpers(tmp_path, start=False) as three:
            put_in_postgres(three.trio, 0, private.location())
            await restart(three)
            await until_well(three)
            await asyncio.to_thread(private.stop_immediately)
            status, page = await until_page(three, lambda reply: "database" in concerns(reply))
            assert (status, page["ready"]) == (503, False)
            assert str(private.folder) not in json.dumps(page), "anyone may read the page"
            metrics = read_exposition((await asked(three, "/metrics"))[1])
            assert (metrics["trefoil_ledger_up"].value(), metrics["trefoil_ready"].value()) == (0, 0)
            seen = await asyncio.to_thread(look_at, three.helper_set, [1])
            assert "database" in str(seen[0].to_json())
            await asyncio.to_thread(private.start)
            await until_well(three)
            assert read_exposition((await asked(three, "/metrics"))[1])["trefoil_ledger_up"].value() == 1
    finally:
        private.remove()


async def test_keys_and_certificates_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones beside the old, a new set that all three sign, a restart; reports sealed before still count."""
    monkeypatch.setattr(health, "KEY_NOTICE", 100 * DAY)
    monkeypatch.setattr(health, "CERTIFICATE_NOTICE", 830 * DAY)
    async with three_helpers(tmp_path) as three:
        reply = await until_page(three, lambda reply: {"key", "certificate"} == set(concerns(reply)))
        assert len(concerns(reply)) == 6
        before, old, folder = small_batch(three), three.helper_set, three.trio.folder
        shutil.copy(three.trio.helper_set_path, folder / "set-1.json")
        for party, helper in enumerate(old.helpers):
            own = three.trio.helper_folder(party)
            # The launcher keeps no entries; an operator has had one since `trefoil keygen helper`.
            (own / "entry.json").write_text(json.dumps(entry_to_json(helper)))
            await run("keygen", "hpke", "--dir", own, "--days", 200)
            entry = ("--entry", own / "entry.json")
            await run("keygen", "tls", "--name", helper.name, "--dir", own / "tls-2", "--days", 900, *entry)
        entries = [each for party in range(3) for each in ("--entry", three.trio.helper_folder(party) / "entry.json")]
        await run("helper-set", "new", folder / "next.json", *entries, "--number", old.number + 1)
        for party in range(3):
            key = three.trio.helper_folder(party) / "identity.key"
            await run("helper-set", "sign", folder / "next.json", "--key", key)
            path = three.trio.config_path(party)
            named = {"tls_certificate": "tls-2/tls.crt", "tls_key": "tls-2/tls.key"}
            changed = {**json.loads(path.read_text()), **named, "previous_helper_sets": ["../set-1.json"]}
            path.write_text(json.dumps(changed))
        (folder / "next.json").replace(three.trio.helper_set_path)
        await restart(three)
        await until_well(three)
        assert (await three.ask(three.query(before), before)).answer.counted == 5
