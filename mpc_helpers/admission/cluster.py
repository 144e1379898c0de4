"""Where a helper opens its reports: on processes of its own, or on a cluster of machines that its operator runs.

A cluster sees what the helper sees: its HPKE private keys and one share of everything. It belongs to the same
organisation, in a network of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import urlsplit

from mpc_helpers.admission.pool import Pool
from protocol.errors import TrefoilError

CONNECT_SECONDS = 20
# A chunk is done again this often when workers die under it, and then the query fails.
RETRIES = 5
# Chunks kept waiting at a cluster whose size may change while a query runs.
CLUSTER_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Workplace:
    """An executor, how many chunks it can take at a time, and whether its workers share this machine's disk."""

    executor: Executor
    parallel: int = 1
    shared_disk: bool = True


@contextlib.contextmanager
def workplace(address: str, processes: int) -> Iterator[Workplace]:
    """Processes of this machine if `address` is empty, the dask cluster at dask://HOST:PORT otherwise."""
    if address:
        with _dask(address) as place:
            yield place
        return
    pool = Pool(processes)
    try:
        yield Workplace(pool, max(1, processes), shared_disk=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Workplace]:
    parts = urlsplit(address)
    if parts.scheme != "dask" or not parts.hostname or not parts.port:
        raise TrefoilError(f"{address!r} is no executor", "Give it as dask://HOST:PORT, or leave it out.")
    try:
        from distributed import Client
    except ImportError:
        raise TrefoilError("dask is not installed", "Install it with: pip install 'trefoil[cluster]'") from None
    try:
        client = Client(f"tcp://{parts.hostname}:{parts.port}", timeout=CONNECT_SECONDS, set_as_default=False)
    except OSError as error:
        raise TrefoilError(
            f"there is no dask scheduler at {parts.hostname}:{parts.port}: {error}", "Start it: dask scheduler"
        ) from None
    with client:
        yield Workplace(client.get_executor(retries=RETRIES, pure=False), CLUSTER_CHUNKS, shared_disk=False)
