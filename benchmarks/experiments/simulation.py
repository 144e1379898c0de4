"""Run the three systems over a world, part by part, and measure what they spent and what they answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.experiments.policies import DevicePolicy, IpaLike, PolicyOutcome, System, label_of
from benchmarks.experiments.world import Epochs, Flags, Floats, Ints, Matches, World, match
from protocol.units import MICROS

BLOCK = 1_000_000
# Times are compared only with each other; far below and above any.
NEVER = np.iinfo(np.int64).max
# Enough for the eye.
MOST_QUANTILES = 4_000


@dataclass(frozen=True, slots=True)
class Run:
    """One system over one world. Sums by query are in units; budgets in micros."""

    system: System | None
    label: str
    kappa: int
    consumed: int
    largest: int
    filters: int
    executed: Flags
    truth: Ints
    answer: Ints
    flagged: Ints
    paid: Ints
    # The queries in the order in which their batches fill up, and the epochs that each of them spans.
    order: Ints
    first_epoch: Ints = field(repr=False)
    last_epoch: Ints = field(repr=False)
    # One number per owner: the average budget spent over the epochs its advertiser ever asked for, in micros.
    owner_average: Floats = field(repr=False)
    rmsre: Floats = field(repr=False)
    seconds: float

    @property
    def average(self) -> float:
        """Return the budget consumed per filter: ε per device and epoch."""
        return self.consumed / MICROS / self.filters if self.filters else 0.0

    @property
    def maximum(self) -> float:
        """The most any one filter has consumed, in ε."""
        return self.largest / MICROS

    @property
    def errors(self) -> Floats:
        """Return the RMSRE of the queries that ran and whose true answer is not zero."""
        return self.rmsre[self.executed & (self.truth > 0)]

    def thinned(self) -> Run:
        """Return the run without what no figure needs: of each owner's average only a few thousand quantiles."""
        ordered = np.sort(self.owner_average)
        picked = np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_QUANTILES)).astype(np.int64)
        return replace(self, owner_average=ordered[picked])


@dataclass(slots=True)
class _Batches:
    """Each query's batch: true sum, epochs spanned, and when it is full."""

    truth: Ints
    first_epoch: Ints
    last_epoch: Ints
    full: Ints

    @classmethod
    def empty(cls, count: int) -> _Batches:
        zeros = np.zeros(count, dtype=np.int64)
        return cls(zeros, np.full(count, NEVER), np.full(count, -NEVER), np.full(count, -NEVER))

    def add(self, part: World, matches: Matches) -> None:
        query = part.conversions.query
        np.add.at(self.truth, query, np.where(matches.attributed, part.conversions.value, 0))
        np.minimum.at(self.first_epoch, query, matches.first_epoch)
        np.maximum.at(self.last_epoch, query, matches.last_epoch)
        np.maximum.at(self.full, query, part.conversions.time)

    def order(self) -> Ints:
        """Return the queries in the order in which their batches fill up; ties by number."""
        return np.lexsort((np.arange(len(self.full)), self.full))

    def spans(self, advertiser: Ints) -> Ints:
        """Return how many epochs each advertiser's queries span, from the first ever requested to the last."""
        advertisers = int(advertiser.max()) + 1
        first = np.full(advertisers, NEVER)
        last = np.full(advertisers, -NEVER)
        np.minimum.at(first, advertiser, self.first_epoch)
        np.maximum.at(last, advertiser, self.last_epoch)
        return np.where(last >= first, last - first + 1, 0)


@dataclass(slots=True)
class _Tally:
    """A device policy's sums, gathered part by part."""

    policy: DevicePolicy
    answer: Ints
    flagged: Ints
    paid: Ints
    owner_spent: list[Ints] = field(default_factory=list)
    largest: int = 0
    seconds: float = 0.0

    @classmethod
    def empty(cls, policy: DevicePolicy, count: int) -> _Tally:
        answer, flagged, paid = np.zeros((3, count), dtype=np.int64)
        return cls(policy, answer, flagged, paid)

    def add(self, part: World, outcome: PolicyOutcome) -> None:
        query = part.conversions.query
        np.add.at(self.answer, query, outcome.report)
        np.add.at(self.flagged, query, outcome.flagged.astype(np.int64))
        np.add.at(self.paid, query, outcome.paid)
        self.owner_spent.append(outcome.consumed.sum(axis=1))
        self.largest = max(self.largest, int(outcome.consumed.max()))


