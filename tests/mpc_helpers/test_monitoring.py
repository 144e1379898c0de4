"""Log lines, metrics and health: complete, in the expected formats, and never with a secret, a site or a person.

Each thing that stops queries, or will, is a reason in the answer of /healthz; alive and ready are two questions.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from typer.testing import CliRunner

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.engine import LedgerClosed, LedgerError
from mpc_helpers.local.launcher import prepare
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.worker import ForkServer
from mpc_helpers.service import health as health_module
from mpc_helpers.service import housekeeping
from mpc_helpers.service.health import (
    CERTIFICATE_NOTICE,
    KEY_NOTICE,
    Concern,
    Expiry,
    Health,
    LedgerWatch,
    PeerWatch,
    Reason,
)
from mpc_helpers.service.housekeeping import LastRound
from mpc_helpers.service.monitoring import Metrics, count_processes, fields, start_logging, usage
from mpc_helpers.service.server import MetricsAccess
from protocol.cli.app import app
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.files import write_private_file
from protocol.querier.failure import QueryFailed
from protocol.querier.result import QueryResult
from protocol.status import Failure, QueryState
from protocol.units import DAY
from tests.mpc_helpers.test_agreement import FlakyDatabase
from tests.mpc_helpers.test_server import Reply, column, send, small_batch, talking_to, upload, url
from tests.support.bad_helper import agreement_of
from tests.support.exposition import Family, read_exposition
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, three_helpers, until


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


@pytest.mark.usefixtures("restored")
def test_a_text_line_is_one_line_whatever_is_in_it() -> None:
    written = io.StringIO()
    start_logging("info", "text", written)
    log = logging.getLogger("trefoil.test")
    log.debug("not written")
    log.info("said: %s", "two\nlines \x1b[31m and a colour", extra=fields(query="abc"))
    (line,) = written.getvalue().splitlines()
    assert " INFO test said: two�lines �[31m and a colour" in line
    try:
        raise RuntimeError("here")
    except RuntimeError:
        log.exception("a defect")
    assert "RuntimeError: here" in written.getvalue()


@pytest.mark.usefixtures("restored")
def test_a_json_line_has_its_fields() -> None:
    written = io.StringIO()
    start_logging("warning", "json", written)
    log = logging.getLogger("trefoil.test")
    log.info("not written")
    log.warning("said: %s", "two\nlines", extra=fields(query="abc", reports=5))
    try:
        raise RuntimeError("here")
    except RuntimeError:
        log.exception("a defect")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "test",
        "message": "said: two\nlines",
        "query": "abc",
        "reports": 5,
    }
    assert "RuntimeError: here" in second["traceback"]


async def test_a_query_has_one_line_when_it_comes_and_one_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Enough to follow it by, and too little to fetch its answer with."""
    caplog.set_level(logging.INFO)
    async with three_helpers(tmp_path) as three:
        batch = small_batch(three)
        first, second = three.query(batch), three.query(batch)
        await three.ask(first, batch)
        with pytest.raises(QueryFailed):
            await three.ask(second, batch)
        async with talking_to(three) as session:  # asked again, it is tried again, and ends again
            await send(session, "GET", url(second.signed))
        lines = [getattr(record, "fields", {}) for record in caplog.records if record.name.endswith("service.queries")]
        for asked, outcome in ((first, "released"), (second, "failed")):
            digest = asked.query.digest.hex()
            mine = [line for line in lines if line.get("query") == digest[:16]]
            came = [line for line in mine if line["event"] == "query arrived"]
            ended = [line for line in mine if line["event"] == "query ended"]
            assert len(came) == len(ended) == 3  # one of each at each helper
            assert {line["id"] for line in came} == {asked.query.query_id.hex()[:8]}
            assert {(line["site"], line["reports"], line["buckets"], line["noise"]) for line in came} == {
                (SITE, 5, 4, "local")
            }
            assert {(line["site"], line["reports"], line["outcome"]) for line in ended} == {(SITE, 5, outcome)}
            assert all(line["seconds"] >= 0 for line in ended)
            assert digest not in caplog.text
        assert all(permit.hex() not in caplog.text for permit in first.permits)


