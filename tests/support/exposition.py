"""Prometheus' text format, read strictly: whatever a scraper might only guess at is an error here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)")
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_NUMBER = re.compile(r"NaN|[+-]Inf|-?\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass
class Family:
    """One metric: its kind, and its samples by their labels."""

    kind: str
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        return self.samples[tuple(sorted(labels.items()))]


def read_exposition(text: str) -> dict[str, Family]:
    """Every metric on a page: HELP, then TYPE, then its samples, nothing twice, counters called `_total`."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helped, current = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped, meaning = line.removeprefix("# HELP ").split(" ", 1)
            assert meaning, line
            assert helped not in families, line
        elif line.startswith("# TYPE "):
            current, kind = line.removeprefix("# TYPE ").split(" ")
            assert current == helped, line
            assert kind in ("counter", "gauge"), line
            assert current.endswith("_total") == (kind == "counter"), line
            families[current] = Family(kind)
        else:
            _add_sample(families, current, line)
    return families


def _add_sample(families: dict[str, Family], current: str, line: str) -> None:
    sample = _SAMPLE.fullmatch(line)
    assert sample is not None, line
    name, labels, value = sample.groups()
    assert name == current, line
    assert _NUMBER.fullmatch(value), line
    pairs = _PAIR.findall(labels or "")
    assert len({label for label, _ in pairs}) == len(pairs), line
    key = tuple(sorted(pairs))
    assert key not in families[name].samples, line
    families[name].samples[key] = float(value.replace("Inf", "inf"))
    if families[name].kind == "counter":
        assert families[name].samples[key] >= 0, line
