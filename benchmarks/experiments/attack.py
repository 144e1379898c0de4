"""What sites can learn or destroy when they work together, measured on real devices (as Big Bird studies).

One person, one epoch. Colluding sites, each with a filter of its own, ask for all they can get:

- *learn*: all of them ask about the same publisher's impressions, and put their answers together;
- *destroy*: each brings its own publisher and drains what all sites share, so that an honest shop gets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rich.table import Table

from benchmarks.experiments.tables import plain_table
from device.conversion import AttributionRequest
from device.device import Device
from device.impression import ImpressionOptions
from device.limits import DeviceLimits
from device.memory_store import MemoryStore
from device.privacy_filter import FilterKind
from device.report import PlainSeal
from protocol.epsilon import MICROS

NOW = 1_704_067_200
SITES = (1, 2, 4, 8, 16, 32)
# Far above anything asked for here: a limit that is switched off.
OFF = 2**52
HONEST_EPSILON = 0.5


class Defence(Enum):
    """Which of the device's limits are switched on, each level on top of the one before."""

    SITE_FILTERS = "site filters only"
    GLOBAL_FILTER = "and a global filter"
    PUBLISHER_QUOTA = "and publisher quotas"
    ACTION_QUOTA = "and 2 sites per action"


@dataclass(frozen=True, slots=True)
class Attack:
    """What so many colluding sites reached against one defence. ε in micros."""

    defence: Defence
    sites: int
    learned: int
    drained: int
    honest_report: int

    @property
    def best_guess(self) -> float:
        """How often the colluders can at best tell whether an impression was there: e^ε/(1 + e^ε), against 0.5."""
        return 1 / (1 + math.exp(-min(self.learned / MICROS, 700)))

    def as_json(self) -> dict[str, object]:
        """The measurement as it is written out."""
        return {
            "defence": self.defence.value,
            "sites": self.sites,
            "epsilon_learned": self.learned / MICROS,
            "best_guess": self.best_guess,
            "epsilon_drained": self.drained / MICROS,
            "honest_report_survives": self.honest_report > 0,
        }


def measure(defences: Sequence[Defence] = tuple(Defence), sites: Sequence[int] = SITES) -> list[Attack]:
    """Every attack against every defence, each on a fresh device."""
    return [_attack(defence, count) for defence in defences for count in sites]


def _attack(defence: Defence, count: int) -> Attack:
    learned, _ = _collude(defence, count, own_publishers=False)
    drained, honest = _collude(defence, count, own_publishers=True)
    return Attack(defence, count, learned, drained, honest)


def _collude(defence: Defence, count: int, *, own_publishers: bool) -> tuple[int, int]:
    """One user action leads through all colluding sites; then the person buys at an honest shop.

    Returns what the colluders' own filters paid, which bounds what their reports can say, and the honest report.
    """
    device = _device(defence)
    device.save_impression("news.example", ImpressionOptions(0, conversion_sites=["honest.example"]), action="reading")
    if not own_publishers:
        device.save_impression("popular.example", ImpressionOptions(0), action="browsing")
    for number in range(count):
        shop = f"colluder{number}.example"
        if own_publishers:
            options = ImpressionOptions(0, conversion_sites=[shop])
            device.save_impression(f"publisher{number}.example", options, action="redirected")
        device.measure_conversion(shop, _everything(1.0), action="redirected")
    honest = device.measure_conversion("honest.example", _everything(HONEST_EPSILON), action="buying")
    return _paid_by_colluders(device), honest[0]


def _device(defence: Defence) -> Device[tuple[int, ...]]:
    store = MemoryStore(debug=True)
    store.fix_epoch_start(NOW)
    return Device(store, PlainSeal(), clock=lambda: NOW + 1, limits=_limits(defence))


def _limits(defence: Defence) -> DeviceLimits:
    standard = DeviceLimits()
    levels = list(Defence).index(defence)
    return replace(
        standard,
        global_budget=standard.global_budget if levels >= 1 else OFF,
        impression_site_quota=standard.impression_site_quota if levels >= 2 else OFF,
        sites_per_action=2 if levels >= 3 else None,
    )


def _everything(epsilon: float) -> AttributionRequest:
    """A request for the current epoch at full price: one bucket, value 1, sensitivity 1."""
    return AttributionRequest(epochs=[0], epsilon=epsilon, buckets=1, value=1, query_sensitivity=1)


def _paid_by_colluders(device: Device[tuple[int, ...]]) -> int:
    return sum(
        state.spent for state in device.budget() if state.kind is FilterKind.SITE and state.site.startswith("colluder")
    )


def attack_table(attacks: Sequence[Attack]) -> Table:
    """The attacks as a person reads them."""
    columns = ("limits", "sites", "ε learned", "best guess", "ε drained", "honest shop measured")
    table = plain_table("colluding sites against one person, one epoch", columns, words={"limits"})
    for attack in attacks:
        table.add_row(
            attack.defence.value,
            str(attack.sites),
            f"{attack.learned / MICROS:g}",
            f"{attack.best_guess:.4f}",
            f"{attack.drained / MICROS:g}",
            "yes" if attack.honest_report else "no",
        )
    return table
