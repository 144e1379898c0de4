"""Attribution: how the value of one conversion is divided among the impressions that its epochs paid for.

Every function here is the paper's A(F₁, …, F_k): it sees relevant impressions by epoch and returns a histogram. What
makes it private is not the function but `attribute`, which runs it: an empty set is never passed to it, and its output
is clipped to non-negative integers that sum to at most the value. Then ‖A(F) − A(∅)‖₁ is the sum of the report (Theorem
4, case 2), and no epoch can move a report by more than twice the value (Theorem 18). So the sensitivity follows from
value, buckets and weeks, not from the function.

On a command line functions have names: `last`, `first`, `equal`, `last-n` and `slots` are built in; `module:function`
is imported from the current folder or from an installed package.
"""

from __future__ import annotations

import functools
import math
import operator
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from device.errors import RangeError
from device.events import Impression
from protocol.errors import ErrorKind, TrefoilError
from protocol.shape import MAX_SPREAD

# Implemented in C: a sort over many impressions should cost little more than one over few.
_time = attrgetter("time")
_precedence = attrgetter("priority", "time")


class Award(NamedTuple):
    """The value to divide, the number of buckets, and the coins that were drawn once for the conversion."""

    value: int
    buckets: int
    coins: Sequence[float] = ()


class Order(Enum):
    """The order in which impressions are read; ties by the order of saving."""

    EARLIEST = "earliest first"
    LATEST = "latest first"
    PRECEDENCE = "highest priority first, then latest"


class Need(NamedTuple):
    """The impressions of an epoch that a function must see to return the same as for all of them."""

    order: Order = Order.EARLIEST
    most: int | None = None


class AttributionFunction(Protocol):
    """Divides an award among relevant impressions, by epoch. Run by `attribute`, never on an empty set."""

    def __call__(self, relevant: Mapping[int, Sequence[Impression]], award: Award, /) -> Sequence[float]: ...


def attribute(
    function: AttributionFunction, relevant: Mapping[int, Sequence[Impression]], award: Award
) -> tuple[int, ...]:
    """Run `function` on the epochs that have impressions, and return its output clipped: the report's histogram.

    If the function raises, return zeros: its error would reveal to the querier what it had seen.
    """
    # Tuples: a function must not change what the charge follows from.
    nonempty = {epoch: tuple(impressions) for epoch, impressions in relevant.items() if impressions}
    if not nonempty:
        return (0,) * award.buckets
    try:
        return clip(function(nonempty, award), award)
    except BaseException as error:
        # Also SystemExit and the like, which would roll the transaction and its charge back.
        if is_interrupt(error):
            raise
        return (0,) * award.buckets


def is_interrupt(error: BaseException) -> bool:
    """Return whether a person interrupts the program, which Python raises in its main thread: that of a simulation.

    On the worker of a real device a querier's function has raised it, and its caller could read what the function saw.
    """
    # By the class itself, last: an exception may say that it has another, and raise when it is asked.
    return threading.current_thread() is threading.main_thread() and issubclass(type(error), KeyboardInterrupt)


def clip(answer: Sequence[float], award: Award) -> tuple[int, ...]:
    """Return exactly `buckets` non-negative integers of sum at most the value: rounded down, then cut in order."""
    left = award.value
    clipped = [0] * award.buckets
    for bucket, amount in enumerate(answer[: award.buckets]):
        if not amount:
            continue
        # Written so that NaN becomes 0, and infinity the part of the value that is left.
        whole = (left if amount >= left else math.floor(amount)) if amount > 0 else 0
        # Again in plain integers: a custom type may lie about its order and its floor.
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
    """The properties of a built-in function. Nothing is assumed about any other.

    `need` takes the function and the number of buckets, `most_buckets` the function: both depend on its parameters.
    """

    name: str
    kind: type[AttributionFunction]
    make: Callable[[Sequence[float]], AttributionFunction]
    need: Callable[[Any, int], Need] = lambda *_: Need()
    most_buckets: Callable[[Any], int] = lambda _: MAX_SPREAD
    # The fewest buckets in which it makes sense: slots need several.
    least_buckets: int = 1


# The one list of built-in functions: name, what each must see, and in how many buckets it can put something.
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


def _built_in(function: AttributionFunction) -> BuiltIn | None:
    """Return the entry of exactly this class: a subclass may look at more, and return anything.

    By identity: the class of a querier's function may claim to equal anything.
    """
    kind = type(function)
    return next((each for each in BUILT_IN if each.kind is kind), None)


def is_ours(function: AttributionFunction) -> bool:
    """Return whether `function` is built in, so that it has no state and depends on its arguments alone."""
    return _built_in(function) is not None


def needs(function: AttributionFunction, buckets: int) -> Need:
    """Return what must be read for `function`: everything, unless it is built in."""
    entry = _built_in(function)
    return Need() if entry is None else entry.need(function, buckets)


def most_buckets(function: AttributionFunction) -> int:
    """Return in how many buckets a function can put something: any number, unless it is built in."""
    entry = _built_in(function)
    return MAX_SPREAD if entry is None else entry.most_buckets(function)


def fair_allocation(value: int, credit: Sequence[float], coins: Sequence[float]) -> list[int]:
    """Return integers in proportion to `credit` that sum to `value`, fair in expectation, each off by less than one.

    In IEEE doubles, in the standard's order: the results of its own scenarios depend on that. Needs one coin in [0, 1)
    fewer than there are credits.
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
    """Return the histogram of `parts`. What falls outside is lost: one impression must not move another's credit."""
    histogram = [0] * award.buckets
    for impression, part in zip(impressions, parts, strict=True):
        if impression.histogram_index < award.buckets:
            histogram[impression.histogram_index] += part
    return histogram


OURS = {each.name: each for each in BUILT_IN}


def named_function(name: str, credit: Sequence[float] = (1.0,)) -> AttributionFunction:
    """Return the attribution function of this name; `credit` is for `last-n` alone."""
    if name in OURS:
        return OURS[name].make(credit)
    hint = f"Built in are {', '.join(OURS)}; your own is module:function."
    function: AttributionFunction = imported(name, "attribution function", hint)
    if not callable(function):
        raise TrefoilError(
            f"{name} is not a function", "Name one that takes (relevant, award).", kind=ErrorKind.WRONG_TYPE
        )
    return function


def imported(name: str, what: str, hint: str) -> Any:  # Any: the person's own object, checked by the caller
    """Return the object that `module:name` names, with the current folder on the path as Python itself has it."""
    if ":" not in name:
        raise TrefoilError(f"there is no {what} {name!r}", hint, kind=ErrorKind.UNKNOWN_NAME)
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise TrefoilError(f"cannot import {name}: {error}", hint, kind=ErrorKind.MISSING_DEPENDENCY) from None
    finally:
        sys.path.remove(folder)
