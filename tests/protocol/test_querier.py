"""The querier: what she accepts and keeps, whom she names when there is no answer, and helpers that answer anything."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpc_helpers.identity import tls
from mpc_helpers.local.launcher import prepare
from protocol.answer import Answer, AnswerShare
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError, printable
from protocol.field import P
from protocol.helper_set import HelperEntry, HelperSet
from protocol.keys import IdentityKey
from protocol.left_out import digest_of
from protocol.net.json_message import decode_json
from protocol.noise import NoiseMode, NoiseScale
from protocol.querier import ask as querying
from protocol.querier.ask import Querier
from protocol.querier.connections import MAX_ANSWER_BYTES, HelperConnections
from protocol.querier.failure import QueryFailed
from protocol.querier.result import CONFIDENCE, QueryResult, assess, bias_bound, plot_result
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.querier.view import Follower, permille, show
from protocol.query import Query, SignedQuery, make_permits
from protocol.shares import PARTIES, share, to_shamir
from protocol.status import Failure, QueryState, QueryStatus
from protocol.vote import SignedVote, Vote
from tests.support import protocol_samples as samples
from tests.support.raising import raises
from tests.support.renewal import renew
from tests.support.three_helpers import MemoryMpc, ThreeHelpers, real_now, terms, three_helpers


async def test_one_wrong_share_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 2 computes as it should and seals something else; test_answer.py has every share and field."""
    honest = AnswerShare.seal

    def seal(self: AnswerShare, by: int, query: Query, identity: IdentityKey) -> bytes:
        vector = self.vector.copy()
        vector[2] = (int(vector[2]) + (by == 1)) % P
        return honest(replace(self, vector=vector), by, query, identity)

    monkeypatch.setattr(AnswerShare, "seal", seal)
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 2, 3, 4]] * 3, terms(4)))
        with raises(ErrorKind.INCONSISTENT, ProtocolError):
            await three.ask(three.query(batch), batch)


async def test_a_share_that_another_helper_signed_names_the_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = AnswerShare.seal
    monkeypatch.setattr(
        AnswerShare,
        "seal",
        lambda self, by, query, identity: honest(self, by, query, IdentityKey.generate() if by == 2 else identity),
    )
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        with raises(ErrorKind.NOT_OPENED, QueryFailed) as failed:
            await three.ask(three.query(batch), batch)
        assert (failed.value.stage, failed.value.helpers) == ("opening", (2,))


