"""What a querier keeps: every query whose answer may come, for as long as the helpers keep it, and no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.listing import list_and_show
from protocol.querier.query_failed import QueryFailed
from protocol.querier.query_folder import QueryFolder, ask_batch
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.querier.worth import QueryResult
from protocol.query import NoiseMode
from protocol.shares import PARTIES
from protocol.status import QueryState
from tests.support.protocol_samples import HELPER_SET, QUERIER, report
from tests.support.renewal import renew
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers, write_batch

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
        return Querier(self.three.helper_set, clock=self.now, patience=3, request_seconds=3)

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


async def test_an_answer_is_fetched_after_renewals_of_the_helper_set(tmp_path: Path) -> None:
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        for _ in range(2):
            await asyncio.gather(*(mine.three.stop(party) for party in range(PARTIES)))
            renew(mine.three.trio)
            await asyncio.gather(*(mine.three.start(party) for party in range(PARTIES)))
        mine.ahead = DAY
        assert (await mine.ask()).answer == first.answer


async def test_a_batch_that_grew_does_not_hide_its_answer(tmp_path: Path) -> None:
    async with shop(tmp_path) as mine:
        first = await mine.ask()
        mine.grow()
        with pytest.raises(TrefoilError, match="has changed since it was queried") as changed:
            await mine.ask()
        saved = mine.folder.newest()
        assert saved is not None
        digits = saved.query.query_id.hex()[:8]
        assert f"trefoil query --id {digits}" in changed.value.hint
        assert "--new" in changed.value.hint
        assert (await mine.querier.fetch(mine.folder.find(digits))).answer == first.answer
        with pytest.raises(TrefoilError, match="no query of"):
            mine.folder.find("zz")


async def test_an_interrupted_querier_resumes(tmp_path: Path) -> None:
    """Interrupted before anyone answered: the same query goes on, from a private file."""
    async with shop(tmp_path) as mine:
        await mine.three.stop(2)
        with pytest.raises(QueryFailed, match="helper-3") as failed:
            await mine.ask()
        assert failed.value.taken
        (saved,) = mine.folder.all()
        (path,) = mine.folder.path.iterdir()
        assert (path.stat().st_mode & 0o777, mine.folder.path.stat().st_mode & 0o777) == (0o600, 0o700)
        await mine.three.start(2)
        assert (await mine.ask()).query == saved.query


async def test_a_wrong_key_does_not_stick_to_the_batch(tmp_path: Path) -> None:
    async with shop(tmp_path) as mine:
        with pytest.raises(QueryFailed, match="all three helpers answer: the query is not signed by the key") as wrong:
            await mine.ask(key=IdentityKey.generate())
        assert wrong.value.again is None
        assert not mine.folder.path.exists()
        assert (await mine.ask()).answer.counted == 4
        with pytest.raises(TrefoilError, match="was queried before, with another site key"):
            await mine.ask(key=IdentityKey.generate())


async def test_a_query_that_no_helper_took_is_not_kept(tmp_path: Path) -> None:
    """Nor does it hide one that was taken before."""
    async with shop(tmp_path) as mine:
        with pytest.raises(QueryFailed, match="deadline is"):
            await mine.ask(QueryOptions(seconds=10 * DAY))
        assert not mine.folder.path.exists()
        first = await mine.ask()
        with pytest.raises(QueryFailed, match="deadline is"):
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
    assert ("Ask a new one with --new" in refused.value.hint) is not taken
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
        with pytest.raises(TrefoilError, match="was queried before, with another ε, noise or minimum"):
            await mine.ask(other)


async def test_the_list_says_what_was_asked_and_which_answers_are_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with shop(tmp_path) as mine:
        path, helpers = mine.batch.path, mine.three.trio.helper_set_path
        assert await asyncio.to_thread(list_and_show, path, helpers) == []
        assert "nothing was asked" in capsys.readouterr().out
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
        assert json.loads(json.dumps(listed)) == listed


def test_a_damaged_query_is_said_so(tmp_path: Path) -> None:
    folder = QueryFolder(tmp_path / "batch")
    folder.path.mkdir()
    (folder.path / "00.json").write_text("{}")
    (folder.path / "00.json").chmod(0o600)
    with pytest.raises(TrefoilError, match="not a saved query"):
        folder.all()


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
        with pytest.raises(QueryFailed, match=r"The answer was released, and is gone: .*kept it for 7 days"):
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
        with pytest.raises(QueryFailed, match="this query ended as expired, and this helper has forgotten it"):
            await mine.ask()
        with pytest.raises(QueryFailed, match="all 4 reports were counted before"):
            await mine.ask(new=True)


async def test_a_query_that_was_never_uploaded_ends_and_is_forgotten(tmp_path: Path) -> None:
    async with shop(tmp_path, {"answer_days": 1}) as mine:
        saved = mine.three.query(mine.batch)
        await mine.three.intakes[0].submit(saved.query.digest, saved.signed.encode())
        mine.ahead = 60
        await mine.three.storage(0).tidy()
        status = mine.three.intakes[0].status(saved.query.digest)
        assert status.failure is not None
        assert status.failure.stage is QueryState.AWAITING
        mine.ahead = 2 * DAY
        await mine.three.storage(0).forget(mine.now())
        assert mine.three.intakes[0].registry.find(saved.query.digest) is None
