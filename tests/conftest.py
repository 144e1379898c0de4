"""Settings every test shares, and a place for what a test has to show beside passing."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.commit_world import Runs
    from tests.support.three_agreements import ThreeAgreements

# aiohttp reads all roots of the system, twice, when it is imported: 0.08 s of each process that tests start. None is
# trusted here.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)
os.environ.setdefault("SSL_CERT_DIR", os.devnull)

# Collection makes millions of objects that stay: an eighth of its time went into looking for garbage among them.
gc.disable()

# A busy machine is no bug: nothing here is decided by how long an example took.
settings.register_profile("trefoil", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trefoil")

# Seconds for pytest-timeout, far more than any test takes on a busy machine: at the limit a test fails with a traceback
# and the next one runs. `pytest --timeout` overrides it, as the long hunts of the Makefile do.
os.environ.setdefault("PYTEST_TIMEOUT", "900")

# Files that take longest, by processor time with all processes they start, and by waiting. A file runs in one worker:
# one that begins late would end long after the rest.
_LONGEST = (
    "test_commit_crashes.py",
    "test_browser.py",
    "test_documentation.py",
    "test_postgres_ledger.py",
    "test_ledger_parts.py",
    "test_chaos.py",
    "test_compose.py",
    "test_browser_hostile.py",
    "test_commit_mutants.py",
    "test_hunt.py",
    "test_throughput.py",
    "test_browser_person.py",
    "test_noise_audit.py",
    "test_query.py",
    "test_querier.py",
    "test_browser_extension.py",
    "test_bad_helper.py",
    "test_device_commands.py",
    "test_report_ledger.py",
    "test_experiments_commands.py",
    "test_device_timing.py",
    "test_noise_channels.py",
    "test_parts_of_reports.py",
    "test_doctor.py",
    "test_rollback.py",
    "test_config.py",
    "test_hpke_batch.py",
    "test_collector.py",
    "test_cli.py",
    "test_stopping.py",
    "test_guide.py",
    "test_launcher.py",
    "test_device_properties.py",
    "test_helper.py",
    "test_executors.py",
    "test_schedule.py",
    "test_mistakes.py",
    "test_own_workload.py",
    "test_load.py",
    "test_ingest.py",
    "test_live.py",
)

_SHOWN = "shown at the end"


# Markers by folder, and by file where a folder has several kinds.
_MARKED = {
    "processes": ("processes", "virtual"),
    "documents": ("documents",),
    "browser": (
        "test_browser.py",
        "test_browser_extension.py",
        "test_browser_hostile.py",
        "test_browser_person.py",
    ),
    "statistical": ("test_noise_audit.py",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests, and run the longest files first: see `make check` and `make test`."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        for marker, names in _MARKED.items():
            if item.path.name in names or item.path.parent.name in names:
                item.add_marker(marker)


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look through what was collected from files."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def unlimited_logs() -> None:
    """Begin each test with a new minute of every log: the lines of earlier tests count against its own otherwise."""
    for log in list(logging.root.manager.loggerDict.values()):
        for limited in getattr(log, "filters", ()):
            getattr(limited, "_windows", {}).clear()


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Text to print after the run, from whichever process the test ran in: a matrix and its counts, say."""
    return lambda text: record_property(_SHOWN, text)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """For the tests of COMMIT.md: plays worlds."""
    from tests.support.commit_world import Runs  # here, so that only those tests wait for it

    # In memory where there is such a place: these crashes kill processes, not power, so fsync would only cost time.
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else tmp_path
    yield Runs(folder)
    shutil.rmtree(folder)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeAgreements]:
    """For the tests of Agree and Spend: three helpers that have nothing but their ledgers."""
    from tests.support.three_agreements import ThreeAgreements

    three = ThreeAgreements(tmp_path)
    yield three
    for ledger in three.ledgers:
        ledger.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to show."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in report.user_properties:
                if name == _SHOWN:
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(str(text))
