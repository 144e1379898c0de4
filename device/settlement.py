"""The settlement of one request: what was found, what was paid for it, and the line that the log keeps of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from device.checked_request import CheckedRequest, Events, Read, no_events
from device.reach import Reach
from device.storage import LOGGED_EPOCHS, EpochEntry, EpochOutcome, ReportRecord


@dataclass(frozen=True, slots=True)
class Found:
    """What *Match* found: where it looked, the sites of relevant events by epoch, and how to read those."""

    reach: Reach
    sites: Mapping[int, Collection[str]]
    # The events of some epochs that the attribution function needs to see; inside the transaction only.
    read: Read
    # Epochs that the querier's own functions were not shown, because they could not have paid for it.
    hidden: Collection[int] = ()
    # The same for what the querier itself has shown, where that is free: F ∩ P, which no epoch has to pay for.
    own: Read = no_events

    @property
    def relevant(self) -> Events:
        """All of them."""
        return self.read(self.sites)


@dataclass(frozen=True, slots=True)
class Settled:
    """What *Charge* settled: what each epoch that could pay has paid to the querier's own filter, and the report's
    histogram where the charge had to know it. After a `fault` there is no report to know.
    """

    paid: Mapping[int, int]
    output: tuple[int, ...] | None
    fault: bool = False
    # What the report is if its one epoch cannot pay.
    free: tuple[int, ...] = ()


def record_of(request: CheckedRequest, now: int, found: Found, settled: Settled) -> ReportRecord:
    """The line in the log: as long for a null report as for any other."""
    terms, window = request.loss_terms, found.reach.window
    epochs = tuple(
        EpochEntry(epoch, _outcome(request, epoch, found, settled), settled.paid.get(epoch, 0))
        for epoch in window[-LOGGED_EPOCHS:]
    )
    asked = (terms.epsilon_micros, terms.query_sensitivity, request.site, request.caller)
    return ReportRecord(now, *asked, epochs, request.side)


def _outcome(request: CheckedRequest, epoch: int, found: Found, settled: Settled) -> EpochOutcome:
    """What the person is told about one epoch of a request."""
    if not found.reach.measuring:
        return EpochOutcome.NOT_MEASURED
    if epoch not in found.reach.usable:
        return EpochOutcome.CLOSED
    if settled.fault:
        return EpochOutcome.FAULT
    if epoch not in found.sites and epoch not in found.hidden and request.side_query is None:
        return EpochOutcome.NOTHING_FOUND
    return EpochOutcome.PAID if epoch in settled.paid else EpochOutcome.OUT_OF_BUDGET
