"""SIGINT (Ctrl-C) and SIGTERM: both end every command in the same orderly way.

A daemon waits for an event; any other command gets a `KeyboardInterrupt` and cleans up. Handlers are installed even if
SIGINT is ignored, as shells do for background jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from protocol.errors import ErrorKind, TrefoilError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(TrefoilError):
    """A command was interrupted. The hint says what was kept."""

    kind = ErrorKind.INTERRUPTED


@contextlib.contextmanager
def keeping(what: str) -> Iterator[None]:
    """Turn an interrupt in this block into `Interrupted` with the hint `what`; the innermost block decides."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted", what) from None


def interrupt_when_terminated() -> None:
    """Make SIGTERM interrupt this process as Ctrl-C does; by default, Python exits without cleaning up."""

    def interrupt(_number: int, frame: FrameType | None) -> None:
        at_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(at_ctrl_c):  # ignored, as in a background job
            raise KeyboardInterrupt
        # `asyncio.run` installs a handler that cancels the main task; raising here could hit the loop between tasks.
        at_ctrl_c(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)


def stop_event() -> asyncio.Event:
    """Return an event of the running loop that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.contextmanager
def stop_flag() -> Iterator[threading.Event]:
    """Yield a flag that SIGINT and SIGTERM set in this block, for programs without an event loop."""
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
