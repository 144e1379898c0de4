"""What each guarantee allows in the worst case, and how much of it a clever querier takes: exact games on real devices.

Every game is between two databases that the guarantee calls neighbours. What the querier knows anyway (its own events,
and those of whoever it works with) is in both. `worst_loss` tries every adaptive sequence of questions; its value is
the most that any of them can learn, in ε. A bound that a game reaches is tight: no smaller promise would be true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from rich.table import Table

from benchmarks.experiments.small_worlds import (
    START,
    WEEK,
    Event,
    SmallWorld,
    TwoDevices,
    WorldQuery,
    query,
    w3c,
    worst_loss,
)
from benchmarks.experiments.tables import plain_table
from device.attribution import LastTouch
from device.conversion import AttributionRequest, ConversionOptions
from device.impression import ImpressionOptions
from device.limits import DeviceLimits, OwnSite
from device.privacy_filter import FilterKind
from device.side_query import SideQuery
from protocol.epsilon import MICROS

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
        """Whether no attack found more than was promised."""
        return self.reached <= self.bound

    def as_json(self) -> dict[str, object]:
        """The promise as it is written out."""
        return {
            "situation": self.situation,
            "source": self.source,
            "bound": float(self.bound) / MICROS,
            "reached": float(self.reached) / MICROS,
        }


def measure_guarantees() -> list[Guarantee]:
    """Every promise of the README's table about what sites learn."""
    return [
        one_site(),
        own_impressions(OwnSite.COUNTED),
        own_impressions(OwnSite.CHARGED),
        side_query(),
        with_a_publisher([SHOP]),
        with_a_publisher([SHOP, STORE]),
        all_sites(with_publisher=False),
        all_sites(with_publisher=True),
        two_devices(),
        *(drained_limit(crowd) for crowd in CROWDS),
    ]


def one_site() -> Guarantee:
    """Theorem 1, case 1: a site that is never shown its own events learns its budget and no more."""
    events = (Event(0, 0, site=NEWS), Event(1, 1, site=NEWS))
    menu = [query(_paper((0, 1))), query(_paper((0,), sensitivity=1)), query(_paper((1,), sensitivity=1))]
    pairs = [(events, events[1:]), (events, events[:1]), (events[:1], ())]
    reached = max(
        worst_loss(SmallWorld(having, LIMITS), SmallWorld(lacking, LIMITS), menu) for having, lacking in pairs
    )
    return Guarantee("one site, which is not shown its own ads", "Theorem 1, case 1", Fraction(BUDGET), reached)


def own_impressions(rule: OwnSite) -> Guarantee:
    """Theorem 1, case 2: the site's own ad is in both databases; another's ad, which is private to it, in one.

    First it asks about the other's ad, which only one database can pay for; then about its own, which only the other
    database still can. Where own ads are free, neither database pays for them, and the case is the first again.
    """
    limits = replace(LIMITS, own_site=rule)
    own, private = Event(1, 0, site=SHOP, match_value=1), Event(1, 1, site=NEWS, match_value=2)
    # Alone, and together over one week and two: there the other's ad moves what the own one had.
    menu = [query(_standard([match])) for match in (1, 2)]
    menu += [query(_standard([1, 2])), query(_standard([1, 2], lookback_days=13))]
    having, lacking = SmallWorld((own, private), limits), SmallWorld((own,), limits)
    reached = max(worst_loss(having, lacking, menu), worst_loss(lacking, having, menu))
    situation = "one site, with ads on its own pages"
    if rule is OwnSite.CHARGED:
        return Guarantee(f"{situation} (own_site=CHARGED)", "Theorem 1, case 1", Fraction(BUDGET), reached)
    return Guarantee(situation, "Theorem 1, case 2", Fraction(2 * BUDGET), reached)


