"""Measure the cost and the accuracy of each noise mode: `trefoil bench noise`.

Processor time is that of three real workers over TLS, minus that of a session without noise. Each worker is a fresh
process; for comparison, the same is measured in one process that has run sessions before, without TLS. Bytes are
counted there too, where every frame is seen. Rounds are the duration in seconds of a session on a virtual clock on
which every frame takes one second and computation none.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Self

from benchmarks.results.columns import Columns, Record
from mpc_helpers.identity.tls import TlsIdentity, make_identity
from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.mpc.fork_server_main import session_of_zeros
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms
from mpc_helpers.mpc.session import Peer
from mpc_helpers.mpc.worker import ForkServer, Worker, WorkerRun, WorkerSetup
from protocol.errors import TrefoilError
from protocol.noise import NoiseMode, NoiseScale, laplace_variance
from protocol.shares import PARTIES

SESSION_SECONDS = 600.0
ROUND_BUCKETS = 8
# Warm-up sessions until Python has specialised its functions (`mpc_helpers.mpc.fork_server_main`).
_UNCOUNTED = 3


def terms_of(mode: NoiseMode, buckets: int, scale: int) -> SumTerms:
    """Return the terms for ε = 1: one report changes the sum by as much as the scale."""
    return SumTerms(SumKind.of(mode), Fraction(1, scale), scale, buckets)


def possible(buckets: Sequence[int], scales: Sequence[int]) -> list[tuple[NoiseMode, SumTerms]]:
    """Return every combination that helpers accept, smallest first."""
    combinations = []
    for scale in sorted(scales):
        for count in sorted(buckets):
            for mode in NoiseMode:
                terms = terms_of(mode, count, scale)
                try:
                    terms.check_cost()
                except TrefoilError:
                    continue
                combinations.append((mode, terms))
    return combinations


def measure_all(
    wanted: Sequence[tuple[NoiseMode, SumTerms]], repeats: int, progress: Callable[[], None]
) -> list[Record]:
    rounds: dict[tuple[NoiseMode, Fraction], int] = {}
    results = []
    with tempfile.TemporaryDirectory(prefix="trefoil-noise-") as folder, _Workers(Path(folder)) as bench:
        for mode, terms in wanted:
            if (mode, terms.rate) not in rounds:
                rounds[mode, terms.rate] = count_rounds(terms)
            results.append(measure(mode, terms, bench, repeats, rounds[mode, terms.rate]))
            progress()
    return results


def measure(mode: NoiseMode, terms: SumTerms, bench: _Workers, repeats: int, rounds: int) -> Record:
    """Measure one mode in several sessions of real workers, each after one without noise.

    `cpu_seconds` is of the slowest of three workers, drawing included, beyond what a session without noise takes
    (`session_cpu_seconds`); `again_cpu_seconds` a third of three parties in one process that has run them before;
    `bytes` what the helper that sends most sends to both others.
    """
    quiet = SumTerms(SumKind.DEBUG, terms.rate, terms.change, terms.buckets)
    pairs = [(bench.run(quiet), bench.run(terms)) for _ in range(repeats)]
    without = statistics.median(cpu for (cpu, _), _ in pairs)
    scale = NoiseScale(mode, terms.rate, terms.change)
    return {
        "mode": mode.value,
        "buckets": terms.buckets,
        "scale": int(1 / terms.rate),
        "cpu_seconds": max(0.0, statistics.median(cpu for _, (cpu, _) in pairs) - without),
        "session_cpu_seconds": without,
        "again_cpu_seconds": max(0.0, _again(terms, repeats) - _again(quiet, repeats)) / PARTIES,
        "wall_seconds": statistics.median(wall for _, (_, wall) in pairs),
        "bytes": count_bytes(terms),
        "rounds": rounds,
        "standard_deviation": scale.standard_deviation,
        "variance_over_laplace": scale.variance / laplace_variance(terms.rate),
        "half_width_95": scale.half_width(0.95),
        "delta": float(scale.delta),
    }


def _again(terms: SumTerms, repeats: int) -> float:
    """Return the processor seconds of a session of three parties in this process, after warm-up sessions."""
    spent = []
    for _ in range(_UNCOUNTED + repeats):
        start = time.process_time()
        asyncio.run(_seconds(terms))
        spent.append(time.process_time() - start)
    return statistics.median(spent[_UNCOUNTED:])


def count_bytes(terms: SumTerms) -> int:
    """Return the bytes that the busiest party sends in a session in this process, framing included."""
    sent: Counter[int] = Counter()

    def count(sender: int, _: int, frame: bytes) -> bytes:
        sent[sender] += len(frame)
        return frame

    asyncio.run(_seconds(terms, count))
    return max(sent.values())


def count_rounds(terms: SumTerms) -> int:
    """Return the number of sequential messages beyond those of a session without noise."""
    few = SumTerms(terms.kind, terms.rate, terms.change, ROUND_BUCKETS)
    quiet = SumTerms(SumKind.DEBUG, terms.rate, terms.change, ROUND_BUCKETS)
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(_seconds(few, latency=1.0)) - runner.run(_seconds(quiet, latency=1.0))


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: nothing waits for a real socket, so the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.now += timeout
        return ready


async def _seconds(terms: SumTerms, intercept: Intercept | None = None, latency: float = 0.0) -> int:
    """Run a session of three parties in this process, and return its duration in whole seconds of the loop's clock."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await session_of_zeros(terms, SESSION_SECONDS, intercept, latency=latency)
    return round(loop.time() - start)


