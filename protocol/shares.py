"""Secret shares: replicated among three helpers in a report, degree-1 Shamir inside the MPC and in the answer.

A histogram h is x₁ + x₂ + x₃ mod p. x₁ and x₂ are expanded from seeds s₁ and s₂; x₃ is explicit, masked by the
expansion of s₃ and sent once as the report's body. Helper i holds two seeds (DESIGN.md, "Shares"):

    helper 1: s₁ s₂      helper 2: s₂ s₃      helper 3: s₃ s₁

so that exactly two helpers hold every component, and any one helper's view is uniform.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.errors import Inconsistent, InvalidValue
from protocol.field import (
    SEED_SIZE,
    P,
    Vector,
    add,
    expand,
    expand_many,
    from_integers,
    lift,
    multiply_constant,
    subtract,
)

PARTIES = 3
# SEEDS_OF[party] = the two seeds (0-based) that helper holds, in the order its payload carries them.
SEEDS_OF: tuple[tuple[int, int], ...] = ((0, 1), (1, 2), (2, 0))
# The body is x₃ masked by s₃, so seed index 2 is the one that unmasks it; helper 1 never needs the body.
BODY_SEED = 2
# LACKING[party] = the component (0-based) that helper does not know.
LACKING: tuple[int, ...] = (2, 0, 1)

Entropy = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class SharedVector:
    """A secret vector, split. Each helper gets two of the three seeds; helpers 2 and 3 also get the body."""

    seeds: tuple[bytes, bytes, bytes] = field(repr=False)
    body: Vector

    def components(self, party: int) -> dict[int, Vector]:
        """Return the two components that helper `party` (0, 1, 2) can compute: its whole view of the secret."""
        return {index: component(index, self.seeds[index], self.body.size, self.body) for index in SEEDS_OF[party]}


def component(index: int, seed: bytes, length: int, body: Vector | None) -> Vector:
    """Return x₁ or x₂ expanded from its seed, or x₃: the body without its mask, and beyond the body the mask alone."""
    expanded = expand(seed, length)
    if index != BODY_SEED:
        return expanded
    if body is None:
        raise InvalidValue("the third component needs the body")
    return np.concatenate([subtract(body, expanded[: body.size]), expanded[body.size :]])


def share(values: Sequence[int], *, entropy: Entropy = os.urandom) -> SharedVector:
    """Run by a device: split integers into three components with fresh seeds."""
    seeds = (entropy(SEED_SIZE), entropy(SEED_SIZE), entropy(SEED_SIZE))
    secret = from_integers(values)
    x1, x2, mask = expand_many(seeds, secret.size)
    x3 = subtract(subtract(secret, x1), x2)
    return SharedVector(seeds, add(x3, mask))


def reconstruct(components: Sequence[Vector]) -> list[int]:
    """Return the secret from all three components. For tests and vectors: no party of the protocol holds all three."""
    x1, x2, x3 = components
    return lift(add(add(x1, x2), x3))


def to_shamir(party: int, components: dict[int, Vector]) -> Vector:
    """Run by a helper on its sums: convert two replicated components to its degree-1 Shamir share at x = party + 1.

    Component c belongs to the line through (0, 1) that is zero at the helper lacking it, so its weight at x is
    1 − x/x_lacking. The map is linear, so apply it once to the sums of all reports, not to each report.
    """
    first, second = (
        multiply_constant(components[index], 1 - (party + 1) * pow(LACKING.index(index) + 1, -1, P))
        for index in SEEDS_OF[party]
    )
    return add(first, second)


def open_shamir(shares: Sequence[Vector]) -> list[int]:
    """Run by the querier: check that the three shares lie on a line, then read the secret off at x = 0.

    Any one changed share breaks y₁ − 2·y₂ + y₃ = 0 in some bucket: a malicious helper is detected, but not
    identified.
    """
    if len(shares) != PARTIES or len({vector.size for vector in shares}) != 1:
        raise InvalidValue("an answer needs three shares of the same length")
    y1, y2, y3 = shares
    if np.any(subtract(add(y1, y3), add(y2, y2))):
        raise Inconsistent(
            "the three answer shares do not fit together: at least one helper computed or sent a wrong share",
            "Do not use this answer. Ask the three operators to compare their logs for this query.",
        )
    return lift(subtract(add(y1, y1), y2))
