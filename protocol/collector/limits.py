"""Which reports a collector accepts, and how many: decided from the public header and the clock, before storing.

`ReportKind` says which reports can be in one batch: those that agree in everything that a query fixes.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from protocol.errors import ErrorKind, TrefoilError
from protocol.header import Header, ReportTerms, check_site
from protocol.hpke import Suite
from protocol.query import Query
from protocol.units import DAY, HOUR
from protocol.wire import Writer, tagged_hash


@dataclass(frozen=True, slots=True)
class ReportKind:
    """What all reports of one query share: the terms, all but the hour (a query may span many), set and suite."""

    terms: ReportTerms
    helper_set: bytes
    suite: Suite

    @classmethod
    def of(cls, header: Header) -> ReportKind:
        return cls(replace(header.terms, time=0), header.helper_set, header.suite)

    @property
    def name(self) -> str:
        """Return eight hexadecimal digits that name the kind in tables and file names."""
        terms, writer = self.terms, Writer()
        writer.text(terms.site).text(terms.caller).text(terms.unit).uint(terms.buckets, 4).uint(terms.kappa, 8)
        writer.uint(terms.cap, 8).uint(terms.spread, 2).uint(terms.epsilon_micros, 4).uint(terms.sensitivity, 8)
        writer.uint(terms.debug, 1).fixed(self.helper_set, len(self.helper_set)).uint(self.suite.value, 2)
        return tagged_hash("kind of report", writer.done()).hex()[:8]

    def is_counted_by(self, query: Query) -> bool:
        """Return whether a query is for this kind. Its ε may be smaller, and it names the current helper set."""
        same = ("site", "caller", "unit", "buckets", "kappa", "cap", "spread", "sensitivity", "debug")
        return (
            all(getattr(self.terms, name) == getattr(query, name) for name in same)
            and self.terms.epsilon_micros >= query.epsilon_micros
            and self.suite is query.suite
        )

    def describe(self) -> str:
        terms = self.terms
        checked = f", sums up to {terms.cap}" if terms.cap else ", unchecked"
        debug = ", debug" if terms.debug else ""
        return f"{terms.buckets} buckets of {terms.unit} at ε {terms.epsilon_micros / 1e6:g}{checked}{debug}"


class PostRefusal(Enum):
    """Why a report was refused: the code in the response, and its status.

    400 and 403 are permanent; 408, 429, 503 and 507 mean retry later.
    """

    MALFORMED = "malformed", 400
    OTHER_SITE = "other-site", 403
    OTHER_HELPERS = "other-helpers", 403
    TOO_OLD = "too-old", 400
    TOO_NEW = "too-new", 400
    TOO_FAST = "too-fast", 429
    SLOW = "slow", 408
    SITE_FULL = "site-full", 507
    FULL = "full", 507
    BUSY = "busy", 503
    DISK = "disk", 503


class ReportRefused(TrefoilError):
    """One report was not stored. The response carries the reason."""

    kind = ErrorKind.REFUSED

    def __init__(self, reason: PostRefusal, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


# Of an address: what it may post at once, in seconds of its rate.
BURST_SECONDS = 10
# Of one site at a time. Each kind has an equal share of the site's quota that no other can take.
MAX_KINDS = 16


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """Rate and storage limits per site, and the rate per address.

    `lifetime_days` is the age at which helpers reject a report.
    """

    sites: frozenset[str]
    helper_sets: frozenset[bytes] = frozenset()
    per_second: int = 2_000
    burst: int = 10_000
    per_address: int = 10
    site_bytes: int = 2**33
    total_bytes: int = 2**35
    lifetime_days: int = 30

    def __post_init__(self) -> None:
        if not self.sites:
            raise TrefoilError(
                "a collector needs at least one site", "Name it with --site.", kind=ErrorKind.MISSING_OPTION
            )
        for site in self.sites:
            check_site(site)
        numbers = (self.per_second, self.burst, self.per_address, self.site_bytes, self.total_bytes, self.lifetime_days)
        if any(type(number) is not int or number < 1 for number in numbers):
            raise TrefoilError("a collector's limits are integers of at least 1", kind=ErrorKind.OUT_OF_RANGE)

    def check(self, header: Header, now: int) -> None:
        """Refuse a report that no query of this collector's sites could count."""
        terms = header.terms
        if terms.site not in self.sites:
            raise ReportRefused(PostRefusal.OTHER_SITE, f"this collector accepts no reports of {terms.site}")
        if self.helper_sets and header.helper_set not in self.helper_sets:
            raise ReportRefused(
                PostRefusal.OTHER_HELPERS, "the report is sealed to other helpers", "Give the device the current set."
            )
        if terms.time <= now - self.lifetime_days * DAY:
            raise ReportRefused(PostRefusal.TOO_OLD, f"the report is over {self.lifetime_days} days old")
        if terms.time > now + HOUR:
            raise ReportRefused(PostRefusal.TOO_NEW, "the report is from the future", "Compare the clocks.")


# How many addresses are remembered; the one that has posted least recently is forgotten first, and has a full bucket.
MAX_ADDRESSES = 2**16
# Who has an IPv6 address has all of its /64.
_IPV6_PREFIX = 64


class PostingRate:
    """A token bucket for each site and for each address: some reports at once, and so many a second in the long run.

    The address comes first: a stranger that floods must not use up what the site has for everybody.
    """

    def __init__(self, limits: CollectorLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        # Only sites that the limits name have a bucket, so memory is bounded.
        self._sites: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._addresses: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take_from_address(self, address: str) -> None:
        """Take one token of the address that a report came from, or raise `ReportRefused`."""
        rate = self._limits.per_address
        if not self._take(self._addresses, _network_of(address), rate, BURST_SECONDS * rate):
            message = "reports of your address arrive too fast"
            raise ReportRefused(PostRefusal.TOO_FAST, message, "Retry in a few seconds.")
        while len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)

    def take(self, site: str) -> None:
        """Take one token of a site, or raise `ReportRefused`."""
        if not self._take(self._sites, site, self._limits.per_second, self._limits.burst):
            message = f"reports of {site} arrive too fast"
            raise ReportRefused(PostRefusal.TOO_FAST, message, "Retry in a few seconds.")

    def _take(self, buckets: OrderedDict[str, tuple[float, float]], name: str, rate: int, burst: int) -> bool:
        now = self._clock()
        left, since = buckets.get(name, (float(burst), now))
        left = min(float(burst), left + (now - since) * rate)
        buckets[name] = (left - 1 if left >= 1 else left, now)
        buckets.move_to_end(name)
        return left >= 1


def _network_of(address: str) -> str:
    """Return what one stranger is assumed to hold: an IPv4 address, or a /64 of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
