"""Cookie Monster on real devices, one for each owner, with any attribution function; and policies of one's own.

As a policy it stands beside those that run in columns, which support last touch alone. A device runs some ten thousand
conversions a second, not millions. `--policy` names a class, `--function` an attribution function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from benchmarks.experiments.policies import DevicePolicy, PolicyOutcome, System
from benchmarks.experiments.world import Matches, World
from device.attribution import OURS, AttributionFunction, imported, named_function
from device.budget import FilterKind, report_sensitivity
from device.conversion import AttributionRequest
from device.device import Device
from device.events import Impression, ImpressionOptions
from device.limits import MAX_EPOCHS, DeviceLimits
from device.report import PlainSeal, Seal
from device.stores.memory_store import MemoryStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MICROS

SITE, PUBLISHER = "shop.example", "news.example"
# Filters that all sites share are not part of the paper's accounting: too large here ever to refuse.
UNBOUNDED = 2**52
MOST_CONVERSIONS = 500_000
R = TypeVar("R")


class Happening(NamedTuple):
    """An impression (`row` is -1) or the conversion of a row, of one owner. Impressions of a second come first."""

    owner: int
    time: int
    row: int


@dataclass(frozen=True)
class OnDevices:
    """`function` over `buckets`, which decide how far one epoch can move a report (Theorem 18)."""

    system: ClassVar[System | None] = None
    name: str
    function: AttributionFunction
    buckets: int = 1
    capacity: int = MICROS

    @property
    def label(self) -> str:
        """The function, and by how many times its value one epoch can move a report over several."""
        return f"devices, {self.name} ({report_sensitivity(1, self.buckets, epochs=2)}× value)"

    @property
    def spread(self) -> float:
        """Noise is made for the larger sensitivity, and the answer is the sum of all buckets."""
        return report_sensitivity(1, self.buckets, epochs=2) * math.sqrt(self.buckets)

    def run(self, world: World, matches: Matches) -> PolicyOutcome:
        """Make and charge every report on a device of its owner."""
        if len(world.conversions.owner) > MOST_CONVERSIONS:
            raise TrefoilError(
                f"real devices measure at most {MOST_CONVERSIONS:,} conversions here",
                "Give a smaller --scale.",
                kind=ErrorKind.TOO_LARGE,
            )
        first = int(matches.first_epoch.min())
        consumed = np.zeros((world.owners, int(matches.last_epoch.max()) - first + 1), dtype=np.int64)
        report, paid = np.zeros((2, len(world.conversions.owner)), dtype=np.int64)
        for owner, happenings in groupby(happenings_of(world), key=lambda happening: happening.owner):
            life = OwnerDevice(world, matches, PlainSeal(), self.function, self.buckets, self.capacity)
            for happening in happenings:
                before = sum(life.spent().values())
                histogram = life.live(happening)
                if histogram is not None:
                    report[happening.row] = sum(histogram)
                    paid[happening.row] = sum(life.spent().values()) - before
            for epoch, amount in life.spent().items():
                consumed[owner, epoch - first] = amount
        nothing = np.zeros(len(report), dtype=np.int64)
        return PolicyOutcome(report, nothing, nothing.astype(np.bool_), paid, consumed, first)


class OwnerDevice(Generic[R]):
    """One owner's device, from its first impression to its last conversion."""

    def __init__(
        self,
        world: World,
        matches: Matches,
        seal: Seal[R],
        function: AttributionFunction,
        buckets: int = 1,
        capacity: int = MICROS,
    ) -> None:
        self._world, self._matches, self._function, self._buckets = world, matches, function, buckets
        self._now = 0
        self._store = MemoryStore(debug=seal.reveals)
        self._store.fix_epoch_start(matches.epochs.anchor)
        days = matches.epochs.seconds // DAY
        limits = DeviceLimits(
            site_budget=capacity,
            global_budget=UNBOUNDED,
            impression_site_quota=UNBOUNDED,
            side_query_quota=UNBOUNDED,
            epoch_days=days,
            # Nothing is pruned, so that every budget can be counted at the end.
            max_lookback_days=MAX_EPOCHS * days,
        )
        self._device = Device(self._store, seal, clock=lambda: self._now, limits=limits)

    def live(self, happening: Happening) -> R | None:
        """Save an impression, or return the report of a conversion that is worth anything."""
        self._now = happening.time
        if happening.row < 0:
            self._device.save_impression(PUBLISHER, ImpressionOptions(0, lifetime_days=10_000))
        elif self._world.conversions.value[happening.row]:
            return self._device.measure(SITE, self._request(happening))
        return None

    def _request(self, happening: Happening) -> AttributionRequest:
        world, matches, row = self._world, self._matches, happening.row
        earliest = happening.time - world.window

        def relevant(impression: Impression) -> bool:
            return earliest <= impression.time <= happening.time

        return AttributionRequest(
            epochs=range(int(matches.first_epoch[row]), int(matches.last_epoch[row]) + 1),
            epsilon=int(world.queries.epsilon[world.conversions.query[row]]) / MICROS,
            buckets=self._buckets,
            value=int(world.conversions.value[row]),
            query_sensitivity=world.cap * report_sensitivity(1, self._buckets, epochs=2),
            function=self._function,
            relevant=relevant,
        )

    def spent(self) -> dict[int, int]:
        """Return what each epoch has paid."""
        own = [ledger for owner, ledger in self._store.filters().items() if owner.kind is FilterKind.SITE]
        return dict(entry for ledger in own for entry in ledger.entries())


def happenings_of(world: World) -> list[Happening]:
    """Return the events of each owner, in order."""
    seen = zip(world.impressions.owner.tolist(), world.impressions.time.tolist(), strict=True)
    done = zip(world.conversions.owner.tolist(), world.conversions.time.tolist(), strict=True)
    impressions = [Happening(owner, time, -1) for owner, time in seen]
    return sorted([*impressions, *(Happening(owner, time, row) for row, (owner, time) in enumerate(done))])


def policy_named(name: str) -> DevicePolicy:
    """Return an instance of the class `module:Class`, created without arguments."""
    hint = "Name a class as module:Class; benchmarks/GUIDE.md has one."
    kind = imported(name, "policy", hint)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None)) and hasattr(kind, "system")):
        raise TrefoilError(
            f"{name} is no policy: it needs `system` and `run(world, matches)`", hint, kind=ErrorKind.WRONG_TYPE
        )
    try:
        policy: DevicePolicy = kind()
    except TypeError as error:
        raise TrefoilError(f"{name} cannot be made: {error}", hint, kind=ErrorKind.WRONG_TYPE) from None
    return policy


def on_devices(name: str) -> OnDevices:
    """Return the policy of an attribution function on real devices: one bucket as in the workloads, two for slots."""
    return OnDevices(name, named_function(name), buckets=OURS[name].least_buckets if name in OURS else 1)
