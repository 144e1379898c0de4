"""A helper's HTTPS interface: who is let in, what is refused and how, what survives a restart."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from mpc_helpers.agreement.messages import longest_message
from mpc_helpers.commands import helper
from mpc_helpers.identity.config import HelperConfig, Limits, load_config
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.mpc.noisy_sum import SumTerms
from mpc_helpers.service import queries
from mpc_helpers.service.daemon import Parts
from protocol.batch import BatchReader
from protocol.errors import ErrorKind
from protocol.keys import IdentityKey
from protocol.lanes import describe_opens
from protocol.net.listening import ConnectionLimits
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.query import PERMIT_HEADER, SignedQuery
from protocol.status import QueryState
from tests.support.bad_helper import agreement_of
from tests.support.raising import raises
from tests.support.three_helpers import SITE, ThreeHelpers, real_now, terms, three_helpers, until

Reply = tuple[int, Any]


@asynccontextmanager
async def talking_to(three: ThreeHelpers, party: int = 0) -> AsyncIterator[aiohttp.ClientSession]:
    helper = three.helper_set.helpers[party]
    connector = aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(helper.tls_pin))
    async with aiohttp.ClientSession(helper.address, connector=connector) as session:
        yield session


@asynccontextmanager
async def talking_as(three: ThreeHelpers, party: int) -> AsyncIterator[aiohttp.ClientSession]:
    """To helper 1, with the certificate of one of the three."""
    config = load_config(three.trio.config_path(party))
    context = unpinned()
    context.load_cert_chain(config.tls_certificate, config.tls_key)
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(three.helper_set.helpers[0].address, connector=connector) as session:
        yield session


def unpinned() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def send(
    session: aiohttp.ClientSession, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None
) -> Reply:
    async with session.request(method, path, data=data, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def upload(session: aiohttp.ClientSession, asked: SavedQuery, data: Any, party: int = 0, **more: str) -> Reply:
    """As the querier does, under her permit."""
    headers = {PERMIT_HEADER: asked.permits[party].hex(), **more}
    return await send(session, "PUT", url(asked.signed, "/column"), data, headers)


def column(batch: BatchReader, party: int) -> bytes:
    out = BytesIO()
    out.writelines(batch.column(party, batch.order()))
    return out.getvalue()


def url(signed: SignedQuery, rest: str = "") -> str:
    return f"/v1/queries/{signed.query.digest.hex()}{rest}"


def small_batch(three: ThreeHelpers, count: int = 5, **more: Any) -> BatchReader:
    return three.batch(three.seal([[1, 0, 0, 0]] * count, terms(4, **more)))


async def test_the_public_pages_say_who_and_how_it_is(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        status, config = await send(session, "GET", "/v1/config")
        assert (status, config["party"], config["name"]) == (200, 1, "helper-1")
        assert config["spend_in_parts"] is False
        assert config["helper_set"]["digest"] == three.helper_set.digest.hex()
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        async with asyncio.timeout(20):
            while (ready := await send(session, "GET", "/readyz"))[0] != 200:
                await asyncio.sleep(0.05)
        page = {"status": "ok", "ready": True, "reasons": [], "queries": {"released": 1}, "reloads": 0}
        page |= {"opens": describe_opens(), "mpc_ports": []}
        assert ready == await send(session, "GET", "/healthz") == (200, page)
        status, text = await send(session, "GET", "/metrics")
        assert 'trefoil_queries_total{state="released"} 1' in text
        assert "# TYPE trefoil_queries gauge" in text
        assert SITE not in text


async def test_a_stranger_a_wrong_key_and_a_wrong_caller_are_refused(tmp_path: Path) -> None:
    sites = {SITE: [SITE, "agency.example"], "other.example": ["other.example"]}
    async with three_helpers(tmp_path, sites=sites) as three, talking_to(three) as session:
        query = three.query(small_batch(three)).query
        attempts = {
            "unknown site": (replace(query, site="unknown.example"), three.site_key()),
            "another site's key": (query, three.site_key("other.example")),
            "a key of nobody": (query, IdentityKey.generate()),
            "a caller that is not registered": (replace(query, caller="other.example"), three.site_key()),
        }
        for what, (asked, key) in attempts.items():
            signed = SignedQuery.sign(asked, key)
            status, answer = await send(session, "PUT", url(signed), signed.encode())
            assert status == 403, what
            assert answer["error"] and answer["hint"], what
            assert (await send(session, "GET", url(signed)))[0] == 404, what
        signed = SignedQuery.sign(replace(query, caller="agency.example"), three.site_key())
        assert (await send(session, "PUT", url(signed), signed.encode()))[0] == 200


async def test_a_query_id_means_one_query_for_ever(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        asked = three.query(batch)
        await three.ask(asked, batch)
        for changed in ({"batch_root": bytes(32)}, {"epsilon_micros": 5}, {"deadline": asked.query.deadline + 1}):
            signed = SignedQuery.sign(replace(asked.query, **changed), three.site_key())
            assert (await send(session, "PUT", url(signed), signed.encode()))[0] == 409
        await three.stop(0)
        await three.start(0)
        signed = SignedQuery.sign(replace(asked.query, minimum_reports=2), three.site_key())
        status, answer = await send(session, "PUT", url(signed), signed.encode())
        assert status == 409
        assert "used before" in answer["error"]
        # A debug query is another query, and an id is for one.
        signed = SignedQuery.sign(replace(asked.query, debug=True), three.site_key())
        assert (await send(session, "PUT", url(signed), signed.encode()))[0] == 409


async def test_a_column_of_another_batch_is_refused_and_the_right_one_still_accepted(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch, other = small_batch(three), small_batch(three)
        asked = three.query(batch)
        signed = asked.signed
        assert (await send(session, "PUT", url(signed), signed.encode()))[1]["state"] == "awaiting"
        status, answer = await upload(session, asked, column(other, 0))
        assert (status, "not the one" in answer["error"]) == (409, True)
        assert (await upload(session, asked, column(batch, 0)[:-1]))[0] == 413
        assert (await upload(session, asked, column(batch, 1)))[0] == 413
        assert (await upload(session, asked, b""))[0] == 413
        assert (await upload(session, asked, column(batch, 0)))[0] == 200
        assert (await send(session, "GET", url(signed, "/answer")))[0] == 425
        folder = load_config(three.trio.config_path(0)).data / "queries" / signed.query.digest.hex()
        assert not list(folder.glob("*.part"))


async def test_the_cost_of_noise_is_worked_out_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile ε and Δ in `joint` take 155 ms of it, during which nobody else would be answered."""
    threads = set()
    check = SumTerms.check_cost

    def recorded(terms: SumTerms) -> None:
        threads.add(threading.current_thread())
        check(terms)

    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        signed = three.query(small_batch(three)).signed
        monkeypatch.setattr(SumTerms, "check_cost", recorded)
        assert (await send(session, "PUT", url(signed), signed.encode()))[0] == 200
    assert threads and threading.main_thread() not in threads


