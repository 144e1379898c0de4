"""A helper that answers the querier with whatever it likes: it is named, gets no more time, and writes no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpc_helpers.identity import tls
from protocol.batch import BatchReader
from protocol.errors import ProtocolError
from protocol.helper_set import HelperEntry, HelperSet
from protocol.json_message import decode_json
from protocol.keys import IdentityKey
from protocol.querier import ask as querying
from protocol.querier.ask import Querier
from protocol.querier.connections import MAX_ANSWER_BYTES, HelperConnections
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import SavedQuery
from protocol.query import SignedQuery
from protocol.status import Failure, QueryState, QueryStatus
from protocol.text import printable
from tests.support import protocol_samples as samples

SECONDS = 0.5
# No test waits longer, whatever the querier does.
GIVE_UP = 20.0
HANG_UP = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
AWAITING = json.dumps(QueryStatus(QueryState.AWAITING).to_json()).encode()
QUEUED = json.dumps(QueryStatus(QueryState.QUEUED).to_json()).encode()
RELEASED = json.dumps(QueryStatus(QueryState.RELEASED).to_json()).encode()


def ok(body: bytes, more: bytes = b"") -> bytes:
    return HANG_UP + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def refusing(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@dataclass
class BadServer:
    """Says to each request what `answer` gives for it, all at once or a byte at a time."""

    answer: Callable[[str], bytes]
    trickle: bool = False
    requests: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first = (await reader.readuntil(b"\r\n")).decode()
            self.requests.append(first.split(" HTTP/")[0])
            headers = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int((re.findall(rb"(?i)content-length: (\d+)", headers) or [0])[0]))
            said = self.answer(self.requests[-1])
            for at in range(0, len(said), 1 if self.trickle else max(1, len(said))):
                writer.write(said[at : at + 1] if self.trickle else said)
                await writer.drain()
                await asyncio.sleep(0.05 if self.trickle else 0)
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def listening(server: BadServer, context: ssl.SSLContext | None) -> AsyncIterator[int]:
    running = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    try:
        yield running.sockets[0].getsockname()[1]
    finally:
        running.close()


@contextlib.asynccontextmanager
async def helper_two(folder: Path, server: BadServer) -> AsyncIterator[HelperSet]:
    """A helper set whose second helper is `server`, under its own certificate."""
    identity = tls.make_identity(folder, "bad", 1_700_000_000)
    async with listening(server, tls.server_context(identity)) as port:
        first, second, third = samples.HELPER_SET.helpers
        address = f"https://127.0.0.1:{port}"
        bad = HelperEntry(second.name, second.identity_key, second.hpke_keys, address, identity.pin)
        yield HelperSet(1, (first, bad, third))


async def failing(folder: Path, server: BadServer) -> QueryFailed:
    """What a querier makes of it."""
    async with (
        helper_two(folder, server) as helper_set,
        asyncio.timeout(GIVE_UP),
        HelperConnections(helper_set, SECONDS) as helpers,
    ):
        with pytest.raises(QueryFailed) as failed:
            await helpers.get(1, "/v1/queries/00")
    assert failed.value.helpers == (1,)
    assert "Birch" in str(failed.value)
    return failed.value


class ServerThatStays(BadServer):
    """Answers two requests on each connection, then closes it without a word, as one does that is restarted."""

    connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(QUEUED) + QUEUED)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


async def test_a_connection_is_used_again_and_replaced_when_it_has_gone(tmp_path: Path) -> None:
    server = ServerThatStays(lambda _: b"")
    async with (
        helper_two(tmp_path, server) as helper_set,
        asyncio.timeout(GIVE_UP),
        HelperConnections(helper_set, SECONDS) as helpers,
    ):
        for _ in range(4):
            await helpers.get(1, "/v1/queries/00")
    assert server.connections == 2


async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """Neither to plain HTTP nor to another helper: nothing there is pinned."""
    elsewhere = BadServer(lambda _: ok(RELEASED))
    async with listening(elsewhere, None) as port:
        to = b"Location: http://127.0.0.1:%d/v1/queries/00\r\n" % port
        for status in (301, 302, 303, 307, 308):
            said = b"HTTP/1.1 %d Elsewhere\r\nConnection: close\r\n%sContent-Length: 2\r\n\r\n{}" % (status, to)
            folder = tmp_path / str(status)
            folder.mkdir()
            failed = await failing(folder, BadServer(lambda _, said=said: said))  # type: ignore[misc]
            assert (failed.http_status, f"HTTP status {status}" in str(failed)) == (status, True)
    assert elsewhere.requests == []


@pytest.mark.parametrize("said", [ok(b" " * 10_000 + RELEASED), b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000])
async def test_a_byte_now_and_then_does_not_win_time(tmp_path: Path, said: bytes) -> None:
    """In the body and in the headers: each byte comes sooner than a socket's own limit would notice."""
    failed = await failing(tmp_path, BadServer(lambda _: said, trickle=True))
    assert "does not answer within 0.5 s" in str(failed)


