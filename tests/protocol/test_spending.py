"""What is left of a querier's reports by her own record, and the audit that adds released answers up another way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from protocol.answer import Answer
from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.collector.batches import summary
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.helper_set import HelperSet
from protocol.left_out import code_of
from protocol.querier import view
from protocol.querier.failure import refusal
from protocol.querier.query_folder import QueryFolder, RecordedQuery
from protocol.querier.saved_query import QueryOptions, SavedQuery, make_query
from protocol.querier.spending import ReportGroup, audit, check_choice, spending_of
from protocol.report import SealedReport
from protocol.status import Failure, QueryState, QueryStatus, Shortfall
from protocol.units import least_need, need
from tests.support import protocol_samples as samples
from tests.support.raising import raises

NAMES = ("Alder", "Birch", "Cedar")


def reports(names: Sequence[int], **terms: int) -> list[SealedReport]:
    return [samples.report(f"spending {name} {terms}", [0] * 8, samples.terms(**terms)) for name in names]


def batch_of(path: Path, content: Sequence[SealedReport]) -> BatchReader:
    return BatchReader(samples.write_batch(path, content))


def save(batch: BatchReader, micros: int, *, rest: bool = True, kind: str = "") -> SavedQuery:
    options = QueryOptions(epsilon_micros=micros, keeps_rest=rest, kind=kind)
    made = make_query(batch, options, samples.HELPER_SET, samples.QUERIER, samples.NOW)
    return QueryFolder(batch.path).keep(made)


def answered(batch: BatchReader, saved: SavedQuery, left_out: Sequence[int] = ()) -> None:
    """Record an answer without some reports, named by their place in the batch's order by digest."""
    codes = np.zeros((3, len(batch)), dtype=np.uint8)
    codes[1, list(left_out)] = code_of(Rejection.SEEN)
    query, counted = saved.query, len(batch) - len(left_out)
    terms = (query.noise, query.epsilon_micros, query.sensitivity)
    lists = (codes[0], codes[1], codes[2])
    answer = Answer([0] * 8, None, len(batch), counted, ({}, {}, {}), *terms, 1, bytes(32), lists)
    QueryFolder(batch.path).keep_outcome(query, answer)


def lefts(path: Path, *others: Path) -> list[tuple[int, int, bool]]:
    spent = spending_of([path, *others])[0]
    return sorted((group.left, group.count, group.sure) for group in spent.groups)


def test_answers_add_up_report_by_report(tmp_path: Path) -> None:
    batch = batch_of(tmp_path / "b", reports(range(6)))
    assert lefts(batch.path) == [(1_000_000, 6, True)]
    answered(batch, save(batch, 200_000))
    answered(batch, save(batch, 500_000), left_out=[0, 1])
    assert lefts(batch.path) == [(300_000, 4, True), (800_000, 2, True)]
    # Nobody has fetched this one: its reports may be in an answer.
    third = save(batch, 100_000)
    assert lefts(batch.path) == [(200_000, 4, False), (700_000, 2, False)]
    QueryFolder(batch.path).keep_outcome(third.query, None)
    assert lefts(batch.path) == [(300_000, 4, True), (800_000, 2, True)]
    answered(batch, save(batch, 100_000, rest=False), left_out=[0])
    assert lefts(batch.path) == [(0, 1, True), (0, 4, True), (800_000, 1, True)]
    assert audit([batch.path])[0].paid == 1_000_000


def test_what_is_below_the_least_part_is_nothing(tmp_path: Path) -> None:
    batch = batch_of(tmp_path / "b", reports([1]))
    answered(batch, save(batch, 1_000_000 - 15_624))
    assert lefts(batch.path) == [(0, 1, True)]


def test_a_report_in_two_batches_counts_in_both(tmp_path: Path) -> None:
    content = reports(range(5))
    first, second = batch_of(tmp_path / "a", content[:3]), batch_of(tmp_path / "b", content[2:])
    answered(first, save(first, 400_000))
    answered(second, save(second, 300_000))
    assert lefts(second.path) == [(700_000, 3, True)]
    assert lefts(second.path, first.path) == [(300_000, 1, True), (700_000, 2, True)]


def test_a_batch_that_grew_counts_its_old_answer_as_possible(tmp_path: Path) -> None:
    """Its order by digest is another one, so that nobody knows which reports the answer holds."""
    batch = batch_of(tmp_path / "b", reports(range(3)))
    answered(batch, save(batch, 400_000))
    batch.path.unlink()
    grown = batch_of(batch.path, reports(range(4)))
    assert lefts(grown.path) == [(600_000, 4, False)]