WANTED = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "trefoil_admit_cpu_seconds_total",
    "trefoil_build_info",
    "trefoil_certificate_expiry_seconds",
    "trefoil_concerns",
    "trefoil_connections",
    "trefoil_connections_cut_total",
    "trefoil_disk_free_bytes",
    "trefoil_failed_proofs",
    "trefoil_key_expiry_seconds",
    "trefoil_ledger_alarms",
    "trefoil_ledger_cpu_seconds_total",
    "trefoil_ledger_bytes",
    "trefoil_ledger_log_bytes",
    "trefoil_ledger_moves",
    "trefoil_ledger_reports",
    "trefoil_ledger_seconds_total",
    "trefoil_ledger_up",
    "trefoil_open_lanes",
    "trefoil_peer_bytes_total",
    "trefoil_peer_clock_seconds",
    "trefoil_peer_up",
    "trefoil_process_cpu_seconds",
    "trefoil_process_peak_bytes",
    "trefoil_queries",
    "trefoil_queries_total",
    "trefoil_ready",
    "trefoil_reports_rejected_total",
    "trefoil_requests_total",
    "trefoil_stage_seconds_total",
    "trefoil_uploads",
}


def test_counters_grow_and_gauges_are_read_when_asked() -> None:
    metrics = Metrics()
    count = metrics.counter("things_total", "things seen")
    by_kind = metrics.counter("kinds_total", "kinds seen", kind=["even", "odd"])
    value = 1.0
    metrics.gauge("level", "how much\nthere is", lambda: {(("where", 'a"b\\c'),): value})
    count()
    by_kind(2, kind="odd")
    by_kind(kind="new")
    value = 7.5
    assert metrics.render().splitlines() == [
        "# HELP things_total things seen",
        "# TYPE things_total counter",
        "things_total 1.0",
        "# HELP kinds_total kinds seen",
        "# TYPE kinds_total counter",
        'kinds_total{kind="even"} 0.0',
        'kinds_total{kind="new"} 1.0',
        'kinds_total{kind="odd"} 2.0',
        "# HELP level how much\\nthere is",
        "# TYPE level gauge",
        'level{where="a\\"b\\\\c"} 7.5',
    ]


def test_a_metric_exists_once() -> None:
    metrics = Metrics()
    metrics.value("level", "how much", lambda: 1.0)
    with pytest.raises(ValueError, match="level"):
        metrics.value("level", "there already", lambda: 1.0)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), TrefoilError("unreadable")])
def test_one_that_cannot_be_read_does_not_hide_the_others(error: Exception) -> None:
    def broken() -> float:
        raise error

    metrics = Metrics()
    metrics.value("broken", "of a disk that is gone", broken)
    metrics.value("level", "how much", lambda: 1.0)
    page = read_exposition(metrics.render())
    assert (page["broken"].samples, page["level"].samples) == ({}, {(): 1.0})


async def test_everything_an_operator_needs_is_there_from_the_start(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:

        async def page() -> dict[str, Family]:
            status, text = await send(session, "GET", "/metrics")
            assert status == 200
            assert SITE not in text
            _check_with_promtool(text)
            return read_exposition(text)

        fresh = await page()
        assert set(fresh) == WANTED
        rejected = fresh["trefoil_reports_rejected_total"].samples
        assert {dict(labels)["reason"]: count for labels, count in rejected.items()} == dict.fromkeys(
            (reason.value for reason in Rejection), 0
        )
        ended = fresh["trefoil_queries_total"]
        for state in ("released", "failed", "disputed", "withdrawn"):
            assert ended.value(state=state) == 0
        assert set(fresh["trefoil_peer_up"].samples) == {(("peer", "helper-2"),), (("peer", "helper-3"),)}
        assert len(fresh["trefoil_key_expiry_seconds"].samples) == 3
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        later = await page()
        assert later["trefoil_queries_total"].value(state="released") == 1
        assert later["trefoil_queries"].value(state="released") == 1
        assert later["trefoil_ledger_moves"].value() > fresh["trefoil_ledger_moves"].value()
        assert later["trefoil_peer_bytes_total"].value() > 0
        with pytest.raises(QueryFailed):
            await three.ask(three.query(batch), batch)
        assert (await page())["trefoil_reports_rejected_total"].value(reason="already spent") == 5
        # What a stage took is counted once, however often its query is looked at or tried again.
        assert all(not any(each.unreported_seconds().values()) for each in three.queries[0]._tracked.values())
        await three.stop(0)
        await three.start(0)
        async with asyncio.timeout(20):
            while (await page())["trefoil_ledger_reports"].value() != 5:
                await asyncio.sleep(0.1)


async def test_no_worker_and_no_fork_server_is_in_the_metrics() -> None:
    """What a worker used would be in its parent's figures too, once it has ended. The daemon's own usage knows both."""
    metrics = Metrics()
    count_processes(metrics)
    async with ForkServer() as fork_server:
        child = await fork_server.fork()
        assert set(usage(os.getpid()).cpu_seconds) >= {"daemon", "fork server"}
        for family in ("trefoil_process_cpu_seconds", "trefoil_process_peak_bytes"):
            shown = {dict(labels)["process"] for labels in read_exposition(metrics.render())[family].samples}
            assert "daemon" in shown and not shown & {"fork server", "other"}
        await fork_server.end(child)
        child.close()


TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("token", "remote", "header", "admitted"),
    [
        (b"", "127.0.0.1", "", True),
        (b"", "127.8.9.1", "", True),
        (b"", "::1", "", True),
        (b"", "::ffff:127.0.0.1", "", True),
        (b"", "192.0.2.7", "", False),
        (b"", "::ffff:192.0.2.7", "", False),
        (b"", None, "", False),
        (b"", "192.0.2.7", "Bearer ", False),
        (TOKEN, "192.0.2.7", "Bearer 0123456789abcdef", True),
        (TOKEN, "192.0.2.7", "Bearer 0123456789abcdeF", False),
        (TOKEN, "192.0.2.7", "0123456789abcdef", False),
        (TOKEN, "127.0.0.1", "", False),
    ],
)
def test_metrics_are_for_this_machine_or_for_those_with_the_token(
    token: bytes, remote: str | None, header: str, admitted: bool
) -> None:
    """With a token loopback needs it too: behind a proxy on this machine everyone comes from loopback."""
    request = make_mocked_request("GET", "/metrics", headers={"Authorization": header} if header else {})
    asked = request.clone(remote=remote) if remote else request
    access = MetricsAccess(token)
    if admitted:
        access.check(asked)
    else:
        with raises(ErrorKind.FORBIDDEN):
            access.check(asked)
    assert "0123" not in repr(access)


