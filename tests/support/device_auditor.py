"""An auditor: what a device may do and must charge, worked out a second time from the paper and the standard.

It shares nothing with the engine but the words in which calls are made. It knows what was shown and asked, keeps an
account of its own of every filter, and says after each call whether the report and every budget's change are right.
Charges may be one micro-epsilon above the exact ceiling, as the standard computes them in doubles; never below.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from device.attribution import Award, EqualCredit, FirstTouch, LastNSlots, LastNTouch, LastTouch
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.events import Impression, ImpressionOptions
from device.limits import DeviceLimits
from device.overview import Overview
from device.request import SideQueryForm
from device.stores.storage import EpochOutcome

DAY = 86_400
MICROS = 1_000_000
Account = tuple[FilterKind, str, int]
OURS = (LastTouch, FirstTouch, EqualCredit, LastNTouch, LastNSlots)


class Disagreement(AssertionError):
    """The device did what the auditor says it must not, or did not what it must."""


@dataclass(frozen=True)
class Ad:
    """An impression as the auditor remembers it; empty lists mean anyone."""

    time: int
    site: str
    caller: str
    bucket: int
    match_value: int
    priority: int
    expires: int
    sites: frozenset[str]
    callers: frozenset[str]

    def shown(self) -> Impression:
        """As a custom function sees it."""
        return Impression(self.time, self.site, self.caller, self.bucket, self.match_value, self.priority)


@dataclass(frozen=True)
class Asked:
    """One conversion in plain terms, whichever call it came by."""

    site: str
    caller: str
    weeks: tuple[int, ...]
    since: int
    epsilon: float
    noise: int  # Δ, what the noise is scaled to
    most: int  # how far one week can move the report
    value: int
    buckets: int
    share: Callable[[Sequence[Ad]], list[int]]
    kappa: int = 0
    last_touch: bool = False
    match_values: frozenset[int] = frozenset()
    from_sites: frozenset[str] = frozenset()
    from_callers: frozenset[str] = frozenset()
    own_hidden: bool = False
    custom: bool = False
    test: Callable[[Ad], bool] | None = None

    def least_and_most(self, moved: int) -> tuple[int, int]:
        """What must be charged for moving the report by so much, and what may be."""
        promised = math.floor(Fraction(self.epsilon) * MICROS)
        exact = math.ceil(Fraction(promised * moved, self.noise))
        return exact, math.ceil(Fraction(self.epsilon) * MICROS * moved / self.noise) + 1 if moved else exact

    def by_doubles(self, moved: int) -> int:
        """What the standard's own arithmetic charges, to the micro-epsilon, where no account shows what was charged."""
        return max(math.ceil(moved / (self.noise / self.epsilon) * MICROS), self.least_and_most(moved)[0])


