"""Health: each thing that stops queries, or will, is a reason on the page; alive and ready are two questions."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.local.launcher import prepare
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.service import housekeeping, peer_watch
from mpc_helpers.service.clocks import LastRound
from mpc_helpers.service.expiry import CERTIFICATE_NOTICE, KEY_NOTICE, Expiry
from mpc_helpers.service.health import Concern, Health, Reason
from mpc_helpers.service.peer_watch import PeerWatch
from protocol.errors import TrefoilError
from protocol.seconds import DAY
from protocol.status import Failure, QueryState
from tests.support.exposition import read_exposition
from tests.support.three_helpers import ThreeHelpers, real_now, three_helpers
from tests.test_server import Reply, send, small_batch, talking_to

NOW = 1_800_000_000


def test_a_reason_that_stops_queries_comes_first_and_is_not_ready() -> None:
    found: list[Reason] = []
    health = Health([lambda: found])
    assert (health.ready, health.page({"more": 1})) == (
        True,
        {"status": "ok", "ready": True, "reasons": [], "more": 1},
    )
    found.append(Reason(Concern.KEY, "soon"))
    assert (health.ready, health.page({})["status"]) == (True, "warning")
    found.append(Reason(Concern.PEER, "gone", stops=True))
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
    membership = load_membership(load_config(prepare(tmp_path / "trio", now=NOW).config_path(0)), NOW)
    down = {1: "helper-2 cannot be reached"}

    async def ask(party: int) -> None:
        if party in down:
            raise TrefoilError(down[party])

    watch = PeerWatch(membership, ask)
    assert [reason.text for reason in watch.reasons()] == [
        "helper-2 has not been heard from yet",
        "helper-3 has not been heard from yet",
    ]
    for _ in range(3):
        await watch.look()
    assert watch.reasons() == [Reason(Concern.PEER, "helper-2 cannot be reached", stops=True)]
    assert list(watch.gauge().values()) == [0.0, 1.0]
    down.clear()
    await watch.look()
    assert (watch.reasons(), list(watch.gauge().values())) == ([], [1.0, 1.0])
    # One line for each change, not for each look.
    said = [record.getMessage() for record in caplog.records if record.name == "trefoil.peers"]
    assert said[0] == "helper-2 does not answer: helper-2 cannot be reached"
    assert len(said) <= 2


def test_keys_and_certificates_are_announced_before_they_end(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=NOW)
    membership = load_membership(load_config(trio.config_path(0)), NOW)
    own = tls.load_certificate(trio.helper_folder(0) / "tls.crt")
    now = NOW
    expiry = Expiry(membership, lambda: {0: own}, lambda: now)
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
    monkeypatch.setattr(peer_watch, "LOOK_SECONDS", 0.1)
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


async def test_a_ledger_that_went_back_is_on_both_pages(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        ledger = load_config(three.trio.config_path(1)).ledger
        await three.stop(1)
        shutil.copy(ledger, tmp_path / "backup")
        await three.start(1)
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        await three.stop(1)
        shutil.copy(tmp_path / "backup", ledger)
        await three.start(1)
        again = small_batch(three)
        asking = asyncio.create_task(three.ask(three.query(again), again))
        for party in (0, 2):
            reply = await until_page(three, lambda reply: "ledger" in concerns(reply), party)
            assert any("helper 2 has a ledger that went back" in reason["text"] for reason in reply[1]["reasons"])
        metrics = read_exposition((await asked(three, "/metrics"))[1])
        assert metrics["trefoil_ledger_alarms"].value(helper="helper-2") == 1
        await asyncio.gather(asking, return_exceptions=True)


async def test_disk_clock_proofs_and_disputes_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "HEAR_SECONDS", 0.1)
    async with three_helpers(tmp_path, start=False) as three:
        config = load_config(three.trio.config_path(0))
        config.data.mkdir(exist_ok=True)
        LastRound(config.data).accept(real_now() - DAY)
        await three.start(0)
        daemon = three.daemons[0]
        daemon.desk.storage._free = lambda _folder: 0
        FailedProofs(config.failed_proofs).judge(lambda: False, "helper 2 cheated")
        job = await daemon.desk.registry.keep(three.query(small_batch(three)).signed)
        await job.enter(QueryState.DISPUTED, Failure(QueryState.VOTING, 1, "helper 2 voted both ways"))
        reply = await until_page(three, lambda reply: "clock" in concerns(reply))
        assert concerns(reply) == ["peer", "peer", "disk", "proofs", "dispute", "clock"]
        assert [reason["stops"] for reason in reply[1]["reasons"]] == [True] * 3 + [False] * 3
