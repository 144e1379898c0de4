"""A report's shape: everything public that decides which numbers are shared, how many, and what is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from protocol.denominations import Plane, denominations
from protocol.epsilon import MAX_SENSITIVITY
from protocol.errors import ProtocolError

MAX_BUCKETS = 2**16
MAX_CAP = 2**40
MAX_SPREAD = 2**16 - 1
# Numbers in a body.
MAX_EXPLICIT = 2**17
# With more terms than this, two points would cost less than 2^100 hashes to forge.
_TWO_POINTS = 2**11


@dataclass(frozen=True, slots=True)
class Shape:
    """`cap` bounds the histogram's sum, `spread` is in how many buckets it may lie; both are 0 if nothing is checked.

    Both belong to the query, never to one conversion: they stand in the header for everyone to read.
    """

    buckets: int
    kappa: int = 0
    cap: int = 0
    spread: int = 0
    # The polynomials of the coins; the side query's, if there is one, is the last.
    planes: tuple[Plane, ...] = field(init=False, repr=False, compare=False)
    points: int = field(init=False, repr=False, compare=False)
    # Numbers in the body.
    explicit: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.buckets, self.kappa)
        if self.cap or self.spread:
            _check_cap(self.buckets, self.cap, self.spread)
        coins = denominations(self.cap, self.spread) if self.cap else ()
        terms = self.buckets + sum(plane.degree for plane in coins)
        planes = coins + ((Plane(1, 1),) if self.kappa and self.cap else ())
        points = (2 if terms <= _TWO_POINTS else 3) if self.cap else 0
        explicit = self.length + points * sum(plane.degree for plane in planes)
        if explicit > MAX_EXPLICIT:
            raise ProtocolError(
                f"a report of this shape would hold {explicit} numbers; {MAX_EXPLICIT} is the most",
                "Ask for fewer buckets, a lower cap or a smaller spread.",
            )
        for name, value in (("planes", planes), ("points", points), ("explicit", explicit)):
            object.__setattr__(self, name, value)

    @property
    def checked(self) -> bool:
        """Whether helpers can check the numbers."""
        return self.cap > 0

    @property
    def length(self) -> int:
        """How many numbers the histogram has; a side query adds one, the last."""
        return self.buckets + (1 if self.kappa else 0)

    @property
    def openings(self) -> int:
        """How many openings the header has, and as many masks there are: one for each point and plane."""
        return self.points * len(self.planes)

    @property
    def expanded(self) -> int:
        """How many numbers each seed is expanded to. Masks come last, and cost no bytes."""
        return self.explicit + self.openings

    @property
    def residues(self) -> int:
        """How many numbers must be zero in a good report: at each point the sum, the side query, every opening."""
        return self.points * (1 + (1 if self.kappa else 0) + len(self.planes))


@lru_cache(maxsize=64)
def shape_of(buckets: int, kappa: int, cap: int, spread: int) -> Shape:
    """The same shape for every report of a query: counting its coins takes longer than to look it up."""
    return Shape(buckets, kappa, cap, spread)


def _check_size(buckets: int, kappa: int) -> None:
    if not (0 <= kappa <= MAX_SENSITIVITY):
        raise ProtocolError(f"κ must be 0 to 2^40, not {kappa}")
    if not (0 < buckets <= MAX_BUCKETS):
        raise ProtocolError(f"a histogram has 1 to {MAX_BUCKETS} buckets, not {buckets}")


def _check_cap(buckets: int, cap: int, spread: int) -> None:
    if not (0 < cap <= MAX_CAP):
        raise ProtocolError(f"a cap is 1 to 2^40, not {cap}")
    if not (0 < spread <= min(buckets, cap, MAX_SPREAD)):
        raise ProtocolError(f"a spread is 1 to the least of buckets, cap and {MAX_SPREAD}, not {spread}")