async def test_a_wrong_certificate_is_not_talked_to(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        asked = three.query(batch)
        first, second, third = three.helper_set.helpers
        posing = HelperEntry(second.name, second.identity_key, second.hpke_keys, first.address, second.tls_pin)
        with raises(ErrorKind.WRONG_KEY, QueryFailed) as failed:
            await Querier(HelperSet(1, (first, posing, third))).ask(asked, batch)
        assert failed.value.helpers == (1,) and "helper-2" in str(failed.value)


async def test_a_helper_that_stalls_is_named_with_its_stage_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helper 3 takes everything and never begins. The querier's clock is turned past the deadline."""
    ahead = 0

    async def forever(*_: object) -> None:
        nonlocal ahead
        ahead = 1000
        await asyncio.Event().wait()

    async with three_helpers(tmp_path) as three:
        monkeypatch.setattr(three.queries[2].helper, "answer", forever)
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        querier = Querier(three.helper_set, clock=lambda: three.clock() + ahead)
        with raises(ErrorKind.TIMEOUT, QueryFailed) as failed:
            await querier.ask(three.query(batch), batch)
        assert 2 in failed.value.helpers
        assert "helper-3" in str(failed.value) and "queued" in str(failed.value)


async def test_helpers_name_the_one_they_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 2 refuses to begin; at the query's deadline the two others say whom they waited for."""

    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    async with three_helpers(tmp_path) as three:
        monkeypatch.setattr(three.queries[1].helper, "answer", forever)
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        failed = await three.fails(batch, QueryOptions(seconds=2))
        assert failed.kind is ErrorKind.ABORTED
        assert failed.helpers == (1,)
        assert failed.stage == "agreeing"


def offline(tmp_path: Path) -> ThreeHelpers:
    return ThreeHelpers(prepare(tmp_path / "trio", now=real_now()), MemoryMpc(), tmp_path)


def test_a_damaged_query_file_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "batch.query"
    for content in (
        "",
        "{}",
        '{"trefoil_query": 3}',
        '{"trefoil_query": 2}',
        '{"trefoil_query": 1, "query": "00", "answer_key": "00"}',
    ):
        path.write_text(content)
        path.chmod(0o600)
        with raises(ErrorKind.FILE_DAMAGED):
            SavedQuery.load(path)


def test_an_empty_batch_cannot_be_queried(tmp_path: Path) -> None:
    three = offline(tmp_path)
    batch = three.batch(three.seal([[1, 0]], terms(2)))
    batch.path.write_bytes(batch.path.read_bytes()[:32])
    with raises(ErrorKind.TOO_FEW):
        make_query(type(batch)(batch.path), QueryOptions(), three.helper_set, three.site_key(), three.clock())


def result_of(
    three: ThreeHelpers, *, kappa: int = 0, debug: bool = False, histogram: list[int] | None = None
) -> QueryResult:
    numbers = histogram or [5, -3, 120]
    report = three.seal([[0] * (len(numbers) + bool(kappa))], terms(len(numbers), kappa=kappa, debug=debug))
    query = three.query(three.batch(report), QueryOptions(noise=NoiseMode.PAIRWISE, debug=debug)).query
    flags, counted = 40 if kappa else None, (np.zeros(1, dtype=np.uint8),) * 3
    answer = Answer(numbers, flags, 1, 1, ({}, {}, {}), query.noise, 1_000_000, 2, 1, bytes(32), counted)
    return assess(query, answer, {}, 10)


def test_an_answer_says_what_it_is_worth(tmp_path: Path) -> None:
    three = offline(tmp_path)
    plain = result_of(three)
    scale = NoiseScale(NoiseMode.PAIRWISE, plain.query.gamma, plain.query.sensitivity)
    assert (plain.noise_sd, plain.half_width) == (scale.standard_deviation, scale.half_width(CONFIDENCE))
    assert plain.delta == 0
    assert plain.bias is None
    with_side = result_of(three, kappa=4)
    expected = bias_bound(40, kappa=4, sigma=with_side.noise_sd, largest_change=2, beta=0.05)
    assert with_side.bias == expected
    exact = result_of(three, debug=True)
    assert (exact.noise_sd, exact.half_width) == (0.0, 0)
    assert with_side.to_json()["bias_bound"] == expected.bound


def test_an_answer_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        DataFrame=lambda columns, index: (columns, index), RangeIndex=lambda size, name: (size, name)
    )
    monkeypatch.setitem(sys.modules, "pandas", made)
    result = result_of(offline(tmp_path))
    columns, index = result.to_pandas()
    assert columns["answer"] == result.histogram == [5, -3, 120]
    assert columns["high"][2] - columns["low"][2] == 2 * result.half_width
    assert index == (3, "bucket")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(ErrorKind.MISSING_DEPENDENCY):
        result.to_pandas()


def test_the_printed_answer_has_bars_and_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three = offline(tmp_path)
    show(result_of(three, kappa=4), ["a", "b", "c"])
    shown = capsys.readouterr().out
    assert "120" in shown
    assert "-3" in shown
    assert "bias: at most" in shown
    show(result_of(three, debug=True, histogram=[1] * 100), ["a", "b", "c"])
    shown = capsys.readouterr().out
    assert "DEBUG" in shown
    assert "36 more buckets" in shown


