"""The coins a device tosses. Passed in, so that scenarios can fix them; by default they come from the system."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass


def fair_coin() -> float:
    """Uniform in [0, 1), on the grid of 53-bit doubles."""
    return secrets.randbits(53) / 2**53


@dataclass(frozen=True, slots=True)
class DeviceCoins:
    """Where an epoch starts, and how the odd units of credit fall. Both in [0, 1)."""

    epoch_start: Callable[[], float] = fair_coin
    credit: Callable[[], float] = fair_coin