def test_truncated_lists_are_not_believed(tmp_path: Path) -> None:
    batch = batch_of(tmp_path / "b", reports(range(3)))
    saved, codes = save(batch, 400_000), np.zeros(3, dtype=np.uint8)
    query = saved.query
    terms = (query.noise, query.epsilon_micros, query.sensitivity)
    fewer = Answer([0] * 8, None, 3, 2, ({}, {}, {}), *terms, 1, bytes(32), (codes, codes, codes))
    QueryFolder(batch.path).keep_outcome(query, fewer)
    assert lefts(batch.path) == [(600_000, 3, False)]


def test_the_audit_finds_answers_that_cost_more_than_was_paid(tmp_path: Path) -> None:
    """Whatever the helpers' rule says: the audit does not use it. By one micro, and by what was used up before."""
    for name, amounts, wrong in (
        ("within", [(600_000, True), (400_000, False)], False),
        ("a micro", [(600_000, True), (400_001, True)], True),
        ("whole twice", [(200_000, False), (200_000, False)], True),
    ):
        batch = batch_of(tmp_path / name, reports([1, 2]))
        for saved in [save(batch, micros, rest=rest) for micros, rest in amounts]:
            answered(batch, saved)
        if wrong:
            with raises(ErrorKind.INCONSISTENT, TrefoilError):
                audit([batch.path])
        else:
            audit([batch.path])
    # An answer that was asked for when another had come that used the reports up; not one that was asked for before.
    for name, late in (("late", True), ("early", False)):
        batch = batch_of(tmp_path / name, reports([1, 2]))
        early = save(batch, 200_000)
        whole = save(batch, 200_000, rest=False)
        answered(batch, whole)
        answered(batch, save(batch, 100_000) if late else early)
        # Fetched again, the first is no later for that.
        answered(batch, whole)
        with raises(ErrorKind.INCONSISTENT, TrefoilError) if late else nullcontext():
            audit([batch.path])
    # What may not have been released accuses nobody.
    batch = batch_of(tmp_path / "unknown", reports([1, 2]))
    for _ in range(3):
        save(batch, 900_000)
    assert lefts(batch.path) == [(0, 2, False)] and audit([batch.path])


QUERY = samples.query()
ASKED = st.lists(st.tuples(st.integers(1, 400_000), st.integers(1, 300)), max_size=9)


@given(st.integers(1, 1_000_000), st.integers(1, 200), ASKED)
def test_what_the_rule_lets_through_the_audit_accepts(paid: int, reach: int, asked: list[tuple[int, int]]) -> None:
    """And what is left is what a ledger would leave: the two computations agree on every sequence of answers."""
    left, answers = paid, []
    for epsilon, sensitivity in asked:
        cost = need(paid, reach, epsilon, sensitivity)
        if cost <= left:
            left -= cost
            query = replace(QUERY, epsilon_micros=epsilon, sensitivity=sensitivity, keeps_rest=True)
            answers.append(RecordedQuery(query, b"\x80"))
    group = ReportGroup(1, paid, reach, tuple(answers))
    assert not group.overspent
    assert group.left == (left if left >= least_need(paid) else 0)
    # One more answer of the whole rate is too much as soon as there was one.
    whole = replace(QUERY, epsilon_micros=paid, sensitivity=reach, keeps_rest=True)
    more = replace(group, answers=(*answers, RecordedQuery(whole, b"\x80")))
    assert more.overspent == bool(answers)


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    batch = batch_of(tmp_path / "b", reports([1]))
    saved = save(batch, 400_000)
    note = QueryFolder(batch.path).path / f"{saved.query.query_id.hex()}.outcome"
    short = '{"outcome": "answered", "counted": "%s"}'
    for content in ("", "{}", "[]", '{"outcome": "lost"}', short % "zz", short % "", short % "0000"):
        note.write_text(content)
        with raises(ErrorKind.FILE_DAMAGED, TrefoilError):
            spending_of([batch.path])


@pytest.mark.parametrize(
    ("micros", "rest", "refused"),
    [
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (1_000_000, None, False),
        (999_999, None, True),
        (999_999, True, False),
        (999_999, False, False),
    ],
)
def test_a_choice_that_must_be_made(tmp_path: Path, micros: int | None, rest: bool | None, refused: bool) -> None:
    batch = batch_of(tmp_path / "b", reports([1]))
    options = QueryOptions(epsilon_micros=micros, keeps_rest=rest)
    if not refused:
        check_choice(batch, options)
        return
    with raises(ErrorKind.MISSING_OPTION, TrefoilError) as error:
        check_choice(batch, options)
    assert ("--use-up" in error.value.hint) == (micros is not None)


def test_paid_is_the_most_that_a_report_of_the_batch_paid(tmp_path: Path) -> None:
    """Half a batch paid what is asked, the other twice that: there the rest would be lost without a word."""
    batch = batch_of(tmp_path / "b", [*reports([1]), *reports([2], epsilon_micros=2_000_000)])
    (kind,) = {kind for kind in kinds(batch) if "ε 1," in kind[1] or kind[1].endswith("ε 1")}
    with raises(ErrorKind.MISSING_OPTION, TrefoilError):
        check_choice(batch, QueryOptions(epsilon_micros=1_000_000, kind=kind[0]))


