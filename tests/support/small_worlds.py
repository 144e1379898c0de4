"""The small worlds of `trefoil experiment attack`, and what only tests ask of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from benchmarks.experiments.small_worlds import (
    NOW,
    PUBLISHER,
    QUERIER,
    START,
    UNBOUNDED,
    WEEK,
    Clock,
    Event,
    Events,
    Options,
    PlainDevice,
    RewindableStore,
    SmallWorld,
    Spending,
    WorldQuery,
    fixed_coins,
    l1,
    noise_rate,
    populate,
    query,
    w3c,
    worst_loss,
)
from device.memory_store import MemoryStore
from device.privacy_filter import FilterKind, FilterOwner

Happening = TypeVar("Happening")

__all__ = [
    "NOW",
    "PUBLISHER",
    "QUERIER",
    "START",
    "UNBOUNDED",
    "WEEK",
    "Clock",
    "Event",
    "Events",
    "Options",
    "PlainDevice",
    "RewindableStore",
    "SmallWorld",
    "Spending",
    "WorldQuery",
    "fixed_coins",
    "l1",
    "noise_rate",
    "paid_by",
    "populate",
    "query",
    "quick_folder",
    "repeated_loss",
    "subsets",
    "w3c",
    "without_epoch",
    "worst_loss",
]


def subsets(events: Sequence[Happening]) -> Iterator[tuple[Happening, ...]]:
    """Every set of these events."""
    for size in range(len(events) + 1):
        yield from itertools.combinations(events, size)


def without_epoch(events: Iterable[Event], epoch: int) -> Events:
    """The neighbouring database: one device-epoch is gone."""
    return tuple(event for event in events if event.epoch != epoch)


def repeated_loss(world: SmallWorld, neighbour: SmallWorld, queries: Iterable[WorldQuery]) -> Fraction:
    """The same for one fixed list of queries, asked one after the other."""
    return sum((asked.rate * l1(world.ask(asked), neighbour.ask(asked)) for asked in queries), Fraction(0))


def paid_by(store: MemoryStore, epoch: int, kind: FilterKind = FilterKind.SITE, site: str = QUERIER) -> int:
    """What `epoch` has paid to one of its filters, as it stands in the ledger (a budget shown to people is capped)."""
    ledger = store.filters().get(FilterOwner(kind, site))
    return ledger.spent(epoch) if ledger else 0


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where there is such a place, for tests that open many databases and do not test the disk."""
    memory = Path("/dev/shm")  # only a parent; the folder in it is new and private
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
