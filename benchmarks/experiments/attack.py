"""What sites can learn or destroy, alone or colluding, measured on real devices (as Big Bird studies).

Attacks: one person, one epoch, and colluding sites that each have a filter of their own.

- *learn*: all of them query the same publisher's impressions, and combine their answers;
- *destroy*: each brings its own publisher and drains the shared limits, so that an honest shop gets nothing.

Guarantees: exact games between two databases that the guarantee calls neighbours. Events that the querier knows anyway
(its own, and those of its colluders) are in both. `worst_loss` tries every adaptive sequence of queries; its value is
the most that any of them can learn, in ε. A bound that a game reaches is tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from rich.table import Table

from benchmarks.experiments.small_worlds import (
    START,
    WEEK,
    Event,
    Options,
    SmallWorld,
    TwoDevices,
    WorldQuery,
    query,
    w3c,
    worst_loss,
)
from benchmarks.results.columns import Columns, on_terminal
from device.attribution import LastTouch
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.events import ImpressionOptions
from device.limits import DeviceLimits, OwnSite
from device.report import PlainSeal
from device.request import SideQuery
from device.stores.memory_store import MemoryStore
from protocol.units import MICROS

BUDGET = MICROS
# One budget binds at a time; the others are those of the standard.
LIMITS = DeviceLimits(site_budget=BUDGET)
SHOP, STORE, NEWS, BLOG = "shop.example", "store.example", "news.example", "blog.example"
# How many people a site that measures a drained limit asks at once.
CROWDS = (1, 3, 10)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise: what its theorem allows and what the best attack reaches, both in micro-epsilons."""

    situation: str
    source: str
    bound: Fraction
    reached: Fraction

    @property
    def holds(self) -> bool:
        """Return whether no attack exceeded the bound."""
        return self.reached <= self.bound

    def as_json(self) -> dict[str, object]:
        return {
            "situation": self.situation,
            "source": self.source,
            "bound": float(self.bound) / MICROS,
            "reached": float(self.reached) / MICROS,
        }


def measure_guarantees() -> list[Guarantee]:
    """Measure every promise of the README's table about what sites learn."""
    return [
        one_site(),
        *(own_impressions(rule, by_frame=by_frame) for rule in OwnSite for by_frame in (False, True)),
        own_impressions(None, by_frame=True),
        side_query(),
        with_a_publisher([SHOP]),
        with_a_publisher([SHOP, STORE]),
        all_sites(with_publisher=False),
        all_sites(with_publisher=True),
        *(two_devices(rule, ads) for rule in (None, *OwnSite) for ads in Ads),
        two_devices_flagged(),
        *(drained_limit(crowd) for crowd in CROWDS),
    ]


def one_site() -> Guarantee:
    """Play Theorem 1, case 1: a site that is never shown its own events learns its budget and no more."""
    events = (Event(0, 0, site=NEWS), Event(1, 1, site=NEWS))
    menu = [query(_paper((0, 1))), query(_paper((0,), sensitivity=1)), query(_paper((1,), sensitivity=1))]
    pairs = [(events, events[1:]), (events, events[:1]), (events[:1], ())]
    reached = max(
        worst_loss(SmallWorld(having, LIMITS), SmallWorld(lacking, LIMITS), menu) for having, lacking in pairs
    )
    return Guarantee("one site, which is not shown its own ads", "Theorem 1, case 1", Fraction(BUDGET), reached)


def own_impressions(rule: OwnSite | None, *, by_frame: bool = False) -> Guarantee:
    """Play Theorem 1, case 2: the querying site's own ad is in both databases, an ad of another site in only one.

    The own ad was shown on the site's own page or, if `by_frame`, saved by its frame on another page. The site first
    asks about the other ad, which only one database can pay for; then about its own, which only the other still can.
    Where own ads are hidden, this is case 1. Without a `rule` the request is the paper's.
    """
    limits = LIMITS if rule is None else replace(LIMITS, own_site=rule)
    own = _ad(Ads.BY_FRAME if by_frame else Ads.ON_PAGES, 0)
    private = _ad(Ads.OF_OTHERS, 1)
    menu = [query(_about([match], rule)) for match in (1, 2)]
    # Together over one week and two, too: there the other's ad moves what the own one had.
    menu += [query(_about([1, 2], rule)), query(_about([1, 2], rule, weeks=2))]
    having, lacking = SmallWorld((own, private), limits), SmallWorld((own,), limits)
    reached = max(worst_loss(having, lacking, menu), worst_loss(lacking, having, menu))
    ads = "ads that its frames saved on others' pages" if by_frame else "ads on its own pages"
    situation = f"one site, with {ads}{_mode(rule)}"
    if rule is OwnSite.COUNTED:
        return Guarantee(situation, "Theorem 1, case 2", Fraction(2 * BUDGET), reached)
    return Guarantee(situation, "Theorem 1, case 1", Fraction(BUDGET), reached)