async def test_nonsense_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        signed = three.query(small_batch(three)).signed
        wrong_digest = f"/v1/queries/{'00' * 32}"
        for method, path, body, expected in (
            ("PUT", url(signed), b"", 400),
            ("PUT", url(signed), signed.encode() + b"x", 400),
            ("PUT", url(signed), bytes(9000), 413),
            ("PUT", wrong_digest, signed.encode(), 400),
            ("PUT", "/v1/queries/nonsense", signed.encode(), 400),
            ("GET", f"/v1/queries/{'00%20' * 32}", None, 400),
            ("GET", f"/v1/queries/{'00' * 31}%20%20", None, 400),
            ("GET", wrong_digest, None, 404),
            ("GET", wrong_digest + "/answer", None, 404),
            ("PUT", wrong_digest + "/column", b"x", 404),
            ("GET", "/nothing/here", None, 404),
            ("DELETE", url(signed), None, 405),
        ):
            status, answer = await send(session, method, path, body)
            assert status == expected, (method, path)
            assert answer["error"], (method, path)
        assert (await send(session, "GET", "/healthz"))[0] == 200


async def test_what_this_helper_will_not_do_is_said_at_submission(tmp_path: Path) -> None:
    limits = {"minimum_reports": 3, "maximum_reports": 6, "seconds": 100, "queries_per_site": 1}
    async with three_helpers(tmp_path, options={"limits": limits}) as three, talking_to(three) as session:

        async def refused(asked: SavedQuery) -> tuple[int, str]:
            status, answer = await send(session, "PUT", url(asked.signed), asked.signed.encode())
            return status, answer.get("error", "")

        def changed(**fields: Any) -> SavedQuery:
            asked = three.query(small_batch(three))
            signed = SignedQuery.sign(replace(asked.query, **fields), three.site_key())
            return replace(asked, signed=signed)

        assert (await refused(three.query(small_batch(three, 2))))[0] == 422
        assert (await refused(three.query(small_batch(three, 7))))[0] == 422
        assert (await refused(changed(deadline=1)))[0] == 422
        assert (await refused(three.query(small_batch(three), QueryOptions(seconds=1000))))[0] == 422
        assert (await refused(changed(helper_set=bytes(32))))[0] == 422
        status, error = await refused(changed(epsilon_micros=1, sensitivity=2**40))
        assert (status, "too large to draw" in error) == (422, True)
        assert (await refused(three.query(small_batch(three))))[0] == 200
        assert (await refused(three.query(small_batch(three))))[0] == 429


