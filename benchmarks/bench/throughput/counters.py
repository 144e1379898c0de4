"""What each helper has used since it started, as its own metrics page says: wherever it runs, the same numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpc_helpers.local.launcher import fetch
from protocol.helper_set import HelperEntry, HelperSet

_LINE = re.compile(r'^(trefoil_\w+)(?:{\w+="([^"]*)"})? (\S+)$', re.MULTILINE)
_FETCH_SECONDS = 10.0

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HelperCounters:
    """Of one helper: processor seconds by process, by part of admitting and in the ledger; memory; bytes
    to peers, of the ledger with its log, and of the log.

    `processes` is empty at a helper whose system does not say, or that is older than this number.
    """

    processes: Values
    peaks_mb: Values
    admit: Values
    ledger_seconds: float
    ledger_cpu_seconds: float
    peer_bytes: float
    ledger_bytes: float
    log_bytes: float

    @classmethod
    def parse(cls, page: str) -> HelperCounters:
        """What the page says, and zero for what it does not."""
        found: dict[str, dict[str, float]] = {}
        for name, label, value in _LINE.findall(page):
            found.setdefault(name, {})[label] = float(value)
        peaks = found.get("trefoil_process_peak_bytes", {})
        return cls(
            found.get("trefoil_process_cpu_seconds", {}),
            {process: size / 2**20 for process, size in peaks.items()},
            found.get("trefoil_admit_cpu_seconds_total", {}),
            found.get("trefoil_ledger_seconds_total", {}).get("", 0.0),
            found.get("trefoil_ledger_cpu_seconds_total", {}).get("", 0.0),
            found.get("trefoil_peer_bytes_total", {}).get("", 0.0),
            found.get("trefoil_ledger_bytes", {}).get("", 0.0),
            found.get("trefoil_ledger_log_bytes", {}).get("", 0.0),
        )

    @classmethod
    def fetch(cls, helper: HelperEntry) -> HelperCounters:
        """From a helper that runs."""
        return cls.parse(fetch(helper, "/metrics", _FETCH_SECONDS).decode())

    def since(self, before: HelperCounters) -> HelperCounters:
        """The difference; memory stays the most that was ever held."""
        return HelperCounters(
            _difference(self.processes, before.processes),
            self.peaks_mb,
            _difference(self.admit, before.admit),
            self.ledger_seconds - before.ledger_seconds,
            self.ledger_cpu_seconds - before.ledger_cpu_seconds,
            self.peer_bytes - before.peer_bytes,
            self.ledger_bytes - before.ledger_bytes,
            self.log_bytes - before.log_bytes,
        )

    @property
    def cpu_seconds(self) -> float | None:
        """Of all its processes, if it says so."""
        return sum(self.processes.values()) if self.processes else None


@dataclass(frozen=True, slots=True)
class Counters:
    """Of all three."""

    helpers: tuple[HelperCounters, ...]

    @classmethod
    def read(cls, helper_set: HelperSet) -> Counters:
        """Ask all three helpers."""
        return cls(tuple(HelperCounters.fetch(helper) for helper in helper_set.helpers))

    def since(self, before: Counters) -> Counters:
        """What was used between two readings."""
        return Counters(tuple(now.since(then) for now, then in zip(self.helpers, before.helpers, strict=True)))

    @property
    def cpu_seconds(self) -> float | None:
        """Of all processes of all three; None if one does not say."""
        spent = [helper.cpu_seconds for helper in self.helpers]
        known = [seconds for seconds in spent if seconds is not None]
        return sum(known) if len(known) == len(spent) else None

    @property
    def peer_bytes(self) -> float:
        """Between all of them."""
        return sum(helper.peer_bytes for helper in self.helpers)


def _difference(now: Values, before: Values) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