def side_query() -> Guarantee:
    """The flag says that a week could not pay. The week with data runs out first, the empty one keeps paying κ."""
    events = (Event(0, 0, site=NEWS),)
    asked = replace(_paper((0,), sensitivity=1), side_query=SideQuery(1))
    menu = [query(asked), query(_paper((0,), sensitivity=1))]
    reached = worst_loss(SmallWorld(events, LIMITS), SmallWorld((), LIMITS), menu)
    return Guarantee("one site, with the bias side query", "Theorem 1, case 2", Fraction(2 * BUDGET), reached)


def with_a_publisher(shops: Sequence[str]) -> Guarantee:
    """Theorem 10: the coalition knows what the publisher showed, so it is in both databases. No device can tell."""
    having, lacking = (SmallWorld(events, LIMITS) for events in _coalition())
    situation = f"{len(shops)} {'shop' if len(shops) == 1 else 'shops'} together with a publisher"
    reached = worst_loss(having, lacking, _about_each(shops))
    return Guarantee(situation, "Theorem 10", Fraction(2 * BUDGET * len(shops)), reached)


def all_sites(*, with_publisher: bool) -> Guarantee:
    """What no number of sites exceeds: the global filter, here small enough for three of them to meet it."""
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
    """An ad that a publisher knows of in both databases, and one that it does not know of in the first."""
    known, private = Event(1, 0, site=NEWS, match_value=1), Event(1, 1, site=BLOG, match_value=2)
    return (known, private), (known,)


def _about_each(shops: Sequence[str]) -> list[WorldQuery]:
    """Every shop may ask about either ad."""
    return [query(_paper((1,), sensitivity=1, match_values=[match]), site=shop) for shop in shops for match in (1, 2)]


def two_devices() -> Guarantee:
    """Theorem 2: are two conversions from one device, or has the person two? Each world spends a budget the other kept.

    In both worlds there are two ads and two conversions, A and B. Either all are on one device, or the second ad and
    conversion B are on another one.
    """
    first, second = Event(1, 0, site=NEWS, match_value=1), Event(1, 1, site=BLOG, match_value=2)
    one = TwoDevices(SmallWorld((first, second), LIMITS), SmallWorld((), LIMITS), moved=())
    two = TwoDevices(SmallWorld((first,), LIMITS), SmallWorld((second,), LIMITS), moved=("B",))
    menu = [
        query(_paper((1,), sensitivity=1, match_values=[match]), conversion=conversion)
        for conversion in "AB"
        for match in (1, 2)
    ]
    reached = max(worst_loss(one, two, menu), worst_loss(two, one, menu))
    return Guarantee("one device or two: linking a person", "Theorem 2", Fraction(3 * BUDGET), reached)


def drained_limit(crowd: int) -> Guarantee:
    """A site learns about a week that it never asks for, from a limit that others drained after they had asked.

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
    """What the chain saw of week 0, what our site has paid for that week, and what it saw of week 1."""

    chain_report: int
    we_paid: int
    our_report: int


def _chain(*, saw_ad: bool, drains: bool) -> _Looked:
    """One device, with the standard's limits, in one of the two databases."""
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
    """P(X ≥ threshold) for discrete Laplace noise of rate 1 and a threshold of 0 or 1."""
    return math.exp(-threshold) / (1 + math.exp(-1))


def _paper(
    epochs: Sequence[int], *, sensitivity: int = 2, epsilon: float = 0.5, match_values: Sequence[int] = ()
) -> AttributionRequest:
    """The paper's request for half of the budget: two buckets, value 1."""
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
    """The standard's call, about some kinds of ads in the last week or the last two."""
    return w3c(2, epsilon=1.0, lookback_days=lookback_days, match_values=match_values)


def guarantee_table(guarantees: Sequence[Guarantee]) -> Table:
    """The promises as a person reads them."""
    columns = ("who, and what they can do", "promised by", "ε allowed", "ε reached")
    table = plain_table("what sites can learn about one week of one device", columns, words=set(columns[:2]))
    for one in guarantees:
        numbers = (f"{float(one.bound) / MICROS:g}", f"{float(one.reached) / MICROS:.4g}")
        table.add_row(one.situation, one.source, *numbers)
    return table
