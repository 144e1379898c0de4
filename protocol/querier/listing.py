"""`trefoil query --list`: what was asked of a batch, and which answers the helpers hold."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from protocol import epsilon
from protocol.console import out
from protocol.helper_set import HelperSet
from protocol.querier.ask import Querier
from protocol.querier.query_failed import QueryFailed
from protocol.querier.query_folder import SHOWN_DIGITS, QueryFolder
from protocol.querier.saved_query import SavedQuery
from protocol.status import QueryState, QueryStatus

# A list is looked at, not waited for.
LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ListedQuery:
    """One query, and where each helper is with it."""

    saved: SavedQuery
    statuses: Mapping[int, QueryStatus | QueryFailed]

    @property
    def held(self) -> bool:
        """Whether all three helpers hold the answer."""
        return all(_is_released(status) for status in self.statuses.values())

    def told(self, names: Sequence[str]) -> str:
        """What became of it, in a few words."""
        if self.held:
            return "answered: all three helpers hold it"
        return "; ".join(f"{names[party]}: {_word(status)}" for party, status in sorted(self.statuses.items()))

    def to_json(self, names: Sequence[str]) -> dict[str, object]:
        """For programs."""
        query = self.saved.query
        return {
            "query_id": query.query_id.hex(),
            "made": self.saved.made,
            "deadline": query.deadline,
            "reports": query.batch_size,
            "epsilon_micros": query.epsilon_micros,
            "noise": query.noise.value,
            "debug": query.debug,
            "answer_held": self.held,
            "helpers": {names[party]: _word(status) for party, status in self.statuses.items()},
        }


def _is_released(status: QueryStatus | QueryFailed) -> bool:
    return isinstance(status, QueryStatus) and status.state is QueryState.RELEASED


def _word(status: QueryStatus | QueryFailed) -> str:
    if isinstance(status, QueryFailed):
        return "does not know it" if status.refused else "cannot be reached"
    return status.state.value


def list_and_show(reports: Path, helpers: Path) -> list[dict[str, object]]:
    """Print every query of a batch, oldest first. What was never asked needs no helper."""
    helper_set = HelperSet.load(helpers)
    names = [helper.name for helper in helper_set.helpers]
    listed = asyncio.run(_look(QueryFolder(reports).all(), helper_set))
    _show(listed, names, reports)
    return [entry.to_json(names) for entry in listed]


async def _look(saved: Sequence[SavedQuery], helper_set: HelperSet) -> list[ListedQuery]:
    querier = Querier(helper_set, request_seconds=LOOK_SECONDS)
    found = await asyncio.gather(*(querier.statuses(one) for one in saved))
    return [ListedQuery(one, statuses) for one, statuses in zip(saved, found, strict=True)]


def _show(listed: Sequence[ListedQuery], names: Sequence[str], reports: Path) -> None:
    if not listed:
        out.print(f"nothing was asked of {reports}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title=f"queries on {reports}")
    for heading in ("id", "asked (UTC)", "reports", "ε", "noise", "what became of it"):
        table.add_column(heading)
    for entry in listed:
        query = entry.saved.query
        made = datetime.datetime.fromtimestamp(entry.saved.made, datetime.UTC)
        table.add_row(
            query.query_id.hex()[:SHOWN_DIGITS],
            f"{made:%Y-%m-%d %H:%M}",
            str(query.batch_size),
            epsilon.show(query.epsilon_micros),
            "debug" if query.debug else query.noise.value,
            entry.told(names),
        )
    out.print(table)
    out.print("Fetch an answer with: trefoil query --id ID", markup=False, highlight=False)