class _Workers:
    """Sessions of three real workers on this machine. They share one fork server, which does not affect their cost."""

    def __init__(self, folder: Path) -> None:
        now = int(time.time())  # noqa: TID251 - an edge: certificates are valid from now on
        self._failed_proofs = folder / "failed-proofs"
        FailedProofs(self._failed_proofs).prepare()
        self._identities = [_identity(folder, party, now) for party in range(PARTIES)]
        self._runner = asyncio.Runner()
        self._fork_server = ForkServer()

    def __enter__(self) -> Self:
        self._runner.run(self._fork_server.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._fork_server.__aexit__())
        self._runner.close()

    def run(self, terms: SumTerms) -> tuple[float, float]:
        """Return the processor seconds of the slowest worker, and the seconds from the last start to the last share."""
        return self._runner.run(self._run(terms))

    async def _run(self, terms: SumTerms) -> tuple[float, float]:
        setups = [
            WorkerSetup(party, identity, terms, self._failed_proofs) for party, identity in enumerate(self._identities)
        ]
        workers = [Worker(setup, self._fork_server) for setup in setups]
        try:
            ports = await asyncio.gather(*(worker.start() for worker in workers))
            start = time.perf_counter()
            first, second, third = (
                Peer("127.0.0.1", port, identity.der) for port, identity in zip(ports, self._identities, strict=True)
            )
            run = WorkerRun(os.urandom(32), SESSION_SECONDS, (first, second, third), [0] * terms.buckets)
            await asyncio.gather(*(worker.run(run) for worker in workers))
            return max(worker.cpu_seconds for worker in workers), time.perf_counter() - start
        finally:
            await asyncio.gather(*(worker.stop() for worker in workers))


def _identity(folder: Path, party: int, now: int) -> TlsIdentity:
    own = folder / str(party)
    own.mkdir()
    return make_identity(own, f"helper-{party + 1}", now)


COLUMNS: Columns[Record] = {
    "mode": lambda cost: cost["mode"],
    "b": lambda cost: cost["scale"],
    "buckets": lambda cost: cost["buckets"],
    "ms in a fresh process": lambda cost: f"{1e3 * cost['cpu_seconds']:.1f}",
    "in one that ran some": lambda cost: f"{1e3 * cost['again_cpu_seconds']:.1f}",
    "bytes it sends": lambda cost: cost["bytes"],
    "rounds": lambda cost: cost["rounds"],
    "sd": lambda cost: f"{cost['standard_deviation']:,.1f}",
    "variance, × Laplace": lambda cost: f"{cost['variance_over_laplace']:.3f}",
    "95 % within": lambda cost: f"±{cost['half_width_95']:,}",
    "δ": lambda cost: f"{cost['delta']:.0e}" if cost["delta"] else "0",
}
