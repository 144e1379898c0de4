"""Sums over columns: equal to the plaintext's, however the column is cut, and over exactly the accepted reports."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.admission import ingest as aggregation
from mpc_helpers.admission.chunk import ChunkJob, ingest_chunk
from mpc_helpers.admission.cluster import Workplace
from mpc_helpers.admission.ingest import chunk_length, ingest
from protocol.batch import BatchReader, ColumnReader
from protocol.errors import ProtocolError, Rejection
from protocol.query import Query
from protocol.report import SealedReport
from protocol.shape import Shape
from protocol.shares import PARTIES, open_shamir
from tests.support import protocol_samples as samples
from tests.support.processes import holds

HISTOGRAMS = [[index, 1, -index, 2**40, 0, 7 * index, index % 3, 1] for index in range(40)]


@pytest.fixture(scope="module")
def reports() -> list[SealedReport]:
    return [samples.report(f"sum {index}", values) for index, values in enumerate(HISTOGRAMS)]


@pytest.fixture(scope="module")
def columns(reports: list[SealedReport], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return samples.write_columns(tmp_path_factory.mktemp("columns"), reports)


@pytest.fixture(scope="module")
def query(reports: list[SealedReport]) -> Query:
    return samples.query_for(reports)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seven reports to a chunk, so that forty make six."""
    monkeypatch.setattr(aggregation, "chunk_length", lambda *_: 7)
    yield


def plain_sum(histograms: list[list[int]]) -> list[int]:
    """The clear twin."""
    return [sum(column) for column in zip(*histograms, strict=True)]


def test_the_helpers_hold_the_plaintext_sum(columns: list[Path], query: Query) -> None:
    ingested = samples.ingest_columns(columns, query)
    assert [one.rejections() for one in ingested] == [{}, {}, {}]
    assert samples.opened_sum(ingested) == plain_sum(HISTOGRAMS)


@pytest.mark.usefixtures("small_chunks")
def test_cutting_into_chunks_changes_nothing(columns: list[Path], query: Query) -> None:
    assert samples.opened_sum(samples.ingest_columns(columns, query)) == plain_sum(HISTOGRAMS)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shared_disk", [True, False])
def test_threads_finishing_in_any_order_change_nothing(columns: list[Path], query: Query, shared_disk: bool) -> None:
    done: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        ingested = [
            ingest(
                ColumnReader(path),
                ColumnReader(path).digests(),
                samples.rules(party, query),
                Workplace(pool, 3, shared_disk=shared_disk),
                done.append,
            )
            for party, path in enumerate(columns)
        ]
    assert samples.opened_sum(ingested) == plain_sum(HISTOGRAMS)
    assert sum(done) == PARTIES * len(HISTOGRAMS)


def test_worker_processes_give_the_same(columns: list[Path], query: Query) -> None:
    """What travels to a worker and back is plain data."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rules = samples.rules(1, query)
        column = ColumnReader(columns[1])
        there = ingest(column, column.digests(), rules, Workplace(pool))
    here = samples.ingest_columns(columns, query)[1]
    assert (there.reasons == here.reasons).all()
    assert all((there.total(there.admitted)[index] == here.total(here.admitted)[index]).all() for index in (1, 2))


def test_a_process_that_opened_reports_keeps_no_key(columns: list[Path], query: Query) -> None:
    """A destroyed key must not live on in the pool's processes, which live as long as the daemon."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rules, column = samples.rules(1, query), ColumnReader(columns[1])
        assert not ingest(column, column.digests(), rules, Workplace(pool)).rejections()
        assert [pool.submit(holds, key.private[::-1]).result(60) for key in rules.keys] == [False] * len(rules.keys)


def test_a_key_is_looked_up_by_its_set_too(columns: list[Path], query: Query) -> None:
    """Two sets may name one id; only the key of the report's own set opens it."""
    column, rules = ColumnReader(columns[1]), samples.rules(1, query)
    other = [replace(key, helper_set=bytes(32), private=samples.hpke_key("other").raw) for key in rules.keys]
    for keys in ((*rules.keys, *other), (*other, *rules.keys)):
        found = ingest(column, column.digests(), replace(rules, keys=keys), samples.INLINE)
        assert found.rejections() == {}


