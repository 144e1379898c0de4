"""How many reports a model takes, before anything is asked: conversions of a level against the noise of a bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from protocol.errors import TrefoilError
from protocol.regression.design import Noise


class Outlook(Enum):
    """What a ratio of conversions per level to noise has given in the experiments (`trefoil experiment regression`)."""

    GOOD = "most of the possible gain"
    FAIR = "about half of the possible gain"
    POOR = "little of the possible gain; the fit may be declined"
    NONE = "nothing; the fit will be declined"


_LEAST = {Outlook.GOOD: 4.0, Outlook.FAIR: 2.0, Outlook.POOR: 0.9}


@dataclass(frozen=True, slots=True)
class RegressionPlan:
    """`ratio` is the conversions for each level of the widest field, divided by one bucket's noise."""

    reports: int
    ratio: float
    outlook: Outlook
    reports_for_good: int


def plan(reports: int, rate: float, widest_field: int, noise: Noise) -> RegressionPlan:
    """`rate` is how often a conversion follows; `widest_field` the number of levels of the widest field."""
    if reports < 1 or widest_field < 1:
        raise TrefoilError("a plan takes at least one report and one level")
    if not (0 < rate < 1):
        raise TrefoilError(f"a conversion rate lies between 0 and 1, not at {rate}")
    deviation = math.sqrt(noise.variance)
    each = rate / widest_field
    ratio = reports * each / deviation if deviation else math.inf
    outlook = next((name for name, least in _LEAST.items() if ratio >= least), Outlook.NONE)
    return RegressionPlan(reports, ratio, outlook, math.ceil(_LEAST[Outlook.GOOD] * deviation / each))
