"""Checked reports for tests, honest ones and every class of lie, and what the three helpers make of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.column import fit
from mpc_helpers.admission.ingest import AdmittedColumn
from protocol import numerators, validity
from protocol.field import P, Vector, from_integers
from protocol.header import ReportTerms
from protocol.query import Query
from protocol.report import SealedReport, seal_deal, seal_report
from protocol.shape import Shape, pay, polynomial
from protocol.shares import PARTIES
from protocol.validity import Deal, Polynomials, Seeds, deal_numbers
from tests.support import protocol_samples as samples

Mask = npt.NDArray[np.bool_]


def draw(_: bytes = b"") -> Seeds:
    return os.urandom(32), os.urandom(32), os.urandom(32)


def terms_of(shape: Shape) -> ReportTerms:
    return samples.terms(
        buckets=shape.buckets, kappa=shape.kappa, cap=shape.cap, spread=shape.spread, sensitivity=max(shape.cap, 1)
    )


def histogram_of(shape: Shape, **values: int) -> list[int]:
    """`b3=7` puts 7 into bucket 3; `side` is the side query's number."""
    histogram = [0] * shape.length
    for place, value in values.items():
        histogram[-1 if place == "side" else int(place[1:])] = value
    return histogram


def some_histogram(shape: Shape, seed: int) -> list[int]:
    """A valid one, drawn."""
    chosen = np.random.default_rng(seed)
    histogram, left = [0] * shape.length, int(chosen.integers(0, shape.cap + 1))
    for bucket in chosen.choice(shape.buckets, size=int(chosen.integers(0, shape.spread + 1)), replace=False).tolist():
        histogram[bucket] = int(chosen.integers(0, left + 1))
        left -= histogram[bucket]
    if shape.kappa:
        histogram[-1] = shape.kappa * int(chosen.integers(2))
    return histogram


def honest(histogram: Sequence[int], shape: Shape) -> SealedReport:
    return seal_report(histogram, terms_of(shape), samples.HELPER_SET)


def numbers_of(histogram: Sequence[int], shape: Shape) -> Vector:
    """Any numbers at all, as a report shares them."""
    amounts = [(place + 1, value) for place, value in enumerate(histogram[: shape.buckets])]
    return np.concatenate([numerators.encode(amounts, shape.buckets), from_integers(histogram[shape.buckets :])])


def planes_of(histogram: Sequence[int], shape: Shape) -> list[list[int]]:
    """The polynomials of an honest histogram."""
    amounts = [(place + 1, value) for place, value in enumerate(histogram[: shape.buckets]) if value]
    coins = shape.planes[:-1] if shape.kappa else shape.planes
    planes = [polynomial(labels) for labels in pay(amounts, coins)]
    return planes + ([polynomial([1 if histogram[-1] else 0])] if shape.kappa else [])


Openings = Callable[[list[int], list[int]], list[int]]


def lying(
    histogram: Sequence[int],
    shape: Shape,
    planes: Polynomials,
    openings: Openings = lambda right, _: right,
) -> SealedReport:
    """A report of these numbers with these polynomials. `openings` may change what is opened, knowing the points."""
    return seal_lie(deal_numbers(numbers_of(histogram, shape), planes, shape, draw), openings)


def seal_lie(dealt: Deal, openings: Openings = lambda right, _: right) -> SealedReport:
    def opening(one: Deal, points: Sequence[int]) -> list[int]:
        return openings(validity.open_at(one, points), list(points))

    return seal_deal(dealt, terms_of(dealt.shape), samples.HELPER_SET, opening=opening)


@dataclass(frozen=True)
class Checked:
    """What three helpers hold of a batch, and which report stands where."""

    ingested: list[AdmittedColumn]
    # The place in column order of the reports as they were given.
    places: list[int]

    def zero(self) -> list[bool]:
        """Of each report as given: whether the three helpers' check shares of all residues are equal."""
        shares = [all_shares(one) for one in self.ingested]
        assert fit(*shares).all()
        equal = (shares[1] == shares[2]).all(axis=1) & (shares[0] == shares[2]).all(axis=1)
        return [bool(equal[place]) for place in self.places]


def all_shares(ingested: AdmittedColumn) -> Vector:
    """The check shares of every report, all of which opened, out of the blocks a helper would show."""
    shape = ingested.rules.query.shape
    blocks = ingested.show(range(len(ingested.blocks)))
    assert blocks is not None
    data = b"".join(block[8:] for block in blocks)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(-1, shape.residues)


def query_of(reports: Sequence[SealedReport], shape: Shape) -> Query:
    terms = terms_of(shape)
    query = samples.query_for(reports, buckets=shape.buckets, kappa=shape.kappa, sensitivity=terms.sensitivity)
    return replace(query, cap=shape.cap, spread=shape.spread)


def check(folder: Path, reports: Sequence[SealedReport], shape: Shape) -> Checked:
    """Let all three helpers ingest these reports."""
    ingested = samples.ingest_columns(samples.write_columns(folder, reports), query_of(reports, shape))
    digests = [row.tobytes() for row in ingested[0].column.digests()]
    return Checked(ingested, [digests.index(report.digest) for report in reports])


def half() -> int:
    """1/2 in the field: twice of it is one."""
    return (P + 1) // 2


assert PARTIES == 3
