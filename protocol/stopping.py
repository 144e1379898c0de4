"""Being asked to stop: Ctrl-C (SIGINT) and SIGTERM end every command in the same orderly way.

A command that runs until it is stopped waits for an event; any other is interrupted where it is, and cleans up on its
way out. Handlers are set even where the parent had SIGINT ignored, as shells do for what they start in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from protocol.errors import TrefoilError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(TrefoilError):
    """A command was stopped at its work. The hint says what was kept."""


@contextlib.contextmanager
def keeping(what: str) -> Iterator[None]:
    """Say what is kept of the work in this block, if it is interrupted. The innermost block knows best."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted", what) from None


def interrupt_when_terminated() -> None:
    """Let SIGTERM interrupt this process as Ctrl-C does: without it, Python ends at once and removes nothing."""

    def interrupt(_number: int, frame: FrameType | None) -> None:
        at_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(at_ctrl_c):  # ignored, as in the background of a script
            raise KeyboardInterrupt
        # Inside `asyncio.run` it cancels the work. An exception from here could hit the loop between two tasks.
        at_ctrl_c(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)


def stop_event() -> asyncio.Event:
    """Set as soon as someone wants this process to stop; for use in a running event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.contextmanager
def stop_flag() -> Iterator[threading.Event]:
    """The same for a program without an event loop: set instead of breaking off whatever is being done."""
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
