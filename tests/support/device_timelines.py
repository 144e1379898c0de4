"""Random timelines of a device: everything that sites and a person can do, under a clock that goes both ways.

A timeline is a list of happenings drawn from a seed. `play` runs it on a device and has the auditor check every step;
`shortest` takes away what a failure does not need. Only the device's public calls are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.experiments.small_worlds import START, WEEK, PlainDevice
from device.attribution import (
    AttributionFunction,
    Award,
    EqualCredit,
    FirstTouch,
    LastNSlots,
    LastNTouch,
    LastTouch,
)
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.events import Impression, ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.storage import Store
from device.web.http_headers import parse_measure_conversion, parse_save_impression
from protocol.errors import TrefoilError
from tests.support.device_auditor import DAY, MICROS, Auditor, Disagreement, by_paper, by_standard

SITES = ("shop.example", "store.example", "news.example", "blog.example")
CALLERS = (None, None, "ads.example")
# Budgets that a few calls use up; a lookback of little more than three weeks, so that weeks go out of reach.
LIMITS = DeviceLimits(
    site_budget=MICROS,
    global_budget=MICROS * 5 // 2,
    impression_site_quota=MICROS * 2,
    max_lookback_days=23,
    max_impressions_per_site=3,
    max_impressions_per_epoch=4,
    max_sites_per_epoch=3,
)
EXTRA_LIMITS: tuple[dict[str, int], ...] = (
    {},
    {"site_budget": MICROS * 2},
    {"sites_per_action": 2},
    {"epoch_days": 5, "max_lookback_days": 30, "global_budget": MICROS * 3 // 2},
    {"impression_site_quota": MICROS // 2, "max_impressions_per_epoch": 2},
)


@dataclass(frozen=True)
class Wait:
    """The clock moves, or is set back."""

    seconds: int


@dataclass(frozen=True)
class Save:
    """A site saves an impression, by script or by header."""

    site: str
    caller: str | None
    options: ImpressionOptions
    action: str
    by_header: bool = False


@dataclass(frozen=True)
class Convert:
    """A site measures a conversion, by one of both calls, or by header. Weeks of a request count back from now."""

    site: str
    caller: str | None
    options: ConversionOptions | AttributionRequest
    action: str
    by_header: bool = False


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused, whatever is stored, and must leave nothing behind."""

    call: Save | Convert


@dataclass(frozen=True)
class ClearSite:
    site: str


@dataclass(frozen=True)
class ClearHistory:
    sites: tuple[str, ...]
    forget: bool


@dataclass(frozen=True)
class Switch:
    on: bool


@dataclass(frozen=True)
class Restart:
    """The program ends and starts again, on the same store."""


Happening = Wait | Save | Convert | Wrong | ClearSite | ClearHistory | Switch | Restart
Timeline = tuple[Happening, ...]


@dataclass(frozen=True)
class Case:
    """One timeline with the limits it runs under, and the seed it came from."""

    seed: int
    limits: DeviceLimits
    timeline: Timeline

    def __str__(self) -> str:
        steps = "\n".join(f"  {number}. {happening}" for number, happening in enumerate(self.timeline))
        return f"seed {self.seed}\n{self.limits}\n{steps}"


# Functions of a querier's own: greedy ones, wrong ones, and tests that fail on some impressions.


def greedy(relevant: Mapping[int, Sequence[Impression]], award: Award) -> Sequence[float]:
    return [1.9, -3.0, math.nan, math.inf, 7.0]


def by_week(relevant: Mapping[int, Sequence[Impression]], award: Award) -> Sequence[float]:
    return [len(impressions) for _, impressions in sorted(relevant.items())]


def failing(relevant: Mapping[int, Sequence[Impression]], award: Award) -> Sequence[float]:
    raise ValueError(relevant)


def even_bucket(impression: Impression) -> bool:
    return impression.histogram_index % 2 == 0


def fails_on_blogs(impression: Impression) -> bool:
    if impression.site == "blog.example":
        raise KeyError(impression.site)
    return True


FUNCTIONS: tuple[AttributionFunction, ...] = (
    *(LastTouch(), LastTouch(), LastTouch(), FirstTouch(), EqualCredit(), LastNSlots(), LastNTouch((1.0, 1.0))),
    *(greedy, by_week, failing),
)