def test_a_job_done_twice_gives_the_same(columns: list[Path], query: Query) -> None:
    column = ColumnReader(columns[2])
    job = ChunkJob(samples.rules(2, query), column.layout, 3, np.zeros(9, dtype=np.bool_), columns[2])
    first, second = ingest_chunk(job), ingest_chunk(job)
    assert first.hours.tobytes() == second.hours.tobytes()
    assert all((one == two).all() for one, two in zip(first.sums, second.sums, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("left_out", [[], [0], [39], [0, 6, 7, 13, 39], list(range(39)), list(range(40))])
def test_leaving_reports_out_after_agreement(
    columns: list[Path], query: Query, reports: list[SealedReport], left_out: list[int]
) -> None:
    """The others' refusals are taken out of the sums, exactly."""
    ingested = samples.ingest_columns(columns, query)
    accepted = np.ones(len(reports), dtype=np.bool_)
    accepted[left_out] = False
    order = np.argsort([report.digest for report in reports])
    expected = plain_sum([HISTOGRAMS[index] for index in order[accepted]] or [[0] * 8])
    shares = [one.shamir_share(accepted) for one in ingested]
    assert open_shamir(shares) == expected


def test_a_report_never_admitted_cannot_be_accepted(columns: list[Path], query: Query) -> None:
    stricter = replace(query, epsilon_micros=2_000_000)
    ingested = samples.ingest_columns(columns, stricter)[0]
    assert ingested.rejections() == {Rejection.NOISE_TOO_SMALL: 40}
    assert ingested.total(ingested.admitted)[0].tolist() == [0] * 8
    with pytest.raises(ProtocolError, match="never admitted"):
        ingested.total(np.ones(40, dtype=np.bool_))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("copies", [2, 3, 9])
def test_repeats_count_once_even_across_chunks(tmp_path: Path, copies: int) -> None:
    """Every report has its own bucket, so that a 2 proves a replay. Nine copies straddle chunks of seven."""
    once = [samples.report(f"own {index}", [int(index == bucket) for bucket in range(8)]) for index in range(8)]
    many = [*once, *[once[3]] * (copies - 1), once[7]]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, many), samples.query_for(many))
    assert [one.rejections() for one in ingested] == [{Rejection.DUPLICATE: copies}] * PARTIES
    assert samples.opened_sum(ingested) == [1] * 8


def test_bad_reports_of_every_kind_at_once_cost_only_themselves(tmp_path: Path) -> None:
    good = [samples.report(f"good {index}", [1] * 8) for index in range(6)]
    first, second, third = good[0].payloads
    bad = [
        replace(samples.report("b1"), body=bytes(64)),
        replace(samples.report("b2"), payloads=(first, second, third)),
        samples.report("b3", None, samples.terms(debug=True)),
        replace(samples.report("b4"), header=b"\xff" * 273),
        replace(samples.report("b5"), header=bytes(273)),
    ]
    reports = [*good, *bad]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    assert samples.opened_sum(ingested) == [6] * 8
    common = {Rejection.UNOPENABLE: 1, Rejection.WRONG_MODE: 1, Rejection.UNKNOWN_VERSION: 2}
    assert ingested[0].rejections() == common
    assert ingested[1].rejections() == ingested[2].rejections() == {**common, Rejection.WRONG_BODY: 1}


def test_a_batch_of_only_bad_reports_sums_to_nothing(tmp_path: Path) -> None:
    reports = [samples.report(f"all bad {index}", [5] * 8, samples.terms(debug=True)) for index in range(3)]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    assert samples.opened_sum(ingested) == [0] * 8


def test_a_side_query_is_summed_with_the_rest(tmp_path: Path) -> None:
    terms = samples.terms(kappa=10)
    reports = [samples.report(f"side {index}", [*[index] * 8, 10], terms) for index in range(3)]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports, kappa=10))
    assert samples.opened_sum(ingested) == [3] * 8 + [30]


def test_a_column_of_another_batch_is_refused(columns: list[Path], query: Query) -> None:
    for party, path in ((0, columns[1]), (1, columns[0])):
        with pytest.raises(ProtocolError, match="the query says 40 and"):
            column = ColumnReader(path)
            ingest(column, column.digests(), samples.rules(party, query), samples.INLINE)
    with pytest.raises(ProtocolError, match="the query says 41"):
        samples.ingest_columns(columns, replace(query, batch_size=41))


def test_a_column_out_of_order_is_refused(tmp_path: Path, reports: list[SealedReport], query: Query) -> None:
    batch = BatchReader(samples.write_batch(tmp_path / "batch", reports))
    path = tmp_path / "column"
    with path.open("wb") as file:
        file.writelines(batch.column(0, batch.order()[::-1]))
    with pytest.raises(ProtocolError, match="out of order"):
        samples.ingest_columns([path], query)


@pytest.mark.usefixtures("small_chunks")
def test_order_is_checked_between_chunks_too(tmp_path: Path, reports: list[SealedReport], query: Query) -> None:
    batch = BatchReader(samples.write_batch(tmp_path / "batch", reports))
    order = batch.order()
    path = tmp_path / "column"
    with path.open("wb") as file:
        file.writelines(batch.column(0, np.concatenate([order[7:14], order[:7], order[14:]])))
    with pytest.raises(ProtocolError, match="report 8 of the column is out of order"):
        samples.ingest_columns([path], query)


def test_chunks_are_bounded_in_bytes_and_number(columns: list[Path]) -> None:
    layout = ColumnReader(columns[1]).layout
    plain = Shape(8)
    assert chunk_length(layout, plain) == 2048
    assert chunk_length(replace(layout, body=8 * 1024), plain) * replace(layout, body=8 * 1024).record <= 2**22
    assert chunk_length(replace(layout, body=8 * 2**16), plain) == 64
    checked = Shape(1024, 0, 2**20, 1)
    assert chunk_length(replace(layout, body=0), checked) * 8 * checked.expanded <= 2**22
    assert chunk_length(replace(layout, body=0), checked) % 64 == 0


def test_secrets_do_not_show(columns: list[Path], query: Query) -> None:
    ingested = samples.ingest_columns(columns, query)[0]
    assert "_sums" not in repr(ingested)
    job = ChunkJob(ingested.rules, ingested.column.layout, 0, np.zeros(1, dtype=np.bool_), b"secret payload")
    assert "secret payload" not in repr(job)
