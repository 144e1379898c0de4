"""A querier's own record: which answers are unbiased for certain, from public facts alone (paper, Appendix F).

Run by the querier over all her batches. It costs no budget: nothing is asked of a device or a helper.

*The rule.* Appendix F: if every report r takes at most ε^r from an epoch x, and x has at least ε^G, then
Σ ε^r ≤ ε^G implies that x paid for all of them, so nothing was dropped. Here ε^r is the charge for the largest change
Δ + κ (`ReportSpan.most`), and the sum is over the reports that one device can have made and that can reach x.

*Which reports reach x.* Devices draw where their weeks begin, so x may be any interval [s, s + E). A report made at t
asks about the epochs that meet [t − L, t], so it reaches x if and only if s ≤ t and t − L < s + E. For reports made
from a to b that is some t in [a, b] if and only if a − L − E < s ≤ b. A report made after the last one of a batch has
charged nothing yet when that one is answered, so only batches that had begun by then count against it.

*Proof.* Let a report r of a batch B, made at t ≤ b_B, ask about an epoch x = [s, s + E) of its device. Everything that
x's filter for this site has paid by then was for reports of the same device, made at or before t, that reach x: each is
in a batch that began by b_B and for which a − L − E < s ≤ b; at most `per_device` of each batch are of this device;
each took at most `most`. If the sum, B included, is within the budget at every s with a_B − L − E < s ≤ b_B, the filter
had room for r, whatever the device holds. So no epoch was dropped for lack of this site's budget. ∎

*What it cannot know.* The limits that all sites share (the global filter, quotas) are used up by others too: only the
side query sees that. Epochs that a person has cleared, and devices that are switched off, are bias to neither. What
she must know herself is `Knowledge`; a batch that is missing here is missing in the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from protocol.epsilon import MICROS
from protocol.errors import TrefoilError
from protocol.querier.report_span import ReportSpan
from protocol.seconds import DAY

# Weeks are shown from Mondays: 1 January 1970 was a Thursday.
_MONDAY = 4 * DAY


class BiasStanding(Enum):
    """What a querier knows about bias without asking anyone."""

    CERTAIN = "unbiased for certain"
    MEASURED = "measured"
    UNKNOWN = "unknown, measure it"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the querier must know: no header says it. Days are those of devices; the budget is micros per epoch.

    `per_device` is how many reports of one device a batch holds at most. `digits` are those of every ε she asked for,
    after the point.
    """

    per_device: int
    budget: int = MICROS
    lookback_days: int = 30
    epoch_days: int = 7
    digits: int = 3

    def __post_init__(self) -> None:
        for name in ("per_device", "budget", "lookback_days", "epoch_days"):
            if getattr(self, name) < 1:
                raise TrefoilError(f"{name.replace('_', ' ')} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.digits <= 6:
            raise TrefoilError(f"digits of ε are 0 to 6, not {self.digits}", "6 stands for any number of digits.")


@dataclass(frozen=True, slots=True)
class MeasuredBias:
    """What the side query of one answer said."""

    bound: float
    beta: float


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """One batch: what its reports could cost, and its queries by id, with the bias that was measured, if any was."""

    path: Path
    spans: tuple[ReportSpan, ...]
    queries: tuple[tuple[str, MeasuredBias | None], ...] = ()

    @property
    def begun(self) -> int:
        """When its first report was made."""
        return min(span.first for span in self.spans)

    @property
    def end(self) -> int:
        """When its last one was, at the latest."""
        return max(span.end for span in self.spans)

    @property
    def measured(self) -> MeasuredBias | None:
        """The smallest bound that any of its answers gave."""
        return min((found for _, found in self.queries if found), key=lambda found: found.bound, default=None)


@dataclass(frozen=True, slots=True)
class EpochBias:
    """All device-epochs that begin from `begins` on, for as long as an epoch is: the worst of them."""

    begins: int
    # The most that one device can have been asked for, in micros.
    asked: int
    batches: tuple[AskedBatch, ...]
    standing: BiasStanding
    # The largest bound of the answers that are not certain, where all of them were measured.
    bound: float | None = None


class OwnRecord:
    """Everything that one site has asked devices for."""

    def __init__(self, site: str, batches: Sequence[AskedBatch], knowledge: Knowledge) -> None:
        self.site = site
        self.knowledge = knowledge
        self.batches = sorted((batch for batch in batches if batch.spans), key=lambda batch: (batch.end, batch.path))
        self._epoch = knowledge.epoch_days * DAY
        self._reach = knowledge.lookback_days * DAY + self._epoch

    def load(self, begins: int, by: int) -> int:
        """The most that the epoch which begins then can have been asked for by the moment `by`, by this site."""
        return sum(self._price(batch, begins) for batch in self.batches if batch.begun <= by)

    def certain(self, batch: AskedBatch) -> bool:
        """Whether no epoch that the batch asks about can have been out of this site's budget."""
        starts = self._starts(min(span.first for span in batch.spans) - self._reach + 1, batch.end)
        touched = [start for start in starts if self._price(batch, start)]
        return all(self.load(start, batch.end) <= self.knowledge.budget for start in touched)

    def standing(self, batch: AskedBatch, measured: MeasuredBias | None) -> BiasStanding:
        """Of one of the batch's answers, whose side query said `measured`."""
        if self.certain(batch):
            return BiasStanding.CERTAIN
        return BiasStanding.UNKNOWN if measured is None else BiasStanding.MEASURED

    def epochs(self) -> list[EpochBias]:
        """Every epoch that was asked about, by when it begins, earliest first."""
        if not self.batches:
            return []
        first = min(batch.begun for batch in self.batches) - self._reach + 1
        last = max(batch.end for batch in self.batches)
        rows = range((first - _MONDAY) // self._epoch, (last - _MONDAY) // self._epoch + 1)
        return [self._row(row * self._epoch + _MONDAY, last) for row in rows]

    def _row(self, begins: int, last: int) -> EpochBias:
        starts = self._starts(begins, begins + self._epoch - 1)
        asked = max(self.load(start, last) for start in starts)
        touching = tuple(batch for batch in self.batches if any(self._price(batch, start) for start in starts))
        if asked <= self.knowledge.budget:
            return EpochBias(begins, asked, touching, BiasStanding.CERTAIN)
        bounds = [batch.measured for batch in touching if not self.certain(batch)]
        known = [found.bound for found in bounds if found is not None]
        if len(known) < len(bounds):
            return EpochBias(begins, asked, touching, BiasStanding.UNKNOWN)
        return EpochBias(begins, asked, touching, BiasStanding.MEASURED, max(known, default=0.0))

    def _price(self, batch: AskedBatch, begins: int) -> int:
        """The most that one device pays for its reports in `batch` from the epoch that begins then."""
        reached = [span for span in batch.spans if span.first - self._reach < begins <= span.end]
        most = max((span.most(self.knowledge.digits) for span in reached), default=0)
        return self.knowledge.per_device * most

    def _starts(self, first: int, last: int) -> list[int]:
        """Where the load can change from `first` to `last`: it is constant in between."""
        changes = {span.first - self._reach + 1 for batch in self.batches for span in batch.spans}
        changes |= {span.end + 1 for batch in self.batches for span in batch.spans}
        return sorted({first, *(start for start in changes if first <= start <= last)})
