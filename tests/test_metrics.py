"""Metrics in the text format that Prometheus reads."""

from __future__ import annotations

from mpc_helpers.service.metrics import Metrics


def test_counters_grow_and_gauges_are_read_when_asked() -> None:
    metrics = Metrics()
    count = metrics.counter("things_total", "things seen")
    value = 1.0
    metrics.gauge("level", "how much there is", lambda: {(("where", 'a"b'),): value})
    count()
    count(2, kind="odd")
    count(kind="odd")
    value = 7.5
    assert metrics.render().splitlines() == [
        "# HELP things_total things seen",
        "# TYPE things_total counter",
        "things_total 1",
        'things_total{kind="odd"} 3',
        "# HELP level how much there is",
        "# TYPE level gauge",
        'level{where="a\\"b"} 7.5',
    ]
