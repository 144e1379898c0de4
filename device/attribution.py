"""Attribution: how the value of one conversion is divided among the impressions that its epochs paid for.

Every function here is the paper's A(F₁, …, F_k): it sees relevant impressions by epoch and gives a histogram. What
makes it private is not the function but `attribute`, which runs it: an empty set is never shown to it, and whatever it
answers is cut to non-negative integers that sum to at most the value. Then ‖A(F) − A(∅)‖₁ is the sum of the report
(Theorem 4, case 2), and no epoch can move a report by more than twice the value (Theorem 18).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from device.errors import RangeError
from device.impression import Impression
from protocol.shape import MAX_SPREAD

# In C: a sort over many impressions should cost little more than one over few.
_time = attrgetter("time")
_precedence = attrgetter("priority", "time")


class Award(NamedTuple):
    """What there is to give: a value, over so many buckets, with coins that were drawn once for the conversion."""

    value: int
    buckets: int
    coins: Sequence[float] = ()


class Order(Enum):
    """In which order impressions are read; of equals, the one that was saved first."""

    EARLIEST = "earliest first"
    LATEST = "latest first"
    PRECEDENCE = "highest priority first, then latest"


class Need(NamedTuple):
    """What a function has to see of an epoch to give what it would give for all of it."""

    order: Order = Order.EARLIEST
    most: int | None = None


class AttributionFunction(Protocol):
    """Divides an award among relevant impressions, given by epoch. Run by `attribute`, never on an empty set."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[float]: ...


def attribute(
    function: AttributionFunction, relevant: Mapping[int, Sequence[Impression]], award: Award
) -> tuple[int, ...]:
    """The report's histogram: run `function` on the epochs that have impressions, and clip what it says.

    A function that fails has said nothing: passing its error on would tell the querier what it had seen.
    """
    # Tuples: a function must not change what the charge follows from.
    found = {epoch: tuple(impressions) for epoch, impressions in relevant.items() if impressions}
    if not found:
        return (0,) * award.buckets
    try:
        return clip(function(found, award), award)
    except KeyboardInterrupt:
        raise
    except BaseException:
        # Also SystemExit and the like, which would end the transaction and its charge with it.
        return (0,) * award.buckets


def clip(answer: Sequence[float], award: Award) -> tuple[int, ...]:
    """Exactly `buckets` non-negative integers whose sum is at most the value: rounded down, then cut in order."""
    left = award.value
    clipped = [0] * award.buckets
    for bucket, amount in enumerate(answer[: award.buckets]):
        if not amount:
            continue
        # Written so that NaN gives nothing; an infinity gets what is left.
        whole = (left if amount >= left else math.floor(amount)) if amount > 0 else 0
        # Once more in our own integers: a custom type may lie about its order and its floor.
        clipped[bucket] = min(left, max(0, int(whole)))
        left -= clipped[bucket]
    return tuple(clipped)


@dataclass(frozen=True, slots=True)
class LastTouch:
    """All of the value to the latest impression, whatever its priority: the paper's last touch."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[int]:
        return _to_one(max(_all(relevant), key=_time), award)


@dataclass(frozen=True, slots=True)
class FirstTouch:
    """All of the value to the earliest impression."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[int]:
        return _to_one(min(_all(relevant), key=_time), award)


@dataclass(frozen=True, slots=True)
class EqualCredit:
    """The value in equal parts to all impressions; the odd units go to the latest ones."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[int]:
        latest_first = sorted(_all(relevant), key=_time, reverse=True)
        each, odd = divmod(award.value, len(latest_first))
        parts = [each + (position < odd) for position in range(len(latest_first))]
        return _histogram(latest_first, parts, award)


@dataclass(frozen=True, slots=True)
class LastNTouch:
    """The standard's last-n-touch: by priority, then time; the value divided fairly in proportion to `credit`."""

    credit: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        # Written so that NaN, for which every comparison is false, fails.
        if not self.credit or not all(0 < share < math.inf for share in self.credit):
            raise RangeError("credit must be a list of at least one positive number")

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[int]:
        chosen = sorted(_all(relevant), key=_precedence, reverse=True)[: len(self.credit)]
        parts = fair_allocation(award.value, self.credit[: len(chosen)], award.coins)
        return _histogram(chosen, parts, award)


