"""Measure what dishonest devices cost the helpers: more and more of them in a batch, counts and sums compared exactly.

Debug reports, whose answer has no noise: the sum can be held against the truth. Helpers are three real processes.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results.columns import Columns, on_terminal
from benchmarks.workloads.reports import MAX_VALUE, Workload, make_batch
from mpc_helpers.local.launcher import Launched, fetch, launched_helpers
from protocol.batch import BatchReader
from protocol.cli import console
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.header import ReportTerms, coarse_time
from protocol.keys import load_identity
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query

SITE = "shop.example"
_PEER_BYTES = re.compile(r"^trefoil_peer_bytes_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ValidityCost:
    """One batch. Seconds are from the query's submission to its answer; bytes are between all helpers."""

    reports: int
    invalid: int
    buckets: int
    cap: int
    counted: int
    counted_invalid: list[int]
    sums_exact: bool
    seconds: float
    seconds_by_stage: dict[str, float]
    peer_bytes: int


def measure(reports: int, invalid: Sequence[int], buckets: int) -> list[ValidityCost]:
    """Measure batches of `reports` reports each, with as many dishonest devices as each entry of `invalid`."""
    with tempfile.TemporaryDirectory(prefix="trefoil-validity-") as name:
        folder = Path(name)
        with launched_helpers(folder / "trio", sites={SITE: [SITE]}) as helpers:
            return [_measure_one(helpers, folder / f"{count}.batch", reports, count, buckets) for count in invalid]


def _measure_one(helpers: Launched, path: Path, reports: int, invalid: int, buckets: int) -> ValidityCost:
    if not (0 <= invalid < reports):
        raise TrefoilError(
            f"of {reports} reports, {invalid} cannot be invalid",
            "Leave at least one honest report.",
            kind=ErrorKind.OUT_OF_RANGE,
        )
    now = coarse_time(int(time.time()))  # noqa: TID251 - an edge: real helpers read the real clock
    terms = ReportTerms(SITE, SITE, now, 1_000_000, 2 * MAX_VALUE, buckets, debug=True, cap=MAX_VALUE, spread=1)
    workload = Workload(terms, reports - invalid, seed=invalid, invalid=invalid)
    with console.progress(f"{invalid} of {reports} dishonest", reports) as advance:
        make_batch(path, workload, helpers.trio.helper_set, progress=advance)
    batch, before, start = BatchReader(path), _peer_bytes(helpers), time.perf_counter()
    wishes = QueryOptions(tolerated_bad_permille=1000, seconds=3000, debug=True)
    key = load_identity(helpers.trio.site_key_path(SITE))
    query = make_query(batch, wishes, helpers.trio.helper_set, key, int(time.time()))  # noqa: TID251 - as above
    result = asyncio.run(Querier(helpers.trio.helper_set).ask(query, batch))
    answer = result.answer
    return ValidityCost(
        reports=reports,
        invalid=invalid,
        buckets=buckets,
        cap=terms.cap,
        counted=answer.counted,
        counted_invalid=[counts.get(Rejection.INVALID, 0) for counts in answer.rejections],
        sums_exact=answer.histogram == workload.truth(),
        seconds=time.perf_counter() - start,
        seconds_by_stage=dict(result.seconds),
        peer_bytes=_peer_bytes(helpers) - before,
    )


def _peer_bytes(helpers: Launched) -> int:
    metrics = [fetch(helper, "/metrics", 10.0).decode() for helper in helpers.trio.helper_set.helpers]
    return sum(int(float(match[1])) for text in metrics if (match := _PEER_BYTES.search(text)))


COLUMNS: Columns[ValidityCost] = {
    "reports": lambda cost: cost.reports,
    "dishonest": lambda cost: cost.invalid,
    "counted": lambda cost: cost.counted,
    "invalid at 1, 2, 3": lambda cost: ", ".join(f"{count:,}" for count in cost.counted_invalid),
    "sums exact": lambda cost: "yes" if cost.sums_exact else "NO",
    "seconds": lambda cost: f"{cost.seconds:.1f}",
    "bytes between helpers": lambda cost: cost.peer_bytes,
}


def show(costs: Sequence[ValidityCost]) -> None:
    console.out.print(on_terminal("Dishonest devices in a batch of checked debug reports", COLUMNS, costs))


def to_json(costs: Sequence[ValidityCost]) -> dict[str, object]:
    return {"validity": [asdict(cost) for cost in costs]}
