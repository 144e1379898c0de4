"""Cookie Monster on real devices, one for each owner, with whatever attribution function one likes.

As a policy it stands beside those that run in columns, which know last touch alone. A device runs some ten thousand
conversions a second, not millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np

from benchmarks.experiments.columns import Ints
from benchmarks.experiments.matching import Matches
from benchmarks.experiments.policies import PolicyOutcome, System
from benchmarks.experiments.world import World
from device.attribution import AttributionFunction
from device.conversion import AttributionRequest
from device.device import Device
from device.impression import Impression, ImpressionOptions
from device.limits import MAX_EPOCHS, DeviceLimits
from device.memory_store import MemoryStore
from device.privacy_filter import FilterKind
from device.privacy_loss import report_sensitivity
from device.report import PlainSeal
from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from protocol.seconds import DAY

SITE, PUBLISHER = "shop.example", "news.example"
# Filters that all sites share are not part of the paper's accounting: too large here ever to refuse.
UNBOUNDED = 2**52
MOST_CONVERSIONS = 500_000


class _Happening(NamedTuple):
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
                f"real devices measure at most {MOST_CONVERSIONS:,} conversions here", "Give a smaller --scale."
            )
        first = int(matches.first_epoch.min())
        consumed = np.zeros((world.owners, int(matches.last_epoch.max()) - first + 1), dtype=np.int64)
        report, paid = np.zeros((2, len(world.conversions.owner)), dtype=np.int64)
        for owner, happenings in groupby(_happenings(world), key=lambda happening: happening.owner):
            life = _Life(self, world, matches)
            for happening in happenings:
                life.live(happening, report, paid)
            for epoch, amount in life.spent().items():
                consumed[owner, epoch - first] = amount
        nothing = np.zeros(len(report), dtype=np.int64)
        return PolicyOutcome(report, nothing, nothing.astype(np.bool_), paid, consumed, first)


class _Life:
    """One owner's device, from its first impression to its last conversion."""

    def __init__(self, policy: OnDevices, world: World, matches: Matches) -> None:
        self._policy, self._world, self._matches = policy, world, matches
        self._now = 0
        self._store = MemoryStore(debug=True)
        self._store.fix_epoch_start(matches.epochs.anchor)
        days = matches.epochs.seconds // DAY
        limits = DeviceLimits(
            site_budget=policy.capacity,
            global_budget=UNBOUNDED,
            impression_site_quota=UNBOUNDED,
            epoch_days=days,
            # Nothing is pruned, so that every budget can be counted at the end.
            max_lookback_days=MAX_EPOCHS * days,
        )
        self._device = Device(self._store, PlainSeal(), clock=lambda: self._now, limits=limits)

    def live(self, happening: _Happening, report: Ints, paid: Ints) -> None:
        self._now = happening.time
        if happening.row < 0:
            self._device.save_impression(PUBLISHER, ImpressionOptions(0, lifetime_days=10_000))
        elif self._world.conversions.value[happening.row]:
            before = sum(self.spent().values())
            report[happening.row] = sum(self._device.measure(SITE, self._request(happening)))
            paid[happening.row] = sum(self.spent().values()) - before

    def _request(self, happening: _Happening) -> AttributionRequest:
        world, matches, row = self._world, self._matches, happening.row
        earliest = happening.time - world.window

        def relevant(impression: Impression) -> bool:
            return earliest <= impression.time <= happening.time

        return AttributionRequest(
            epochs=range(int(matches.first_epoch[row]), int(matches.last_epoch[row]) + 1),
            epsilon=int(world.queries.epsilon[world.conversions.query[row]]) / MICROS,
            buckets=self._policy.buckets,
            value=int(world.conversions.value[row]),
            query_sensitivity=world.cap * report_sensitivity(1, self._policy.buckets, epochs=2),
            function=self._policy.function,
            relevant=relevant,
        )

    def spent(self) -> dict[int, int]:
        """What each epoch has paid."""
        own = [ledger for owner, ledger in self._store.filters().items() if owner.kind is FilterKind.SITE]
        return dict(entry for ledger in own for entry in ledger.entries())


def _happenings(world: World) -> list[_Happening]:
    """Everything that happens to each owner, in order."""
    seen = zip(world.impressions.owner.tolist(), world.impressions.time.tolist(), strict=True)
    done = zip(world.conversions.owner.tolist(), world.conversions.time.tolist(), strict=True)
    impressions = [_Happening(owner, time, -1) for owner, time in seen]
    return sorted([*impressions, *(_Happening(owner, time, row) for row, (owner, time) in enumerate(done))])
