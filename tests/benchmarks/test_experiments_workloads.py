"""Workloads: published marginals of the synthetic sets, and real files, well-formed and not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet
import pytest

from benchmarks.experiments import criteo, patcg
from benchmarks.experiments.files import CRITEO_COLUMNS, pieces, read_criteo, read_patcg
from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.world import Epochs, EventTables, match
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY
from tests.support.raising import raises


@pytest.fixture(scope="module")
def events() -> EventTables:
    return patcg.synthesize(seed=1, scale=0.01)


@pytest.fixture(scope="module")
def log() -> EventTables:
    return criteo.synthesize(seed=1, scale=0.02)


def test_microbenchmark_follows_the_recipe() -> None:
    """Users, impressions, times, values and ε as published; each batch has every person at most once."""
    spec = Microbenchmark(participation=0.3, rate=0.01, seed=0)
    assert (spec.users, spec.impressions_each, spec.conversions) == (6667, 2, 40_000)
    assert [Microbenchmark(rate=rate).impressions_each for rate in (0.001, 0.01, 0.1, 1.0)] == [1, 2, 12, 120]
    world = generate(spec)
    done, seen = world.conversions, world.impressions
    assert world.queries.epsilon.tolist() == [46_051] * 20
    assert set(done.value.tolist()) == {world.cap}
    assert np.bincount(done.query).tolist() == [2000] * 20
    assert len(np.unique(done.owner * 20 + done.query)) == 40_000
    # 2024-02-01 and 89 days on; 2024-01-02 and 119 days on.
    assert (done.time.min() - 1_706_745_600) // DAY == 0
    assert (done.time.max() - 1_706_745_600) // DAY == 88
    assert (seen.time.min() - 1_704_153_600) // DAY == 0
    assert (seen.time.max() - 1_704_153_600) // DAY == 118


def test_first_batch_of_a_product_comes_before_the_second() -> None:
    """The first 2000 conversions in time are one query, the next 2000 another."""
    done = generate(Microbenchmark(seed=0, scale=0.1)).conversions
    for product in range(10):
        first, second = (done.time[done.query == 2 * product + half] for half in (0, 1))
        assert first.max() <= second.min()


def test_patcg_has_the_published_marginals(events: EventTables) -> None:
    """1.5 conversions per person, 3.2 impressions per exposed person, ten uniform products, the published quartiles."""
    assert len(events.person) == round(24_113_018 * 0.01)
    assert len(events.person) / len(np.unique(events.person)) == pytest.approx(1.5, rel=1e-4)
    assert len(events.seen_person) / len(np.unique(events.seen_person)) == pytest.approx(3.2, rel=1e-3)
    assert np.bincount(events.product) / len(events.product) == pytest.approx(np.full(10, 0.1), abs=0.005)
    quartiles = np.quantile(events.value, [0.25, 0.5, 0.75])
    assert quartiles == pytest.approx([374, 735, 1445], rel=0.02)
    assert events.value.max() == 1500


def test_patcg_fills_eighty_queries_and_attributes_one_in_a_hundred(events: EventTables) -> None:
    """Batches shrink with the set. At full size the last batch of a product clears its minimum by seven standard
    deviations; at 1/100, by less than one, so some of the 80 are missing.
    """
    world = patcg.world_of(events, scale=0.01)
    assert set(world.queries.epsilon.tolist()) == {690_775}
    assert 73 <= world.submitted <= 80
    assert np.bincount(world.conversions.query).max() == 3030
    assert len(np.unique(world.conversions.owner * 80 + world.conversions.query)) == len(world.conversions.owner)
    share = match(world, Epochs()).attributed.mean()
    assert 0.007 <= share <= 0.012


def test_criteo_has_the_published_marginals(log: EventTables) -> None:
    """292 advertisers of very different sizes, everyone clicks, pieces 1, 1, 2 by quartile."""
    sizes = np.bincount(log.advertiser)
    assert len(sizes) == 292
    assert sizes.max() == round(478_000 * 0.02)
    assert len(log.person) == pytest.approx(1_300_000 * 0.02, rel=0.01)
    assert len(np.unique(log.seen_person)) == round(10_000_000 * 0.02)
    assert np.quantile(log.value, [0.25, 0.5, 0.75]).tolist() == [1000, 1000, 2000]


def test_criteo_leaves_out_the_largest_and_prices_by_batch(log: EventTables) -> None:
    """ε = 5·ln(100)/(0.05·2·n) for a batch of n at full size."""
    world = criteo.world_of(log, scale=0.02)
    assert 0 not in world.queries.advertiser
    counts = np.bincount(world.conversions.query)
    assert counts.max() == 9
    full = world.queries.epsilon[counts == 9]
    assert set(full.tolist()) == {511_685}


def test_augmented_impressions_lie_in_the_month_before(log: EventTables) -> None:
    more = criteo.augment(log, 3, seed=9)
    added = len(more.seen_person) - len(log.seen_person)
    assert added == 3 * len(log.person)
    back = np.tile(log.time, 3) - more.seen_time[-added:]
    assert back.min() >= 0
    assert back.max() <= 30 * DAY


def _write_patcg(folder: Path, *, amounts: list[float] | None = None) -> tuple[Path, Path]:
    seen, done = folder / "seen.parquet", folder / "done.pqt"
    arrow.parquet.write_table(arrow.table({"exp_timestamp": [10, 20, 30], "device_id": ["a", "b", "nobody"]}), seen)
    columns = {
        "conv_timestamp": [50, 40, 60],
        "device_id": ["b", "a", "a"],
        "conv_attribute_2": [7, 3, 3],
        "conv_amount": amounts or [1.25, 99.0, 2.0],
    }
    arrow.parquet.write_table(arrow.table(columns), done)
    return seen, done


def test_real_patcg_files_are_read(tmp_path: Path) -> None:
    """People are numbered alike in both files, products by their first appearance, and amounts are capped cents."""
    read = read_patcg(*_write_patcg(tmp_path))
    assert read.person.tolist() == [0, 1, 1]
    assert read.time.tolist() == [50, 40, 60]
    assert read.product.tolist() == [0, 1, 1]
    assert read.value.tolist() == [125, 1500, 200]
    assert read.seen_person.tolist() == [1, 0, 2]
    assert read.seen_time.tolist() == [10, 20, 30]
    # A folder of files is as good as a file.
    (tmp_path / "folder").mkdir()
    arrow.parquet.write_table(arrow.table({"exp_timestamp": [10], "device_id": ["a"]}), tmp_path / "folder" / "x.pqt")
    assert len(read_patcg(tmp_path / "folder", tmp_path / "done.pqt").seen_person) == 1


def test_broken_patcg_files_say_what_is_wrong(tmp_path: Path) -> None:
    seen, done = _write_patcg(tmp_path)
    with raises(ErrorKind.FILE_MISSING):
        read_patcg(tmp_path / "missing.parquet", done)
    with raises(ErrorKind.MISSING_FIELD, TrefoilError) as caught:
        read_patcg(seen, seen)
    assert "conv_timestamp" in str(caught.value)
    (tmp_path / "text.parquet").write_text("not parquet")
    with raises(ErrorKind.FILE_UNREADABLE):
        read_patcg(tmp_path / "text.parquet", done)
    seen, done = _write_patcg(tmp_path, amounts=[1.0, -1.0, 2.0])
    with raises(ErrorKind.OUT_OF_RANGE):
        read_patcg(seen, done)


def _criteo_row(**values: str) -> str:
    return "\t".join(values.get(name, "-1") for name in CRITEO_COLUMNS)


def test_real_criteo_log_is_read(tmp_path: Path) -> None:
    """Every row is an impression; sales become conversions later by their delay; rows without a user are dropped."""
    known = {"product_id": "p", "partner_id": "shop", "product_category3": "shoes"}
    rows = [
        _criteo_row(Sale="0", click_timestamp="1000", user_id="u", **known),
        _criteo_row(
            Sale="1",
            click_timestamp="2000",
            Time_delay_for_conversion="30",
            SalesAmountInEuro="31.0",
            product_price="10.0",
            user_id="u",
            **known,
        ),
        _criteo_row(Sale="1", click_timestamp="3000", **known),
        _criteo_row(Sale="1", click_timestamp="4000", user_id="v", product_id="p", partner_id="shop"),
    ]
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(rows) + "\n")
    read = read_criteo(path)
    assert read.seen_time.tolist() == [1000, 2000, 4000]
    assert read.time.tolist() == [2030, 4000]
    assert read.value.tolist() == [3000, 1000]
    assert read.product.tolist() == [0, criteo.UNKNOWN]


def test_broken_criteo_logs_say_what_is_wrong(tmp_path: Path) -> None:
    with raises(ErrorKind.FILE_MISSING):
        read_criteo(tmp_path / "missing")
    path = tmp_path / "short.tsv"
    path.write_text("1\t2\t3\n")
    with raises(ErrorKind.WRONG_FILE):
        read_criteo(path)
    path.write_text(_criteo_row(Sale="maybe") + "\n")
    with raises(ErrorKind.WRONG_FILE):
        read_criteo(path)
    path.write_text(_criteo_row(Sale="0") + "\n")
    with raises(ErrorKind.TOO_FEW):
        read_criteo(path)


def test_pieces_are_whole_and_capped() -> None:
    amount, price = np.array([31.0, 5.0, np.nan, 900.0, 3.0]), np.array([10.0, 10.0, 10.0, 1.0, 0.0])
    assert pieces(amount, price).tolist() == [3, 1, 1, 5, 1]
