"""Three helpers on SQLite beside three of which two keep their ledgers in PostgreSQL: the same batches, by turns.

    python -m tests.support.mixed_ledgers --reports 100000 --rounds 3

Prints the processor time of each batch, with that of the database server, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.throughput.grid import SITE, Cell
from benchmarks.throughput.measurement import Target, _ask_counted, _batch, now
from mpc_helpers.local.launcher import launched, prepare
from tests.support.ledger_places import put_in_postgres
from tests.support.private_postgres import PrivatePostgres


def server_seconds(server: PrivatePostgres) -> float:
    """Processor seconds of the server's processes that live: helpers keep their sessions."""
    parent = (server.folder / "data" / "postmaster.pid").read_text().split()[0]
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if parent in (fields[1], stat.parent.name):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reports", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cell = Cell(options.reports, 16)
    server = PrivatePostgres()
    with ExitStack() as stack:
        stack.callback(server.remove)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        targets = {}
        for name in ("SQLite", "mixed"):
            trio = prepare(folder / name, now=now(), sites={SITE: [SITE]})
            if name == "mixed":
                for party in (0, 1):
                    put_in_postgres(trio, party, server.location())
            running = stack.enter_context(launched(trio))
            pids = tuple(each.process.pid for each in running.helpers if each.process is not None)
            targets[name] = Target(running.helper_set, running.site_key(SITE), process_ids=pids)
        seconds: dict[str, list[float]] = {name: [] for name in targets}
        for number in range(options.rounds):
            for name, target in targets.items():
                path = folder / "batch"
                batch = _batch(target, path, cell.workload(number, now(), SITE))
                before = server_seconds(server)
                answered = _ask_counted(target, batch, profile=False)
                served = server_seconds(server) - before if name == "mixed" else 0.0
                helpers = answered.used.cpu_seconds or 0.0
                seconds[name].append(helpers + served)
                sys.stdout.write(
                    f"{name}: {answered.result.answer.counted} counted, helpers {helpers:.1f} s, server {served:.1f} s,"
                    f" wall clock {answered.seconds:.1f} s\n"
                )
                sys.stdout.flush()
                path.unlink()
        sqlite, mixed = (statistics.median(each) for each in seconds.values())
        sys.stdout.write(f"two on PostgreSQL take {mixed / sqlite:.3f} times the processor time\n")


if __name__ == "__main__":
    main()
