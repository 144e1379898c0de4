"""(e) SecretFlow SPU on the same histograms: three ABY3 parties on localhost share, sum and reveal them.

Run by a Python that has SPU: `python spu_sum.py REPORTS BUCKETS`. It imports nothing of Trefoil, since SPU wants an
older numpy. Each party is a process of its own; the shares are made by the process that starts them, as devices would.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

PARTIES = 3
MAX_VALUE = 5
RUNS = 3
SECONDS = 120


def histograms(reports: int, buckets: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One bucket of each report has a value, as last-touch reports have it."""
    draw = np.random.default_rng(1)  # noqa: TID251 - a workload, not a secret
    rows = np.zeros((reports, buckets), dtype=np.int64)
    rows[np.arange(reports), draw.integers(buckets, size=reports)] = draw.integers(1, MAX_VALUE + 1, size=reports)
    return rows


def configuration() -> Any:  # Any: SPU ships no types for this
    """ABY3 over 64-bit words."""
    from spu import libspu

    return libspu.RuntimeConfig(protocol=libspu.ProtocolKind.ABY3, field=libspu.FieldType.FM64)


def party(rank: int, addresses: list[str], shape: tuple[int, int], pipe: Connection) -> None:
    """Sum what the pipe brings, `RUNS` times, and send back seconds, processor seconds and the share of the sum."""
    import jax.numpy as jnp
    import spu
    from spu import libspu
    from spu.utils import frontend

    parties = libspu.link.Desc()
    for number, address in enumerate(addresses):
        parties.add_party(f"party-{number}", address)
    link = libspu.link.create_brpc(parties, rank)
    runtime = spu.Runtime(link, configuration())
    secret = [libspu.Visibility.VIS_SECRET]
    program, _ = frontend.compile(
        frontend.Kind.JAX, lambda rows: jnp.sum(rows, axis=0), [np.zeros(shape, dtype=np.int64)], {}, ["rows"], secret,
        lambda outputs: [f"sum-{number}" for number in range(len(outputs))],
    )  # fmt: skip
    shares = pipe.recv()
    pipe.send("ready")
    for _ in range(RUNS):
        pipe.recv()
        wall, cpu = time.perf_counter(), time.process_time()
        runtime.set_var("rows", shares)
        runtime.run(program)
        total = runtime.get_var("sum-0")
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu, total))
    pipe.recv()
    link.stop_link()


def free_addresses() -> list[str]:
    """Ports that nobody listens on now, held together while choosing so that they differ."""
    sockets = [socket.socket() for _ in range(PARTIES)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def receive(pipe: Connection) -> Any:
    """What a party sends, or an error if it has died or hangs."""
    if not pipe.poll(SECONDS):
        raise SystemExit("an SPU party does not answer")
    return pipe.recv()


def main(reports: int, buckets: int) -> None:
    """Print one line of JSON: the best run, sharing included, over all processes."""
    import spu
    from spu import libspu

    rows = histograms(reports, buckets)
    io = spu.Io(PARTIES, configuration())
    wall, cpu = time.perf_counter(), time.process_time()
    shares = io.make_shares(rows, libspu.Visibility.VIS_SECRET)
    sharing = (time.perf_counter() - wall, time.process_time() - cpu)
    start, addresses = multiprocessing.get_context("spawn"), free_addresses()
    pipes = [start.Pipe() for _ in range(PARTIES)]
    processes = [
        start.Process(target=party, args=(rank, addresses, rows.shape, pipes[rank][1]), daemon=True)
        for rank in range(PARTIES)
    ]
    for process in processes:
        process.start()
    # A party takes its share once all three are linked.
    for (pipe, _), share in zip(pipes, shares, strict=True):
        pipe.send(share)
    for pipe, _ in pipes:
        receive(pipe)
    best = (float("inf"), float("inf"))
    for _ in range(RUNS):
        for pipe, _ in pipes:
            pipe.send("go")
        spent = [receive(pipe) for pipe, _ in pipes]
        wall, cpu = time.perf_counter(), time.process_time()
        if (io.reconstruct([total for _, _, total in spent]) != rows.sum(axis=0)).any():
            raise SystemExit("SPU's answer is wrong")
        opening = (time.perf_counter() - wall, time.process_time() - cpu)
        best = min(best, (max(s for s, _, _ in spent) + opening[0], sum(c for _, c, _ in spent) + opening[1]))
    for pipe, _ in pipes:
        pipe.send("end")
    result = {"reports": reports, "seconds": sharing[0] + best[0], "cpu_seconds": sharing[1] + best[1]}
    print(json.dumps(result), flush=True)  # noqa: T201 - read by the benchmark that started this process


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
