"""Settings every test shares, and a place for what a test has to show beside passing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no bug: nothing here is decided by how long an example took.
settings.register_profile("trefoil", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trefoil")

_SHOWN = "shown at the end"


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Text to print after the run, from whichever process the test ran in: a matrix and its counts, say."""
    return lambda text: record_property(_SHOWN, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to show."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in report.user_properties:
                if name == _SHOWN:
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(str(text))