async def test_only_the_two_peers_speak_on_the_peers_path(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)  # by now they know each other's certificates
        async with talking_to(three) as session:
            assert (await send(session, "POST", "/v1/peer/agreement", b"hello"))[0] == 403
        async with talking_as(three, 1) as session:
            # Helper 2's certificate, without helper 2's signature: heard, and not believed.
            assert await send(session, "POST", "/v1/peer/agreement", b"hello") == (200, "")
            for nowhere in ("nowhere", "real", "debug"):
                assert (await send(session, "POST", f"/v1/peer/{nowhere}", b"hello"))[0] == 404
        # Helper 1 does not accept its own certificate from outside either.
        async with talking_as(three, 0) as session:
            with pytest.raises(aiohttp.ClientError):
                await send(session, "POST", "/v1/peer/agreement", b"hello")


async def test_a_peer_is_heard_no_longer_than_a_message_of_the_largest_batch(tmp_path: Path) -> None:
    """Refused by its length if that is told, and otherwise as soon as it is over the limit."""

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, size, 2**16):
            yield bytes(min(2**16, size - start))

    limits = {"maximum_reports": 4001}
    async with three_helpers(tmp_path, options={"limits": limits}) as three:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)  # by now they know each other's certificates
        longest = longest_message(4001)
        async with talking_as(three, 1) as session:
            async with session.post("/v1/peer/agreement", data=BytesIO(bytes(longest))) as response:
                assert (response.status, await response.read()) == (200, b"")
            for data in (BytesIO(bytes(longest + 1)), pieces(longest + 1)):
                async with session.post("/v1/peer/agreement", data=data) as response:
                    assert response.status == 413
                    assert f"over the limit of {longest}" in (await response.json())["error"]


