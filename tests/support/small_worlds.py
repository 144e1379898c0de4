"""Helpers for tests on the small worlds of `trefoil experiment attack` (`benchmarks.experiments.small_worlds`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from benchmarks.experiments.small_worlds import QUERIER, Event, Events, SmallWorld, WorldQuery, l1
from device.budget import FilterKind, FilterOwner
from device.stores.memory_store import MemoryStore

Happening = TypeVar("Happening")


def subsets(events: Sequence[Happening]) -> Iterator[tuple[Happening, ...]]:
    """Yield every set of these events."""
    for size in range(len(events) + 1):
        yield from itertools.combinations(events, size)


def without_epoch(events: Iterable[Event], epoch: int) -> Events:
    """Return the neighbouring database, without one device-epoch."""
    return tuple(event for event in events if event.epoch != epoch)


def repeated_loss(world: SmallWorld, neighbour: SmallWorld, queries: Iterable[WorldQuery]) -> Fraction:
    """Return the privacy loss of one fixed sequence of queries."""
    return sum((asked.rate * l1(world.ask(asked), neighbour.ask(asked)) for asked in queries), Fraction(0))


def paid_by(store: MemoryStore, epoch: int, kind: FilterKind = FilterKind.SITE, site: str = QUERIER) -> int:
    """Return what `epoch` has paid to one of its filters, from the ledger: the budget that people see is capped."""
    ledger = store.filters().get(FilterOwner(kind, site))
    return ledger.spent(epoch) if ledger else 0


@contextmanager
def quick_folder() -> Iterator[Path]:
    """Yield a folder on tmpfs where there is one, for tests that open many databases and do not test the disk."""
    memory = Path("/dev/shm")  # only a parent; the folder in it is new and private
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
