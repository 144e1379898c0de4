"""Small worlds of the display side: a device with a few conversions over two epochs, and publishers that ask.

The engine is the real one, or a broken one. Amounts are in grains, an eighth of ε = 1: with a cap of 8 a report whose
features add up to n costs n grains at a rate of 1, and one answer tells two databases apart by at most n grains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from benchmarks.experiments.small_worlds import (
    START,
    WEEK,
    Clock,
    PlainDevice,
    RewindableStore,
    Spending,
    fixed_coins,
    worst_loss,
)
from device.budget import FilterKind, PrivacyFilter
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.events import ConversionEventOptions, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery
from device.stores.memory_store import ConversionList
from device.stores.sqlite_store import SqlConversions, SqliteStore
from device.stores.storage import Store
from protocol.units import DAY, HOUR
from tests.support.small_worlds import quick_folder, subsets

PUBLISHER = "pub.example"
OTHER_PUBLISHER = "pub2.example"
A, B = "a.example", "b.example"
# When everything is asked: an hour into the third epoch, when windows over both others have closed.
NOW = START + 2 * WEEK + HOUR
GRAIN = 125_000
CAP = 8
BUDGET = 6
PLENTY = 10**6

# What a wrong rule makes of the store's conversions; each is a class over the right one of either store.
Kept = Callable[[type[Any]], type[Any]]
Options = LabelOptions | ConversionOptions | AttributionRequest


def moment(epoch: int, day: int) -> int:
    return START + epoch * WEEK + day * DAY


class Event(NamedTuple):
    """A conversion that names `publishers`, or an impression if it names none."""

    epoch: int
    day: int
    site: str
    caller: str
    publishers: tuple[str, ...]


Events = tuple[Event, ...]


def converted(epoch: int, site: str = A, day: int = 3, caller: str = "", by: tuple[str, ...] | None = None) -> Event:
    """A conversion on `site`; by default both publishers may learn of it."""
    return Event(epoch, day, site, caller or site, (PUBLISHER, OTHER_PUBLISHER) if by is None else by)


def shown(epoch: int, site: str = A, day: int = 3) -> Event:
    """An impression on `site`."""
    return Event(epoch, day, site, site, ())


def public_to(event: Event, *parties: str) -> bool:
    """Whether it happened on the pages of one of `parties`, or through its calls."""
    return event.site in parties or event.caller in parties


@dataclass(frozen=True, eq=False)
class Ask:
    """One released answer over one report of the device: who asks what. `rate` is γ in grains per unit."""

    options: Options
    site: str = PUBLISHER
    intermediary: str | None = None
    rate: Fraction = field(init=False)

    def __post_init__(self) -> None:
        terms = self.options.checked(self.site, self.site, DeviceLimits()).loss_terms
        object.__setattr__(self, "rate", Fraction(terms.epsilon_micros, terms.query_sensitivity * GRAIN))

    def on(self, device: PlainDevice) -> tuple[int, ...]:
        if isinstance(self.options, LabelOptions):
            return device.measure_impression(self.site, self.options, intermediary=self.intermediary)
        return device.measure_conversion(self.site, self.options, intermediary=self.intermediary)


def label(
    features: Sequence[int],
    since: tuple[int, int] = (0, 0),
    days: int = 14,
    *,
    advertisers: Sequence[str] = (A, B),
    rate: Fraction = Fraction(1),
    site: str = PUBLISHER,
    intermediary: str | None = None,
    side_query: SideQuery | None = None,
) -> Ask:
    """A publisher's question about an impression at `since` (epoch and day) and the `days` after it."""
    options = LabelOptions(
        TREFOIL_SERVICE,
        features,
        CAP,
        epsilon=float(rate),
        shown_ago=NOW - moment(*since),
        advertisers=advertisers,
        window_days=days,
        side_query=side_query,
    )
    return Ask(options, site, intermediary)


def limits(**grains: int) -> DeviceLimits:
    """A site budget of BUDGET, and plenty of everything else, unless it says otherwise; in grains."""
    shared = dict.fromkeys(("global_budget", "impression_site_quota", "advertiser_quota", "side_query_quota"), PLENTY)
    named = {"site_budget": BUDGET, **shared}
    return DeviceLimits(**{name: amount * GRAIN for name, amount in (named | grains).items()})  # type: ignore[arg-type]  # all are numbers


class Rewindable(Store, Protocol):
    """A store whose filters can be put back to an earlier state; see `small_worlds.RewindableStore`."""

    def spending(self) -> Spending: ...

    def rewind(self, spending: Spending, /) -> None: ...


