"""How helpers are, as an operator sees them from anywhere: each one's health page, as a table or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.table import Table

from mpc_helpers.identity.config import HelperConfig
from mpc_helpers.local.launcher import health
from mpc_helpers.service.health import Concern
from mpc_helpers.service.reloading import ask_to_reload
from protocol.errors import TrefoilError
from protocol.helper_set import HelperEntry, HelperSet
from protocol.shares import PARTIES
from protocol.text import printable

SECONDS = 10.0
RELOAD_SECONDS = 60.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class HelperHealth:
    """What one helper says of itself; no page if it does not answer as itself."""

    helper: HelperEntry
    page: Mapping[str, object] | None

    @property
    def ready(self) -> bool:
        """Whether it says that nothing stops a query."""
        return self.page is not None and self.page.get("ready") is True

    @property
    def status(self) -> str:
        """In a word or two."""
        return "does not answer" if self.page is None else printable(str(self.page.get("status", "unknown")), 40)

    def reasons(self) -> list[str]:
        """What it says an operator should look at."""
        found = self.page.get("reasons", []) if self.page else []
        texts = (
            [reason.get("text", "") for reason in found if isinstance(reason, dict)] if isinstance(found, list) else []
        )
        return [printable(str(text), 300) for text in texts]

    def queries(self) -> str:
        """How many are in which state."""
        found = self.page.get("queries", {}) if self.page else {}
        counts = found.items() if isinstance(found, dict) else ()
        return printable(", ".join(f"{count} {state}" for state, count in counts), 300)

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {"name": self.helper.name, "address": self.helper.address, "ready": self.ready, "health": self.page}


def look_at(helper_set: HelperSet, which: Sequence[int]) -> list[HelperHealth]:
    """Ask helpers 1, 2 and 3, or those of `which`, at the same time."""
    for number in which:
        if number not in range(1, PARTIES + 1):
            raise TrefoilError(f"there is no helper {number}", "Helpers are 1, 2 and 3.")
    chosen = [helper_set.helpers[number - 1] for number in which or range(1, PARTIES + 1)]
    with ThreadPoolExecutor(PARTIES) as threads:
        pages = list(threads.map(lambda helper: health(helper, SECONDS), chosen))
    return [HelperHealth(helper, page) for helper, page in zip(chosen, pages, strict=True)]


def table_of(found: Sequence[HelperHealth]) -> Table:
    """For people."""
    table = Table()
    for heading in ("helper", "address", "status", "queries", "look at"):
        table.add_column(heading)
    for each in found:
        table.add_row(each.helper.name, each.helper.address, each.status, each.queries(), "\n".join(each.reasons()))
    return table


def reload_and_look(config: HelperConfig, helper: HelperEntry) -> str:
    """Have a running helper read its configuration again, and say what came of it."""
    before = health(helper, SECONDS)
    pid = ask_to_reload(config)
    deadline = time.monotonic() + RELOAD_SECONDS
    while before is not None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        page = health(helper, SECONDS)
        if page is None or page.get("reloads") == before.get("reloads"):
            continue  # its parts are being built again, or it has not begun
        if any(Concern.CONFIGURATION.value in str(reason) for reason in _list(page.get("reasons"))):
            raise TrefoilError(f"{helper.name} goes on with what it used before", "Its log says why.")
        return f"{helper.name} has read its configuration again"
    return f"process {pid} was told to read its configuration again; its log says what came of it"


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
