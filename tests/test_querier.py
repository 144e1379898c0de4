"""The querier's side: what she believes, what she keeps, and whom she names when there is no answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpc_helpers.local.launcher import prepare
from protocol.answer import Answer, AnswerShare
from protocol.errors import ProtocolError, TrefoilError
from protocol.field import P
from protocol.helper_set import HelperEntry, HelperSet
from protocol.keys import IdentityKey
from protocol.noise_scale import NoiseScale
from protocol.querier.ask import Querier
from protocol.querier.bias import bias_bound
from protocol.querier.plot import plot_result
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.querier.view import Follower, permille, show
from protocol.querier.worth import CONFIDENCE, QueryResult, worth
from protocol.query import NoiseMode, Query
from protocol.status import QueryState, QueryStatus
from tests.support.three_helpers import MemoryMpc, ThreeHelpers, real_now, terms, three_helpers


def lying(monkeypatch: pytest.MonkeyPatch, party: int, lie: Callable[[AnswerShare], AnswerShare]) -> None:
    """Helper `party` computes as it should and seals something else."""
    honest = AnswerShare.seal

    def seal(self: AnswerShare, by: int, query: Query, identity: IdentityKey) -> bytes:
        return honest(lie(self) if by == party else self, by, query, identity)

    monkeypatch.setattr(AnswerShare, "seal", seal)


@pytest.mark.parametrize("party", [0, 1, 2])
async def test_one_wrong_share_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, party: int) -> None:
    def lie(share: AnswerShare) -> AnswerShare:
        vector = share.vector.copy()
        vector[2] = (int(vector[2]) + 1) % P
        return replace(share, vector=vector)

    lying(monkeypatch, party, lie)
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 2, 3, 4]] * 3, terms(4)))
        with pytest.raises(ProtocolError, match="do not fit together"):
            await three.ask(three.query(batch), batch)


async def test_helpers_that_disagree_on_what_they_counted_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, 1, lambda share: replace(share, counted=share.counted - 1))
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        with pytest.raises(ProtocolError, match="disagree"):
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
        with pytest.raises(QueryFailed, match="helper-3 cannot be used") as failed:
            await three.ask(three.query(batch), batch)
        assert (failed.value.stage, failed.value.helpers) == ("opening", (2,))


async def test_a_wrong_certificate_is_not_talked_to(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        asked = three.query(batch)
        first, second, third = three.helper_set.helpers
        posing = HelperEntry(second.name, second.identity_key, second.hpke_keys, first.address, second.tls_pin)
        with pytest.raises(QueryFailed, match="helper-2 shows a certificate other than the pinned one"):
            await Querier(HelperSet(1, (first, posing, third))).ask(asked, batch)


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
        monkeypatch.setattr(three.intakes[2]._helper, "answer", forever)
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        querier = Querier(three.helper_set, clock=lambda: three.clock() + ahead)
        with pytest.raises(QueryFailed, match="helper-3") as failed:
            await querier.ask(three.query(batch), batch)
        assert 2 in failed.value.helpers
        assert "queued" in str(failed.value)


async def test_helpers_name_the_one_they_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper 2 refuses to begin; at the query's deadline the two others say whom they waited for."""

    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    async with three_helpers(tmp_path) as three:
        monkeypatch.setattr(three.intakes[1]._helper, "answer", forever)
        batch = three.batch(three.seal([[1, 0]] * 3, terms(2)))
        with pytest.raises(QueryFailed, match="helper 2") as failed:
            await three.ask(three.query(batch, QueryOptions(seconds=2)), batch)
        assert failed.value.helpers == (1,)
        assert failed.value.stage == "agreeing"


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
        with pytest.raises(TrefoilError, match="not a saved query"):
            SavedQuery.load(path)


def test_an_empty_batch_cannot_be_queried(tmp_path: Path) -> None:
    three = offline(tmp_path)
    batch = three.batch(three.seal([[1, 0]], terms(2)))
    batch.path.write_bytes(batch.path.read_bytes()[:32])
    with pytest.raises(TrefoilError, match="no reports"):
        make_query(type(batch)(batch.path), QueryOptions(), three.helper_set, three.site_key(), three.clock())


def result_of(
    three: ThreeHelpers, *, kappa: int = 0, debug: bool = False, histogram: list[int] | None = None
) -> QueryResult:
    numbers = histogram or [5, -3, 120]
    report = three.seal([[0] * (len(numbers) + bool(kappa))], terms(len(numbers), kappa=kappa, debug=debug))
    query = three.query(three.batch(report), QueryOptions(noise=NoiseMode.PAIRWISE, debug=debug)).query
    flags, counted = 40 if kappa else None, (np.zeros(1, dtype=np.uint8),) * 3
    answer = Answer(numbers, flags, 1, 1, ({}, {}, {}), query.noise, 1_000_000, 2, 1, bytes(32), counted)
    return worth(query, answer, {}, 10)


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
    with pytest.raises(TrefoilError, match="needs pandas"):
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
    with pytest.raises(TrefoilError, match="cannot draw"):
        plot_result(tmp_path / "answer.nonsense", result_of(three))


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
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(TrefoilError, match="0 to 1"):
            permille(share)
