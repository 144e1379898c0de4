"""The bias side query: a flag, worth κ, that says a report may be missing something (paper §3.4, App. F).

It travels as one more bucket, so the querier learns only a noisy count of reports that may be biased; what that count
bounds is the querier's business (`protocol.querier.bias`). The flag follows from which epochs could pay, never from
data alone. Closed epochs pay nothing and are left out: a flag for them would tell, again and again and for nothing,
that the person cleared their history.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from device.errors import RangeError
from device.option import whole
from protocol.epsilon import MAX_SENSITIVITY


class SideQueryForm(Enum):
    """Which reports are flagged."""

    GENERAL = "general"
    LAST_TOUCH = "last touch"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class SideQuery:
    """A request for the flag. A larger κ gives a sharper count and costs more budget."""

    kappa: int
    form: SideQueryForm = SideQueryForm.GENERAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "kappa", whole("κ", self.kappa, 1, MAX_SENSITIVITY))
        if type(self.form) is not SideQueryForm:
            raise RangeError("the form of a side query is a SideQueryForm")

    @staticmethod
    def checked(asked: object) -> SideQuery:
        """The same side query without anything that its class may add: its flag is the engine's to compute.

        Not a method of what is asked for: it would be the querier's own.
        """
        if not isinstance(asked, SideQuery):
            raise RangeError("side_query must be a SideQuery")
        return SideQuery(asked.kappa, asked.form)

    def flag(self, epochs: Collection[int], paid: Collection[int], relevant: Collection[int]) -> int:
        """κ or 0. `paid` are the epochs that could pay; `relevant` those of them that have relevant events."""
        unpaid = [epoch for epoch in epochs if epoch not in paid]
        match self.form:
            case SideQueryForm.GENERAL:
                # Theorem 15: any epoch that was dropped may have held something.
                biased = bool(unpaid)
            case SideQueryForm.LAST_TOUCH:
                # Theorem 16: a dropped epoch changes nothing if a later one that paid holds the last touch.
                last_touch = max(relevant, default=None)
                biased = any(last_touch is None or epoch > last_touch for epoch in unpaid)
            case SideQueryForm.ANY:
                # A label is 1 if any epoch that paid holds a conversion: then a dropped one cannot have changed it.
                biased = bool(unpaid) and not relevant
            case _:
                assert_never(self.form)
        return self.kappa if biased else 0
