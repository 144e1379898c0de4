"""The query: every field is in the digest, one encoding, and only its site's key signs it.

A querier keeps every query whose answer may come, for as long as the helpers keep it, and no other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey
from protocol.keys import IdentityKey
from protocol.noise import NoiseMode
from protocol.querier import query_folder, saved_query
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.result import QueryResult
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.querier.view import list_and_show
from protocol.query import MAX_BATCH, VERSION, VERSION_WITHOUT_REST, Query, SignedQuery
from protocol.shares import PARTIES
from protocol.status import QueryState
from protocol.units import MAX_MICROS, MAX_SENSITIVITY
from tests.support import protocol_samples as samples
from tests.support.protocol_samples import HELPER_SET, QUERIER, report
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers, write_batch

QUERY = samples.query()
HASHES = st.binary(min_size=32, max_size=32)
NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20).map(str.lower)
QUERIES = st.builds(
    Query,
    query_id=st.binary(min_size=16, max_size=16),
    site=NAMES,
    caller=NAMES,
    epsilon_micros=st.integers(1, MAX_MICROS),
    sensitivity=st.integers(1, 2**26),
    buckets=st.integers(1, 2**16),
    kappa=st.integers(0, 2**26),
    unit=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=32),
    helper_set=HASHES,
    batch_root=HASHES,
    batch_size=st.integers(1000, MAX_BATCH),
    answer_key=st.just(samples.ANSWER_KEY.public.raw),
    noise=st.sampled_from(NoiseMode),
    minimum_reports=st.integers(1, 1000),
    tolerated_bad_permille=st.integers(0, 1000),
    deadline=st.integers(1, 2**63 - 1),
    columns=st.tuples(HASHES, HASHES, HASHES),
    debug=st.booleans(),
    suite=st.just(CLASSICAL),
)


def checked(query: Query, cap: int, spread: int) -> Query:
    within = min(cap, query.sensitivity)
    return replace(query, cap=within, spread=min(spread, query.buckets, within))


CHECKED = st.builds(checked, QUERIES, st.integers(1, 2**26), st.integers(1, 20))
OTHER: dict[str, Any] = {
    "query_id": bytes(16),
    "site": "shoq.example",
    "caller": "adz.example",
    "epsilon_micros": 999_999,
    "sensitivity": 101,
    "buckets": 9,
    "kappa": 1,
    "unit": "euros",
    "helper_set": bytes(32),
    "batch_root": b"\x01" * 32,
    "batch_size": 1001,
    "answer_key": b"\x09" + bytes(31),
    "noise": NoiseMode.PAIRWISE,
    "minimum_reports": 2,
    "tolerated_bad_permille": 999,
    "deadline": 1,
    "columns": (bytes(32), bytes(32), b"\x01" * 32),
    "debug": True,
    "cap": 99,
    "spread": 2,
    "suite": POST_QUANTUM,
    "keeps_rest": True,
    "version": VERSION_WITHOUT_REST,
}
# A field that only makes sense with another.
WITH: dict[str, dict[str, Any]] = {
    "cap": {"spread": 1},
    "spread": {"cap": 100},
    "suite": {"answer_key": PrivateKey.generate(POST_QUANTUM).public.raw},
}


@given(st.one_of(QUERIES, CHECKED))
def test_decoding_reverses_encoding(query: Query) -> None:
    assert Query.decode(query.encode()) == query


@given(st.one_of(QUERIES, CHECKED), st.data())
def test_no_second_encoding_decodes(query: Query, data: st.DataObject) -> None:
    changed = bytearray(query.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = Query.decode(bytes(changed))
    except ProtocolError:
        return
    assert decoded.encode() == bytes(changed)


def test_a_query_cut_or_extended_is_refused() -> None:
    for encoded, decode in (
        (QUERY.encode(), Query.decode),
        (SignedQuery.sign(QUERY, samples.QUERIER).encode(), SignedQuery.decode),
    ):
        for length in range(len(encoded)):
            with pytest.raises(ProtocolError):
                decode(encoded[:length])
        with raises(ErrorKind.TRAILING_BYTES, ProtocolError):
            decode(encoded + b"\x00")


def test_every_field_has_another_value_to_try() -> None:
    assert set(OTHER) == {one.name for one in fields(Query)}


@pytest.mark.parametrize("name", OTHER)
def test_every_field_is_in_the_digest_and_under_the_signature(name: str) -> None:
    together = WITH.get(name, {})
    before = replace(QUERY, cap=100, spread=1) if name in ("cap", "spread") else QUERY
    changed = replace(before, **{**together, name: OTHER[name]})
    assert changed.digest != before.digest
    signed = SignedQuery.sign(before, samples.QUERIER)
    signed.verify(samples.QUERIER.public)
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
        replace(signed, query=changed).verify(samples.QUERIER.public)


def test_another_key_does_not_sign_for_the_site() -> None:
    signed = SignedQuery.decode(SignedQuery.sign(QUERY, samples.IDENTITIES[0]).encode())
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError) as caught:
        signed.verify(samples.QUERIER.public)
    assert "shop.example" in str(caught.value)


WRONG: list[dict[str, Any]] = [
    {"query_id": bytes(15)},
    {"site": "Shop.example"},
    {"caller": ""},
    {"epsilon_micros": 0},
    {"epsilon_micros": MAX_MICROS + 1},
    {"sensitivity": 0},
    {"sensitivity": MAX_SENSITIVITY + 1},
    {"buckets": 0},
    {"buckets": 2**16 + 1},
    {"kappa": -1},
    {"kappa": MAX_SENSITIVITY + 1},
    {"unit": ""},
    {"unit": "é" * 20},
    {"unit": "\ud800"},
    {"helper_set": bytes(31)},
    {"batch_root": b""},
    {"batch_size": 0},
    {"batch_size": MAX_BATCH + 1},
    {"answer_key": bytes(33)},
    {"answer_key": bytes(32)},
    {"answer_key": b"\x01" + bytes(31)},
    {"answer_key": b"\xed" + b"\xff" * 30 + b"\x7f"},
    {"minimum_reports": 0},
    {"minimum_reports": 1001},
    {"tolerated_bad_permille": -1},
    {"tolerated_bad_permille": 1001},
    {"deadline": 0},
    {"deadline": 2**63},
    {"columns": (bytes(32), bytes(32), bytes(31))},
    {"columns": (bytes(32), bytes(32))},
    {"cap": 101, "spread": 1},
    {"cap": 5, "spread": 6},
    {"cap": 5},
    {"spread": 1},
    {"suite": POST_QUANTUM},
    {"sensitivity": 2**40, "batch_size": 2**19},
    {"kappa": 2**40, "batch_size": 2**19},
    {"sensitivity": 2**40, "cap": 2**40, "spread": 1, "batch_size": 2**19},
]


@pytest.mark.parametrize("wrong", WRONG, ids=ascii)
def test_fields_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        samples.query(**wrong)


@pytest.mark.parametrize(("from_end", "value"), [(1, 2), (1, 255), (2, 2), (2, 255), (17, 0), (17, 4)])
def test_codes_outside_their_vocabulary_are_refused(from_end: int, value: int) -> None:
    """The last bytes are debug and keeps rest; the noise mode stands before minimum, tolerance, deadline and these."""
    encoded = bytearray(QUERY.encode())
    encoded[-from_end] = value
    with pytest.raises(ProtocolError):
        Query.decode(bytes(encoded))


def test_another_version_is_refused_by_name() -> None:
    with raises(ErrorKind.UNKNOWN_VERSION, ProtocolError):
        Query.decode(b"\x00\x01" + QUERY.encode()[2:])


def test_a_query_of_version_2_uses_reports_up() -> None:
    """One byte less, another digest, and no way to keep the rest."""
    old = replace(QUERY, version=VERSION_WITHOUT_REST)
    assert old.encode() == b"\x00\x02" + QUERY.encode()[2:-1]
    assert Query.decode(old.encode()) == old != QUERY
    assert not old.keeps_rest
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        replace(old, keeps_rest=True)
    for version in (1, VERSION + 1):
        with raises(ErrorKind.UNKNOWN_VERSION, ProtocolError):
            replace(QUERY, version=version)


def test_a_sum_that_could_wrap_is_never_asked_for() -> None:
    """2^20 reports of 2^40 each once came out negative. A cap below Δ allows more reports."""
    largest = samples.query(sensitivity=2**40, batch_size=2**19 - 1)
    assert largest.batch_size * largest.sensitivity < 2**59
    with raises(ErrorKind.TOO_LARGE, ProtocolError):
        replace(largest, batch_size=2**19)
    replace(largest, cap=2**20, spread=1, batch_size=2**32 - 1)


@pytest.mark.parametrize(("schema", "cap", "spread"), [(1, 1, 1), (2, 0, 0), (3, 1, 1), (0, 0, 0), (1, 0, 1)])
def test_a_schema_and_its_cap_go_together(schema: int, cap: int, spread: int) -> None:
    encoded = QUERY.encode()
    at = encoded.index((8).to_bytes(4, "big") + bytes(8)) + 12
    assert encoded[at : at + 12] == b"\x00\x01" + bytes(10)
    forged = schema.to_bytes(2, "big") + cap.to_bytes(8, "big") + spread.to_bytes(2, "big")
    with pytest.raises(ProtocolError):
        Query.decode(encoded[:at] + forged + encoded[at + 12 :])


def test_the_answer_is_sealed_in_the_suite_of_the_reports() -> None:
    key = PrivateKey.generate(POST_QUANTUM)
    query = Query.decode(samples.query(suite=POST_QUANTUM, answer_key=key.public.raw).encode())
    assert key.open(query.answer_public_key.seal(b"share", b"info"), b"info") == b"share"


@pytest.mark.parametrize(
    ("epsilon_micros", "sensitivity", "gamma"),
    [
        (300_000, 7, Fraction(3, 70)),
        (1_000_000, 7, Fraction(1, 7)),
        (1, 3, Fraction(1, 3_000_000)),
        (1, MAX_SENSITIVITY, Fraction(1, 10**6 * 2**40)),
        (MAX_MICROS, 1, Fraction(4294)),
    ],
)
def test_gamma_is_exact(epsilon_micros: int, sensitivity: int, gamma: Fraction) -> None:
    """Values without a rate are rejected before: see `WRONG`."""
    assert samples.query(epsilon_micros=epsilon_micros, sensitivity=sensitivity).gamma == gamma


DAY = 86400
OPTIONS = QueryOptions(seconds=30)


@dataclass
class Shop:
    """A querier with a batch, three helpers, and a clock that she and they share."""

    three: ThreeHelpers
    batch: BatchReader
    ahead: int = 0

    def now(self) -> int:
        return real_now() + self.ahead

    @property
    def folder(self) -> QueryFolder:
        return QueryFolder(self.batch.path)

    @property
    def querier(self) -> Querier:
        return Querier(self.three.helper_set, clock=self.now, patience=10, request_seconds=10)

    async def ask(
        self, options: QueryOptions = OPTIONS, *, key: IdentityKey | None = None, new: bool = False
    ) -> QueryResult:
        return await ask_batch(self.querier, self.batch, options, key or self.three.site_key(), self.now(), new=new)

    def grow(self) -> None:
        """More reports come in."""
        self.batch = write_batch(self.batch.path, self.three.seal([[0, 1]] * 2, terms(2)))


@asynccontextmanager
async def shop(folder: Path, options: Mapping[str, object] | None = None) -> AsyncIterator[Shop]:
    clock: list[Shop] = []
    async with three_helpers(folder, clock=lambda: clock[0].now() if clock else real_now(), options=options) as three:
        clock.append(Shop(three, three.batch(three.seal([[1, 0]] * 4, terms(2)))))
        yield clock[0]


async def test_of_two_commands_at_once_one_resumes_the_query_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[SavedQuery] = []

    def make_after_another(*arguments: Any) -> SavedQuery:
        made = make_query(*arguments)
        if not others:
            others.append(mine.folder.keep(make_query(*arguments)))
        return made

    async with shop(tmp_path) as mine:
        monkeypatch.setattr(query_folder, "make_query", make_after_another)
        assert (await mine.ask()).query == others[0].query
        assert len(mine.folder.all()) == 1


def test_a_query_that_cannot_be_saved_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TrefoilError("cannot write", kind=ErrorKind.FILE_UNWRITABLE)

    batch = write_batch(tmp_path / "batch", [report("one")])
    monkeypatch.setattr(saved_query, "write_private_file", fail)
    with raises(ErrorKind.FILE_UNWRITABLE):
        QueryFolder(batch.path).keep(make_query(batch, OPTIONS, HELPER_SET, QUERIER, real_now()))
    assert list(tmp_path.iterdir()) == [batch.path]


async def test_an_answer_is_fetched_a_day_later(tmp_path: Path) -> None:
    """The deadline bounds what the helpers do, not when their answer is fetched."""
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        mine.ahead = DAY
        assert (await mine.ask()).answer == first.answer
        saved = mine.folder.newest()
        assert saved is not None
        assert (await mine.querier.fetch(saved)).answer == first.answer


async def test_an_answer_is_fetched_after_a_new_query(tmp_path: Path) -> None:
    """The new query is refused, since all reports are spent; the old answer is as near as before."""
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        old = mine.folder.newest()
        assert old is not None
        mine.ahead = 1
        with pytest.raises(QueryFailed):
            await mine.ask(new=True)
        assert mine.folder.all()[0].query.query_id == old.query.query_id
        assert (await mine.querier.fetch(mine.folder.find(old.query.query_id.hex()[:8]))).answer == first.answer


async def test_a_batch_that_grew_does_not_hide_its_answer(tmp_path: Path) -> None:
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        mine.grow()
        with raises(ErrorKind.INCONSISTENT, TrefoilError) as changed:
            await mine.ask()
        saved = mine.folder.newest()
        assert saved is not None
        digits = saved.query.query_id.hex()[:8]
        assert f"trefoil query fetch --id {digits}" in changed.value.hint
        assert "--new" in changed.value.hint
        assert (await mine.querier.fetch(mine.folder.find(digits))).answer == first.answer
        with raises(ErrorKind.UNKNOWN_NAME):
            mine.folder.find("zz")


async def test_an_interrupted_querier_resumes(tmp_path: Path) -> None:
    """Interrupted before anyone answered: the same query goes on, from a private file."""
    async with shop(tmp_path) as mine:
        await mine.three.stop(2)
        with raises(ErrorKind.UNREACHABLE, QueryFailed) as failed:
            await mine.ask()
        assert failed.value.taken and failed.value.helpers == (2,)
        (saved,) = mine.folder.all()
        (path,) = mine.folder.path.iterdir()
        assert (path.stat().st_mode & 0o777, mine.folder.path.stat().st_mode & 0o777) == (0o600, 0o700)
        await mine.three.start(2)
        assert (await mine.ask()).query == saved.query


async def test_a_wrong_key_does_not_stick_to_the_batch(tmp_path: Path) -> None:
    async with shop(tmp_path) as mine:
        with raises(ErrorKind.REFUSED, QueryFailed) as wrong:
            await mine.ask(key=IdentityKey.generate())
        assert wrong.value.http_status == 403 and wrong.value.retryable is None
        assert str(wrong.value).startswith("submitting: all three helpers answer: ")
        assert not mine.folder.path.exists()
        assert (await mine.ask()).answer.counted == 4
        with raises(ErrorKind.INCONSISTENT, TrefoilError):
            await mine.ask(key=IdentityKey.generate())


async def test_a_query_that_no_helper_took_is_not_kept(tmp_path: Path) -> None:
    """Nor does it hide one that was taken before."""
    async with shop(tmp_path) as mine:
        with raises(ErrorKind.REFUSED, QueryFailed) as refused:
            await mine.ask(QueryOptions(seconds=10 * DAY))
        assert "deadline" in str(refused.value) and not refused.value.taken
        assert not mine.folder.path.exists()
        first = await mine.ask()
        with raises(ErrorKind.REFUSED, QueryFailed):
            await mine.ask(QueryOptions(seconds=10 * DAY), new=True)
        assert (await mine.ask()).query == first.query


async def test_a_query_that_one_helper_may_have_is_kept(tmp_path: Path) -> None:
    """Two refuse and one cannot be reached: it may have the query, and its answer key must not be lost."""
    async with shop(tmp_path) as mine:
        await mine.three.stop(1)
        with pytest.raises(QueryFailed) as failed:
            await mine.ask(QueryOptions(seconds=10 * DAY))
        assert failed.value.taken
        assert len(mine.folder.all()) == 1


@pytest.mark.parametrize("taken", [False, True])
async def test_a_query_that_other_helpers_refused_needs_new_and_she_reads_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Asked of the wrong helpers first, it is saved for them: the right ones take it under --new only."""

    async def answer(self: Querier, *_: object) -> QueryResult:
        raise QueryFailed("submitting", (0, 1, 2), "another set", "Use the current one.", http_status=422, taken=taken)

    monkeypatch.setattr(Querier, "ask", answer)
    batch = write_batch(tmp_path / "batch", [report("one")])
    folder = QueryFolder(batch.path)
    folder.keep(make_query(batch, OPTIONS, HELPER_SET, QUERIER, real_now()))
    with pytest.raises(QueryFailed) as refused:
        await ask_batch(Querier(HELPER_SET), batch, OPTIONS, QUERIER, real_now())
    assert ("--new" in refused.value.hint) is not taken
    assert len(folder.all()) == 1


