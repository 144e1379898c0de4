"""What a checked report costs: bytes, sealing and opening, beside Prio3, the bare HPKE calls and an unchecked report.

Times are processor time of this process, measured in many short rounds in which the two sides of a ratio take turns;
the best round of each counts, so that a busy machine slows the run down and leaves the ratios alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.results.columns import Columns, Record, on_terminal
from mpc_helpers.admission.chunk import ChunkJob, ingest_chunk
from mpc_helpers.admission.column import duplicates
from mpc_helpers.admission.executors import keep_freed_memory
from mpc_helpers.admission.headers import AdmissionRules
from mpc_helpers.admission.ingest import chunk_length
from mpc_helpers.identity.membership import Membership
from protocol.batch import BatchReader, BatchWriter, ColumnReader
from protocol.cli import console
from protocol.field import SEED_SIZE
from protocol.header import TIME_STEP, ReportTerms
from protocol.helper_set import PIN_SIZE, HelperEntry, HelperSet, HpkeKeyConfig
from protocol.hpke import CLASSICAL, PrivateKey, Suite
from protocol.keys import IdentityKey
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.query import Query
from protocol.report import SealedReport, header_digest, payload_info, seal_report
from protocol.shares import PARTIES
from protocol.wire import HASH_SIZE

# Two-party Prio3 as the VDAF draft's formulas give it: not measured here.
PRIO3_HISTOGRAM_BYTES = {16: 720, 128: 2_992, 1024: 18_640}
PRIO3_L1_BOUND_SUM_KB_AT_128 = {"values to 7": 7.7, "values to 100": 16.6, "values of 16 bits": 36.3}

_MOST_REPORTS = 512
# A chunk as a helper has it in production, where checked and unchecked reports are compared.
_WHOLE_CHUNK = 2_048
# The largest sum that the helpers let a report of the benchmark have: a purchase of $10,000 in cents.
CAP = 2**20
_SEALS_PER_ROUND = 20
BENCH_TIME = 500_000 * TIME_STEP


def measure(buckets: Sequence[int], rounds: int, suite: Suite = CLASSICAL) -> list[Record]:
    costs = []
    with console.progress("measuring", len(buckets)) as advance:
        for size in buckets:
            costs.append(measure_report(size, rounds, suite))
            advance(note=f"{size} buckets")
    return costs


def measure_report(buckets: int, rounds: int, suite: Suite = CLASSICAL) -> Record:
    """Measure bytes, sealing and opening for one histogram size, alternating checked and unchecked reports.

    Times are microseconds per report; opening ratios are of helpers 1, 2 and 3. `over_unchecked` has ratios to a report
    of schema 1: `seal` of null reports, `seal_full` of the largest value in one bucket.
    """
    helpers = Helpers.fresh(suite)
    unchecked = ReportTerms("shop.example", "ads.example", BENCH_TIME, 1_000_000, 2 * CAP, buckets)
    checked = replace(unchecked, cap=CAP, spread=1)
    sample, plain = helpers.seal(checked), helpers.seal(unchecked)
    work: list[Callable[[], None]] = [
        lambda: _bare_seals(helpers, sample),
        *(partial(_seals, helpers, terms, value) for value in (0, CAP - 1) for terms in (checked, unchecked)),
    ]
    spent = [1e6 * best / _SEALS_PER_ROUND for best in best_of(work, 3 * rounds)]
    bare_seals, seal, plain_seal, full_seal, plain_full_seal = spent
    openings, plain_openings = measure_openings(helpers, [checked, unchecked], rounds, _WHOLE_CHUNK)
    worst = max(openings, key=lambda opening: opening[1] / opening[0])
    payloads, total, plain_total = sum(map(len, sample.payloads)), len(sample.encode()), len(plain.encode())
    return {
        "buckets": buckets,
        "cap": CAP,
        "suite": suite.value,
        "bytes_total": total,
        "bytes_header": len(sample.header),
        "bytes_body": len(sample.body),
        "bytes_payloads": payloads,
        "bytes_framing": total - len(sample.header) - len(sample.body) - payloads,
        "prio3_histogram_bytes": PRIO3_HISTOGRAM_BYTES.get(buckets),
        "bare_seals_us": bare_seals,
        "seal_us": seal,
        "seal_over_bare": seal / bare_seals,
        "bare_open_us": 1e6 * worst[0],
        "open_us": 1e6 * worst[1],
        "open_over_bare": worst[1] / worst[0],
        "open_over_bare_by_helper": [whole / bare for bare, whole in openings],
        "over_unchecked": {
            "unchecked_bytes": plain_total,
            "unchecked_seal_us": plain_seal,
            "unchecked_open_us": [1e6 * whole for _, whole in plain_openings],
            "bytes": total / plain_total,
            "seal": seal / plain_seal,
            "seal_full": full_seal / plain_full_seal,
            "ingest": [one / other for (_, one), (_, other) in zip(openings, plain_openings, strict=True)],
        },
    }


@dataclass(frozen=True, slots=True)
class Helpers:
    """Three helpers with keys made for this run."""

    helper_set: HelperSet
    keys: tuple[PrivateKey, ...]

    @classmethod
    def fresh(cls, suite: Suite = CLASSICAL) -> Helpers:
        """Make three helpers. The set is unsigned: nothing here leaves the process."""
        keys = tuple(PrivateKey.generate(suite) for _ in range(PARTIES))
        first, second, third = (
            HelperEntry(
                f"helper {party + 1}",
                IdentityKey.generate().public,
                (HpkeKeyConfig(key.public, 0, 2 * BENCH_TIME),),
                f"https://helper-{party + 1}.example",
                bytes([party]) * PIN_SIZE,
            )
            for party, key in enumerate(keys)
        )
        return cls(HelperSet(1, (first, second, third)), keys)

    def seal(self, terms: ReportTerms, value: int = 0) -> SealedReport:
        """Seal a report with this value in its first bucket; by default a null report."""
        return seal_report([value] + [0] * (terms.length - 1), terms, self.helper_set)


def _seals(helpers: Helpers, terms: ReportTerms, value: int) -> None:
    for _ in range(_SEALS_PER_ROUND):
        helpers.seal(terms, value)


def _bare_seals(helpers: Helpers, sample: SealedReport) -> None:
    """Seal a payload to each helper by HPKE and do nothing else, with keys and inputs ready."""
    keys = [helper.hpke_keys[0].key for helper in helpers.helper_set.helpers]
    infos = [payload_info(party, sample.header) for party in range(PARTIES)]
    seeds = bytes(2 * SEED_SIZE)
    for _ in range(_SEALS_PER_ROUND):
        for key, info in zip(keys, infos, strict=True):
            key.seal(seeds, info)


def measure_openings(
    helpers: Helpers, kinds: Sequence[ReportTerms], rounds: int, reports: int = _MOST_REPORTS
) -> list[list[tuple[float, float]]]:
    """Return seconds per report of each kind at each helper: the bare HPKE open of a chunk, and its whole ingest.

    All of them take turns, so that other load affects each alike; the two sides of a ratio follow each other at once.
    """
    keep_freed_memory()  # as the processes do in which a helper opens reports
    with ExitStack() as stack:
        columns = [stack.enter_context(_columns(helpers, terms, reports)) for terms in kinds]
        work = [_opening_work(helpers, paths, query) for paths, query in columns]
        spent = best_of([run for runs in zip(*work, strict=True) for run in runs], rounds)
    openings = []
    for place, (_, query) in enumerate(columns):
        seconds = [each / query.batch_size for each in spent[place :: len(kinds)]]
        openings.append(list(zip(seconds[::2], seconds[1::2], strict=True)))
    return openings


def _opening_work(helpers: Helpers, paths: Sequence[Path], query: Query) -> Iterator[Callable[[], None]]:
    """Yield for each helper the bare opens and the ingest of its column."""
    for party, path in enumerate(paths):
        column = ColumnReader(path)
        yield _bare_opens(helpers.keys[party], party, column)
        yield _whole_ingest(column, _rules(helpers, party, query))


def _rules(helpers: Helpers, party: int, query: Query) -> AdmissionRules:
    helper_set, key = helpers.helper_set, helpers.keys[party]
    # Admission signs nothing, so any identity will do.
    member = Membership(party, helper_set, (helper_set,), IdentityKey.generate(), {key.public: key})
    return AdmissionRules.for_query(member, query, oldest=BENCH_TIME - TIME_STEP, newest=BENCH_TIME)


def _bare_opens(key: PrivateKey, party: int, column: ColumnReader) -> Callable[[], None]:
    chunk = column.chunk(0, len(column))
    sealed = list(zip(chunk.payloads(), [payload_info(party, header) for header in chunk.headers()], strict=True))

    def run() -> None:
        for payload, info in sealed:
            key.open(payload, info)

    return run


def _whole_ingest(column: ColumnReader, rules: AdmissionRules) -> Callable[[], None]:
    """Return all the work for a chunk before the ledger is queried. Headers are hashed from memory, as they arrive."""
    arriving = column.chunk(0, len(column))

    def run() -> None:
        hashed = b"".join([header_digest(header) for header in arriving.headers()])
        repeats = duplicates(np.frombuffer(hashed, dtype=np.uint8).reshape(-1, HASH_SIZE))
        if ingest_chunk(ChunkJob(rules, column.layout, 0, repeats, column.path)).reasons.any():
            raise RuntimeError("a report of the benchmark was refused, so its time says nothing")

    return run


@contextmanager
def _columns(helpers: Helpers, terms: ReportTerms, most: int) -> Iterator[tuple[list[Path], Query]]:
    """Yield one chunk of sealed reports on disk, as each helper receives it, and the query over them."""
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as name:
        folder = Path(name)
        with BatchWriter(folder / "batch") as writer:
            writer.add(helpers.seal(terms))
        layout = BatchReader(folder / "batch").layout
        with BatchWriter(folder / "batch") as writer:
            for _ in range(min(most, chunk_length(layout, terms.shape)) - 1):
                writer.add(helpers.seal(terms))
        batch = BatchReader(folder / "batch")
        paths = [folder / f"column-{party + 1}" for party in range(PARTIES)]
        for party, path in enumerate(paths):
            with path.open("wb") as file:
                file.writelines(batch.column(party, batch.order()))
        # Admission takes everything from the query but its signature, so any identity will do here too.
        yield paths, make_query(batch, QueryOptions(), helpers.helper_set, IdentityKey.generate(), BENCH_TIME).query


def best_of(work: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the least processor time of each piece of work. They take turns, so that all see the same load."""
    best = [float("inf")] * len(work)
    for _ in range(rounds):
        for index, run in enumerate(work):
            start = time.process_time()
            run()
            best[index] = min(best[index], time.process_time() - start)
    return best


