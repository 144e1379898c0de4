"""What a helper counts, in Prometheus' text format. No site, no query and no person is named in any of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters that only grow, and gauges that are read when asked for."""

    def __init__(self) -> None:
        self._help: dict[str, tuple[str, str]] = {}
        self._counts: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, Callable[[], Mapping[Labels, float]]] = {}

    def counter(self, name: str, meaning: str) -> Callable[..., None]:
        """A new counter; call the result with an amount and labels to add to it."""
        self._help[name] = ("counter", meaning)
        counts = self._counts[name] = defaultdict(float)

        def add(amount: float = 1, /, **labels: str) -> None:
            counts[tuple(sorted(labels.items()))] += amount

        return add

    def gauge(self, name: str, meaning: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """A value that goes up and down; `read` gives it, by labels, at the moment of asking."""
        self._help[name] = ("gauge", meaning)
        self._gauges[name] = read

    def render(self) -> str:
        """The page that a Prometheus server reads."""
        lines = []
        for name, (kind, meaning) in self._help.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            values = self._counts[name] if kind == "counter" else self._gauges[name]()
            lines += [f"{name}{_show(labels)} {value:.12g}" for labels, value in sorted(values.items())]
        return "\n".join(lines) + "\n"


def _show(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
