"""A query: what the querier asks of three helpers, signed; and the answer she gets."""

from __future__ import annotations

from enum import Enum


class NoiseMode(Enum):
    """How the three helpers make the noise together (DESIGN, "Noise"). There is no mode without noise."""

    LOCAL = "local"
    PAIRWISE = "pairwise"