async def test_a_configured_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    (tmp_path / "token").chmod(0o600)
    options = {"metrics_token": str(tmp_path / "token")}
    async with three_helpers(tmp_path / "three", options=options) as three, talking_to(three) as session:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        assert (await send(session, "GET", "/metrics"))[0] == 403
        token = {"Authorization": f"Bearer {TOKEN.decode()}"}
        async with session.get("/metrics", headers=token) as reply:
            assert reply.status == 200
        # Numbers of queries would tell a site when another asks, wherever they are shown.
        for page in ("/healthz", "/readyz"):
            assert (await send(session, "GET", page))[1]["queries"] == {}
            async with session.get(page, headers=token) as reply:
                assert (await reply.json())["queries"] == {"released": 1}


async def test_a_token_is_private_and_not_short(tmp_path: Path) -> None:
    path = tmp_path / "token"
    async with three_helpers(tmp_path / "three", start=False) as three:
        config = replace(load_config(three.trio.config_path(0)), metrics_token=path)
    with raises(ErrorKind.FILE_MISSING, ConfigError) as missing:
        MetricsAccess.of(config)
    assert "openssl" in missing.value.hint
    write_private_file(path, b"short")
    with raises(ErrorKind.TOO_FEW):
        MetricsAccess.of(config)
    path.write_bytes(TOKEN)
    assert MetricsAccess.of(config).token == TOKEN
    path.chmod(0o644)
    with raises(ErrorKind.FILE_PERMISSIONS):
        MetricsAccess.of(config)


