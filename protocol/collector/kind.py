"""Which reports can be in one batch: all that a query must be equal in, read from the public header."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.header import Header
from protocol.hpke import Suite
from protocol.wire import Writer, tagged_hash


@dataclass(frozen=True, slots=True)
class ReportKind:
    """What all reports of one query share. The hour is not part of it: a query may span many."""

    site: str
    caller: str
    unit: str
    buckets: int
    kappa: int
    cap: int
    spread: int
    epsilon_micros: int
    sensitivity: int
    debug: bool
    helper_set: bytes
    suite: Suite

    @classmethod
    def of(cls, header: Header) -> ReportKind:
        """The kind of one report."""
        terms = header.terms
        return cls(
            terms.site,
            terms.caller,
            terms.unit,
            terms.buckets,
            terms.kappa,
            terms.cap,
            terms.spread,
            terms.epsilon_micros,
            terms.sensitivity,
            terms.debug,
            header.helper_set,
            header.suite,
        )

    @property
    def name(self) -> str:
        """Eight hexadecimal digits by which people and files call it."""
        writer = Writer().text(self.site).text(self.caller).text(self.unit).uint(self.buckets, 4).uint(self.kappa, 8)
        writer.uint(self.cap, 8).uint(self.spread, 2).uint(self.epsilon_micros, 4).uint(self.sensitivity, 8)
        writer.uint(self.debug, 1).fixed(self.helper_set, len(self.helper_set)).uint(self.suite.value, 2)
        return tagged_hash("kind of report", writer.done()).hex()[:8]

    def describe(self) -> str:
        """For a table."""
        checked = f", sums up to {self.cap}" if self.cap else ", unchecked"
        debug = ", debug" if self.debug else ""
        return f"{self.buckets} buckets of {self.unit} at ε {self.epsilon_micros / 1e6:g}{checked}{debug}"
