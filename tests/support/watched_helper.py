"""A helper daemon whose workers record the noise that they draw, for tests: `python -m tests.support.watched_helper`.

With a configuration as its argument it is the installed daemon, except that it starts this module as its fork server.
Each worker then appends what it draws to `drawn` beside the configuration, in lines of one length. With `LEAK` in the
environment it also has two faults that an earlier release had: a worker uses processor time in proportion to its noise,
and the daemon exports the figures of its fork server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpc_helpers.mpc import fork_server_main, noise, worker
from mpc_helpers.service import monitoring
from mpc_helpers.service.daemon import run

FOLDER = "TREFOIL_WATCHED"
# Milliseconds of processor time for noise as large as the scale.
LEAK = "TREFOIL_LEAK"
DRAWN = "drawn"
_FORK_SERVER = "mpc_helpers.mpc.fork_server_main"

Draw = Callable[[Fraction, int, noise.Coins], list[int]]


def read_drawn(path: Path) -> list[int]:
    """Return everything that a helper's workers have drawn, in order."""
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def _watched(draw: Draw) -> Draw:
    path, leak = Path(os.environ[FOLDER]) / DRAWN, float(os.environ.get(LEAK, "0"))

    def drawing(rate: Fraction, buckets: int, coins: noise.Coins) -> list[int]:
        drawn = draw(rate, buckets, coins)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, b"".join(b"%+024d\n" % value for value in drawn))
        os.close(file)
        end = time.process_time() + float(sum(map(abs, drawn)) * rate) * leak / 1000
        while leak and time.process_time() < end:
            pass
        return drawn

    return drawing


def _run_fork_server() -> None:
    for draw in (noise.draw_local, noise.draw_laplace):
        setattr(noise, draw.__name__, _watched(draw))
    fork_server_main.main()


def _run_daemon(config: Path) -> None:
    os.environ[FOLDER] = str(config.parent)

    def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
        # The name of the module that it replaces is how the daemon recognises the process as its fork server.
        return subprocess.Popen((sys.executable, "-m", __spec__.name, _FORK_SERVER), **options)

    replaced = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    setattr(worker, "subprocess", replaced)  # noqa: B010  (mypy: not exported; no argument reaches it)
    if LEAK in os.environ:
        setattr(monitoring.Usage, "without", lambda usage, _: usage)  # noqa: B010  (mypy: a fault, not a method)
    run(config, stop_with_stdin=True, log_format="json")


if __name__ == "__main__":
    if sys.argv[1] == _FORK_SERVER:
        _run_fork_server()
    else:
        _run_daemon(Path(sys.argv[1]))
