"""The alert rules and the unit of DEPLOY.md, tried with the programs that read them.

`make alerts` (TREFOIL_ALERTS=all) has Prometheus itself scrape three real helpers: none fires while all is well, and
each fires when what it is about has happened. Without prometheus or systemd installed, what they check is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import Launched, Trio, health, launched, prepare
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.links import listen
from mpc_helpers.service.health import Concern
from mpc_helpers.service.housekeeping import LastRound
from protocol.helper_set import HelperSet, write_set
from protocol.keys import load_identity
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.shares import PARTIES
from protocol.status import Failure, QueryState
from protocol.units import DAY
from tests.mpc_helpers.test_monitoring import WANTED
from tests.support.ledger_places import put_in_postgres
from tests.support.private_postgres import PrivatePostgres, why_not
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch

ALL = os.environ.get("TREFOIL_ALERTS") == "all"
ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "mpc_helpers" / "operations"
RULES = (OPERATIONS / "alerts.yml").read_text()
NAMES = re.findall(r"- alert: (\w+)", RULES)
WAIT_SECONDS = 120


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, cwd=OPERATIONS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_speak_of_metrics_that_there_are() -> None:
    """And of every concern that a health page may have, directly or through its own metric."""
    expressions = re.findall(r"expr: (.*)", RULES)
    named = set(re.findall(r"\b(?:trefoil|process)_\w+", " ".join(expressions)))
    assert named <= WANTED
    concerns = set(re.findall(r'concern="(\w+)"', " ".join(expressions)))
    own_metric = {Concern.PEER, Concern.LEDGER, Concern.DATABASE, Concern.DISPUTE, Concern.PROOFS}
    assert concerns | {concern.value for concern in own_metric} == {concern.value for concern in Concern}
    assert len(set(NAMES)) == len(NAMES) == len(expressions)


def test_the_operator_is_told_what_to_do_after_each_alert() -> None:
    page = (OPERATIONS.parent / "DEPLOY.md").read_text()
    table = page[page.index("### After an alert") :]
    assert set(re.findall(r"`(Trefoil\w+)`", table)) == set(NAMES)


@needs("promtool")
def test_prometheus_reads_the_rules() -> None:
    run("promtool", "check", "rules", "alerts.yml")
    run("promtool", "test", "rules", "alerts_test.yml")


@needs("systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """The program and the user need not be on this machine: it is checked with others in their place."""
    unit = (OPERATIONS / "trefoil-helper.service").read_text()
    unit = unit.replace("/opt/trefoil/bin/trefoil", shutil.which("true") or "").replace("=trefoil", "=root")
    (tmp_path / "trefoil-helper.service").write_text(unit)
    run("systemd-analyze", "verify", "--man=no", tmp_path / "trefoil-helper.service")


@dataclass
class Scraper:
    """A Prometheus that scrapes three helpers every second, with the rules' waiting times made short."""

    port: int

    def firing(self) -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/alerts", timeout=5) as page:
            alerts = json.load(page)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not set(names) <= (firing := self.firing()):
            assert time.monotonic() < deadline, f"waited for {names}; firing are {firing}"
            time.sleep(0.5)
        print(f"fired: {', '.join(names)}")  # noqa: T201

    def healthy(self) -> bool:
        """Whether all three were scraped."""
        query = f"http://127.0.0.1:{self.port}/api/v1/query?query=sum(up)"
        with contextlib.suppress(OSError), urllib.request.urlopen(query, timeout=5) as page:
            found = json.load(page)["data"]["result"]
            return bool(found) and found[0]["value"][1] == str(PARTIES)
        return False


@contextlib.contextmanager
def scraping(trio: Trio, folder: Path) -> Iterator[Scraper]:
    folder.mkdir()
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 1s", RULES))
    jobs = [
        f"  - job_name: trefoil-{party}\n    scheme: https\n"
        f"    tls_config: {{ca_file: {trio.helper_folder(party)}/tls.crt, server_name: {helper.name}}}\n"
        f"    relabel_configs: [{{target_label: job, replacement: trefoil}}]\n"
        f'    static_configs: [{{targets: ["{helper.endpoint[0]}:{helper.endpoint[1]}"]}}]\n'
        for party, helper in enumerate(trio.helper_set.helpers)
    ]
    timing = "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\nscrape_configs:\n"
    (folder / "prometheus.yml").write_text(timing + "".join(jobs))
    run("promtool", "check", "config", folder / "prometheus.yml")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        scraper = Scraper(port)
        deadline = time.monotonic() + WAIT_SECONDS
        while not scraper.healthy():
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        yield scraper
    finally:
        process.terminate()
        process.wait()


@dataclass
class Asker:
    running: Launched
    folder: Path

    def batch(self, reports: int) -> Path:
        path = self.folder / os.urandom(4).hex()
        write_batch(path, seal_all([[1, 0]] * reports, terms(2), self.running.helper_set))
        return path

    def ask(self, path: Path, seconds: int = 60) -> tuple[SavedQuery, bool]:
        """A new query, and whether it was answered."""
        from protocol.batch import BatchReader

        batch, helper_set = BatchReader(path), self.running.helper_set
        asked = make_query(batch, QueryOptions(seconds=seconds), helper_set, self.running.site_key(SITE), real_now())
        try:
            return asked, asyncio.run(Querier(helper_set, patience=5).ask(asked, batch)).answer.counted > 0
        except QueryFailed:
            return asked, False


def until_ready(running: Launched) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not all((health(helper) or {}).get("ready") for helper in running.helper_set.helpers):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def reloaded(running: Launched, party: int) -> None:
    process = running.helpers[party].process
    assert process is not None
    os.kill(process.pid, signal.SIGHUP)


