"""The long hunt in virtual time: `python -m tests.support.hunt --seed 1 --schedules 100000 --out hunt-virtual.json`.

Counts are written every few seconds, so that whatever ends the run keeps what was run. Processes with seeds of their
own may run beside each other; `--merge benchmarks/results/hunt.json REAL.json VIRTUAL.json ...` puts their files, and
that of `hunt_rounds`, together.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.origin import machine
from protocol.files import write_atomically
from tests.support.hunt_runs import HuntCounts, hunt, quick, shrunk
from tests.support.hunt_schedule import schedule_of
from tests.support.processes import ROOT

WRITE_SECONDS = 10.0


class Record:
    """The file of results, while the hunt runs."""

    def __init__(self, path: Path | None, first_seed: int, of_commit: str) -> None:
        self._path = path
        self._began = time.time()
        self._written = 0.0
        self._header = {
            "command": " ".join(["python -m tests.support.hunt", *sys.argv[1:]]),
            "commit": of_commit,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "first_seed": first_seed,
        }

    def note(self, counts: HuntCounts, *, last: bool = False) -> None:
        if not last and time.monotonic() - self._written < WRITE_SECONDS:
            return
        self._written = time.monotonic()
        found = {
            **self._header,
            "schedules": counts.schedules,
            "mishaps": dict(sorted(counts.mishaps.items())),
            "queries_ended": dict(sorted(counts.ends.items())),
            "violations": len(counts.wrong),
            "wrong": {str(seed): texts for seed, texts in counts.wrong.items()},
            "processor_seconds": round(time.process_time(), 1),
            "seconds": round(time.time() - self._began, 1),
        }
        text = json.dumps(found, indent=1) + "\n"
        if self._path is not None:
            write_atomically(self._path, text.encode())
        if last or self._path is None:
            sys.stdout.write(text)


def commit() -> str:
    """What this tree is a checkout of."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


def merged(real: Path, virtual: Sequence[Path]) -> dict[str, object]:
    """All parts of one hunt, with what every result file has: `make chaos` plays such a hunt."""
    parts = [json.loads(path.read_bytes()) for path in virtual]
    first = min(parts, key=lambda part: int(part["first_seed"]))
    origin = {"command": "make chaos", "machine": machine(), "seed": first["first_seed"]}
    described = {name: first[name] for name in ("commit", "date")}
    return {**origin, **described, "virtual": parts, "real": json.loads(real.read_bytes())}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the tree is a copy without its history")
    parser.add_argument("--merge", type=Path, nargs="+", help="the file to write, that of the rounds, and the others")
    options = parser.parse_args()
    if options.merge:
        out, real, *virtual = options.merge
        write_atomically(out, (json.dumps(merged(real, virtual), indent=1) + "\n").encode())
        return 0
    logging.disable(logging.CRITICAL)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        record = Record(options.out, options.seed, options.commit or commit())
        counts = hunt(Path(folder), range(options.seed, options.seed + options.schedules), record.note)
        record.note(counts, last=True)
        with quick():
            for seed in counts.wrong:
                sys.stdout.write(f"{shrunk(Path(folder) / 'shrunk', schedule_of(seed))}\n")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