class Draw:
    """Happenings from a seed."""

    def __init__(self, seed: int) -> None:
        self._coins = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self._coins.integers(low, high + 1))

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def some(self, choices: Sequence[Any], chance: float = 0.25) -> tuple[Any, ...]:
        return tuple(choice for choice in choices if self._coins.random() < chance)

    def case(self, seed: int) -> Case:
        limits = replace(LIMITS, **self.one(EXTRA_LIMITS))
        return Case(seed, limits, tuple(self.happening() for _ in range(self.number(8, 30))))

    def happening(self) -> Happening:
        kind = self.number(0, 99)
        if kind < 22:
            return Wait(self.wait())
        if kind < 50:
            return self.save()
        if kind < 84:
            return self.convert()
        if kind < 88:
            return Wrong(self.one([self.wrong_save, self.wrong_convert])())
        if kind < 91:
            return ClearSite(self.one([*SITES, "ads.example"]))
        if kind < 95:
            return ClearHistory(self.some(SITES), bool(self.number(0, 1)))
        return Switch(kind < 98) if kind < 99 else Restart()

    def wait(self) -> int:
        """Mostly hours and days; sometimes weeks, sometimes back."""
        kind = self.number(0, 19)
        if kind < 8:
            return self.number(1, 3600)
        if kind < 14:
            return self.number(1, 4 * DAY)
        if kind < 18:
            return self.number(1, 2 * WEEK)
        return -self.number(1, 2 * WEEK) if kind < 19 else self.number(1, 8 * WEEK)

    def save(self) -> Save:
        options = ImpressionOptions(
            histogram_index=self.number(0, 3),
            match_value=self.number(0, 2),
            conversion_sites=self.some(SITES, 0.12),
            conversion_callers=self.some((*SITES, "ads.example"), 0.05),
            lifetime_days=self.one([1, 5, 12, 30, 400]),
            priority=self.number(-1, 1),
        )
        return Save(self.one(SITES), self.one(CALLERS), options, f"act {self.number(0, 2)}", not self.number(0, 3))

    def convert(self) -> Convert:
        standard = self.number(0, 1)
        options = self.standard() if standard else self.request()
        # A header has at most three digits after the point.
        by_header = bool(standard) and options.epsilon > 0.001 and not self.number(0, 3)
        return Convert(self.one(SITES), self.one(CALLERS), options, f"act {self.number(0, 2)}", by_header)

    def epsilon(self) -> float:
        return float(self.one([0.25, 0.5, 0.5, 1.0, 0.1, 0.3, 0.7, 1e-6, 2.5]))

    def standard(self) -> ConversionOptions:
        value = 2 * self.number(1, 3)
        return ConversionOptions(
            TREFOIL_SERVICE,
            histogram_size=self.number(1, 4),
            epsilon=self.epsilon(),
            value=value,
            max_value=value + self.number(0, 3),
            credit=self.one([(1.0,), (1.0,), (1.0, 1.0), (0.5, 0.5)]),
            lookback_days=self.one([None, 1, 3, 6, 13, 20, 90]),
            match_values=self.some(range(3), 0.2),
            impression_sites=self.some(SITES, 0.1),
            impression_callers=self.some((*SITES, "ads.example"), 0.05),
            kappa=self.one([0, 0, 0, 1, 5]),
        )

    def request(self) -> AttributionRequest:
        function, value = self.one(FUNCTIONS), 2 * self.number(1, 3)
        forms = (
            [SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH]
            if isinstance(function, LastTouch)
            else [SideQueryForm.GENERAL]
        )
        flag = SideQuery(self.number(1, 4), self.one(forms)) if self.number(0, 2) == 0 else None
        return AttributionRequest(
            # Negative: weeks before the current one. The player makes them absolute.
            epochs=sorted({-self.number(-1, 4) for _ in range(self.number(1, 4))}),
            epsilon=self.epsilon(),
            buckets=self.number(1, 4),
            value=value,
            query_sensitivity=2 * value + self.number(0, 3),
            function=function,
            relevant=self.one([None, None, None, even_bucket, fails_on_blogs]),
            match_values=self.some(range(3), 0.15),
            side_query=flag,
        )

    def wrong_save(self) -> Save:
        good = self.save()
        changes: list[dict[str, Any]] = [
            {"histogram_index": 10**6},
            {"histogram_index": -1},
            {"match_value": 2**32},
            {"priority": -(2**31) - 1},
            {"lifetime_days": 0},
            {"lifetime_days": 1.5},
            {"histogram_index": 0.5},
            {"conversion_sites": ("a.example",) * 1000},
            {"conversion_callers": ("localhost",)},
        ]
        if self.number(0, 7) == 0:
            return replace(good, site="localhost", by_header=False)
        return replace(good, options=replace(good.options, **self.one(changes)), by_header=False)

    def wrong_convert(self) -> Convert:
        good = self.convert()
        both: list[dict[str, Any]] = [
            *({"epsilon": wrong} for wrong in (0.0, -1.0, math.nan, math.inf, 5000.0)),
            *({"value": wrong} for wrong in (0, -1, 10**15, 1.5, "1")),
            *({"match_values": wrong} for wrong in ([-1], [1] * 1000, [0.5], 1)),
        ]
        only: list[dict[str, Any]] = [
            *({"epochs": wrong} for wrong in ((), (0, 5000), (-0.25,), (0.5, 1.5))),
            *({"buckets": 0}, {"buckets": 10**6}, {"query_sensitivity": 1}, {"query_sensitivity": 2**41}),
        ]
        if isinstance(good.options, ConversionOptions):
            only = [
                *({"histogram_size": 0}, {"histogram_size": 10**6}, {"max_value": 1}, {"max_value": 2**32}),
                *({"credit": wrong} for wrong in ((), (0.0,), (math.nan,), (1.0,) * 1000)),
                *({"lookback_days": 0}, {"aggregation_service": "nobody"}, {"impression_sites": ("localhost",)}),
            ]
        return replace(good, options=replace(good.options, **self.one([*both, *only])), by_header=False)


