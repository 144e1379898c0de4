"""Noise modes: how the three helpers make the noise together (DESIGN.md, "Noise"). There is no mode without noise.

A mode is three records, one in each layer, and each is complete by its type: its name here; its law, all that follows
for an answer, in `protocol.noise_law`; its program, all that helpers run, in `mpc_helpers.mpc.sum_program`. No other
module of a querier or a helper branches on the mode.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, assert_never


class ModeFacts(NamedTuple):
    """What there is to know of a mode without its law: its number on the wire, whether helpers run it unless told
    otherwise, and what it is. A number is never given to another mode.
    """

    code: int
    by_default: bool
    description: str


class NoiseMode(Enum):
    """By the word that people write."""

    LOCAL = "local"
    PAIRWISE = "pairwise"
    JOINT = "joint"

    @property
    def facts(self) -> ModeFacts:
        """Of this mode. One without them does not pass the type check."""
        match self:
            case NoiseMode.LOCAL:
                return ModeFacts(1, True, "every helper adds a part of its own")
            case NoiseMode.PAIRWISE:
                return ModeFacts(2, True, "every two helpers add a part that both know")
            case NoiseMode.JOINT:
                # It makes (ε, δ) of the pure ε that devices paid, so an operator has to name it.
                return ModeFacts(3, False, "the three draw one noise together, which nobody knows")
            case _:
                assert_never(self)