@dataclass(frozen=True, slots=True)
class Simulation:
    """Every system's run over one world, and the time spent finding windows, epochs and impressions for all of them."""

    runs: list[Run]
    matching_seconds: float

    def of(self, system: System) -> list[Run]:
        """Return the runs of one system: with and without a side query, if both were requested."""
        return [run for run in self.runs if run.system is system]


def simulate(
    world: World,
    epochs: Epochs,
    policies: Sequence[DevicePolicy | IpaLike],
    *,
    block: int = BLOCK,
    advance: Callable[[int], None] = lambda _: None,
) -> Simulation:
    """Run every policy over the same world, in this order. `advance` gets the conversions of each part that is done."""
    count = world.submitted
    batches = _Batches.empty(count)
    rows = [policy if isinstance(policy, IpaLike) else _Tally.empty(policy, count) for policy in policies]
    tallies = [row for row in rows if isinstance(row, _Tally)]
    matching = 0.0
    for first, last in world.blocks(block):
        started = time.perf_counter()
        part = world.part(first, last)
        matches = match(part, epochs)
        batches.add(part, matches)
        matching += time.perf_counter() - started
        for tally in tallies:
            started = time.perf_counter()
            tally.add(part, tally.policy.run(part, matches))
            tally.seconds += time.perf_counter() - started
        advance(len(part.conversions.owner))
    # The central budget is asked once every batch is known.
    runs = [
        _device_run(world, batches, row) if isinstance(row, _Tally) else _central_run(world, batches, row)
        for row in rows
    ]
    return Simulation(runs, matching)


def _device_run(world: World, batches: _Batches, tally: _Tally) -> Run:
    """Run every query; the denominator is (devices that converted) times (epochs ever requested), by advertiser."""
    spans = batches.spans(world.queries.advertiser)
    owner_spans = spans[world.owner_advertiser]
    spent = np.concatenate(tally.owner_spent)
    return Run(
        system=tally.policy.system,
        label=label_of(tally.policy),
        kappa=int(getattr(tally.policy, "kappa", 0)),
        consumed=int(spent.sum()),
        largest=tally.largest,
        filters=int(owner_spans.sum()),
        executed=np.ones(world.submitted, dtype=np.bool_),
        truth=batches.truth,
        answer=tally.answer,
        flagged=tally.flagged,
        paid=tally.paid,
        order=batches.order(),
        first_epoch=batches.first_epoch,
        last_epoch=batches.last_epoch,
        owner_average=spent / owner_spans,
        rmsre=rmsre(world, batches.truth, tally.answer, float(getattr(tally.policy, "spread", 1.0))),
        seconds=tally.seconds,
    )


def _central_run(world: World, batches: _Batches, policy: IpaLike) -> Run:
    """Run queries in the order in which batches fill up, on one device, over the epochs from first to last payment."""
    started = time.perf_counter()
    order = batches.order()
    result = policy.run(world.queries, world.cap, order, batches.first_epoch, batches.last_epoch)
    # By advertiser, from the first epoch that paid to the last.
    paying = result.consumed > 0
    skipped = paying.argmax(axis=1) + paying[:, ::-1].argmax(axis=1)
    widths = np.where(paying.any(axis=1), paying.shape[1] - skipped, 0)
    average = result.consumed.sum(axis=1) / np.maximum(widths, 1)
    return Run(
        system=policy.system,
        label=policy.system.value,
        kappa=0,
        consumed=int(result.consumed.sum()),
        largest=int(result.consumed.max()),
        filters=int(widths.sum()),
        executed=result.executed,
        truth=batches.truth,
        answer=np.where(result.executed, batches.truth, 0),
        flagged=np.zeros(world.submitted, dtype=np.int64),
        paid=result.paid,
        order=order,
        first_epoch=batches.first_epoch,
        last_epoch=batches.last_epoch,
        owner_average=average[world.owner_advertiser],
        rmsre=rmsre(world, batches.truth, batches.truth),
        seconds=time.perf_counter() - started,
    )


def noise_scale(world: World) -> Floats:
    """Return b = Δ/ε of each query, in units, for batches of the published size scaled down to the world."""
    return world.scale * world.cap * MICROS / world.queries.epsilon


def rmsre(world: World, truth: Ints, answer: Ints, spread: float = 1.0) -> Floats:
    """Return the analytic root mean square relative error sqrt((Q − Q̃)² + 2·b²)/Q; NaN where Q is zero.

    `spread` is how many times the deviation of one bucket's noise at Δ = cap the answer has.
    """
    squared = (truth - answer).astype(np.float64) ** 2 + 2 * (spread * noise_scale(world)) ** 2
    return np.sqrt(squared) / np.where(truth > 0, truth, np.nan)
