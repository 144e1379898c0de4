"""Record when each function of the project is first called, in every process of a run; for `test_walk`.

Python imports this module at start-up if its folder is on PYTHONPATH. Nothing is recorded before the gate opens,
so that start-up and warm-up leave no trace. CLOCK_MONOTONIC is one clock for all processes of a machine.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

ROOT = os.environ.get("TREFOIL_TRACE_ROOT", "")
FOLDER = os.environ.get("TREFOIL_TRACE", "")
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("device", "protocol", "mpc_helpers"))


def record(folder: str) -> None:
    """Append a line to `folder`/trace for each function's first call in this process, in each act of the story.

    `folder`/gate holds the number of the act, and 0 while nothing is recorded.
    """
    with Path(folder, "gate").open("rb") as file:
        gate = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    trace = os.open(f"{folder}/trace", os.O_WRONLY | os.O_APPEND)
    called: set[tuple[int, object]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        act, code = gate[0], frame.f_code
        if event == "call" and act and (act, code) not in called:
            called.add((act, code))
            if code.co_filename.startswith(PACKAGES):
                file = code.co_filename.removeprefix(f"{ROOT}/")
                os.write(trace, f"{time.monotonic_ns()} {act} {file} {code.co_qualname}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


if FOLDER:
    record(FOLDER)
