"""Requests at the edges of what is allowed: the last number that is taken, and the first that is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from device.attribution import LastNTouch
from device.coins import DeviceCoins
from device.conversion import AttributionRequest, Conversion, ConversionOptions
from device.device import Device
from device.errors import RangeError
from device.impression import ANY_DAYS
from device.limits import MAX_EPOCHS, TREFOIL_SERVICE, DeviceLimits
from device.memory_store import MemoryStore
from device.report import PlainSeal
from protocol.epsilon import MAX_SENSITIVITY

LIMITS = DeviceLimits()
OPTIONS = ConversionOptions(TREFOIL_SERVICE, 4)
REQUEST = AttributionRequest([0], epsilon=1.0, buckets=1, value=1, query_sensitivity=1)


def checked(asked: ConversionOptions | AttributionRequest, **changes: Any) -> Conversion:
    return replace(asked, **changes).checked("shop.example", "shop.example", LIMITS)


@pytest.mark.parametrize(
    ("asked", "name", "least", "most"),
    [
        (OPTIONS, "histogram_size", 1, LIMITS.max_histogram_size),
        (OPTIONS, "max_value", 1, 2**32 - 1),
        (replace(OPTIONS, max_value=7), "value", 1, 7),
        (OPTIONS, "lookback_days", 1, ANY_DAYS),
        (OPTIONS, "kappa", 0, MAX_SENSITIVITY),
        (REQUEST, "buckets", 1, LIMITS.max_histogram_size),
        (replace(REQUEST, query_sensitivity=MAX_SENSITIVITY), "value", 1, MAX_SENSITIVITY),
        (REQUEST, "query_sensitivity", 1, MAX_SENSITIVITY),
    ],
)
def test_each_number_has_its_least_and_its_largest(
    asked: ConversionOptions | AttributionRequest, name: str, least: int, most: int
) -> None:
    for allowed in (least, most):
        checked(asked, **{name: allowed})
    for wrong in (least - 1, most + 1):
        with pytest.raises(RangeError, match=name):
            checked(asked, **{name: wrong})


def test_epochs_of_a_request_are_within_a_thousand_of_each_other() -> None:
    assert checked(REQUEST, epochs=[5, 4 + MAX_EPOCHS], query_sensitivity=2, buckets=2).epochs == (5, 4 + MAX_EPOCHS)
    for wrong in ([5, 5 + MAX_EPOCHS], []):
        with pytest.raises(RangeError, match="a request names 1 to 1000 epochs"):
            checked(REQUEST, epochs=wrong, query_sensitivity=2, buckets=2)


@pytest.mark.parametrize("credit", [(1.0,), (1.0, 1.0), (1.0, 2.0, 3.0)])
def test_as_many_coins_are_tossed_as_parts_of_the_value_can_be_odd(credit: tuple[float, ...]) -> None:
    """One fewer than there are shares, in both APIs; whatever is found."""
    tossed: list[float] = []

    def coin() -> float:
        tossed.append(0.5)
        return 0.5

    coins = DeviceCoins(credit=coin)
    device = Device(MemoryStore(debug=True), PlainSeal(), clock=lambda: 1_900_000_000, coins=coins)
    device.measure_conversion("shop.example", replace(OPTIONS, credit=credit))
    assert len(tossed) == len(credit) - 1
    device.measure("shop.example", replace(REQUEST, function=LastNTouch(credit)))
    assert len(tossed) == 2 * (len(credit) - 1)
