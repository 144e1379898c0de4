"""Reports of lying devices: well-formed, opened by every helper, and found out by the three together."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bulk_reports import Workload, lying_reports, make_batch
from benchmarks.liars import Lie, lies_of, lying_report
from protocol.batch import BatchReader
from protocol.errors import TrefoilError
from protocol.shape import Shape
from tests.support import protocol_samples as samples
from tests.support.checked_reports import check, histogram_of, honest, terms_of

SIDE = Shape(8, 6, 5, 1)


def test_every_lie_is_found_out_and_the_honest_reports_around_it_pass(tmp_path: Path) -> None:
    good = honest(histogram_of(SIDE, b1=5, side=6), SIDE)
    lies = [lying_report(lie, terms_of(SIDE), samples.HELPER_SET) for lie in Lie]
    assert lies_of(SIDE) == list(Lie)
    made = check(tmp_path, [*lies, good], SIDE)
    assert [one.rejections() for one in made.ingested] == [{}, {}, {}], "each helper alone would count them"
    assert made.zero() == [False] * len(Lie) + [True]


def test_a_shape_has_room_for_some_lies() -> None:
    assert Lie.WRONG_FLAG not in lies_of(Shape(8, 0, 5, 1))
    assert Lie.CANCELLING not in lies_of(Shape(1, 0, 5, 1))


def test_lying_devices_beside_a_workload(tmp_path: Path) -> None:
    workload = Workload(samples.terms(cap=5, spread=1), 10, 1, invalid=7)
    make_batch(tmp_path / "batch", workload, samples.HELPER_SET, processes=1, progress=lambda _: None)
    assert len(BatchReader(tmp_path / "batch")) == 17
    assert workload.truth() == Workload(workload.terms, 10, 1).truth()
    assert len(list(lying_reports(workload, samples.HELPER_SET))) == 7
    with pytest.raises(TrefoilError, match="checked reports"):
        Workload(samples.terms(), 10, 1, invalid=1)
    with pytest.raises(TrefoilError, match="checked reports"):
        lying_report(Lie.HUGE, samples.TERMS, samples.HELPER_SET)
