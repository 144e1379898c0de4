"""A page of metrics, read by Prometheus' own library."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Family:
    """One metric: its samples by their labels."""

    samples: dict[tuple[tuple[str, str], ...], float]

    def value(self, **labels: str) -> float:
        return self.samples[tuple(sorted(labels.items()))]


def read_exposition(text: str) -> dict[str, Family]:
    """Return every metric on a page, by its name; none is there twice."""
    families: dict[str, Family] = {}
    for metric in text_string_to_metric_families(text):
        assert metric.type in ("counter", "gauge")
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert name not in families
        families[name] = Family({tuple(sorted(each.labels.items())): each.value for each in metric.samples})
        assert len(families[name].samples) == len(metric.samples)
    return families
