"""Health: what stands in the way of answering queries, and what an operator should look at before it does.

A helper that serves is alive, whatever it lacks: nobody is helped by restarting it because a peer is down. It is ready
when nothing known stops a new query from being answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Concern(Enum):
    """What a reason is about. Each has a gauge, and an alert rule that names it (DEPLOY.md)."""

    PEER = "peer"
    LEDGER = "ledger"
    DISK = "disk"
    CLOCK = "clock"
    KEY = "key"
    CERTIFICATE = "certificate"
    PROOFS = "proofs"
    DISPUTE = "dispute"
    HOUSEKEEPING = "housekeeping"
    CONFIGURATION = "configuration"


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing an operator should know. `stops`: no new query is answered until it is mended."""

    concern: Concern
    text: str
    stops: bool = False

    def to_json(self) -> dict[str, object]:
        """For the health page."""
        return {"concern": self.concern.value, "text": self.text, "stops": self.stops}


Source = Callable[[], Iterable[Reason]]


@dataclass(slots=True)
class Health:
    """Everything that is known to be wrong with one helper, read from its parts at the moment of asking."""

    sources: list[Source] = field(default_factory=list)

    def reasons(self) -> list[Reason]:
        """What stops queries first."""
        return sorted((reason for source in self.sources for reason in source()), key=lambda reason: not reason.stops)

    @property
    def ready(self) -> bool:
        """Whether nothing known stops a new query."""
        return not any(reason.stops for reason in self.reasons())

    def page(self, more: Mapping[str, object]) -> dict[str, object]:
        """What an operator reads, with what else is known of the helper."""
        reasons = self.reasons()
        ready = not any(reason.stops for reason in reasons)
        status = "ok" if not reasons else "warning" if ready else "not ready"
        return {"status": status, "ready": ready, "reasons": [reason.to_json() for reason in reasons], **more}

    def gauge(self) -> Mapping[tuple[tuple[str, str], ...], float]:
        """How many reasons there are of each concern; 0 of most."""
        found = [reason.concern for reason in self.reasons()]
        return {(("concern", concern.value),): float(found.count(concern)) for concern in Concern}
