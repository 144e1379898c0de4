"""Limits that no device may run under: each would switch a filter off without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest

from device.limits import DeviceLimits
from protocol.errors import TrefoilError


@pytest.mark.parametrize("name", ["site_budget", "global_budget", "impression_site_quota"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0, -1, 2**53])
def test_a_budget_is_a_positive_number(name: str, wrong: float) -> None:
    """Nothing compares with NaN: a filter of that capacity would never refuse."""
    limits: dict[str, Any] = {name: wrong}
    with pytest.raises(TrefoilError, match=name):
        DeviceLimits(**limits)