@pytest.mark.skipif(not ALL, reason="make alerts")
@needs("prometheus")
def test_every_rule_fires_when_it_should_and_none_before(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=real_now(), options={"processes": 0, "unchecked_histograms": True})
    fired = {"TrefoilKeyEnds", "TrefoilCertificateEnds", "TrefoilDatabaseDown"}  # in the tests below
    with launched(trio) as running, scraping(trio, tmp_path / "prometheus") as scraper:
        asker = Asker(running, tmp_path)
        until_ready(running)
        counted = asker.batch(1100)
        assert asker.ask(counted)[1]
        time.sleep(10)
        assert scraper.firing() == set()

        def fires(*names: str) -> None:
            scraper.wait_for(*names)
            fired.update(names)

        assert not asker.ask(counted)[1]
        fires("TrefoilReplays")
        small = asker.batch(3)
        assert asker.ask(small)[1]
        failed = [asker.ask(small, seconds=30)[0] for _ in range(12)]
        fires("TrefoilQueriesFail")
        config = [load_config(trio.config_path(party)) for party in range(PARTIES)]
        FailedProofs(config[1].failed_proofs).judge(lambda: False, "a proof of helper 3")
        fires("TrefoilFailedProof")
        good = trio.config_path(1).read_text()
        trio.config_path(1).write_text("{")
        reloaded(running, 1)
        fires("TrefoilConfigurationRefused")
        trio.config_path(1).write_text(good)
        _break_housekeeping(running, trio, failed[0])
        fires("TrefoilHousekeepingFails")
        running.helpers[1].stop()
        LastRound(config[1].data).accept(real_now() - DAY)
        _mark_disputed(config[1].ledger_file)
        running.restart(1)
        fires("TrefoilClockHeld", "TrefoilDisputed")
        with listen("127.0.0.1") as taken:
            stored, held = json.loads(good), [taken.getsockname()[1]]
            trio.config_path(1).write_text(json.dumps({**stored, "mpc_ports": held}))
            running.restart(1)
            fires("TrefoilPortBlocked")
        trio.config_path(1).write_text(good)
        running.restart(1)
        running.helpers[0].stop()
        fires("TrefoilHelperDown", "TrefoilPeerDown")
        shutil.copy(config[0].ledger_file, tmp_path / "old-ledger")
        running.restart(0)
        until_ready(running)
        assert asker.ask(asker.batch(3))[1]
        running.helpers[0].stop()
        shutil.copy(tmp_path / "old-ledger", config[0].ledger_file)
        running.restart(0)
        asker.ask(asker.batch(3), seconds=15)
        fires("TrefoilLedgerRefused")
        stored = json.loads(trio.config_path(2).read_text())
        trio.config_path(2).write_text(json.dumps({**stored, "limits": {"spare_megabytes": 2**32 - 1}}))
        reloaded(running, 2)
        fires("TrefoilDiskNearlyFull")
    assert fired == set(NAMES)


def _break_housekeeping(running: Launched, trio: Trio, failed: SavedQuery) -> None:
    """A column that cannot be removed, as on a disk that fails: it is tried when the query's deadline has passed."""
    column = load_config(trio.config_path(2)).data / "queries" / failed.query.digest.hex() / "column"
    column.unlink(missing_ok=True)
    column.mkdir()
    time.sleep(max(0.0, failed.query.deadline + 1 - real_now()))
    running.restart(2)


def _mark_disputed(ledger: Path) -> None:
    """What a helper's book says after a peer voted both ways; how it comes to that is in test_bad_helper."""
    why = json.dumps(Failure(QueryState.VOTING, 2, "helper 3 voted both ways").to_json())
    with contextlib.closing(sqlite3.connect(ledger)) as book:
        book.execute("UPDATE queries SET state = 'disputed', detail = ? WHERE state = 'failed'", (why,))
        book.commit()


@pytest.mark.skipif(not ALL, reason="make alerts")
@needs("prometheus")
def test_keys_and_certificates_that_end_soon_fire(tmp_path: Path) -> None:
    """Keys made eighty days ago, and a certificate for ten days in a set that all three signed."""
    trio = prepare(tmp_path / "trio", now=real_now() - 80 * DAY, options={"processes": 0})
    folder = trio.helper_folder(0)
    for name in ("tls.crt", "tls.key"):
        (folder / name).unlink()
    pin = tls.make_identity(folder, "helper-1", real_now(), days=10).pin
    first, second, third = trio.helper_set.helpers
    renewed = HelperSet(trio.helper_set.number + 1, (replace(first, tls_pin=pin), second, third))
    for party in range(PARTIES):
        renewed = renewed.signed_by(load_identity(trio.helper_folder(party) / "identity.key"))
    write_set(trio.helper_set_path, renewed)
    with launched(trio), scraping(trio, tmp_path / "prometheus") as scraper:
        scraper.wait_for("TrefoilKeyEnds", "TrefoilCertificateEnds")


@pytest.mark.skipif(not ALL, reason="make alerts")
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@needs("prometheus")
def test_a_database_that_stops_fires(tmp_path: Path) -> None:
    private = PrivatePostgres()
    try:
        trio = prepare(tmp_path / "trio", now=real_now(), options={"processes": 0})
        put_in_postgres(trio, 0, private.location())
        with launched(trio) as running, scraping(trio, tmp_path / "prometheus") as scraper:
            until_ready(running)
            assert scraper.firing() == set()
            private.stop_immediately()
            scraper.wait_for("TrefoilDatabaseDown")
    finally:
        private.remove()
