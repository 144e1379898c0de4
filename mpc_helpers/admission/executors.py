"""Where a helper opens its reports: on processes of its own machine, or on a dask cluster that its operator runs.

The cluster is trusted with everything that the helper itself is trusted with, and with nothing of the other two:

- It is the operator's own: the scheduler and every worker belong to the same organisation as the helper.
- Its workers hold the helper's HPKE private keys in memory while they open a chunk, and see one share of every report.
- Jobs and results are pickled by dask, so anyone who can connect can run code. They travel between these machines only,
  over TLS with a certificate on both ends; in the clear only within one machine. Nothing that a device, a querier or
  another helper sent is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from protocol.errors import ErrorKind, TrefoilError

T = TypeVar("T")

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make malloc keep freed memory in this process: the next chunk needs as much.

    Otherwise glibc returns megabytes to the kernel after every chunk, and the page faults to get them back cost more
    than summing: at 1,024 buckets about a fifth of an open. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        change = ctypes.CDLL(None).mallopt
        change(_M_MMAP_THRESHOLD, 2**26)
        change(_M_TRIM_THRESHOLD, 2**28)


def _init_process() -> None:
    """Prepare a process of the pool, which exits when the daemon does, even if that is killed."""
    keep_freed_memory()
    # Ctrl-C goes to the whole process group; the daemon decides when its pool ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Pool(Executor):
    """A process pool that survives the death of a process: running jobs fail, the next `submit` starts a new pool.

    With `processes` = 0 everything runs in one thread, for small helpers and tests.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._lock = threading.Lock()
        self._pool: Executor | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._lock:
            if self._pool is None:
                self._pool = self._start()
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._pool.shutdown(wait=False)
                self._pool = self._start()
                return self._pool.submit(fn, *args, **kwargs)

    def warm_up(self) -> None:
        """Start the processes before the first query needs them, without waiting."""
        for _ in range(self.processes):
            self.submit(os.getpid)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)
                self._pool = None

    def _start(self) -> Executor:
        if not self.processes:
            return ThreadPoolExecutor(1, thread_name_prefix="admit")
        # Not fork: the daemon has threads, and a forked child could inherit a lock that is never released.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.processes, mp_context=context, initializer=_init_process)


CONNECT_SECONDS = 20
# Retries of a chunk whose workers die; then the query fails.
RETRIES = 5
# Chunks queued at a cluster, whose size may change while a query runs.
CLUSTER_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class ReportExecutor:
    """An executor for chunks, how many it runs in parallel, and whether its workers share this machine's disk."""

    backend: Executor
    parallel: int = 1
    shared_disk: bool = True


@contextlib.contextmanager
def report_executor(address: str, processes: int) -> Iterator[ReportExecutor]:
    """Open an executor: processes of this machine if `address` is empty, otherwise the dask cluster there."""
    if address:
        with _dask(address) as executor:
            yield executor
        return
    pool = Pool(processes)
    try:
        yield ReportExecutor(pool, max(1, processes), shared_disk=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _scheduler_at(address: str) -> str:
    """Return a scheduler's address in dask's form. Jobs carry private keys: without TLS it must be on this machine."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("dask", "tls") or not parts.hostname or not port:
        raise TrefoilError(
            f"{address!r} is no executor",
            "Give it as tls://HOST:PORT, on this machine also as dask://HOST:PORT, or leave it out.",
            kind=ErrorKind.MALFORMED,
        )
    if parts.scheme == "dask" and not _is_loopback(parts.hostname):
        raise TrefoilError(
            f"{parts.hostname} is another machine: dask:// would send it private keys in the clear",
            "Give the scheduler certificates and use tls://HOST:PORT (DEPLOY.md, 'More machines').",
            kind=ErrorKind.FORBIDDEN,
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{'tls' if parts.scheme == 'tls' else 'tcp'}://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


@contextlib.contextmanager
def _dask(address: str) -> Iterator[ReportExecutor]:
    scheduler = _scheduler_at(address)
    try:
        from distributed import Client
    except ImportError:
        hint = "Install it with: pip install 'trefoil[cluster]'"
        raise TrefoilError("dask is not installed", hint, kind=ErrorKind.MISSING_DEPENDENCY) from None
    try:
        security = _certificates() if scheduler.startswith("tls://") else None
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False, security=security)
    except (OSError, RuntimeError) as error:
        raise TrefoilError(
            f"there is no dask scheduler at {scheduler}: {error}",
            "Start it: dask scheduler. With tls://, both ends need a certificate of the same authority.",
            kind=ErrorKind.UNREACHABLE,
        ) from None
    with client:
        yield ReportExecutor(client.get_executor(retries=RETRIES, pure=False), CLUSTER_CHUNKS, shared_disk=False)


def _certificates() -> Any:  # Any: dask's own class, which is here only where dask is installed
    """Return the certificates of dask's configuration, with encryption required."""
    from distributed.security import Security

    security = Security(require_encryption=True)
    missing = [name for name in ("tls_ca_file", "tls_client_cert", "tls_client_key") if not getattr(security, name)]
    if missing:
        raise TrefoilError(
            f"tls:// needs certificates, and dask's configuration has no {missing[0]}",
            "Set distributed.comm.tls in ~/.config/dask, as DEPLOY.md, 'More machines' shows.",
            kind=ErrorKind.MISSING_OPTION,
        )
    return security
