"""Where a helper opens its reports: on processes of its own, or on a cluster of machines that its operator runs.

A cluster sees what the helper sees: its HPKE private keys and one share of everything. It belongs to the same
organisation, and what goes to it over a network goes under TLS, with certificates on both ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never
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
    """Processes of this machine if `address` is empty, otherwise the dask cluster whose scheduler is there."""
    if address:
        with _dask(address) as place:
            yield place
        return
    pool = Pool(processes)
    try:
        yield Workplace(pool, max(1, processes), shared_disk=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Way(Enum):
    """How a scheduler is reached, by the scheme of its address."""

    PLAIN = "dask"
    TLS = "tls"


@dataclass(frozen=True, slots=True)
class _Scheduler:
    """Where a dask scheduler listens. Jobs carry private keys, so in the clear they go no further than this machine."""

    way: _Way
    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> _Scheduler:
        parts = urlsplit(address)
        try:
            way, port = _Way(parts.scheme), parts.port
        except ValueError:
            way, port = None, None
        if way is None or not parts.hostname or not port:
            raise TrefoilError(
                f"{address!r} is no executor",
                "Give it as tls://HOST:PORT, on this machine also as dask://HOST:PORT, or leave it out.",
            )
        if way is _Way.PLAIN and not _is_here(parts.hostname):
            raise TrefoilError(
                f"{parts.hostname} is another machine: dask:// would send it private keys in the clear",
                "Give the scheduler certificates and use tls://HOST:PORT (DEPLOY.md, 'More machines').",
            )
        return cls(way, parts.hostname, port)

    @property
    def address(self) -> str:
        """As dask has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        match self.way:
            case _Way.PLAIN:
                return f"tcp://{host}:{self.port}"
            case _Way.TLS:
                return f"tls://{host}:{self.port}"
            case _:
                assert_never(self.way)


def _is_here(host: str) -> bool:
    """Whether every address of a host is a loopback address."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Workplace]:
    scheduler = _Scheduler.parse(address)
    try:
        from distributed import Client
    except ImportError:
        raise TrefoilError("dask is not installed", "Install it with: pip install 'trefoil[cluster]'") from None
    try:
        client = Client(
            scheduler.address, timeout=CONNECT_SECONDS, set_as_default=False, security=_security(scheduler.way)
        )
    except (OSError, RuntimeError) as error:
        raise TrefoilError(
            f"there is no dask scheduler at {scheduler.host}:{scheduler.port}: {error}",
            "Start it: dask scheduler. With tls://, both ends need a certificate of the same authority.",
        ) from None
    with client:
        yield Workplace(client.get_executor(retries=RETRIES, pure=False), CLUSTER_CHUNKS, shared_disk=False)


def _security(way: _Way) -> Any:  # Any: dask's own class, which is here only where dask is installed
    """What dask's configuration says about certificates, with nothing in the clear."""
    if way is _Way.PLAIN:
        return None
    from distributed.security import Security

    security = Security(require_encryption=True)
    missing = [name for name in ("tls_ca_file", "tls_client_cert", "tls_client_key") if not getattr(security, name)]
    if missing:
        raise TrefoilError(
            f"tls:// needs certificates, and dask's configuration has no {missing[0]}",
            "Set distributed.comm.tls in ~/.config/dask, as DEPLOY.md, 'More machines' shows.",
        )
    return security