FAULTS = {
    "deep JSON": (ok(b"[" * 200_000 + b"]" * 200_000), "nested too deeply"),
    "no JSON": (ok(b"\xff\xfe"), "not JSON"),
    "nothing": (ok(b""), "not JSON"),
    "a bomb": (ok(gzip.compress(bytes(2**24)), b"Content-Encoding: gzip\r\n"), "not JSON"),
    "too much": (ok(bytes(MAX_ANSWER_BYTES + 1)), f"more than {MAX_ANSWER_BYTES} bytes"),
    "not a number": (ok(b'{"done": NaN}'), "JSON does not know"),
    "a field twice": (ok(b'{"state": "queued", "state": "released"}'), "a field twice"),
    "no HTTP": (b"\x1b[2Jno HTTP at all\r\n\r\n", "cannot be reached"),
    "hanging up": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "cannot be reached"),
    "an error that is a list": (refusing(500, b'{"error": [[[]]], "hint": {}}'), "HTTP status 500"),
    "an error in a list": (refusing(500, b"[]"), "HTTP status 500"),
    "an escape": (refusing(422, json.dumps({"error": "\x1b]0;owned\x07 no", "hint": "\x1b[31m"}).encode()), "owned"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_fault_names_the_helper_and_shows_only_printable_text(tmp_path: Path, fault: str) -> None:
    said, reason = FAULTS[fault]
    failed = await failing(tmp_path, BadServer(lambda _: said))
    assert reason in str(failed)
    assert (str(failed) + failed.hint).isprintable()


def test_text_from_elsewhere_is_made_printable_and_short() -> None:
    assert printable("plain ε ± 3") == "plain ε ± 3"
    # Escapes, line breaks, and the characters that turn the direction of writing.
    shown = printable("a\x1b[2J\r\nb\u202ec\x9b")
    assert shown.isprintable()
    assert (shown[0], shown[-2]) == ("a", "c")
    assert len(printable("x" * 10_000)) == 2001


@pytest.mark.parametrize("text", [b"[", b"[1] 2", b"Infinity", b"-Infinity", b'"\xed\xa0\x80"', b"1" * 5000])
def test_json_is_one_value_or_none(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_json(text)


NO_STATUS: dict[str, bytes] = {
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of statuses": b"[%s]" % RELEASED,
    "another state": json.dumps({**json.loads(RELEASED), "state": "done"}).encode(),
    "a failure with a list": json.dumps({**json.loads(RELEASED), "state": "failed", "failure": []}).encode(),
}


async def ask(
    folder: Path, answer: Callable[[str], bytes], second: Callable[[str], bytes] | None = None
) -> QueryFailed:
    """A whole query to three helpers that all answer alike, but perhaps for the second: what the querier says of it."""
    answers = (answer, second or answer, answer)
    names = ("one", "two", "three")
    async with contextlib.AsyncExitStack() as stack:
        entries = []
        for name, helper, says in zip(names, samples.HELPER_SET.helpers, answers, strict=True):
            (folder / name).mkdir()
            identity = tls.make_identity(folder / name, name, 1_700_000_000)
            port = await stack.enter_async_context(listening(BadServer(says), tls.server_context(identity)))
            address = f"https://127.0.0.1:{port}"
            entries.append(HelperEntry(name, helper.identity_key, helper.hpke_keys, address, identity.pin))
        helper_set = HelperSet(1, (entries[0], entries[1], entries[2]))
        batch = BatchReader(samples.write_batch(folder / "batch", [samples.report("one")]))
        query = samples.query(batch_size=1, batch_root=batch.root(), deadline=samples.NOW + 60)
        saved = SavedQuery(SignedQuery.sign(query, IdentityKey.generate()), samples.ANSWER_KEY, samples.NOW)
        async with asyncio.timeout(GIVE_UP):
            with pytest.raises(QueryFailed) as failed:
                await Querier(helper_set, clock=lambda: samples.NOW, request_seconds=GIVE_UP).ask(saved, batch)
    return failed.value


@pytest.mark.parametrize("stage", ["PUT", "GET"])
@pytest.mark.parametrize("nonsense", NO_STATUS)
async def test_what_is_no_status_names_the_helper(tmp_path: Path, stage: str, nonsense: str) -> None:
    """As the answer to the query itself, and while it is followed."""
    said = NO_STATUS[nonsense]
    failed = await ask(tmp_path, lambda request: ok(said if request.startswith(stage) else QUEUED))
    assert "answers with what is no status" in str(failed)
    assert failed.helpers


@pytest.mark.parametrize("said", [b"[]", b"{}", b'{"share": []}', b'{"share": "zz", "votes": []}', b'{"share": "00"}'])
async def test_what_is_no_answer_names_the_helper(tmp_path: Path, said: bytes) -> None:
    failed = await ask(tmp_path, lambda request: ok(said if request.endswith("/answer") else RELEASED))
    assert (failed.stage, failed.helpers) == ("opening", (0,))
    assert "the answer share of one cannot be used" in str(failed)


async def test_a_reason_reaches_the_terminal_without_its_escapes(tmp_path: Path) -> None:
    escape = Failure(QueryState.AGREEING, None, "\x1b[2Jall is well", "\x1b]52;c;cm0gLXJm\x07")
    said = json.dumps(QueryStatus(QueryState.FAILED, failure=escape).to_json()).encode()
    failed = await ask(tmp_path, lambda request: ok(said if request.startswith("GET") else QUEUED))
    assert "all is well" in str(failed)
    assert (str(failed) + failed.hint).isprintable()


# Each request of a query, and what helpers say to it. The last ends the query: an answer without a share.
REQUESTS = {
    r"PUT /v1/queries/\w+$": AWAITING,
    r"PUT /v1/queries/\w+/column$": QUEUED,
    r"GET /v1/queries/\w+$": RELEASED,
    r"GET /v1/queries/\w+/answer$": b"{}",
}


def asked_for(request: str) -> str:
    (kind,) = (kind for kind in REQUESTS if re.match(kind, request))
    return kind


def open_door(request: str) -> bytes:
    return ok(REQUESTS[asked_for(request)])


@pytest.mark.parametrize("closed", REQUESTS)
async def test_a_door_that_is_closed_for_a_moment_is_knocked_at_again(tmp_path: Path, closed: str) -> None:
    """As that of a helper which takes up a new set. Closed twice, as the HTTP library may try again at once."""
    asked: list[str] = []

    def second(request: str) -> bytes:
        asked.append(asked_for(request))
        return b"" if asked[-1] == closed and asked.count(closed) <= 2 else open_door(request)

    failed = await ask(tmp_path, open_door, second)
    assert "there is no share in it" in str(failed)
    assert asked.count(closed) >= 3


async def test_a_column_that_arrived_before_the_door_closed_is_not_sent_again(tmp_path: Path) -> None:
    columns: list[str] = []

    def second(request: str) -> bytes:
        if request.endswith("/column"):
            columns.append(request)
            return b""
        return ok(QUEUED) if request.startswith("PUT") and columns else open_door(request)

    assert "there is no share in it" in str(await ask(tmp_path, open_door, second))
    assert len(columns) <= 2  # one by the HTTP library itself


async def test_nobody_waits_for_helpers_of_which_none_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(querying, "DOOR_SECONDS", 10 * GIVE_UP)
    failed = await ask(tmp_path, lambda _: b"")
    assert (failed.stage, failed.helpers) == ("submitting", (0, 1, 2))