def kinds(batch: BatchReader) -> list[tuple[str, str]]:
    listed = summary(batch.path)
    return list(zip(listed.kinds, listed.descriptions, strict=True))


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, list(map(str, words)))
    return done.exit_code, done.output


def test_commands_show_what_was_paid_and_what_is_left(tmp_path: Path) -> None:
    batch, target = batch_of(tmp_path / "b", reports(range(4))), tmp_path / "out.json"
    answered(batch, save(batch, 200_000), left_out=[3])
    code, _ = run("batch", "ls", batch.path, "--json", target)
    (row,) = json.loads(target.read_text())
    assert (code, row["paid_micros"], row["left_exact"]) == (0, 1_000_000, True)
    assert row["left_micros"] == [800_000, 1_000_000]
    code, _ = run("query", "audit", batch.path, "--json", target)
    rows = json.loads(target.read_text())
    assert code == 0 and sorted((row["reports"], row["left_micros"]) for row in rows) == [(1, 1_000_000), (3, 800_000)]


class Submitted(Exception):
    """Stands for the helpers: carries the options of the query."""

    def __init__(self, options: QueryOptions) -> None:
        self.options = options


def test_a_new_query_asks_by_default_for_what_is_left_by_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def submit(_querier: object, _batch: object, options: QueryOptions, *_: object, **__: object) -> None:
        raise Submitted(options)

    monkeypatch.setattr(view, "ask_batch", submit)
    monkeypatch.setattr(HelperSet, "load", lambda _path: samples.HELPER_SET)
    monkeypatch.setattr(view, "load_identity", lambda _path: samples.QUERIER)
    batch = batch_of(tmp_path / "b", reports(range(4)))

    def asked(*, new: bool = True, **options: Any) -> tuple[int | None, bool | None]:
        with pytest.raises(Submitted) as submitted:
            view.ask_and_show(batch.path, tmp_path, tmp_path, QueryOptions(**options), samples.NOW, new=new)
        return submitted.value.options.epsilon_micros, submitted.value.options.keeps_rest

    assert asked() == (None, None), "nothing was taken, so all of it"
    answered(batch, save(batch, 200_000), left_out=[3])
    capsys.readouterr()
    assert asked() == (800_000, False)
    assert "asks for 0.8" in capsys.readouterr().out
    assert asked(new=False) == (None, None), "it resumes"
    assert asked(epsilon_micros=100_000, keeps_rest=True) == (100_000, True)
    answered(batch, save(batch, 800_000, rest=False), left_out=[3])
    assert asked() == (None, None), "of the report that is left, all of it"


def shortfall(*counts: int) -> Shortfall:
    first, second, third = ({Rejection.TOO_LITTLE_LEFT: count} if count else {} for count in counts)
    return Shortfall(5, 0, 5, (first, second, third))


@pytest.mark.parametrize(
    ("counts", "affords", "named", "micros"),
    [((5, 5, 5), (300_000, 200_000, 400_000), "Birch", "0.2"), ((0, 0, 5), (None, None, 100_000), "Cedar", "0.1")],
)
def test_a_refusal_names_what_can_be_asked_for_and_by_which_helper(
    counts: tuple[int, ...], affords: tuple[int | None, ...], named: str, micros: str
) -> None:
    failures = [Failure(QueryState.AGREEING, None, "few", "", shortfall(*counts), each) for each in affords]
    statuses = {party: QueryStatus(QueryState.FAILED, failure=each) for party, each in enumerate(failures)}
    statuses = {party: QueryStatus.from_json(status.to_json()) for party, status in statuses.items()}
    error = refusal(statuses, NAMES)
    assert error.kind is ErrorKind.TOO_FEW and error.retryable is False
    assert named in error.hint and f"--epsilon {micros}" in error.hint


def test_where_nothing_can_be_asked_for_no_amount_is_named() -> None:
    failure = Failure(QueryState.AGREEING, None, "few", "", shortfall(5, 5, 5))
    error = refusal({party: QueryStatus(QueryState.FAILED, failure=failure) for party in range(3)}, NAMES)
    assert "--epsilon" not in error.hint


def test_a_failure_of_an_earlier_release_has_no_amount() -> None:
    """Ledgers have stored such failures, and helpers of an earlier release send them."""
    stored = Failure(QueryState.AGREEING, None, "few", "", shortfall(1, 1, 1), 7).to_json()
    assert Failure.from_json(stored).affordable == 7
    del stored["affordable"]
    assert Failure.from_json(stored).affordable is None
    for wrong in (0, -1, 2**32, "7", 7.0, True):
        with pytest.raises(TrefoilError):
            Failure.from_json(stored | {"affordable": wrong})