def _check_with_promtool(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


NOW = 1_800_000_000


def test_a_reason_that_stops_queries_comes_first_and_is_not_ready() -> None:
    reasons: list[Reason] = []
    health = Health([lambda: reasons])
    assert (health.ready, health.page({"more": 1})) == (
        True,
        {"status": "ok", "ready": True, "reasons": [], "more": 1},
    )
    reasons.append(Reason(Concern.KEY, "soon"))
    assert (health.ready, health.page({})["status"]) == (True, "warning")
    reasons.append(Reason(Concern.PEER, "gone", stops=True))
    page = health.page({})
    assert (health.ready, page["status"], page["ready"]) == (False, "not ready", False)
    assert page["reasons"] == [
        {"concern": "peer", "text": "gone", "stops": True},
        {"concern": "key", "text": "soon", "stops": False},
    ]
    assert {dict(labels)["concern"]: count for labels, count in health.gauge().items()} == {
        concern.value: float(concern in (Concern.KEY, Concern.PEER)) for concern in Concern
    }


async def test_a_peer_is_down_until_it_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, health_module.__name__)
    membership = load_membership(load_config(prepare(tmp_path / "trio", now=NOW).config_path(0)), NOW)
    down_text = "helper-2 cannot be reached"
    down = {1: down_text}

    async def ask(party: int) -> None:
        if party in down:
            raise TrefoilError(down[party])

    watch = PeerWatch(membership, ask)
    assert [reason.text for reason in watch.reasons()] == [
        "helper-2 has not responded yet",
        "helper-3 has not responded yet",
    ]
    for _ in range(3):
        await watch.look()
    assert watch.reasons() == [Reason(Concern.PEER, "helper-2 cannot be reached", stops=True)]
    assert list(watch.gauge().values()) == [0.0, 1.0]
    down.clear()
    await watch.look()
    assert (watch.reasons(), list(watch.gauge().values())) == ([], [1.0, 1.0])
    # One line for each change, not for each look.
    said = [record.getMessage() for record in caplog.records if record.name.endswith("service.health")]
    assert down_text in said[0]
    assert len(said) <= 2
    # No warning at a healthy start, where one helper is up before the next; one if it was met before, or waits long.

    def warnings() -> int:
        return sum(record.levelno >= logging.WARNING for record in caplog.records)

    assert warnings() == 0
    down[1] = down_text
    await watch.look()
    assert warnings() == 1
    late = PeerWatch(membership, ask)
    for _ in range(health_module.STARTING_POLLS + 2):
        await late.look()
    assert warnings() == 2


def test_keys_and_certificates_are_announced_before_they_end(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=NOW)
    membership = load_membership(load_config(trio.config_path(0)), NOW)
    own = tls.load_certificate(trio.helper_folder(0) / "tls.crt")
    now = NOW
    expiry = Expiry(membership.helper_set, lambda: {0: own}, lambda: now)
    assert expiry.reasons() == []
    keys_end, certificate_ends = NOW + 90 * DAY, tls.ends(own)
    assert set(expiry.keys().values()) == {float(keys_end)}
    assert list(expiry.certificate_ends().values()) == [float(certificate_ends)]
    assert certificate_ends == NOW + tls.VALID_DAYS * DAY
    now = keys_end - KEY_NOTICE - 1
    assert expiry.reasons() == []
    now = keys_end - KEY_NOTICE
    soon = expiry.reasons()
    assert [(reason.concern, reason.stops) for reason in soon] == [(Concern.KEY, False)] * 3
    assert "of helper-1 ends on 2027-04-15: prepare a new set" in soon[0].text
    now = certificate_ends - CERTIFICATE_NOTICE
    assert [reason.stops for reason in expiry.reasons() if reason.concern is Concern.CERTIFICATE] == [False]
    now = certificate_ends
    ended = [reason for reason in expiry.reasons() if reason.concern is Concern.CERTIFICATE]
    assert [reason.stops for reason in ended] == [True]
    assert "the certificate of helper-1 ended on" in ended[0].text


async def asked(three: ThreeHelpers, page: str, party: int = 0) -> Reply:
    async with talking_to(three, party) as session:
        return await send(session, "GET", page)


async def until_page(three: ThreeHelpers, fits: Callable[[Reply], bool], party: int = 0) -> Reply:
    async with asyncio.timeout(30):
        while not fits(reply := await asked(three, "/readyz", party)):
            await asyncio.sleep(0.05)
    return reply


def concerns(reply: Reply) -> list[str]:
    return [reason["concern"] for reason in reply[1]["reasons"]]


async def test_a_peer_that_is_down_is_on_the_page_and_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "LOOK_SECONDS", 0.1)
    async with three_helpers(tmp_path) as three:
        await until_page(three, lambda reply: reply[0] == 200)
        await three.stop(1)
        status, page = await until_page(three, lambda reply: reply[0] == 503)
        assert (concerns((status, page)), page["status"], page["ready"]) == (["peer"], "not ready", False)
        # It is alive all the same: an orchestrator that restarted it would help nobody.
        assert await asked(three, "/healthz") == (200, page)
        metrics = read_exposition((await asked(three, "/metrics"))[1])
        assert metrics["trefoil_peer_up"].value(peer="helper-2") == 0
        assert (metrics["trefoil_ready"].value(), metrics["trefoil_concerns"].value(concern="peer")) == (0, 1)
        await three.start(1)
        await until_page(three, lambda reply: reply[0] == 200)