class RewindableDatabase(SqliteStore):
    """The same in SQLite."""

    _watched: Collection[FilterKind] = ()

    @classmethod
    def fresh(cls, path: Path, watched: Collection[FilterKind]) -> Self:
        cls.create(path, epoch_length=WEEK, debug=True)
        made = cls.open(path, epoch_length=WEEK, clock=lambda: START)
        assert isinstance(made, cls)
        made._watched = watched
        return made

    def spending(self) -> Spending:
        # Not in a transaction of the store, which would be durable: a device runs in between, and it is what is tested.
        watched = [(owner, ledger) for owner, ledger in self.filters().items() if owner.kind in self._watched]
        return tuple(sorted((owner, *entry) for owner, ledger in watched for entry in ledger.entries()))

    def rewind(self, spending: Spending) -> None:
        filters: dict[Any, PrivacyFilter] = {}
        for owner, epoch, amount in spending:
            filters.setdefault(owner, PrivacyFilter()).consume(epoch, amount)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM filter")
        self.keep(filters)
        self._connection.execute("COMMIT")


class Shelf(Protocol):
    """Where worlds get their stores from."""

    def store(self, watched: Collection[FilterKind], kept: Kept | None) -> Rewindable: ...


class InMemory:
    """Stores in memory."""

    def store(self, watched: Collection[FilterKind], kept: Kept | None) -> Rewindable:
        made = RewindableStore(watched)
        made.conversions = (kept(ConversionList) if kept else ConversionList)()
        return made


class OnDisk:
    """Databases in a folder, one for each world, which are closed together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[RewindableDatabase] = []

    def store(self, watched: Collection[FilterKind], kept: Kept | None) -> Rewindable:
        made = RewindableDatabase.fresh(self._folder / f"{len(self.made)}.db", watched)
        made.conversions = (kept(SqlConversions) if kept else SqlConversions)(made._connection)
        self.made.append(made)
        return made


@contextmanager
def on_disk() -> Iterator[OnDisk]:
    with quick_folder() as folder:
        shelf = OnDisk(folder)
        try:
            yield shelf
        finally:
            for made in shelf.made:
                made.close()


class DisplayWorld:
    """A device with these events, to be asked in any state of its filters."""

    def __init__(
        self,
        events: Iterable[Event],
        make: Callable[..., PlainDevice] = Device,
        kept: Kept | None = None,
        watched: Collection[FilterKind] = (FilterKind.SITE,),
        shelf: Shelf | None = None,
        **grains: int,
    ) -> None:
        self.store = (shelf or InMemory()).store(watched, kept)
        self.clock = Clock()
        self.device = make(self.store, PlainSeal(), clock=self.clock, limits=limits(**grains), coins=fixed_coins())
        populate(self.device, self.store, self.clock, events)
        self.fresh: Spending = ()
        self._steps: dict[tuple[Spending, Ask], tuple[tuple[int, ...], Spending]] = {}

    def step(self, spending: Spending, asked: Ask, /) -> tuple[tuple[int, ...], Spending]:
        """What the device says when its filters stand at `spending`, and where they stand afterwards."""
        if (spending, asked) not in self._steps:
            self.store.rewind(spending)
            self._steps[spending, asked] = asked.on(self.device), self.store.spending()
        return self._steps[spending, asked]


def populate(device: Device[Any], store: Any, clock: Clock, events: Iterable[Event]) -> None:
    """Let these events happen in their order of time, then set the clock to when the device will be asked."""
    with store.transaction():
        store.fix_epoch_start(START)
    for event in sorted(events):
        clock.now = moment(event.epoch, event.day)
        caller = None if event.caller == event.site else event.caller
        if event.publishers:
            options = ConversionEventOptions(event.publishers)
            device.save_conversion(event.site, options, intermediary=caller)
        else:
            device.save_impression(event.site, ImpressionOptions(0), intermediary=caller)
    clock.now = NOW


def without_epoch(events: Iterable[Event], epoch: int, *parties: str) -> Events:
    """The neighbouring database: of one device-epoch only what is public to `parties` is left."""
    return tuple(event for event in events if event.epoch != epoch or public_to(event, *parties))


def neighbours(possible: Sequence[Event], *parties: str) -> Iterator[tuple[Events, Events]]:
    """Every database over `possible`, beside what is left of it without the private part of one of its epochs."""
    for events in subsets(possible):
        for epoch in (0, 1):
            fewer = without_epoch(events, epoch, *parties)
            if len(fewer) < len(events):
                yield events, fewer


def worst_of(menu: Sequence[Ask], pairs: Iterable[tuple[Events, Events]], **world: Any) -> Fraction:
    """The largest loss over all pairs."""
    worlds: dict[Events, DisplayWorld] = {}

    def at(events: Events) -> DisplayWorld:
        if events not in worlds:
            worlds[events] = DisplayWorld(events, **world)
        return worlds[events]

    return max(worst_loss(at(one), at(other), menu) for one, other in pairs)
