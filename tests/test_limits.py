"""Limits that no device may run under: each would switch a filter off without a word."""

from __future__ import annotations

import math
from dataclasses import fields
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


# By hand, so that a bound cannot move unseen: the least and the largest value of every limit that is a number.
BOUNDS = {
    **dict.fromkeys(["site_budget", "global_budget", "impression_site_quota", "advertiser_quota"], (1, 2**53 - 1)),
    **dict.fromkeys(["sites_per_action", "max_credit_size", "max_publishers", "max_advertisers"], (1, 65_535)),
    **dict.fromkeys(["max_match_values", "max_conversion_sites", "max_conversion_callers"], (0, 65_535)),
    **dict.fromkeys(["max_impression_sites", "max_impression_callers", "max_labels"], (0, 65_535)),
    **dict.fromkeys(["max_impressions_per_site", "max_impressions_per_epoch"], (1, 2**31 - 1)),
    **dict.fromkeys(["max_sites_per_epoch", "max_conversions_per_epoch", "max_log_records"], (1, 2**31 - 1)),
    "activation_seconds": (1, 366 * 86_400 - 1),
    "epoch_days": (1, 3660),
    "max_lookback_days": (1, 36_600),
    "max_histogram_size": (1, 2**20),
}


def made(**limits: Any) -> DeviceLimits:
    return DeviceLimits(**limits)


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items(), ids=BOUNDS)
def test_every_limit_has_its_bounds(name: str, bounds: tuple[int, int]) -> None:
    for allowed in bounds:
        assert getattr(made(**{name: allowed}), name) == allowed
    for wrong in (bounds[0] - 1, bounds[1] + 1):
        with pytest.raises(TrefoilError) as refused:
            made(**{name: wrong})
        assert str(refused.value) == f"the limit {name} must be {bounds[0]} to {bounds[1]}, not {wrong}"


@pytest.mark.parametrize("name", BOUNDS)
def test_only_one_limit_can_be_left_out(name: str) -> None:
    if name == "sites_per_action":
        assert made(sites_per_action=None).sites_per_action is None
        return
    with pytest.raises(TrefoilError, match=f"the limit {name} must be"):
        made(**{name: None})


def test_every_limit_that_is_a_number_is_here() -> None:
    others = {"own_site", "aggregation_services"}
    assert {field.name for field in fields(DeviceLimits)} == BOUNDS.keys() | others
