"""Asking without `await`: for scripts and notebooks, whether or not an event loop is running already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from protocol.batch import BatchReader
from protocol.epsilon import entitlement
from protocol.helper_set import HelperSet
from protocol.keys import IdentityKey
from protocol.querier.ask import Querier
from protocol.querier.query_folder import ask_batch
from protocol.querier.saved_query import QueryOptions
from protocol.querier.worth import QueryResult
from protocol.query import NoiseMode

T = TypeVar("T")


def ask(
    batch: Path | str,
    helper_set: HelperSet,
    site_key: IdentityKey,
    *,
    epsilon: float | None = None,
    noise: NoiseMode | str = NoiseMode.LOCAL,
    tolerate: float = 0.1,
    seconds: int = 600,
    new: bool = False,
    debug: bool = False,
) -> QueryResult:
    """Ask the three helpers about a batch file, as `trefoil query` does: asked again, it resumes.

    `tolerate` is the share of bad reports above which the query fails. `debug` is for batches of debug reports, whose
    answer has no noise.
    """
    options = QueryOptions(
        epsilon_micros=None if epsilon is None else entitlement(epsilon),
        noise=NoiseMode(noise),
        tolerated_bad_permille=round(1000 * tolerate),
        seconds=seconds,
        debug=debug,
    )
    now = int(time.time())  # noqa: TID251 - an edge: a script reads the real clock
    return run(ask_batch(Querier(helper_set), BatchReader(Path(batch)), options, site_key, now, new=new))


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`: here, or in a thread of its own where an event loop is running (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "trefoil") as thread:
        return thread.submit(asyncio.run, work).result()