def side_query() -> Guarantee:
    """Play the side query's flag, which reports a week that could not pay: a week with data runs out first."""
    events = (Event(0, 0, site=NEWS),)
    flagged = replace(_paper((0,), sensitivity=1), side_query=SideQuery(1))
    menu = [query(flagged), query(_paper((0,), sensitivity=1))]
    reached = worst_loss(SmallWorld(events, LIMITS), SmallWorld((), LIMITS), menu)
    return Guarantee("one site, with the bias side query", "Theorem 1, case 2", Fraction(2 * BUDGET), reached)


def with_a_publisher(shops: Sequence[str]) -> Guarantee:
    """Play Theorem 10: the coalition knows what its publisher showed, so that ad is in both databases."""
    having, lacking = (SmallWorld(events, LIMITS) for events in _coalition())
    situation = f"{len(shops)} {'shop' if len(shops) == 1 else 'shops'} together with a publisher"
    reached = worst_loss(having, lacking, _about_each(shops))
    return Guarantee(situation, "Theorem 10", Fraction(2 * BUDGET * len(shops)), reached)


def all_sites(*, with_publisher: bool) -> Guarantee:
    """Play against the global filter, here small enough for three sites to reach it."""
    limits = replace(LIMITS, global_budget=BUDGET * 3 // 2)
    watched = (FilterKind.SITE, FilterKind.GLOBAL)
    databases = _coalition() if with_publisher else (_coalition()[0][1:], ())
    having, lacking = (SmallWorld(events, limits, watched=watched) for events in databases)
    reached = worst_loss(having, lacking, _about_each(["a.example", "b.example", "c.example"]))
    situation = "3 shops, whatever their budgets, global budget 1.5"
    if with_publisher:
        return Guarantee(f"{situation}, and a publisher", "Theorem 10, global", Fraction(3 * BUDGET), reached)
    return Guarantee(situation, "Theorem 1, global", Fraction(BUDGET * 3, 2), reached)


def _coalition() -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Return two databases: both have an ad that the publisher knows of, the first also one that it does not."""
    public, private = Event(1, 0, site=NEWS, match_value=1), Event(1, 1, site=BLOG, match_value=2)
    return (public, private), (public,)


def _about_each(shops: Sequence[str]) -> list[WorldQuery]:
    """Let every shop ask about either ad."""
    return [query(_paper((1,), sensitivity=1, match_values=[match]), site=shop) for shop in shops for match in (1, 2)]


class Ads(Enum):
    """Whose ads a game is about: private to the site that asks, or known to it."""

    OF_OTHERS = "of others"
    ON_PAGES = "on its own pages"
    BY_FRAME = "saved by its own frames"


def _ad(ads: Ads, number: int) -> Event:
    """Return the ad for bucket 0 or 1, in week 1."""
    site = SHOP if ads is Ads.ON_PAGES else (NEWS, BLOG)[number]
    caller = SHOP if ads is Ads.BY_FRAME else None
    return Event(1, number, site=site, match_value=number + 1, caller=caller)


def two_devices(rule: OwnSite | None, ads: Ads) -> Guarantee:
    """Play Theorem 2: are two conversions from one device or two? Each world spends a budget that the other kept.

    In both worlds there are two ads and two conversions, A and B. Either all are on one device, or the second ad and
    conversion B are on another one. Where the ads are hidden there is nothing to move, and nothing is learnt
    (Theorem 9). Without a `rule` the request is the paper's, which hides own ads always.
    """
    limits = LIMITS if rule is None else replace(LIMITS, own_site=rule)
    reached = _one_or_two(ads, limits, [_about([match], rule) for match in (1, 2)])
    situation = f"one device or two, by ads {ads.value}{_mode(rule)}"
    if ads is Ads.OF_OTHERS or rule is OwnSite.COUNTED:
        return Guarantee(situation, "Theorem 2", Fraction(3 * BUDGET), reached)
    return Guarantee(situation, "Theorem 9", Fraction(0), reached)


def two_devices_flagged() -> Guarantee:
    """Play the same with the bias side query. Its flag shows what a device has left, with ads or without."""
    plain = [_paper((1,), sensitivity=1, match_values=[match]) for match in (1, 2)]
    flagged = [replace(each, side_query=SideQuery(1)) for each in plain]
    reached = _one_or_two(Ads.OF_OTHERS, LIMITS, plain + flagged)
    return Guarantee("one device or two, with the bias side query", "Theorem 2", Fraction(3 * BUDGET), reached)


def _one_or_two(ads: Ads, limits: DeviceLimits, requests: Sequence[Options]) -> Fraction:
    first, second = _ad(ads, 0), _ad(ads, 1)
    one = TwoDevices(SmallWorld((first, second), limits), SmallWorld((), limits), moved=())
    two = TwoDevices(SmallWorld((first,), limits), SmallWorld((second,), limits), moved=("B",))
    menu = [query(options, conversion=conversion) for conversion in "AB" for options in requests]
    return max(worst_loss(one, two, menu), worst_loss(two, one, menu))


def _mode(rule: OwnSite | None) -> str:
    return " (the paper's request)" if rule is None else f" (own_site={rule.name})"


def _about(match_values: Sequence[int], rule: OwnSite | None, weeks: int = 1) -> Options:
    """Ask about some kinds of ads in the last week or two: by the standard's call, or without `rule` by the paper's."""
    if rule is not None:
        return _standard(match_values, lookback_days=7 * weeks - 1)
    return _paper((0, 1)[-weeks:], sensitivity=weeks, match_values=match_values)


def drained_limit(crowd: int) -> Guarantee:
    """Play a site that learns about a week it never queries, from a shared limit that other sites drained.

    A chain of four shops looks at week 0: was its ad seen? If the noisy answer says so, the chain measures its campaign
    on everybody in week 1, and uses up the quota of a publisher. Our site counts that publisher's ads in week 1 on
    `crowd` devices, where it finds all of them or none. Its own filter for week 0 has paid nothing in either database,
    and nothing is all that a guarantee of its own would let it learn.
    """
    having, lacking = _chain(saw_ad=True, drains=True), _chain(saw_ad=False, drains=False)
    # Noise of rate 1 on both answers. The chain drains when its own says 1 or more.
    drained = [_at_least(1 - looked.chain_report) for looked in (having, lacking)]
    # Answers far below tell best that the limit was drained; this much less likely they come from one that was not.
    otherwise = math.exp(-crowd * (lacking.our_report - having.our_report))
    likely = [share + (1 - share) * otherwise for share in drained]
    situation = f"a limit that others drained, seen on {crowd} {'device' if crowd == 1 else 'devices'}"
    paid = max(having.we_paid, lacking.we_paid)
    return Guarantee(situation, "none (Big Bird)", Fraction(paid), Fraction(math.log(likely[0] / likely[1])) * MICROS)


class _Looked(NamedTuple):
    """The chain's view of week 0, the payment of our site for that week, and its view of week 1."""

    chain_report: int
    we_paid: int
    our_report: int


def _chain(*, saw_ad: bool, drains: bool) -> _Looked:
    """Run the chain and our site on one device with the standard's limits, in one of the two databases."""
    world = SmallWorld((Event(0, 0, site=NEWS),) if saw_ad else (), DeviceLimits())
    everything = replace(_paper((0,), sensitivity=1), epsilon=1.0, buckets=1)
    chain = [f"chain{number}.example" for number in range(4)]
    (chain_report,) = world.device.measure(chain[0], everything)
    world.clock.now = START + WEEK + 1
    world.device.save_impression(NEWS, ImpressionOptions(0))
    for shop in chain if drains else []:
        world.device.measure(shop, replace(everything, epochs=(1,)))
    (our_report,) = world.device.measure(SHOP, replace(everything, epochs=(1,)))
    paid = [one.spent for one in world.device.budget() if (one.kind, one.site, one.epoch) == (FilterKind.SITE, SHOP, 0)]
    return _Looked(chain_report, sum(paid), our_report)


def _at_least(threshold: int) -> float:
    """Return P(X ≥ threshold) for discrete Laplace noise of rate 1 and a threshold of 0 or 1."""
    return math.exp(-threshold) / (1 + math.exp(-1))


def _paper(
    epochs: Sequence[int], *, sensitivity: int = 2, epsilon: float = 0.5, match_values: Sequence[int] = ()
) -> AttributionRequest:
    """Return the paper's request for half of the budget: two buckets, value 1."""
    return AttributionRequest(
        epochs=epochs,
        epsilon=epsilon,
        buckets=2,
        value=1,
        query_sensitivity=sensitivity,
        function=LastTouch(),
        match_values=match_values,
    )


def _standard(match_values: Sequence[int], lookback_days: int = 6) -> ConversionOptions:
    """Return the standard's call, about some kinds of ads in the last week or the last two."""
    return w3c(2, epsilon=1.0, lookback_days=lookback_days, match_values=match_values)


GUARANTEES: Columns[Guarantee] = {
    "who, and what they can do": lambda one: one.situation,
    "promised by": lambda one: one.source,
    "ε allowed": lambda one: f"{float(one.bound) / MICROS:g}",
    "ε reached": lambda one: f"{float(one.reached) / MICROS:.4g}",
}


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
    """The result of `sites` colluding sites against one defence. ε in micros."""

    defence: Defence
    sites: int
    learned: int
    drained: int
    honest_report: int

    @property
    def best_guess(self) -> float:
        """Return the colluders' best chance to guess whether an impression existed: e^ε/(1 + e^ε), against 0.5."""
        return 1 / (1 + math.exp(-min(self.learned / MICROS, 700)))

    def as_json(self) -> dict[str, object]:
        return {
            "defence": self.defence.value,
            "sites": self.sites,
            "epsilon_learned": self.learned / MICROS,
            "best_guess": self.best_guess,
            "epsilon_drained": self.drained / MICROS,
            "honest_report_survives": self.honest_report > 0,
        }


def measure(defences: Sequence[Defence] = tuple(Defence), sites: Sequence[int] = SITES) -> list[Attack]:
    """Run every attack against every defence, each on a fresh device."""
    return [_attack(defence, count) for defence in defences for count in sites]


def _attack(defence: Defence, count: int) -> Attack:
    learned, _ = _collude(defence, count, own_publishers=False)
    drained, honest = _collude(defence, count, own_publishers=True)
    return Attack(defence, count, learned, drained, honest)


def _collude(defence: Defence, count: int, *, own_publishers: bool) -> tuple[int, int]:
    """Lead one user action through all colluding sites; then let the person buy at an honest shop.

    Return what the colluders' own filters paid, which bounds what their reports can say, and the honest report.
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
    """Return a request for the current epoch at full price: one bucket, value 1, sensitivity 1."""
    return AttributionRequest(epochs=[0], epsilon=epsilon, buckets=1, value=1, query_sensitivity=1)


def _paid_by_colluders(device: Device[tuple[int, ...]]) -> int:
    return sum(
        state.spent for state in device.budget() if state.kind is FilterKind.SITE and state.site.startswith("colluder")
    )


ATTACKS: Columns[Attack] = {
    "limits": lambda attack: attack.defence.value,
    "sites": lambda attack: str(attack.sites),
    "ε learned": lambda attack: f"{attack.learned / MICROS:g}",
    "best guess": lambda attack: f"{attack.best_guess:.4f}",
    "ε drained": lambda attack: f"{attack.drained / MICROS:g}",
    "honest shop measured": lambda attack: "yes" if attack.honest_report else "no",
}


def attack_tables(guarantees: Sequence[Guarantee], attacks: Sequence[Attack]) -> list[Table]:
    title, words = "what sites can learn about one week of one device", {"who, and what they can do", "promised by"}
    colluding = on_terminal("colluding sites against one person, one epoch", ATTACKS, attacks, words={"limits"})
    return [on_terminal(title, GUARANTEES, guarantees, words), colluding]