class Player:
    """Plays a timeline on a device, with the auditor beside it."""

    def __init__(
        self,
        store: Store,
        case: Case,
        make: Callable[..., PlainDevice] = Device,
        *,
        reopened: Callable[[Store, int], Store] = lambda store, _: store,
    ) -> None:
        self._store, self._case, self._make, self._reopened = store, case, make, reopened
        self._now = START + 5 * WEEK
        self._taken: set[int] = set()
        self._waits = 0
        self._start_device()
        self._auditor = Auditor(case.limits, self._device.calendar().start)

    @property
    def store(self) -> Store:
        """The store as it was last opened."""
        return self._store

    def _start_device(self) -> None:
        coins = DeviceCoins(lambda: 0.25, lambda: 0.5)
        self._device = self._make(
            self._store, PlainSeal(), clock=lambda: self._now, limits=self._case.limits, coins=coins
        )

    def play(self) -> None:
        for happening in self._case.timeline:
            self._tick()
            self._happen(happening)
            self._auditor.check_at_rest(self._device.overview())

    def _tick(self) -> None:
        """No two happenings share a second: which of two ads came first would be anyone's guess."""
        self._now += 1
        while self._now in self._taken:
            self._now += 1
        self._taken.add(self._now)

    def _happen(self, happening: Happening) -> None:
        auditor, device, now = self._auditor, self._device, self._now
        match happening:
            case Wait(seconds):
                self._now = max(START, now + seconds)
                self._waits += 1
            case Save():
                self._save(happening)
                caller = happening.caller or happening.site
                auditor.save(now, happening.site, caller, happening.options, self._action(happening))
            case Convert():
                self._convert(happening)
            case Wrong(call):
                self._refuse(call)
            case ClearSite(site):
                device.clear_impressions_for_site(site)
                auditor.clear_site(site)
            case ClearHistory(sites, forget):
                device.clear_browsing_history(sites, forget_visits=forget)
                auditor.forget(now, frozenset(sites)) if forget else auditor.empty(now, frozenset(sites))
            case Switch(on):
                device.enable() if on else device.disable()
                auditor.on = on
            case Restart():
                self._store = self._reopened(self._store, now)
                self._start_device()

    def _action(self, happening: Save | Convert) -> str | None:
        """A user's action is over when the clock moves; no store promises to keep it for weeks."""
        return None if self._case.limits.sites_per_action is None else f"{happening.action}, wait {self._waits}"

    def _save(self, save: Save) -> None:
        options = parse_save_impression(save_header(save.options)) if save.by_header else save.options
        self._device.save_impression(save.site, options, intermediary=save.caller, action=self._action(save))

    def _convert(self, convert: Convert) -> None:
        options = self._absolute(convert.options)
        caller = convert.caller or convert.site
        if isinstance(options, ConversionOptions):
            asked = by_standard(self._auditor, self._now, convert.site, caller, options)
            if convert.by_header:
                options = parse_measure_conversion(measure_header(options), "https://shop.example/").options
        else:
            asked = by_paper(self._auditor, convert.site, caller, options)
        action = self._action(convert)
        report = self._device.measure_conversion(convert.site, options, intermediary=convert.caller, action=action)
        self._auditor.measure(self._now, asked, action, report, self._device.overview())

    def _absolute(self, options: ConversionOptions | AttributionRequest) -> ConversionOptions | AttributionRequest:
        if isinstance(options, ConversionOptions):
            return options
        current = self._auditor.week(self._now)
        return replace(options, epochs=[current + week for week in options.epochs])

    def _refuse(self, call: Save | Convert) -> None:
        before = len(self._device.reports())
        try:
            if isinstance(call, Save):
                self._save(call)
            else:
                options = self._absolute(call.options)
                self._device.measure_conversion(call.site, options, intermediary=call.caller, action=self._action(call))
        except TrefoilError:
            if len(self._device.reports()) != before:
                raise Disagreement("a refused call was logged") from None
        else:
            raise Disagreement("a wrong call was not refused")


