"""Seeded randomness for workloads: reproducible on purpose, never used for a nonce, a key, a share or noise."""

from __future__ import annotations

import numpy as np

Generator = np.random.Generator  # noqa: TID251 - the type, for those who are handed one


def generator(*seed: int) -> Generator:
    """Return a numpy Generator: the same seed makes the same workload on every machine."""
    return np.random.default_rng(seed)  # noqa: TID251 - the one place workloads draw from