@dataclass(frozen=True, slots=True)
class LastNSlots:
    """The latest impressions in slots of their own, one bucket each, with the value in equal parts (paper §3.2)."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[int]:
        slots = sorted(_all(relevant), key=_time, reverse=True)[: award.buckets]
        each, odd = divmod(award.value, len(slots))
        return [each + (position < odd) for position in range(len(slots))]


@dataclass(frozen=True, slots=True)
class Features:
    """A publisher's features, whichever conversions followed: the report of one impression (paper, Appendix A)."""

    numbers: tuple[int, ...]

    def __call__(self, relevant: Mapping[int, Sequence[object]], award: Award, /) -> Sequence[int]:  # noqa: ARG002 - the protocol's shape
        return self.numbers


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """All that is known of one of our functions; of any other, nothing is.

    `need` and `most_buckets` may look at the function, and the former at the number of buckets.
    """

    name: str
    kind: type[AttributionFunction]
    make: Callable[[Sequence[float]], AttributionFunction]
    need: Callable[[Any, int], Need] = lambda *_: Need()
    most_buckets: Callable[[Any], int] = lambda _: MAX_SPREAD
    # In how many buckets it is itself: slots need several.
    least_buckets: int = 1


# The one place for a function of ours: what it is called, what it must be shown, and where it can put something.
BUILT_IN = (
    BuiltIn("last", LastTouch, lambda _: LastTouch(), lambda *_: Need(Order.LATEST, 1), lambda _: 1),
    BuiltIn("first", FirstTouch, lambda _: FirstTouch(), lambda *_: Need(Order.EARLIEST, 1), lambda _: 1),
    BuiltIn("equal", EqualCredit, lambda _: EqualCredit()),
    BuiltIn(
        "last-n",
        LastNTouch,
        lambda credit: LastNTouch(tuple(credit)),
        lambda function, _: Need(Order.PRECEDENCE, len(function.credit)),
        lambda function: len(function.credit),
    ),
    BuiltIn(
        "slots",
        LastNSlots,
        lambda _: LastNSlots(),
        lambda _, buckets: Need(Order.LATEST, buckets),
        least_buckets=2,
    ),
)


def _known(function: AttributionFunction) -> BuiltIn | None:
    """By class, not by instance: whoever derives from one of ours may look at more, and give anything.

    By identity: the class of a querier's function may say that it equals anything.
    """
    kind = type(function)
    return next((each for each in BUILT_IN if each.kind is kind), None)


def is_ours(function: AttributionFunction) -> bool:
    """Whether `function` is one of ours: it has no state, and looks at nothing but what it is given."""
    return _known(function) is not None


def needs(function: AttributionFunction, buckets: int) -> Need:
    """What must be read for `function`. Of ours one knows; any other is shown everything."""
    known = _known(function)
    return Need() if known is None else known.need(function, buckets)


def most_buckets(function: AttributionFunction) -> int:
    """In how many buckets a function can ever put something: any number, unless we know it better."""
    known = _known(function)
    return MAX_SPREAD if known is None else known.most_buckets(function)


def fair_allocation(value: int, credit: Sequence[float], coins: Sequence[float]) -> list[int]:
    """Integers in proportion to `credit` that sum to `value`, fair in expectation, each off by less than one.

    In IEEE doubles, in the standard's order: what it gives for its own scenarios depends on that. Needs one coin in
    [0, 1) fewer than there are credits.
    """
    parts = _proportions(value, [float(share) for share in credit])
    carried = 0
    for other, coin in zip(range(1, len(parts)), coins, strict=False):
        fraction1, fraction2 = parts[carried] % 1, parts[other] % 1
        up = fraction1 + fraction2 > 1
        step1, step2 = (1 - fraction1, 1 - fraction2) if up else (-fraction1, -fraction2)
        if step1 + step2 == 0:
            # Both are whole already, or a rounding error short of it.
            continue
        step = step2
        if coin < step2 / (step1 + step2):
            step = step1
            carried, other = other, carried
        parts[other] += step
        parts[carried] -= step
    return [math.floor(part + 0.5) for part in parts]


def _proportions(value: int, credit: Sequence[float]) -> list[float]:
    # Added one by one: newer versions of Python's sum() round differently.
    total = functools.reduce(operator.add, credit)
    parts = [value * share / total for share in credit]
    if not all(math.isfinite(part) for part in parts) or not math.isfinite(total):
        # Credits near the largest double overflow on the way; only their ratios matter.
        return _proportions(value, [share / max(credit) for share in credit])
    return parts


def _all(relevant: Mapping[int, Sequence[Impression]]) -> list[Impression]:
    return [impression for impressions in relevant.values() for impression in impressions]


def _to_one(impression: Impression, award: Award) -> list[int]:
    return _histogram([impression], [award.value], award)


def _histogram(impressions: Sequence[Impression], parts: Sequence[int], award: Award) -> list[int]:
    """What falls outside the histogram is lost: giving it to others would let one impression move another's credit."""
    histogram = [0] * award.buckets
    for impression, part in zip(impressions, parts, strict=True):
        if impression.histogram_index < award.buckets:
            histogram[impression.histogram_index] += part
    return histogram