SIZES: Columns[Record] = {
    "buckets": lambda cost: cost["buckets"],
    "total": lambda cost: cost["bytes_total"],
    "header": lambda cost: cost["bytes_header"],
    "body": lambda cost: cost["bytes_body"],
    "payloads": lambda cost: cost["bytes_payloads"],
    "framing": lambda cost: cost["bytes_framing"],
    "Prio3Histogram, two parties (design)": lambda cost: cost["prio3_histogram_bytes"] or "",
}
TIMES: Columns[Record] = {
    "buckets": lambda cost: cost["buckets"],
    "3 bare seals": lambda cost: f"{cost['bare_seals_us']:.1f}",
    "seal": lambda cost: f"{cost['seal_us']:.1f}",
    "over bare seals": lambda cost: f"{cost['seal_over_bare']:.2f}",
    "bare open": lambda cost: f"{cost['bare_open_us']:.1f}",
    "open": lambda cost: f"{cost['open_us']:.1f}",
    "over bare open": lambda cost: f"{cost['open_over_bare']:.2f}",
}
OVER_UNCHECKED: Columns[Record] = {
    "buckets": lambda cost: cost["buckets"],
    "bytes": lambda cost: f"{cost['over_unchecked']['unchecked_bytes']:,} → {cost['bytes_total']:,}",
    "over unchecked": lambda cost: f"{cost['over_unchecked']['bytes']:.2f}",
    "sealing, null": lambda cost: f"{cost['over_unchecked']['seal']:.2f}",
    "full": lambda cost: f"{cost['over_unchecked']['seal_full']:.2f}",
    "ingest at 1, 2, 3": lambda cost: ", ".join(f"{ratio:.2f}" for ratio in cost["over_unchecked"]["ingest"]),
}


def show(costs: Sequence[Record]) -> None:
    console.out.print(on_terminal("Bytes per report, for all three helpers", SIZES, costs))
    bounds = ", ".join(f"{size} kB for {what}" for what, size in PRIO3_L1_BOUND_SUM_KB_AT_128.items())
    console.out.print(f"Prio3L1BoundSum at 128 buckets: {bounds} (figures from the design document)\n", highlight=False)
    ingest = "opening is the whole of a helper's ingest, at the slowest helper"
    console.out.print(on_terminal(f"Microseconds per report; {ingest}", TIMES, costs))
    title = f"A checked report (cap {CAP:,}) over an unchecked one, in the same run by turns"
    console.out.print(on_terminal(title, OVER_UNCHECKED, costs))


def to_json(costs: Sequence[Record]) -> dict[str, object]:
    return {"reports": costs, "prio3_l1_bound_sum_kb_at_128": PRIO3_L1_BOUND_SUM_KB_AT_128}
