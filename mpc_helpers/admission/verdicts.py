"""Verdicts: what the three helpers found out together about the numbers of each report. Facts, so they only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpc_helpers.admission.column import Mask


@dataclass(slots=True)
class Verdicts:
    """Two masks over a batch, in memory: they are kept over all attempts at a query, and found again after a crash.

    Written by the check between helpers and by nothing else. Neither takes a report out of the sums by itself.
    """

    confirmed: Mask = field(repr=False)
    invalid: Mask = field(repr=False)

    @classmethod
    def none(cls, reports: int) -> Verdicts:
        """Nothing is known yet."""
        return cls(np.zeros(reports, dtype=np.bool_), np.zeros(reports, dtype=np.bool_))