@dataclass
class Auditor:
    """The account of one device. `closed` is the last week that nothing may be paid from any more."""

    limits: DeviceLimits
    start: int
    ads: list[Ad] = field(default_factory=list)
    paid: Counter[Account] = field(default_factory=Counter)
    emptied: set[Account] = field(default_factory=set)
    acted: dict[tuple[str, int, str], list[str]] = field(default_factory=dict)
    closed: float = -math.inf
    # The latest time of a measurement: what had expired by then may be gone.
    latest: float = -math.inf
    on: bool = True

    def week(self, moment: int) -> int:
        return (moment - self.start) // self.limits.epoch_length

    # What sites and the person do

    def save(self, now: int, site: str, caller: str, options: ImpressionOptions, action: str | None) -> None:
        """A week loses its own oldest ads: of a site with its share, of one too many, of the site that has most."""
        if not self.on or not self._admitted("save", now, action, site):
            return
        lifetime = min(options.lifetime_days, self.limits.max_lookback_days) * DAY
        lists = frozenset(options.conversion_sites), frozenset(options.conversion_callers)
        self._make_room([ad for ad in self.ads if self.week(ad.time) == self.week(now)], site)
        named = (options.histogram_index, options.match_value, options.priority)
        self.ads.append(Ad(now, site, caller, *named, now + lifetime, *lists))

    def _make_room(self, week: Sequence[Ad], site: str) -> None:
        share = Counter(ad.site for ad in week)
        if share[site] >= self.limits.max_impressions_per_site:
            loser = site
        elif site not in share and len(share) >= self.limits.max_sites_per_epoch:
            last = {other: max(ad.time for ad in week if ad.site == other) for other in share}
            gone = min(share, key=lambda other: (last[other], other))
            self.ads = [ad for ad in self.ads if ad not in week or ad.site != gone]
            return
        elif len(week) >= self.limits.max_impressions_per_epoch:
            most = max(share.values())
            first = min((ad for ad in week if share[ad.site] == most), key=lambda ad: (ad.time, ad.site))
            loser = site if share[site] == most else first.site
        else:
            return
        oldest = min((ad for ad in week if ad.site == loser), key=lambda ad: ad.time)
        self.ads = [ad for ad in self.ads if ad is not oldest]

    def clear_site(self, site: str) -> None:
        """What the site saved goes; ads that named it lose its name, and go if that was the only one."""
        kept = []
        for ad in self.ads:
            stripped = replace(ad, sites=ad.sites - {site}, callers=ad.callers - {site})
            named_nobody_else = (ad.sites and not stripped.sites) or (ad.callers and not stripped.callers)
            if ad.caller != site and not named_nobody_else:
                kept.append(stripped)
        self.ads = kept

    def forget(self, now: int, sites: frozenset[str]) -> None:
        """Every week up to now, and up to the last that paid, is closed to everyone."""
        last_paid = max((week for (_, _, week), amount in self.paid.items() if amount), default=self.week(now))
        self.closed = max(self.closed, self.week(now), last_paid)
        self.ads = [ad for ad in self.ads if sites and ad.site not in sites]
        self.acted = {
            action: [one for one in acted if sites and one not in sites] for action, acted in self.acted.items()
        }
        for account in [one for one in self.paid if not sites or one[1] in sites]:
            del self.paid[account]
            self.emptied.discard(account)

    def empty(self, now: int, sites: frozenset[str]) -> None:
        """The sites' own budgets for every week in reach are permanently gone."""
        for week in range(self.week(now - self.limits.max_lookback_days * DAY), self.week(now) + 1):
            for site in sites:
                self.emptied.add((FilterKind.SITE, site, week))
                self.paid[FilterKind.SITE, site, week] = self.limits.site_budget

    # What a conversion must give

    def measure(self, now: int, asked: Asked, action: str | None, report: Sequence[int], seen: Overview) -> None:
        """Check the report, every budget and the log after one conversion, and keep the account."""
        flag = 1 if asked.kappa else 0
        self.latest = max(self.latest, now)
        if not self.on:
            # Weeks out of reach are closed all the same.
            self._check_barrier(seen)
        if not self.on or not self._admitted("measure", now, action, asked.site):
            self._require(
                tuple(report) == (0,) * (asked.buckets + flag), "a device that does not measure reports nothing"
            )
            self._compare(seen, {})
            self._check_log(now, asked, seen, dict.fromkeys(asked.weeks, EpochOutcome.NOT_MEASURED))
            return
        self.closed = max(self.closed, self.week(now - self.limits.max_lookback_days * DAY) - 1)
        usable = [week for week in asked.weeks if self.closed < week <= self.week(now)]
        found = {week: self._relevant(now, asked, week) for week in usable}
        owed = self._owed(asked, found)
        paying = {week for week in usable if self._pays(week, owed[week], seen)}
        # The querier's own functions are shown only what could pay for the worst.
        candidates = {week: self._candidates(now, asked, week) for week in usable if asked.custom}
        hidden = {week for week, ads in candidates.items() if ads and not self._able(asked, week, ads)}
        paying -= hidden
        for week in hidden:
            found[week] = found[week] or candidates[week]
        kept = [ad for week in sorted(paying) for ad in found[week]]
        expected = asked.share(kept) if kept else [0] * asked.buckets
        self._require(list(report[: asked.buckets]) == expected, f"the report must be {expected}")
        if asked.kappa:
            self._check_flag(asked, paying, found, report)
        self._compare(seen, {account: bounds for week in paying for account, bounds in owed[week].items()})
        self._check_log(now, asked, seen, self._outcomes(asked, usable, paying, found))

    def _candidates(self, now: int, asked: Asked, week: int) -> list[Ad]:
        """What the querier's own test would be shown."""
        return self._relevant(now, replace(asked, test=None), week)

    def _able(self, asked: Asked, week: int, candidates: Sequence[Ad]) -> bool:
        """Whether the week could pay for the worst, which is that the report is full and every candidate relevant."""
        most = (asked.value if len(asked.weeks) == 1 else asked.most) + asked.kappa
        charges = {(FilterKind.SITE, asked.site, week): most, (FilterKind.GLOBAL, "", week): asked.most + asked.kappa}
        charges |= {(FilterKind.IMPRESSION_SITE, ad.site, week): asked.most + asked.kappa for ad in candidates}
        return not any(
            account in self.emptied or self.paid[account] + asked.by_doubles(moved) > self._capacity(account)
            for account, moved in charges.items()
        )

    def _relevant(self, now: int, asked: Asked, week: int) -> list[Ad]:
        def fits(ad: Ad) -> bool:
            return (
                self.week(ad.time) == week
                and ad.time >= asked.since
                and now <= ad.expires
                and (not ad.sites or asked.site in ad.sites)
                and (not ad.callers or asked.caller in ad.callers)
                and (not asked.match_values or ad.match_value in asked.match_values)
                and (not asked.from_sites or ad.site in asked.from_sites)
                and (not asked.from_callers or ad.caller in asked.from_callers)
                and not (asked.own_hidden and {ad.site, ad.caller} & {asked.site, asked.caller})
                and (asked.test is None or asked.test(ad))
            )

        return sorted((ad for ad in self.ads if fits(ad)), key=lambda ad: ad.time)

    def _owed(self, asked: Asked, found: Mapping[int, Sequence[Ad]]) -> dict[int, dict[Account, tuple[int, int]]]:
        """Theorem 4: nothing without relevant ads; the report's sum if one week was asked for; else all it can move.

        Limits that sites share pay all it can move in either case; a flag costs κ on top, with ads or without. Without
        ads a quota of its own pays for it.
        """
        owed: dict[int, dict[Account, tuple[int, int]]] = {}
        for week, ads in found.items():
            moved = asked.most if ads else 0
            own = sum(asked.share(ads)) if ads and len(asked.weeks) == 1 else moved
            charges = {
                (FilterKind.SITE, asked.site, week): asked.least_and_most(own + asked.kappa),
                (FilterKind.GLOBAL, "", week): asked.least_and_most(moved + asked.kappa),
            }
            if asked.kappa and not ads:
                charges[FilterKind.SIDE_QUERY, "", week] = asked.least_and_most(asked.kappa)
            for site in {ad.site for ad in ads}:
                charges[FilterKind.IMPRESSION_SITE, site, week] = asked.least_and_most(moved + asked.kappa)
            owed[week] = charges
        return owed

    def _pays(self, week: int, owed: Mapping[Account, tuple[int, int]], seen: Overview) -> bool:
        """Whether the week must pay. Where a micro-epsilon of rounding decides, whether it did."""
        if any(account in self.emptied for account in owed):
            return False
        left = {account: self._capacity(account) - self.paid[account] for account in owed}
        if any(least > left[account] for account, (least, _) in owed.items()):
            return False
        if all(most <= left[account] for account, (_, most) in owed.items()):
            return True
        now = spent(seen)
        return any(now[account] != self.paid[account] for account in owed)

    def _check_flag(
        self, asked: Asked, paying: set[int], found: Mapping[int, Sequence[Ad]], report: Sequence[int]
    ) -> None:
        """κ if an open week could not pay; for last touch, if one after the last touch could not."""
        dropped = [week for week in found if week not in paying]
        if asked.last_touch:
            touched = max((week for week in paying if found[week]), default=-math.inf)
            dropped = [week for week in dropped if week > touched]
        expected = asked.kappa if dropped else 0
        self._require(report[asked.buckets] == expected, f"the flag must be {expected}")

    # What the person's own page must show

    def _compare(self, seen: Overview, owed: Mapping[Account, tuple[int, int]]) -> None:
        """Every open week's account is what it was, and what it owed on top."""
        now = spent(seen)
        for account in {*now, *self.paid, *owed}:
            if account[2] <= self.closed:
                self._require(now[account] <= self.paid[account], f"{account} is closed, and paid")
                continue
            least, most = owed.get(account, (0, 0))
            change = now[account] - self.paid[account]
            self._require(least <= change <= most, f"{account} must pay {least} to {most}, and paid {change}")
            self._require(now[account] <= self._capacity(account), f"{account} is overdrawn")
            self.paid[account] = now[account]

    def check_at_rest(self, seen: Overview) -> None:
        """After anything that happens: no account has changed since, and every ad that can be reached is there."""
        self._check_barrier(seen)
        self._compare(seen, {})
        self._require(seen.enabled == self.on, "measurement is on or off, as the person chose")
        kept = Counter(self._in_words(seen))
        missing = [ad for ad in self.ads if kept[ad] == 0]
        strange = kept - Counter(self.ads)
        gone = (self.week(ad.time) <= self.closed or ad.expires < self.latest for ad in missing)
        self._require(all(gone), f"{missing} must be kept")
        self._require(not strange, f"{list(strange)} must be gone")
        # What is closed may be forgotten, and is then gone for good.
        self.ads = [ad for ad in self.ads if ad not in missing]

    def _check_barrier(self, seen: Overview) -> None:
        """All that must be closed is, and nothing that can still be reached."""
        shown = -math.inf if seen.barrier is None else self.week(seen.barrier)
        self._require(shown >= self.closed, f"week {self.closed} must be closed")
        out_of_reach = self.week(seen.now - self.limits.max_lookback_days * DAY) - 1
        self._require(shown <= max(self.closed, out_of_reach), f"week {shown} is closed for no reason")
        self.closed = shown

    def _in_words(self, seen: Overview) -> list[Ad]:
        return [
            Ad(*saved.impression, saved.expires, saved.conversion_sites, saved.conversion_callers)
            for saved in seen.impressions
        ]

    def _outcomes(
        self, asked: Asked, usable: Sequence[int], paying: set[int], found: Mapping[int, Sequence[Ad]]
    ) -> dict[int, EpochOutcome]:
        outcomes = dict.fromkeys(asked.weeks, EpochOutcome.CLOSED)
        for week in usable:
            owes = bool(found[week] or asked.kappa)
            # A week without ads may have paid for the flag: the line says what, and that nothing was found.
            paid = EpochOutcome.PAID if found[week] else EpochOutcome.NOTHING_FOUND
            outcomes[week] = paid if week in paying or not owes else EpochOutcome.OUT_OF_BUDGET
        return outcomes

    def _check_log(self, now: int, asked: Asked, seen: Overview, outcomes: Mapping[int, EpochOutcome]) -> None:
        """The last line of the log is this request, with what became of its latest weeks."""
        self._require(bool(seen.reports), "every conversion is logged")
        last = seen.reports[-1]
        shown = (last.time, last.site, last.caller, last.query_sensitivity)
        self._require(shown == (now, asked.site, asked.caller, asked.noise), f"the log says {shown}")
        if self.on:
            listed = {entry.epoch: entry.outcome for entry in last.epochs}
            wanted = {week: outcomes[week] for week in asked.weeks[-len(listed) :]}
            self._require(listed == wanted, f"the log must say {wanted}, not {listed}")

    def _capacity(self, account: Account) -> int:
        match account[0]:
            case FilterKind.SITE:
                return self.limits.site_budget
            case FilterKind.GLOBAL:
                return self.limits.global_budget
            case FilterKind.IMPRESSION_SITE:
                return self.limits.impression_site_quota
            case FilterKind.ADVERTISER:
                return self.limits.advertiser_quota
            case FilterKind.SIDE_QUERY:
                return self.limits.side_query_quota

    def _admitted(self, what: str, now: int, action: str | None, site: str) -> bool:
        """The first so many sites of an action in a week, counted apart for saving and measuring."""
        if self.limits.sites_per_action is None or action is None:
            return True
        sites = self.acted.setdefault((what, self.week(now), action), [])
        if site not in sites and len(sites) < self.limits.sites_per_action:
            sites.append(site)
        return site in sites

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Disagreement(what)