def save_header(options: ImpressionOptions) -> str:
    """The same options as a Save-Impression header."""
    members = [f"histogram-index={options.histogram_index}", f"match-value={options.match_value}"]
    members += [f"lifetime-days={options.lifetime_days}", f"priority={options.priority}", "later-version=?1"]
    lists = {"conversion-sites": options.conversion_sites, "conversion-callers": options.conversion_callers}
    return ", ".join([*members, *(f"{name}={_strings(sites)}" for name, sites in lists.items())])


def measure_header(options: ConversionOptions) -> str:
    """The same options as a Measure-Conversion header."""
    members = [f'aggregation-service="{options.aggregation_service}"', f"histogram-size={options.histogram_size}"]
    members.append(f"epsilon={options.epsilon:.3f}")
    members += [f"value={options.value}", f"max-value={options.max_value}", 'report-url="/reports"']
    members += [f"kappa={options.kappa}"] if options.kappa else []
    members += [f"credit=({' '.join(str(share) for share in options.credit)})"]
    members += [f"match-values=({' '.join(map(str, options.match_values))})"]
    lists = {"impression-sites": options.impression_sites, "impression-callers": options.impression_callers}
    members += [f"{name}={_strings(sites)}" for name, sites in lists.items()]
    if options.lookback_days is not None:
        members.append(f"lookback-days={options.lookback_days}")
    return ", ".join(members)


def _strings(names: Sequence[str]) -> str:
    return "(" + " ".join(f'"{name}"' for name in names) + ")"


def cases(first_seed: int) -> Iterator[Case]:
    """One case after another, each from its own seed."""
    seed = first_seed
    while True:
        yield Draw(seed).case(seed)
        seed += 1


Runner = Callable[[Case], None]


def disagreement(run: Runner, case: Case) -> str | None:
    """What the auditor says about a case, or that a call which it expected to work raised; None if all is well."""
    try:
        run(case)
    except Disagreement as found:
        return str(found)
    except TrefoilError as error:
        return f"{type(error).__name__}: {error}"
    return None


def shortest(run: Runner, case: Case) -> Case:
    """Take happenings away, one at a time, for as long as what is left still fails."""
    position = len(case.timeline) - 1
    while position >= 0:
        fewer = replace(case, timeline=(*case.timeline[:position], *case.timeline[position + 1 :]))
        if disagreement(run, fewer) is not None:
            case = fewer
        position -= 1
    return case
