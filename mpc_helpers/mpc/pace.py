"""How long drawing noise is given, so that when a helper is ready says nothing about what it drew.

A large |noise| is made of long random walks, which take time. Without an allowance for the longest of them, a peer that
sees when this helper is ready learns something about its noise; most of all for few buckets and large scales.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from fractions import Fraction

# Each bound below is exceeded with probability at most e^−28.5, under 2^−41: both together under 2^−40.
TAIL = 28.5
# What drawing costs at most on a slow core: for each bucket, for each step of its walk, for each step near zero, which
# is looked at bit by bit. A 3 GHz core takes 5 to 40 µs, 1 to 2 ns and 0.6 µs.
BUCKET_SECONDS, STEP_SECONDS, NEAR_SECONDS = 200e-6, 4e-9, 2.5e-6


def allowance(buckets: int, rate: Fraction) -> float:
    """Seconds that drawing is given: by buckets m and scale b = 1/γ alone, never by what is drawn."""
    steps = longest_walks(buckets) / float(rate)
    near = math.sqrt(largest_squares(buckets) * steps)
    return buckets * BUCKET_SECONDS + steps * STEP_SECONDS + near * NEAR_SECONDS


def longest_walks(buckets: int) -> float:
    """What the walks of all buckets take together, in units of b: at most m + √(2mt) + t.

    A walk has as many steps as a geometric variable, which is b times an exponential one, rounded down. So all together
    are below b times a Gamma(m) variable, whose tail this is (Boucheron, Lugosi, Massart 2013, section 2.4).
    """
    return buckets + math.sqrt(2 * buckets * TAIL) + TAIL


def largest_squares(buckets: int) -> float:
    """A walk of N steps is near zero for some |Z|·√N of them, Z normal; here ΣZ², at most m + 2√(mt) + 2t.

    By Cauchy and Schwarz Σ|Z|√N ≤ √(ΣZ²·ΣN) (Laurent and Massart 2000, lemma 1, for ΣZ²).
    """
    return buckets + 2 * math.sqrt(buckets * TAIL) + 2 * TAIL


@contextlib.asynccontextmanager
async def paced(seconds: float) -> AsyncIterator[None]:
    """End a whole number of `seconds` after the start, and nearly always one.

    On a machine that is slower than anyone thought, what shows is how often that time had to be given, and no more.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    yield
    if seconds > 0:
        taken = loop.time() - start
        await asyncio.sleep(seconds * max(1, math.ceil(taken / seconds)) - taken)
