"""What a query takes of the reports in a batch: what each paid, and what the answer costs it (SPEC.md §3).

Reports of one batch have one (ε, Δ), or a few, so they are grouped, and nothing is stored for each report where all are
alike. A helper's admission makes this record from the headers; its ledger takes it to reserve and to look reports up.
Every amount that a ledger learns from a peer, a file or a query is clamped by `paid`, which the report's digest covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol import units
from protocol.errors import Inconsistent, OutOfRange

Places = npt.NDArray[np.int64]
Left = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_Groups = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Amount:
    """What reports of one (ε, Δ) paid, and what one query needs of each, in micros of the report's own ε."""

    paid: int
    sensitivity: int
    need: int

    def __post_init__(self) -> None:
        if not (0 < self.need <= self.paid):
            message = f"a query takes 1 to {self.paid} micros of a report that paid {self.paid}, not {self.need}"
            raise OutOfRange(message)

    @classmethod
    def of(cls, paid: int, sensitivity: int, query_epsilon: int, query_sensitivity: int) -> Amount:
        """Return the amount for reports that the query's noise covers; reject others."""
        return cls(paid, sensitivity, units.need(paid, sensitivity, query_epsilon, query_sensitivity))

    @property
    def least(self) -> int:
        """Return the least that any query needs of such a report: one with less left is used up."""
        return units.least_need(self.paid)


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts of a batch. `group` has the place of each report's amount in `distinct`; None if all are 0."""

    count: int
    distinct: tuple[Amount, ...]
    group: _Groups | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.group is not None and len(self.group) != self.count:
            raise Inconsistent("a batch has one amount for each report")
        if self.count and not self.distinct:
            raise Inconsistent("a batch of reports has at least one amount")

    def __len__(self) -> int:
        return self.count

    def chosen(self, mask: Mask) -> Amounts:
        group = None if self.group is None else self.group[mask]
        return Amounts(int(np.count_nonzero(mask)), self.distinct, group)

    def groups(self, start: int, stop: int) -> Iterator[tuple[Amount, Places]]:
        """Yield each amount that occurs from `start` to `stop`, with the places of its reports counted from `start`."""
        stop = min(stop, self.count)
        if start >= stop:
            return
        if self.group is None:
            yield self.distinct[0], np.arange(stop - start)
            return
        span = self.group[start:stop]
        # Sorted once: malicious devices can make as many groups as there are reports.
        order = np.argsort(span, kind="stable")
        numbers, starts = np.unique(span[order], return_index=True)
        for number, places in zip(numbers, np.split(order, starts[1:]), strict=True):
            yield self.distinct[int(number)], places

    def affordable(self, left: Left, needed: int, query_sensitivity: int) -> int | None:
        """Return the largest ε at which `needed` reports have enough left, in micros; None if there is none.

        `left` is what a ledger leaves of each report, 0 for those that cannot be counted at any ε. Run only for a query
        that failed.
        """
        if not (0 < needed <= self.count):
            return None
        most = np.zeros(self.count, dtype=np.int64)
        for amount, places in self.groups(0, self.count):
            # A report cannot have more left than it paid, whatever a rebuilt ledger was told.
            rests, which = np.unique(np.minimum(left[places], amount.paid), return_inverse=True)
            terms = amount.paid, amount.sensitivity
            largest = [units.affordable(*terms, int(rest), query_sensitivity) for rest in rests]
            most[places] = np.array(largest, dtype=np.int64)[which]
        return int(np.partition(most, self.count - needed)[self.count - needed]) or None


class AmountsBuilder:
    """Collects the amounts of a batch chunk by chunk. Places that are never written keep the first amount."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: dict[Amount, int] = {}
        self._group: _Groups | None = None

    def add(self, start: int, groups: Sequence[tuple[Amount, Places]]) -> None:
        """Add the groups of a chunk, with places counted from its `start`."""
        for amount, places in groups:
            number = self._numbers.setdefault(amount, len(self._numbers))
            if number and self._group is None:
                self._group = np.zeros(self._count, dtype=np.uint32)
            if self._group is not None:
                self._group[start + places] = number

    def done(self) -> Amounts | None:
        """Return the amounts; None where no report has one, because none is covered by the query's noise."""
        return Amounts(self._count, tuple(self._numbers), self._group) if self._numbers else None
