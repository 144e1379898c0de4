"""Devices that lie: reports whose numbers no honest device would send, sealed as an honest one seals.

Each carries the proof of a null report, for no lie has one of its own. Used to show that helpers refuse them.
"""

from __future__ import annotations

import os
from enum import Enum

import numpy as np

from protocol import numerators
from protocol.errors import TrefoilError
from protocol.field import P, from_integers
from protocol.header import ReportTerms
from protocol.helper_set import HelperSet
from protocol.report import SealedReport, seal_deal
from protocol.shape import Shape
from protocol.validity import Seeds, deal_numbers

_HALF = (P + 1) // 2
_HUGE = 2**59


class Lie(Enum):
    """What a device may put into its report that it should not."""

    NEGATIVE = "a negative number"
    OVER_THE_CAP = "one more than the cap"
    HUGE = "a huge number"
    FRACTIONAL = "half of one"
    CANCELLING = "two huge numbers that cancel"
    WRONG_FLAG = "twice the side query's number"


def lies_of(shape: Shape) -> list[Lie]:
    """The lies that a report of this shape has room for."""
    return [
        lie
        for lie in Lie
        if (lie is not Lie.CANCELLING or shape.buckets > 1) and (lie is not Lie.WRONG_FLAG or shape.kappa)
    ]


def lying_report(lie: Lie, terms: ReportTerms, helper_set: HelperSet) -> SealedReport:
    """A well-formed report with this lie in it."""
    shape = terms.shape
    if not shape.checked:
        raise TrefoilError("a lie is refused in checked reports only", "Make the reports with a cap.")
    buckets, side = _numbers(lie, shape)
    amounts = [(place + 1, value) for place, value in enumerate(buckets)]
    numbers = numerators.encode(amounts, shape.buckets)
    if shape.kappa:
        numbers = np.append(numbers, from_integers([side]))
    null_proof = [[1] + [0] * plane.degree for plane in shape.planes]
    return seal_deal(deal_numbers(numbers, null_proof, shape, _new_seeds), terms, helper_set)


def _numbers(lie: Lie, shape: Shape) -> tuple[list[int], int]:
    first = {
        Lie.NEGATIVE: [-1],
        Lie.OVER_THE_CAP: [shape.cap + 1],
        Lie.HUGE: [_HUGE],
        Lie.FRACTIONAL: [_HALF],
        Lie.CANCELLING: [_HUGE, -_HUGE],
        Lie.WRONG_FLAG: [0],
    }[lie]
    side = 2 * shape.kappa if lie is Lie.WRONG_FLAG else 0
    return first + [0] * (shape.buckets - len(first)), side


def _new_seeds(_: bytes) -> Seeds:
    return os.urandom(32), os.urandom(32), os.urandom(32)
