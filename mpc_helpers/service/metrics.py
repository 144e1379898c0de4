"""What a helper counts, in Prometheus' text format. No site, no query and no person is named in any of it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from protocol.errors import TrefoilError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOG = logging.getLogger("trefoil.metrics")

Labels = tuple[tuple[str, str], ...]
Reading = Callable[[], Mapping[Labels, float]]


class Metrics:
    """Counters that only grow, and gauges that are read when asked for. Every series that can be is there from 0."""

    def __init__(self) -> None:
        self._help: dict[str, tuple[str, str]] = {}
        self._read: dict[str, Reading] = {}

    def counter(self, name: str, meaning: str, **values: Iterable[str]) -> Callable[..., None]:
        """A new counter; call the result with an amount and labels to add to it.

        `values` are what each label may say: each combination begins at 0, so that a first increase is one.
        """
        names = sorted(values)
        combinations = itertools.product(*(values[label] for label in names))
        counts: dict[Labels, float] = {tuple(zip(names, each, strict=True)): 0.0 for each in combinations}
        self.counted(name, meaning, lambda: counts)

        def add(amount: float = 1, /, **labels: str) -> None:
            key = tuple(sorted(labels.items()))
            counts[key] = counts.get(key, 0.0) + amount

        return add

    def counted(self, name: str, meaning: str, read: Reading) -> None:
        """A counter that someone else keeps."""
        if not name.endswith("_total"):
            raise ValueError(f"the counter {name} must be called ..._total")
        self._add(name, "counter", meaning, read)

    def gauge(self, name: str, meaning: str, read: Reading) -> None:
        """A value that goes up and down; `read` gives it, by labels, at the moment of asking."""
        if name.endswith("_total"):
            raise ValueError(f"{name} sounds like a counter and is a gauge")
        self._add(name, "gauge", meaning, read)

    def value(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A gauge without labels."""
        self.gauge(name, meaning, lambda: {(): read()})

    def render(self) -> str:
        """The page that a Prometheus server reads."""
        lines = []
        for name, (kind, meaning) in self._help.items():
            lines += [f"# HELP {name} {_escape(meaning)}", f"# TYPE {name} {kind}"]
            try:
                values = sorted(self._read[name]().items())
            except (OSError, TrefoilError) as error:
                # One that cannot be read, of a disk that is gone, must not hide the others.
                _LOG.warning("%s cannot be read: %s", name, error)
                continue
            lines += [f"{name}{_show(labels)} {_number(value)}" for labels, value in values]
        return "\n".join(lines) + "\n"

    def _add(self, name: str, kind: str, meaning: str, read: Reading) -> None:
        if name in self._help:
            raise ValueError(f"there is a metric {name} already")
        self._help[name] = (kind, meaning)
        self._read[name] = read


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _show(labels: Labels) -> str:
    if not labels:
        return ""
    return (
        "{" + ",".join(f'{key}="{_escape(value).replace(chr(34), chr(92) + chr(34))}"' for key, value in labels) + "}"
    )


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")
