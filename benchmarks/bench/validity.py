"""What lying devices cost the helpers: a batch with more and more of them, its counts and sums compared exactly.

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

from rich.table import Table

from benchmarks.bulk_reports import MAX_VALUE, Workload, make_batch
from mpc_helpers.local.launcher import Launched, fetch, launched_helpers
from protocol import console
from protocol.batch import BatchReader
from protocol.errors import Rejection, TrefoilError
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
    """Batches of `reports` reports each, so many of them of lying devices."""
    with tempfile.TemporaryDirectory(prefix="trefoil-validity-") as name:
        folder = Path(name)
        with launched_helpers(folder / "trio", sites={SITE: [SITE]}) as helpers:
            return [_measure_one(helpers, folder / f"{count}.batch", reports, count, buckets) for count in invalid]


def _measure_one(helpers: Launched, path: Path, reports: int, invalid: int, buckets: int) -> ValidityCost:
    if not (0 <= invalid < reports):
        raise TrefoilError(f"of {reports} reports, {invalid} cannot be invalid", "Leave at least one honest report.")
    now = coarse_time(int(time.time()))  # noqa: TID251 - an edge: real helpers read the real clock
    terms = ReportTerms(SITE, SITE, now, 1_000_000, 2 * MAX_VALUE, buckets, debug=True, cap=MAX_VALUE, spread=1)
    workload = Workload(terms, reports - invalid, seed=invalid, invalid=invalid)
    with console.progress(f"{invalid} of {reports} lie", reports) as advance:
        make_batch(path, workload, helpers.trio.helper_set, progress=advance)
    batch, before, start = BatchReader(path), _peer_bytes(helpers), time.perf_counter()
    wishes = QueryOptions(tolerated_bad_permille=1000, seconds=3000, debug=True)
    key = load_identity(helpers.trio.site_key_path(SITE))
    asked = make_query(batch, wishes, helpers.trio.helper_set, key, int(time.time()))  # noqa: TID251 - as above
    result = asyncio.run(Querier(helpers.trio.helper_set).ask(asked, batch))
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
    pages = [fetch(helper, "/metrics", 10.0).decode() for helper in helpers.trio.helper_set.helpers]
    return sum(int(float(found[1])) for page in pages if (found := _PEER_BYTES.search(page)))


def show(costs: Sequence[ValidityCost]) -> None:
    """A table for a person."""
    table = Table(title="Lying devices in a batch of checked debug reports")
    for title in ("reports", "lie", "counted", "invalid at 1, 2, 3", "sums exact", "seconds", "bytes between helpers"):
        table.add_column(title, justify="right")
    for cost in costs:
        table.add_row(
            f"{cost.reports:,}",
            f"{cost.invalid:,}",
            f"{cost.counted:,}",
            ", ".join(f"{count:,}" for count in cost.counted_invalid),
            "yes" if cost.sums_exact else "NO",
            f"{cost.seconds:.1f}",
            f"{cost.peer_bytes:,}",
        )
    console.out.print(table)


def to_json(costs: Sequence[ValidityCost]) -> dict[str, object]:
    """What a file of results holds."""
    return {"validity": [asdict(cost) for cost in costs]}
