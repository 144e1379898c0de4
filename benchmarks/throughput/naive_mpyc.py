"""(d) What a newcomer to MPyC would write: every report an input, a secure sum, an output. Run by `bench throughput`.

Stock MPyC on purpose, in three processes that it starts itself: `python -m benchmarks.throughput.naive_mpyc -M3`. No
helper may see a report, so each inputs its additive share of every report; the shares are made up beforehand and not
timed.
"""

from __future__ import annotations

import json
import os
import time

from mpyc.runtime import mpc

P = 2**61 - 1


def additive_share(party: int, report: int, buckets: int) -> list[int]:
    """Return one party's share of a histogram with a 1 in one bucket. Not random: the benchmark needs only the sum."""
    last = [int(bucket == report % buckets) - 3 * bucket - 2 for bucket in range(buckets)]
    return [[bucket + 1, 2 * bucket + 1, value][party] % P for bucket, value in enumerate(last)]


async def main(reports: int, buckets: int) -> None:
    """Sum `reports` histograms of `buckets` numbers and say how long it took, from the first input to the output."""
    secure = mpc.SecFld(modulus=P)
    mine = [additive_share(mpc.pid, report, buckets) for report in range(reports)]
    async with mpc:
        start, start_cpu = time.perf_counter(), time.process_time()
        total = [secure(0)] * buckets
        for share in mine:
            for dealt in mpc.input([secure(value) for value in share]):
                total = mpc.vector_add(total, dealt)
        answer = await mpc.output(total)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    if sum(int(value) for value in answer) != reports:
        raise RuntimeError("the naive program's answer is wrong")
    if mpc.pid == 0:
        line = json.dumps({"reports": reports, "buckets": buckets, "seconds": seconds, "cpu_seconds": cpu_seconds})
        print(line, flush=True)  # noqa: T201 - read by the benchmark that started this process


if __name__ == "__main__":
    mpc.run(main(int(os.environ["NAIVE_REPORTS"]), int(os.environ["NAIVE_BUCKETS"])))