def spent(seen: Overview) -> Counter[Account]:
    """What the person's page says about every filter."""
    return Counter({(one.kind, one.site, one.epoch): one.spent for one in seen.filters})


def by_standard(auditor: Auditor, now: int, site: str, caller: str, options: ConversionOptions) -> Asked:
    """The standard's call: noise of scale 2·max_value/ε, and a report that moves by at most twice its value."""
    days = min(options.lookback_days or auditor.limits.max_lookback_days, auditor.limits.max_lookback_days)
    since = now - days * DAY
    return Asked(
        site,
        caller,
        tuple(range(auditor.week(since), auditor.week(now) + 1)),
        since,
        options.epsilon,
        noise=2 * options.max_value,
        most=2 * options.value,
        value=options.value,
        buckets=options.histogram_size,
        share=lambda ads: by_credit(ads, options.credit, options.value, options.histogram_size),
        kappa=options.kappa,
        match_values=frozenset(options.match_values),
        from_sites=frozenset(options.impression_sites),
        from_callers=frozenset(options.impression_callers),
    )


def by_paper(auditor: Auditor, site: str, caller: str, request: AttributionRequest) -> Asked:
    """The paper's request: Theorem 18 doubles the value where several buckets meet several weeks."""
    weeks = tuple(sorted(set(request.epochs)))
    several = request.buckets > 1 and len(weeks) > 1
    flag = request.side_query
    return Asked(
        site,
        caller,
        weeks,
        auditor.start + weeks[0] * auditor.limits.epoch_length,
        request.epsilon,
        noise=request.query_sensitivity,
        most=request.value * (2 if several else 1),
        value=request.value,
        buckets=request.buckets,
        share=lambda ads: by_function(ads, request, auditor),
        kappa=flag.kappa if flag else 0,
        last_touch=flag is not None and flag.form is SideQueryForm.LAST_TOUCH,
        match_values=frozenset(request.match_values),
        own_hidden=True,
        custom=request.relevant is not None or type(request.function) not in OURS,
        test=None if request.relevant is None else _careful(request.relevant),
    )


