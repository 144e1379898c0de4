"""Scenario files: JSON timelines of calls with what each must give, and the limits and coins that a folder shares.

What is unknown in a scenario fails it, so that none passes because part was not understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device.coins import DeviceCoins
from device.limits import DeviceLimits
from protocol.console import err
from protocol.errors import TrefoilError

CONFIG = "CONFIG.json"

# The standard's names of limits, and ours.
_LIMITS = {
    "globalPrivacyBudgetPerEpoch": "global_budget",
    "impressionSiteQuotaPerEpoch": "impression_site_quota",
    "perSitePrivacyBudget": "site_budget",
    "privacyBudgetEpochDays": "epoch_days",
    "maxConversionSitesPerImpression": "max_conversion_sites",
    "maxConversionCallersPerImpression": "max_conversion_callers",
    "maxImpressionSitesForConversion": "max_impression_sites",
    "maxImpressionCallersForConversion": "max_impression_callers",
    "maxCreditSize": "max_credit_size",
    "maxMatchValues": "max_match_values",
    "maxLookbackDays": "max_lookback_days",
    "maxHistogramSize": "max_histogram_size",
    "activationSeconds": "activation_seconds",
}
_COINS = {"epochStart": "epoch_start", "fairlyAllocateCreditFraction": "credit"}
_DEFAULT_COIN = 0.5


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """The limits and fixed coins of a folder of scenarios."""

    limits: DeviceLimits
    coins: DeviceCoins

    @classmethod
    def load(cls, path: Path) -> ScenarioConfig:
        """From a CONFIG.json; what it leaves out is the default, and without the file everything is."""
        given = as_object(load_json(path), str(path)) if path.exists() else {}
        unknown = set(given) - set(_LIMITS) - set(_COINS) - {"aggregationServices"}
        if unknown:
            err.print(f"warning: {path} has unknown settings: {', '.join(sorted(unknown))}", highlight=False)
        values: dict[str, Any] = {_LIMITS[name]: whole(value) for name, value in given.items() if name in _LIMITS}
        if "aggregationServices" in given:
            values["aggregation_services"] = frozenset(given["aggregationServices"])
        fixed = {ours: float(given.get(theirs, _DEFAULT_COIN)) for theirs, ours in _COINS.items()}
        return cls(DeviceLimits(**values), DeviceCoins(*(_constant(fixed[ours]) for ours in ("epoch_start", "credit"))))


def load_json(path: Path) -> object:
    """A file's JSON, or an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrefoilError(f"cannot read {path}: {error}") from None


def as_object(value: object, what: str) -> dict[str, Any]:
    """A JSON object without its comments."""
    if not isinstance(value, dict):
        raise TrefoilError(f"{what} must be an object, not {type(value).__name__}")
    return {key: item for key, item in value.items() if key != "$comment"}


def python_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The standard's camelCase options in Python names; comments go. An unknown one is refused by the dataclass."""
    named = {}
    for name, value in as_object(options, "options").items():
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        exact = snake in {"epsilon", "credit"}
        named[snake] = value if exact else _wholes(value)
    return named


def whole(value: object) -> int:
    """JSON knows one kind of number: 5.0 is the integer 5."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _wholes(value: object) -> object:
    if isinstance(value, list):
        return [_wholes(item) for item in value]
    return whole(value) if isinstance(value, float) else value


def _constant(coin: float) -> Callable[[], float]:
    return lambda: coin