@pytest.mark.parametrize(
    "other", [QueryOptions(epsilon_micros=7), QueryOptions(noise=NoiseMode.PAIRWISE), QueryOptions(minimum_reports=2)]
)
async def test_a_query_is_not_resumed_under_other_options(tmp_path: Path, other: QueryOptions) -> None:
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        assert (await mine.ask(QueryOptions(seconds=500))).query == first.query
        same = QueryOptions(epsilon_micros=first.query.epsilon_micros)
        assert (await mine.ask(same)).query == first.query
        with raises(ErrorKind.INCONSISTENT, TrefoilError):
            await mine.ask(other)


async def test_the_list_says_what_was_asked_and_which_answers_are_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with shop(tmp_path) as mine:
        path, helpers = mine.batch.path, mine.three.trio.helper_set_path
        assert await asyncio.to_thread(list_and_show, path, helpers) == []
        assert "no query on" in capsys.readouterr().out
        await mine.ask()
        mine.ahead = 1
        with pytest.raises(QueryFailed):
            await mine.ask(new=True)
        await mine.three.stop(0)
        mine.ahead = 2
        with pytest.raises(QueryFailed):
            await mine.ask(QueryOptions(seconds=31), new=True)
        await mine.three.start(0)
        listed = await asyncio.to_thread(list_and_show, path, helpers)
        shown = capsys.readouterr().out
        assert [entry["answer_held"] for entry in listed] == [True, False, False]
        assert [entry["reports"] for entry in listed] == [4, 4, 4]
        assert listed[1]["helpers"] == {"helper-1": "failed", "helper-2": "withdrawn", "helper-3": "withdrawn"}
        assert isinstance(listed[2]["helpers"], dict)
        assert listed[2]["helpers"]["helper-1"] == "does not know it"
        assert "answered: all three helpers hold it" in shown
        assert str(listed[0]["query_id"])[:8] in shown
        # What an operator finds in the log, and how the querier finds it.
        assert listed[1]["log_name"] == QueryFolder(path).all()[1].query.digest.hex()[:16]
        assert str(listed[1]["log_name"]) in shown.replace("\n", "")
        assert json.loads(json.dumps(listed)) == listed