async def test_a_database_that_hangs_is_a_reason_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was closed for good ends the watch, with the error that says why."""
    monkeypatch.setattr(health_module, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(health_module, "LOOK_SECONDS", 0.05)
    answers, closed = threading.Event(), LedgerClosed("taken over")
    watch = LedgerWatch(lambda: None if answers.wait(30) else pytest.fail("waited for 30 s"))
    looking = asyncio.create_task(watch.look())
    async with asyncio.timeout(30):
        while not watch.reasons():
            await asyncio.sleep(0.01)
        assert [(reason.concern, reason.stops) for reason in watch.reasons()] == [(Concern.DATABASE, True)]
        answers.set()
        await looking
        assert watch.reasons() == []
        outcomes = iter([None, LedgerError("gone for a moment"), None, closed])

        def check() -> None:
            if (error := next(outcomes)) is not None:
                raise error

        assert await LedgerWatch(check).run() is closed


async def test_no_site_is_told_where_a_ledger_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file, or its database's address, is in the log alone: in no failure and in no response."""
    # Another test may have used up this minute's lines.
    monkeypatch.setattr(logging.getLogger("mpc_helpers.service.server"), "filters", [])
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        asked, later = three.query(batch), three.query(batch)
        assert (await send(session, "PUT", url(asked.signed), asked.signed.encode()))[0] == 200
        disk = FlakyDatabase(agreement_of(three, 0).ledger)
        disk.trouble = "disk I/O error"
        await upload(session, asked, column(batch, 0))
        await until(lambda: three.queries[0].status(asked.query.digest).state is QueryState.FAILED)
        failed = await send(session, "GET", url(asked.signed))
        refused = await send(session, "PUT", url(later.signed), later.signed.encode())
        disk.trouble = ""
        place = str(load_config(three.trio.config_path(0)).ledger)
    assert (failed[0], refused[0]) == (200, 503)
    assert [("ledger" in str(page), place in str(page)) for page in (failed[1], refused[1])] == [(True, False)] * 2
    logged = [record.name for record in caplog.records if place in record.getMessage()]
    assert {"mpc_helpers.service.queries", "mpc_helpers.service.server"} <= set(logged)


async def roll_back(
    three: ThreeHelpers, save: Callable[[], object], restore: Callable[[], object]
) -> asyncio.Task[QueryResult]:
    """Restore helper 2's ledger from before a query, and return the next query, by which both peers notice."""
    await three.stop(1)
    await asyncio.to_thread(save)
    await three.start(1)
    batch = small_batch(three)
    await three.ask(three.query(batch), batch)
    await three.stop(1)
    await asyncio.to_thread(restore)
    await three.start(1)
    again = small_batch(three)
    return asyncio.create_task(three.ask(three.query(again), again))


async def roll_back_file(three: ThreeHelpers, backup: Path) -> asyncio.Task[QueryResult]:
    ledger = load_config(three.trio.config_path(1)).ledger_file
    return await roll_back(three, lambda: shutil.copy(ledger, backup), lambda: shutil.copy(backup, ledger))


async def until_both_peers_notice(three: ThreeHelpers) -> None:
    for party in (0, 2):
        reply = await until_page(three, lambda reply: "ledger" in concerns(reply), party)
        assert any("helper 2 has a ledger that went back" in reason["text"] for reason in reply[1]["reasons"])


async def test_disk_clock_proofs_and_disputes_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "HEAR_SECONDS", 0.1)
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0.2)
    async with three_helpers(tmp_path, start=False) as three:
        config = load_config(three.trio.config_path(0))
        config.data.mkdir(exist_ok=True)
        LastRound(config.data).accept(real_now() - DAY)
        await three.start(0)
        daemon = three.daemons[0]
        daemon.queries.storage._free = lambda _folder: 0
        FailedProofs(config.failed_proofs).judge(lambda: False, "helper 2 cheated")
        job = await daemon.queries.track(three.query(small_batch(three)).signed)
        await job.enter(QueryState.DISPUTED, Failure(QueryState.VOTING, 1, "helper 2 voted both ways"))
        reply = await until_page(three, lambda reply: "clock" in concerns(reply))
        assert concerns(reply) == ["peer", "peer", "disk", "proofs", "dispute", "clock"]
        assert [reason["stops"] for reason in reply[1]["reasons"]] == [True] * 3 + [False] * 3
        # What DEPLOY.md says to do ends each of them at a running helper, except the dispute, which nothing ends.
        daemon.queries.storage._free = lambda _folder: 2**40
        for command in (["alarm", "clear"], ["ledger", "accept-clock"]):
            done = CliRunner().invoke(
                app, [*command, "--config", str(three.trio.config_path(0))], catch_exceptions=False
            )
            assert done.exit_code == 0, done.output
        await until_page(three, lambda reply: concerns(reply) == ["peer", "peer", "dispute"])
