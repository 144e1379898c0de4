"""What a collector takes, and how much of it: decided by public header and clock, before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from protocol.errors import TrefoilError
from protocol.header import Header, check_site
from protocol.seconds import DAY, HOUR


class Refused(Enum):
    """Why a report is not taken. The value is the code that a client sees."""

    MALFORMED = "malformed"
    OTHER_SITE = "other-site"
    OTHER_HELPERS = "other-helpers"
    TOO_OLD = "too-old"
    TOO_NEW = "too-new"
    TOO_FAST = "too-fast"
    SLOW = "slow"
    SITE_FULL = "site-full"
    FULL = "full"
    BUSY = "busy"
    DISK = "disk"


class NotTaken(TrefoilError):
    """A report that is not stored; the client is shown why."""

    def __init__(self, reason: Refused, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """`per_second` and `burst` bound how fast one site's reports come; `lifetime_days` is the helpers' own limit."""

    sites: frozenset[str]
    helper_sets: frozenset[bytes] = frozenset()
    per_second: int = 2_000
    burst: int = 10_000
    site_bytes: int = 2**33
    total_bytes: int = 2**35
    lifetime_days: int = 30

    def __post_init__(self) -> None:
        if not self.sites:
            raise TrefoilError("a collector takes reports of at least one site", "Name it with --site.")
        for site in self.sites:
            check_site(site)
        numbers = (self.per_second, self.burst, self.site_bytes, self.total_bytes, self.lifetime_days)
        if any(type(number) is not int or number < 1 for number in numbers):
            raise TrefoilError("a collector's limits are whole numbers of at least 1")

    def check(self, header: Header, now: int) -> None:
        """Refuse what no query of this collector's sites could count."""
        terms = header.terms
        if terms.site not in self.sites:
            raise NotTaken(Refused.OTHER_SITE, f"this collector takes no reports of {terms.site}")
        if self.helper_sets and header.helper_set not in self.helper_sets:
            raise NotTaken(
                Refused.OTHER_HELPERS, "the report is sealed to other helpers", "Give the device the current set."
            )
        if terms.time <= now - self.lifetime_days * DAY:
            raise NotTaken(Refused.TOO_OLD, f"the report is over {self.lifetime_days} days old")
        if terms.time > now + HOUR:
            raise NotTaken(Refused.TOO_NEW, "the report is from the future", "Compare the clocks.")


class PostingRate:
    """How many reports a site may still post: `burst` at once, `per_second` in the long run."""

    def __init__(self, limits: CollectorLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, site: str) -> None:
        """One report; only sites that the limits name have a place here, so memory is bounded."""
        now = self._clock()
        left, since = self._left.get(site, (float(self._limits.burst), now))
        left = min(float(self._limits.burst), left + (now - since) * self._limits.per_second)
        if left < 1:
            raise NotTaken(Refused.TOO_FAST, f"reports of {site} come too fast", "Post it again in a few seconds.")
        self._left[site] = (left - 1, now)