async def test_every_subcommand_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One story at three helpers: `query --reports` is `query run`; then list, fetch, and a withdrawal too late."""
    async with shop(tmp_path) as mine:
        trio = mine.three.trio
        files = ["--reports", str(mine.batch.path), "--helpers", str(trio.helper_set_path)]
        key = ["--site-key", str(trio.site_key_path("shop.example"))]

        async def run(*arguments: str) -> tuple[int, Any]:
            code = await asyncio.to_thread(cli.run, ["-q", "query", *arguments, *files, "--json", "-"])
            return code, json.loads(capsys.readouterr().out)

        code, answer = await run(*key)
        assert code == 0 and answer["reports_counted"] == 4
        assert (await run("run", *key))[1]["answer"] == answer["answer"]
        (entry,) = (await run("list"))[1]
        assert entry["answer_held"] and entry["query_id"] == answer["query_id"]
        assert (await run("fetch", "--id", entry["query_id"][:8]))[1]["answer"] == answer["answer"]
        code, failure = await run("withdraw", *key)
        assert code != 0 and "not withdrawn" in failure["error"]["message"]


async def test_helpers_keep_an_answer_for_as_long_as_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through restarts. Then the share is erased, and later the query forgotten; its reports never."""
    async with shop(tmp_path, {"answer_days": 7}) as mine:
        first = await mine.ask()
        for mine.ahead in (DAY, 7 * DAY - 60):
            for party in range(PARTIES):
                await mine.three.storage(party).forget(mine.now())
            assert (await mine.ask()).answer == first.answer
        mine.ahead = 7 * DAY + 60
        for party in range(PARTIES):
            await mine.three.storage(party).forget(mine.now())
        with raises(ErrorKind.EXPIRED, QueryFailed):
            await mine.ask()
        listed = await asyncio.to_thread(list_and_show, mine.batch.path, mine.three.trio.helper_set_path)
        assert listed[0]["helpers"] == {f"helper-{number}": "expired" for number in (1, 2, 3)}
        mine.ahead = 15 * DAY
        for party in range(PARTIES):
            await mine.three.storage(party).forget(mine.now())
            await mine.three.stop(party)
            await mine.three.start(party)
        assert not list(mine.three.trio.folder.glob("helper-*/data/queries/*"))
        assert not [record for record in caplog.records if "lost" in record.message or "read back" in record.message]
        with raises(ErrorKind.REFUSED, QueryFailed):
            await mine.ask()
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await mine.ask(new=True)


async def test_a_query_that_was_never_uploaded_ends_and_is_forgotten(tmp_path: Path) -> None:
    async with shop(tmp_path, {"answer_days": 1}) as mine:
        saved = mine.three.query(mine.batch)
        await mine.three.queries[0].submit(saved.query.digest, saved.signed.encode())
        mine.ahead = 60
        await mine.three.storage(0).tidy()
        status = mine.three.queries[0].status(saved.query.digest)
        assert status.failure is not None
        assert status.failure.stage is QueryState.AWAITING
        mine.ahead = 2 * DAY
        await mine.three.storage(0).forget(mine.now())
        assert mine.three.queries[0].find(saved.query.digest) is None
