"""Measure what dishonest devices cost the helpers: more and more of them in a batch, counts and sums compared exactly.

Debug reports, whose answer has no noise: the sum can be held against the truth. Helpers are three real processes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.results.columns import Columns, Record
from benchmarks.throughput.point import Counters
from benchmarks.workloads.reports import Workload, make_batch, purchase_terms
from mpc_helpers.local.launcher import Launched, launched_helpers
from protocol.cli import console
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.querier.query_folder import ask

SITE = "shop.example"


def measure(reports: int, invalid: Sequence[int], buckets: int) -> list[Record]:
    """Measure batches of `reports` reports each, with as many dishonest devices as each entry of `invalid`."""
    with tempfile.TemporaryDirectory(prefix="trefoil-validity-") as name:
        folder = Path(name)
        with launched_helpers(folder / "trio", sites={SITE: [SITE]}) as helpers:
            return [_measure_one(helpers, folder / f"{count}.batch", reports, count, buckets) for count in invalid]


def _measure_one(helpers: Launched, path: Path, reports: int, invalid: int, buckets: int) -> Record:
    """Measure one batch: seconds are from the query's submission to its answer, and bytes between all helpers."""
    if not (0 <= invalid < reports):
        raise TrefoilError(
            f"of {reports} reports, {invalid} cannot be invalid",
            "Leave at least one honest report.",
            kind=ErrorKind.OUT_OF_RANGE,
        )
    now = int(time.time())  # noqa: TID251 - an edge: real helpers read the real clock
    terms = replace(purchase_terms(SITE, buckets, now), debug=True)
    workload = Workload(terms, reports - invalid, seed=invalid, invalid=invalid)
    with console.progress(f"{invalid} of {reports} dishonest", reports) as advance:
        make_batch(path, workload, helpers.helper_set, progress=advance)
    before, start = Counters.read(helpers.helper_set), time.perf_counter()
    result = ask(path, helpers.helper_set, helpers.site_key(SITE), tolerate=1, seconds=3000, debug=True)
    answer = result.answer
    return {
        "reports": reports,
        "invalid": invalid,
        "buckets": buckets,
        "cap": terms.cap,
        "counted": answer.counted,
        "counted_invalid": [counts.get(Rejection.INVALID, 0) for counts in answer.rejections],
        "sums_exact": answer.histogram == workload.truth(),
        "seconds": time.perf_counter() - start,
        "seconds_by_stage": dict(result.seconds),
        "peer_bytes": int(Counters.read(helpers.helper_set).since(before).peer_bytes),
    }


COLUMNS: Columns[Record] = {
    "reports": lambda cost: cost["reports"],
    "dishonest devices": lambda cost: cost["invalid"],
    "counted": lambda cost: cost["counted"],
    "left out as invalid, by helper": lambda cost: ", ".join(f"{count:,}" for count in cost["counted_invalid"]),
    "sums": lambda cost: "exact" if cost["sums_exact"] else "WRONG",
    "seconds": lambda cost: f"{cost['seconds']:.0f}",
    "bytes between helpers": lambda cost: cost["peer_bytes"],
}