async def test_a_disk_that_is_full_during_an_upload_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        asked = three.query(batch)
        signed = asked.signed
        await send(session, "PUT", url(signed), signed.encode())

        def full(_handle: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("mpc_helpers.admission.column.os.fsync", full)
            status, answer = await upload(session, asked, column(batch, 0))
        assert (status, "No space left" in answer["error"]) == (507, True)
        folder = load_config(three.trio.config_path(0)).data / "queries" / signed.query.digest.hex()
        assert [path.name for path in folder.iterdir()] == ["query"]
        assert (await upload(session, asked, column(batch, 0)))[0] == 200


async def test_a_failure_keeps_stage_helper_and_reason_through_a_restart(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        asked = three.query(batch)
        with pytest.raises(QueryFailed):
            await three.ask(asked, batch)
        before = (await send(session, "GET", url(asked.signed)))[1]
        assert before["state"] == "failed"
        assert before["failure"]["stage"] == "agreeing"
        await three.stop(0)
        await three.start(0)
        after = (await send(session, "GET", url(asked.signed)))[1]
        assert (after["state"], after["failure"]["reason"]) == ("failed", before["failure"]["reason"])


async def test_a_query_goes_on_after_all_three_helpers_were_restarted(tmp_path: Path) -> None:
    """Helper 3 is away while the columns arrive at the others; all are stopped, all come back, the answer comes."""
    reached = asyncio.Event()

    def note(step: Failpoint) -> None:
        if step is Failpoint.PROPOSE_SENT_TO_ONE:
            reached.set()

    async with three_helpers(tmp_path, steps={0: note}) as three:
        batch = small_batch(three)
        asked = three.query(batch, QueryOptions(seconds=60))
        for party in range(3):
            async with talking_to(three, party) as session:
                await send(session, "PUT", url(asked.signed), asked.signed.encode())
                if party < 2:
                    await upload(session, asked, column(batch, party), party)
        await reached.wait()
        for party in range(3):
            await three.stop(party)
        for party in range(3):
            await three.start(party)
        result = await three.ask(asked, batch)
        assert result.answer.histogram[0] - three.noise_of(result)[0] == 5


async def test_a_helper_stops_while_its_database_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that is cancelled first reads what it has reserved, and waits for the ledger's one thread."""
    monkeypatch.setattr(queries, "CLOSE_SECONDS", (0.1, 10.0))
    answers = threading.Event()
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        asked = three.query(batch)
        await send(session, "PUT", url(asked.signed), asked.signed.encode())
        await upload(session, asked, column(batch, 0))
        await until(lambda: three.queries[0].status(asked.query.digest).state is QueryState.AGREEING)
        hanging = asyncio.ensure_future(agreement_of(three, 0).offload(lambda: answers.wait(60)))
        stopping = asyncio.create_task(three.stop(0))
        stopped, _ = await asyncio.wait([stopping], timeout=20)
        answers.set()
        await asyncio.gather(hanging, stopping)
    assert stopped


async def test_a_query_whose_column_never_came_ends_and_makes_room(tmp_path: Path) -> None:
    ahead = 0
    limits = {"queries_per_site": 1}
    async with (
        three_helpers(tmp_path, clock=lambda: real_now() + ahead, options={"limits": limits}) as three,
        talking_to(three) as session,
    ):
        first = three.query(small_batch(three), QueryOptions(seconds=60)).signed
        assert (await send(session, "PUT", url(first), first.encode()))[0] == 200
        second = three.query(small_batch(three), QueryOptions(seconds=60)).signed
        assert (await send(session, "PUT", url(second), second.encode()))[0] == 429
        ahead = 61
        second = three.query(small_batch(three), QueryOptions(seconds=60)).signed
        assert (await send(session, "PUT", url(second), second.encode()))[0] == 200
        await three.storage(0).tidy()
        ended = (await send(session, "GET", url(first)))[1]
        assert (ended["state"], ended["failure"]["stage"]) == ("failed", "awaiting")
        assert (await send(session, "GET", url(second)))[1]["state"] == "awaiting"


async def test_a_column_that_trickles_in_is_waited_for_until_the_deadline_only(tmp_path: Path) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b"trefoil"
        await asyncio.Event().wait()

    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        batch = small_batch(three)
        asked = three.query(batch, QueryOptions(seconds=6))
        assert (await send(session, "PUT", url(asked.signed), asked.signed.encode()))[0] == 200
        size = {"Content-Length": str(len(column(batch, 0)))}
        status, answer = await upload(session, asked, trickle(), 0, **size)
        assert (status, "did not arrive" in answer["error"]) == (410, True)


@pytest.mark.parametrize("after_an_answer", [False, True])
@pytest.mark.parametrize("trickle", [b"", b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"x" * 5000])
async def test_a_connection_whose_headers_do_not_end_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trickle: bytes, after_an_answer: bool
) -> None:
    """Silent, or with one more byte now and then: neither holds a connection."""
    monkeypatch.setattr("mpc_helpers.service.server.HEADER_SECONDS", 0.5)
    async with three_helpers(tmp_path, start=False) as three, asyncio.timeout(20):
        await three.start(0)
        address = urlsplit(three.helper_set.helpers[0].address)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=unpinned())
        if after_an_answer:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: helper\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"}")
        closed = asyncio.create_task(reader.read())
        for byte in trickle:
            if closed.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        with suppress(ConnectionError):
            await closed
        writer.close()


