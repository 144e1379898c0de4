"""What tests put in place of the real thing, and how often messages are repeated."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mpc_helpers.ledger.attempt import Step
from protocol.errors import Rejection

T = TypeVar("T")


class Offload(Protocol):
    """Runs a blocking call of the ledger away from the event loop, one at a time and in order."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """The call's result."""


class OneThread:
    """The `Offload` of an installed helper, once for its ledger and once for check shares that it computes again.

    One thread each: moves reach the ledger in the order in which they were asked for, and neither a slow disk nor a
    peer that asks for much stops the event loop or the threads that admit reports.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """The call's result."""
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Take no more calls."""
        self._thread.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between repeats of a message (doubling from `first`), and until a reply counts as lost."""

    first: float = 0.05
    longest_agree: float = 1.0
    longest_ask: float = 30.0
    patience: float = 10.0


def _nothing(_: Step) -> None:
    """What happens at a crash point of an installed helper."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """`left_out` is told what this helper leaves out of an attempt beside what it did not admit, for whoever counts.

    For the others an installed helper has the defaults. `step` is called at each crash point of COMMIT.md.
    """

    entropy: Callable[[int], bytes] = os.urandom
    step: Callable[[Step], None] = _nothing
    offload: Offload | None = None
    left_out: Callable[[Mapping[Rejection, int]], None] = lambda _counts: None