def by_credit(ads: Sequence[Ad], credit: Sequence[float], value: int, buckets: int) -> list[int]:
    """Highest priority first, then latest. Only credits that divide the value evenly are asked for."""
    chosen = sorted(ads, key=lambda ad: (ad.priority, ad.time), reverse=True)[: len(credit)]
    total = sum(credit[: len(chosen)])
    parts = [value * share / total for share in credit[: len(chosen)]]
    assert all(part == int(part) for part in parts), "timelines ask for even parts only"
    return _into_buckets(chosen, [int(part) for part in parts], buckets)


def by_function(ads: Sequence[Ad], request: AttributionRequest, auditor: Auditor) -> list[int]:
    """The paper's functions, each in a line of its own; one of the querier's is run and cut."""
    latest_first = sorted(ads, key=lambda ad: ad.time, reverse=True)
    value, buckets = request.value, request.buckets
    match request.function:
        case LastTouch():
            return _into_buckets(latest_first[:1], [value], buckets)
        case FirstTouch():
            return _into_buckets(latest_first[-1:], [value], buckets)
        case EqualCredit():
            return _into_buckets(latest_first, _evenly(value, len(latest_first)), buckets)
        case LastNSlots():
            parts = _evenly(value, len(latest_first[:buckets]))
            return parts + [0] * (buckets - len(parts))
        case LastNTouch(credit=credit):
            return by_credit(ads, credit, value, buckets)
        case custom:
            weeks = sorted({auditor.week(ad.time) for ad in ads})
            shown = {week: [ad.shown() for ad in ads if auditor.week(ad.time) == week] for week in weeks}
            try:
                return _cut(custom(shown, Award(value, buckets)), value, buckets)
            except Exception:
                return [0] * buckets


def _evenly(value: int, count: int) -> list[int]:
    """The odd units go to those that come first."""
    return [value // count + (position < value % count) for position in range(count)]


def _into_buckets(ads: Sequence[Ad], parts: Sequence[int], buckets: int) -> list[int]:
    """What an ad outside the histogram would get is lost."""
    histogram = [0] * buckets
    for ad, part in zip(ads, parts, strict=True):
        if ad.bucket < buckets:
            histogram[ad.bucket] += part
    return histogram


def _cut(answer: Sequence[float], value: int, buckets: int) -> list[int]:
    """Whole numbers from zero up, bucket by bucket, until the value is used up."""
    cut, left = [0] * buckets, value
    for bucket, amount in list(enumerate(answer))[:buckets]:
        wanted = 0 if math.isnan(amount) or amount <= 0 else left if amount >= left else int(amount)
        cut[bucket] = wanted
        left -= wanted
    return cut


def _careful(test: Callable[[Impression], bool]) -> Callable[[Ad], bool]:
    """A test that fails has found nothing."""

    def passes(ad: Ad) -> bool:
        try:
            return bool(test(ad.shown()))
        except Exception:
            return False

    return passes
