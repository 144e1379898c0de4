"""From a histogram to what leaves the device. Real and null reports take the same path and have the same size.

`prepare` runs before anything is charged and refuses what could not be sealed; the function it returns runs after the
charge is durable, and cannot fail for a reason that depends on the person's data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from device import errors
from device.request import CheckedRequest
from protocol.errors import ProtocolError, TrefoilError
from protocol.header import ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.report import SealedReport, seal_report

R_co = TypeVar("R_co", covariant=True)
_LOG = logging.getLogger(__name__)


class Seal(Protocol[R_co]):
    """Turns a request's numbers into a report. If the report shows them, it `reveals`: only debug devices may."""

    @property
    def reveals(self) -> bool: ...

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], R_co]: ...


@dataclass(frozen=True, slots=True)
class HelperSetSeal:
    """*Share · Seal* to the three helpers that the device's vendor trusts.

    >>> seal = trefoil.HelperSetSeal(helpers.helper_set)  # doctest: +SKIP
    >>> trefoil.Device(trefoil.MemoryStore(), seal, clock=trefoil.system_clock)  # doctest: +SKIP
    """

    helper_set: HelperSet
    reveals: bool = field(default=False, init=False)

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], SealedReport]:
        try:
            terms = report_terms(request, now, debug=debug)
        except ProtocolError as error:
            # What a header cannot carry: an ε below one millionth, another unit than a word.
            raise errors.RangeError(str(error), error.hint, kind=error.kind) from None
        try:
            self.helper_set.sealing_keys(terms.time)
        except TrefoilError as error:
            # To a page the service is unknown to this device for now.
            raise errors.ReferenceError(str(error), error.hint, kind=error.kind) from None
        return lambda histogram: _seal_or_null(histogram, terms, self.helper_set)


def _seal_or_null(histogram: Sequence[int], terms: ReportTerms, helper_set: HelperSet) -> SealedReport:
    """Seal a report, or a null report if a defect makes its proof fail: after the charge nothing may fail visibly."""
    try:
        return seal_report(histogram, terms, helper_set)
    except ProtocolError as error:
        _LOG.error("the proof of a report failed its own check; sealing a null report instead: %s", error)
        return seal_report([0] * terms.length, terms, helper_set)


@dataclass(frozen=True, slots=True)
class DebugReport:
    """The report of a debug device: the sealed report, which only debug queries accept, and its numbers."""

    sealed: SealedReport
    histogram: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DebugSeal:
    """As `HelperSetSeal`, with the plain histogram beside the report."""

    helper_set: HelperSet
    reveals: bool = field(default=True, init=False)

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], DebugReport]:
        seal = HelperSetSeal(self.helper_set).prepare(request, now, debug=debug)
        return lambda histogram: DebugReport(seal(histogram), tuple(histogram))


@dataclass(frozen=True, slots=True)
class ServicesSeal(Generic[R_co]):
    """Seals to the helpers of the aggregation service that the site has chosen, by its name."""

    by_name: Mapping[str, Seal[R_co]]

    @property
    def reveals(self) -> bool:
        return any(seal.reveals for seal in self.by_name.values())

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], R_co]:
        seal = self.by_name.get(request.service)
        if seal is None:
            raise errors.ReferenceError(f"this device has no helpers for the aggregation service {request.service!r}")
        return seal.prepare(request, now, debug=debug)


@dataclass(frozen=True, slots=True)
class PlainSeal:
    """No sealing at all, for simulation and scenarios: the report is the histogram.

    >>> trefoil.PlainSeal().reveals
    True
    """

    reveals: bool = field(default=True, init=False)

    def prepare(self, request: CheckedRequest, now: int, *, debug: bool) -> Callable[[Sequence[int]], tuple[int, ...]]:  # noqa: ARG002 - the protocol's shape
        return tuple


def report_terms(request: CheckedRequest, now: int, *, debug: bool) -> ReportTerms:
    """Return the public terms of a report: the requested ε and Δ, never what was charged or matched."""
    terms = request.loss_terms
    return ReportTerms(
        site=request.site,
        caller=request.caller,
        time=coarse_time(now),
        epsilon_micros=terms.epsilon_micros,
        sensitivity=terms.query_sensitivity,
        buckets=request.buckets,
        kappa=request.kappa,
        unit=request.unit,
        debug=debug,
        cap=request.cap,
        spread=request.spread,
    )