def test_a_plot_is_an_image(tmp_path: Path) -> None:
    three = offline(tmp_path)
    plot_result(tmp_path / "answer.png", result_of(three))
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")
    with raises(ErrorKind.INVALID_VALUE):
        plot_result(tmp_path / "answer.nonsense", result_of(three))


@pytest.mark.parametrize("kappa", [0, 2])
def test_a_plot_says_what_its_intervals_are(kappa: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("protocol.querier.result.save_figure", lambda _, figure: drawn.append(figure))
    plot_result(tmp_path / "answer.png", result_of(offline(tmp_path), kappa=kappa))
    (figure,) = drawn
    (axes,) = figure.axes
    labels = [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["answer", "noise, 95%"] and len(labels) == (3 if kappa else 2)
    assert ("the most that bias can be" in labels[-1]) == bool(kappa)
    assert ("noise and bias" in figure.get_suptitle()) == bool(kappa)
    # Neither end of an interval is behind a bar.
    assert min(line.get_zorder() for line in axes.collections) > max(bar.get_zorder() for bar in axes.patches)


def test_the_bar_never_goes_back() -> None:
    moves: list[int] = []
    follow = Follower(lambda amount=1, /, *, note="": moves.append(amount))
    for state, done in (
        ("queued", 0),
        ("admitting", 1),
        ("admitting", 9),
        ("agreeing", 0),
        ("admitting", 0),
        ("released", 0),
    ):
        follow({party: QueryStatus(QueryState(state), done, 10) for party in range(3)})
    assert all(move > 0 for move in moves)
    assert sum(moves) == 100


def test_a_share_is_read_with_care() -> None:
    assert permille(0.1) == 100
    for fraction in (-0.1, 1.1, float("nan")):
        with raises(ErrorKind.OUT_OF_RANGE):
            permille(fraction)


ATTEMPT = b"\x07" * 32
ASKED = samples.query(batch_size=20)
NUMBERS = [3, -1, 0, 7, -250, 10**12, 1, 0]


def vote(
    helper: int,
    cast: Vote = Vote.YES,
    *,
    attempt: bytes = ATTEMPT,
    signer: int | None = None,
) -> str:
    """A vote as it stands in an answer, right but for what is asked otherwise."""
    key = samples.IDENTITIES[helper if signer is None else signer]
    return SignedVote.sign(helper, attempt, cast, key).encode().hex()


def answer_of(party: int, query: Query, votes: object) -> dict[str, object]:
    """What helper `party` answers: a good share, and these votes."""
    components = share(NUMBERS, entropy=samples.entropy("answer")).components(party)
    noise = (query.noise, query.epsilon_micros, query.sensitivity)
    proposed = (digest_of(np.zeros(20, dtype=np.uint8)),) * 3
    vector = to_shamir(party, components)
    mine = AnswerShare(query.digest, 4, ATTEMPT, 20, 20, ({}, {}, {}), *noise, proposed, b"", vector)
    return {"share": mine.seal(party, query, samples.IDENTITIES[party]).hex(), "votes": votes}


async def collected(monkeypatch: pytest.MonkeyPatch, votes: Mapping[int, object], query: Query = ASKED) -> Answer:
    """What the querier makes of three good shares that come with these votes."""

    async def served(_self: HelperConnections, party: int, _path: str) -> object:
        return answer_of(party, query, votes[party])

    monkeypatch.setattr(HelperConnections, "get", served)
    querier = Querier(samples.HELPER_SET)
    asked = SavedQuery(SignedQuery.sign(query, samples.QUERIER), samples.ANSWER_KEY, samples.NOW)
    async with HelperConnections(samples.HELPER_SET, 1.0) as helpers:
        return await querier._collect(helpers, asked)


YES = [vote(helper) for helper in range(PARTIES)]
WRONG_VOTES: dict[str, tuple[object, ErrorKind, str]] = {
    "none": ([], ErrorKind.INVALID_VALUE, ""),
    "one missing": (YES[:2], ErrorKind.INVALID_VALUE, ""),
    "two of the same helper": ([YES[0], YES[1], YES[1]], ErrorKind.INVALID_VALUE, ""),
    "one twice besides": ([*YES, YES[0]], ErrorKind.INVALID_VALUE, ""),
    "all on another attempt": (
        [vote(each, attempt=bytes(32)) for each in range(3)],
        ErrorKind.INCONSISTENT,
        "helper 1",
    ),
    "one on another attempt": ([YES[0], vote(1, attempt=bytes(32)), YES[2]], ErrorKind.INCONSISTENT, "helper 2"),
    "a NO from before voting": ([*YES[:2], vote(2, Vote.ABORTED)], ErrorKind.ABORTED, "helper 3"),
    "a NO from after voting": ([*YES[:2], vote(2, Vote.RENOUNCED)], ErrorKind.ABORTED, "helper 3"),
    "one that another helper signed": ([YES[0], vote(1, signer=0), YES[2]], ErrorKind.BAD_SIGNATURE, "helper 2"),
    "one with a changed signature": ([YES[0], YES[1][:-2] + "ff", YES[2]], ErrorKind.BAD_SIGNATURE, "helper 2"),
    "garbage": ([*YES[:2], "garbage"], ErrorKind.WRONG_TYPE, ""),
    "a number": ([*YES[:2], 7], ErrorKind.WRONG_TYPE, ""),
    "bytes that are no vote": ([*YES[:2], "00"], ErrorKind.TRUNCATED, ""),
    "a vote and more": ([*YES[:2], YES[2] + "00"], ErrorKind.TRAILING_BYTES, ""),
    "no list but a table": (dict(enumerate(YES)), ErrorKind.WRONG_TYPE, ""),
    "no list but a text": ("".join(YES), ErrorKind.WRONG_TYPE, ""),
    "nothing": (None, ErrorKind.WRONG_TYPE, ""),
}


@pytest.mark.parametrize("party", range(PARTIES))
@pytest.mark.parametrize("wrong", WRONG_VOTES)
async def test_an_answer_that_not_all_three_voted_for_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, wrong: str, party: int
) -> None:
    votes, kind, culprit = WRONG_VOTES[wrong]
    with raises(kind, QueryFailed) as failed:
        await collected(monkeypatch, {each: votes if each == party else YES for each in range(PARTIES)})
    assert (failed.value.stage, failed.value.helpers) == ("opening", (party,))
    assert samples.HELPER_NAMES[party] in str(failed.value) and culprit in str(failed.value)
    assert "Do not use this answer" in failed.value.hint


async def test_three_yes_in_any_order_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await collected(monkeypatch, {0: YES, 1: YES[::-1], 2: [YES[1], YES[2], YES[0]]})
    assert answer.histogram == NUMBERS


async def test_a_debug_answer_is_voted_for_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt id covers the query's digest and so its debug flag: votes on a real attempt are on another one."""
    query = samples.query(batch_size=20, debug=True)
    assert (await collected(monkeypatch, dict.fromkeys(range(PARTIES), YES), query)).histogram == NUMBERS
    other = [vote(each, attempt=b"r" * 32) for each in range(PARTIES)]
    with raises(ErrorKind.INCONSISTENT, QueryFailed):
        await collected(monkeypatch, dict.fromkeys(range(PARTIES), other), query)


async def test_a_helper_that_hides_the_votes_is_named_and_the_answer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helper 3 over HTTPS: with no votes, then with the good votes of an older query. Nothing is lost by it."""
    async with three_helpers(tmp_path) as three:
        older, batch = (three.batch(three.seal([[1, 0]] * 3, terms(2))) for _ in range(2))
        before, asked = three.query(older), three.query(batch)
        await three.ask(before, older)
        helper = three.queries[2].helper
        honest = helper.stored_answer
        of_older = await honest(before.query)
        assert of_older is not None
        for votes, kind in (((), ErrorKind.INVALID_VALUE), (of_older[1], ErrorKind.INCONSISTENT)):

            async def hidden(query: Query, votes: tuple[bytes, ...] = votes) -> tuple[bytes, tuple[bytes, ...]] | None:
                released = await honest(query)
                return released and (released[0], votes)

            monkeypatch.setattr(helper, "stored_answer", hidden)
            with raises(kind, QueryFailed) as failed:
                await three.ask(asked, batch)
            assert (failed.value.stage, failed.value.helpers) == ("opening", (2,))
        monkeypatch.setattr(helper, "stored_answer", honest)
        assert (await three.ask(asked, batch)).answer.counted == 3


async def test_an_answer_outlives_the_helper_set_that_was_asked(tmp_path: Path) -> None:
    """A vote is bound to its attempt alone: with the old set or the new one, a querier gets what was released."""
    async with three_helpers(tmp_path) as three:
        old = three.helper_set
        before = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        after = three.batch(three.seal([[0, 1]] * 3, terms(2)))
        asked, late = three.query(before), three.query(after)
        first = await three.ask(asked, before)
        for party in range(PARTIES):
            await three.stop(party)
        new = renew(three.trio)
        assert new.digest != old.digest
        await asyncio.gather(*(three.start(party) for party in range(PARTIES)))
        assert (await three.ask(asked, before)).answer == first.answer
        second = await Querier(old).ask(late, after)
        assert second.answer.counted == 3
        assert (await three.ask(late, after)).answer == second.answer


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
    assert failed.kind is ErrorKind.TIMEOUT and "0.5 s" in str(failed)


FAULTS = {
    "deep JSON": (ok(b"[" * 200_000 + b"]" * 200_000), "nested too deeply"),
    "no JSON": (ok(b"\xff\xfe"), "not JSON"),
    "nothing": (ok(b""), "not JSON"),
    "a bomb": (ok(gzip.compress(bytes(2**24)), b"Content-Encoding: gzip\r\n"), "not JSON"),
    "too much": (ok(bytes(MAX_ANSWER_BYTES + 1)), f"more than {MAX_ANSWER_BYTES} bytes"),
    "not a number": (ok(b'{"done": NaN}'), "NaN or an infinity"),
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
        key = IdentityKey.generate()
        signed, permits = SignedQuery.sign(query, key), make_permits(query, key)
        saved = SavedQuery(signed, samples.ANSWER_KEY, samples.NOW, permits=permits)
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
    assert failed.kind is ErrorKind.MALFORMED and "status" in str(failed)
    assert failed.helpers


@pytest.mark.parametrize("said", [b"[]", b"{}", b'{"share": []}', b'{"share": "zz", "votes": []}', b'{"share": "00"}'])
async def test_what_is_no_answer_names_the_helper(tmp_path: Path, said: bytes) -> None:
    failed = await ask(tmp_path, lambda request: ok(said if request.endswith("/answer") else RELEASED))
    assert (failed.stage, failed.helpers) == ("opening", (0,))
    assert failed.kind is ErrorKind.NOT_OPENED and "one" in str(failed)


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
    assert "lacks the field share" in str(failed)
    assert asked.count(closed) >= 3


async def test_a_column_that_arrived_before_the_door_closed_is_not_sent_again(tmp_path: Path) -> None:
    columns: list[str] = []

    def second(request: str) -> bytes:
        if request.endswith("/column"):
            columns.append(request)
            return b""
        return ok(QUEUED) if request.startswith("PUT") and columns else open_door(request)

    assert "lacks the field share" in str(await ask(tmp_path, open_door, second))
    assert len(columns) <= 2  # one by the HTTP library itself


async def test_nobody_waits_for_helpers_of_which_none_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(querying, "SUBMIT_RETRY_SECONDS", 10 * GIVE_UP)
    failed = await ask(tmp_path, lambda _: b"")
    assert (failed.stage, failed.helpers) == ("submitting", (0, 1, 2))