async def test_strangers_whose_bodies_trickle_hold_nobody_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there is room for, each with a query of which one byte comes: the next stranger is served."""
    monkeypatch.setattr(ConnectionLimits, "of_this_process", classmethod(lambda _: ConnectionLimits(4)))
    async with three_helpers(tmp_path, start=False) as three, asyncio.timeout(20):
        await three.start(0)
        address = urlsplit(three.helper_set.helpers[0].address)
        head = f"PUT /v1/queries/{'00' * 32} HTTP/1.1\r\nHost: helper\r\nContent-Length: 1000\r\n\r\nx"
        lines = []
        for _ in range(8):
            lines.append(await asyncio.open_connection(address.hostname, address.port, ssl=unpinned()))
            lines[-1][1].write(head.encode())
            await asyncio.sleep(0.05)
        async with talking_to(three) as session:
            assert (await send(session, "GET", "/healthz"))[0] == 200
        for _, writer in lines:
            writer.transport.abort()


# `make load` resets ten thousand.
RESETS, IN_A_BODY = (10_000, 500) if os.environ.get("TREFOIL_LOAD") == "all" else (1_000, 50)


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def test_resets_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the handshake, and in the middle of a query: that was a line for each."""
    async with three_helpers(tmp_path, start=False) as three, asyncio.timeout(300):
        await three.start(0)
        address = urlsplit(three.helper_set.helpers[0].address)
        head = f"PUT /v1/queries/{'00' * 32} HTTP/1.1\r\nHost: helper\r\nContent-Length: 1000\r\n\r\nx"

        def attack(count: int, *, in_a_body: bool) -> None:
            for number in range(count):
                if number % 100 == 0:
                    time.sleep(0.05)  # a full backlog drops a SYN, which is sent again a second later
                line = socket.create_connection((address.hostname, address.port))
                if in_a_body:
                    line = unpinned().wrap_socket(line)
                    line.sendall(head.encode())
                    line.settimeout(0.005)
                    with suppress(OSError):
                        line.recv(1)  # so that the request is being served
                reset(line)

        await asyncio.sleep(1)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            await asyncio.to_thread(attack, RESETS - IN_A_BODY, in_a_body=False)
            await asyncio.to_thread(attack, IN_A_BODY, in_a_body=True)
            async with talking_to(three) as session:
                assert (await send(session, "GET", "/healthz"))[0] == 200
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) <= 10, lines[:20]


async def test_a_body_may_take_longer_than_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1 + len(body) // 10):
            yield body[at : at + 1 + len(body) // 10]
            await asyncio.sleep(0.1)

    monkeypatch.setattr("mpc_helpers.service.server.HEADER_SECONDS", 0.3)
    async with three_helpers(tmp_path) as three, talking_to(three) as session:
        signed = three.query(small_batch(three)).signed
        async with session.put(url(signed), data=slowly(signed.encode())) as response:
            assert response.status == 200


async def test_columns_that_nothing_can_need_are_removed(tmp_path: Path) -> None:
    ahead = 0
    async with three_helpers(tmp_path, clock=lambda: real_now() + ahead) as three:
        batch = small_batch(three)
        await three.ask(three.query(batch), batch)
        asked = three.query(batch, QueryOptions(seconds=60))
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(asked, batch)
        folder = load_config(three.trio.config_path(0)).data / "queries"
        kept = folder / asked.query.digest.hex() / "column"
        assert list(folder.glob("*/column")) == [kept]
        await three.storage(0).tidy()
        assert kept.exists()
        ahead = 61
        await three.storage(0).tidy()
        assert not kept.exists()


async def test_a_taken_port_is_said_so(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        stored = json.loads(three.trio.config_path(0).read_text())
        await three.stop(0)
        stored["port"] = json.loads(three.trio.config_path(1).read_text())["port"]
        three.trio.config_path(0).write_text(json.dumps(stored))
        with raises(ErrorKind.UNAVAILABLE):
            await three.start(0)


def test_no_installed_helper_reaches_a_failpoint_or_a_noise_record() -> None:
    """Only `Parts` has them, and neither a configuration's fields nor the command's options mention them."""
    reachable = {item.name for item in (*fields(HelperConfig), *fields(Limits))}
    reachable |= set(helper.__annotations__)
    assert {"failpoint", "sessions", "clock"} <= {item.name for item in fields(Parts)}
    assert not {
        name for name in reachable if any(word in name for word in ("failpoint", "session", "seed", "record", "clock"))
    }
