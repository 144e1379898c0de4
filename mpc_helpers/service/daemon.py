"""The daemon: one helper assembled from its configuration, serving until it is stopped, and the reload of its sites."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from mpc_helpers.admission.executors import Pool, ReportExecutor, report_executor
from mpc_helpers.admission.ingest import Admission
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.peers import Hooks, Parties, RetryPolicy
from mpc_helpers.helper import Helper, Sessions
from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.ledger.engine import LedgerClosed
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of, rebuilt_from
from mpc_helpers.service.health import Concern, Expiry, Health, LedgerWatch, PeerWatch, Reason
from mpc_helpers.service.housekeeping import Housekeeping, PeerClocks
from mpc_helpers.service.monitoring import (
    CountRejections,
    LogFormat,
    LogLevel,
    Metrics,
    count_admissions,
    count_processes,
    count_rejections,
    show_ledger,
    show_process,
    start_logging,
)
from mpc_helpers.service.policy import Policy
from mpc_helpers.service.queries import Queries
from mpc_helpers.service.server import Server
from mpc_helpers.service.transport import Certificates, Transport
from mpc_helpers.service.workers import MpcPorts, PortProbes, Rendezvous, worker_sessions
from protocol.cli.stopping import stop_event
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically

_LOG = logging.getLogger(__name__)
# The routes under /v1/peer/ (SPEC §8).
AGREEMENT = "agreement"
WORKERS = "workers"
THREADS = 32
PROCESS_FILE = "process"

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Parts:
    """Replaceable parts, for tests. An installed helper always runs with the defaults."""

    clock: Clock = lambda: int(time.time())  # noqa: TID251 - an edge: the daemon reads the real clock
    failpoint: Callable[[Failpoint], None] = lambda _: None
    sessions: Callable[
        [HelperConfig, Membership, Certificates, Rendezvous], contextlib.AbstractAsyncContextManager[Sessions]
    ] = worker_sessions
    retry: RetryPolicy | None = None


@dataclass(slots=True)
class SiteReloads:
    """The reloads of a process that was started with `config`: of the registered sites, on SIGHUP.

    A restart resumes every query, so only what changes often, and must not interrupt anyone, is reloaded.
    """

    config: HelperConfig
    policy: Policy
    count: int = 0
    # Why the file is not used in full; empty if it is.
    problem: str = ""

    def reload(self, path: Path) -> None:
        """Replace the sites by those of the file. A file that cannot be used changes nothing."""
        self.count += 1
        try:
            fresh = load_config(path)
        except TrefoilError as error:
            # The health page is public, and the error may name sites and paths.
            self.problem = "the configuration file cannot be used: the log says why"
            _LOG.error("the sites were not reloaded: %s (%s)", error, error.hint)
            return
        self.policy.sites = fresh.sites
        _LOG.info("reloaded the sites: %d are registered", len(fresh.sites))
        changed = [
            item.name for item in fields(HelperConfig) if item.name != "sites" and self._differs(fresh, item.name)
        ]
        self.problem = f"restart this helper to apply {', '.join(changed)}" if changed else ""
        if changed:
            _LOG.warning("only sites are reloaded: %s", self.problem)

    def _differs(self, fresh: HelperConfig, name: str) -> bool:
        return bool(getattr(fresh, name) != getattr(self.config, name))

    def reasons(self) -> list[Reason]:
        return [Reason(Concern.CONFIGURATION, self.problem)] if self.problem else []


@dataclass(frozen=True, slots=True)
class Running:
    """A helper that serves."""

    config: HelperConfig
    queries: Queries
    health: Health
    reloads: SiteReloads
    # Done when the ledger is closed for good, with the error that says why. Nothing can be answered from then on.
    ledger_lost: asyncio.Task[LedgerClosed]


@dataclass(frozen=True, slots=True)
class _Base:
    """What all other parts of one helper depend on. `stack` closes what it opened in reverse order."""

    config: HelperConfig
    parts: Parts
    stack: contextlib.AsyncExitStack
    membership: Membership
    ledger: ReportLedger
    certificates: Certificates
    metrics: Metrics
    health: Health
    rejected: CountRejections

    @classmethod
    def open(cls, config: HelperConfig, parts: Parts, stack: contextlib.AsyncExitStack) -> _Base:
        """Check the configuration and open the ledger, which outlives everything that writes to it."""
        membership = load_membership(config, parts.clock())
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        share_keys = None if isinstance(config.ledger, Path) else config.data / "share-keys"
        ledger = ReportLedger(config.ledger, owner_of(membership), failpoint=parts.failpoint, share_keys=share_keys)
        stack.callback(ledger.close)
        certificates = Certificates(membership, config.tls, config.data)
        metrics = Metrics()
        count_processes(metrics)
        return cls(config, parts, stack, membership, ledger, certificates, metrics, Health(), count_rejections(metrics))


@dataclass(frozen=True, slots=True)
class _Peers:
    """The two other helpers, and everything that is exchanged with them."""

    transport: Transport
    clocks: PeerClocks
    watch: PeerWatch
    agreement: Agreement
    rendezvous: Rendezvous


@contextlib.asynccontextmanager
async def serving(config: HelperConfig, parts: Parts | None = None, *, executor: str = "") -> AsyncIterator[Running]:
    """Run one helper: recover, then listen, then resume its queries."""
    async with contextlib.AsyncExitStack() as stack:
        base = _Base.open(config, parts or Parts(), stack)
        peers = await _connect_peers(base)
        # Before listening: a peer must never hear "working" about an attempt that no one works on any more.
        await peers.agreement.recover()
        opener = stack.enter_context(report_executor(executor, config.processes))
        queries = _queries(base, await _helper(base, peers, opener))
        reloads = SiteReloads(config, queries.policy)
        base.health.sources.append(reloads.reasons)
        keeper, watch = _housekeeping(base, peers, queries), _ledger_watch(base)
        await _listen(base, peers, queries, reloads)
        # After listening: a peer that hears from us first asks our server how far our ledger has come.
        await queries.resume()
        for task in (keeper.run(), peers.watch.run()):
            stack.callback(asyncio.create_task(task).cancel)
        if isinstance(opener.backend, Pool):
            opener.backend.warm_up()
        ledger_lost = asyncio.create_task(watch.run())
        stack.callback(ledger_lost.cancel)
        yield Running(config, queries, base.health, reloads, ledger_lost)


async def _connect_peers(base: _Base) -> _Peers:
    config, membership, metrics = base.config, base.membership, base.metrics
    clocks = PeerClocks(membership, base.parts.clock)
    transport = Transport(membership, base.certificates, config.limits, clocks.heard)
    await base.stack.enter_async_context(transport)

    async def send(party: int, message: bytes) -> bytes | None:
        return await transport.send(party, AGREEMENT, message) or None

    hooks = Hooks(failpoint=base.parts.failpoint, left_out=base.rejected)
    from_move = rebuilt_from(config, base.ledger.chain.ledger_id)
    parties, retry = Parties.of(membership), base.parts.retry
    agreement = Agreement(base.ledger, parties, send, retry=retry, hooks=hooks, rebuilt_from=from_move)
    base.stack.push_async_callback(agreement.close)
    probes = PortProbes(membership)

    async def poll(party: int) -> None:
        await probes.look(party, await transport.ask_health(party))

    watch = PeerWatch(membership, poll)
    ports = await base.stack.enter_async_context(MpcPorts(config.mpc_host or config.host, config.mpc_ports))

    async def meet(party: int, message: bytes) -> bytes:
        return await transport.send(party, WORKERS, message)

    rendezvous = Rendezvous(membership.peers, meet, ports, probes)
    metrics.gauge("trefoil_peer_up", "Whether each peer responded to the last poll.", watch.gauge)
    metrics.gauge("trefoil_peer_clock_seconds", "How far each peer's clock is ahead of this one.", clocks.gauge)
    carried = "Bytes of messages to the other helpers and of their replies."
    metrics.counted("trefoil_peer_bytes_total", carried, lambda: {(): transport.carried})
    names = [helper.name for helper in membership.helper_set.helpers]
    metrics.gauge(
        "trefoil_ledger_alarms",
        "Whether the ledger of each helper, this one included, is distrusted.",
        lambda: {(("helper", name),): float(party in agreement.alarms) for party, name in enumerate(names)},
    )
    base.health.sources += [watch.reasons, ports.reasons, probes.reasons, lambda: _alarms(agreement)]
    return _Peers(transport, clocks, watch, agreement, rendezvous)


def _alarms(agreement: Agreement) -> list[Reason]:
    return [Reason(Concern.LEDGER, text, stops=True) for text in agreement.alarms.texts.values()]


async def _helper(base: _Base, peers: _Peers, opener: ReportExecutor) -> Helper:
    config, membership, parts = base.config, base.membership, base.parts
    make_sessions = parts.sessions(config, membership, base.certificates, peers.rendezvous)
    sessions = await base.stack.enter_async_context(make_sessions)
    admission = Admission(
        membership,
        opener,
        lifetime=config.report_lifetime,
        running=config.limits.running,
        watermark=lambda: base.ledger.reports.watermark,
        admitted=count_admissions(base.metrics, base.rejected),
    )
    return Helper(
        membership, config.limits, admission, peers.agreement, sessions, parts.clock, failpoint=parts.failpoint
    )


def _queries(base: _Base, helper: Helper) -> Queries:
    queries = Queries(base.config, base.membership, base.ledger.queries, helper, base.parts.clock, base.metrics)
    base.stack.push_async_callback(queries.close)
    base.health.sources.append(queries.reasons)
    return queries


def _ledger_watch(base: _Base) -> LedgerWatch:
    watch = LedgerWatch(base.ledger.check_held)
    meaning = "Whether the ledger's database responded to the last check, and no other process took it over."
    base.metrics.value("trefoil_ledger_up", meaning, lambda: float(not watch.error))
    base.health.sources.append(watch.reasons)
    return watch


def _housekeeping(base: _Base, peers: _Peers, queries: Queries) -> Housekeeping:
    config, membership, ledger, clock = base.config, base.membership, base.ledger, base.parts.clock
    keeper = Housekeeping(config, membership, ledger, queries.storage, peers.clocks, peers.transport.ask_health, clock)
    expiry = Expiry(membership.helper_set, lambda: base.certificates.by_party, clock)
    metrics = base.metrics
    metrics.gauge("trefoil_key_expiry_seconds", "Expiry of each HPKE key of the set, in Unix time.", expiry.keys)
    ends = "Expiry of each certificate of the set, in Unix time."
    metrics.gauge("trefoil_certificate_expiry_seconds", ends, expiry.certificate_ends)
    show_ledger(metrics, ledger, lambda: keeper.rows)
    show_process(metrics, clock())
    metrics.gauge("trefoil_concerns", "Health reasons, by concern.", base.health.gauge)
    metrics.value("trefoil_ready", "Whether this helper is ready for a new query.", lambda: float(base.health.ready))
    base.health.sources += [keeper.reasons, expiry.reasons]
    return keeper


async def _listen(base: _Base, peers: _Peers, queries: Queries, reloads: SiteReloads) -> None:
    config = base.config

    def health() -> dict[str, object]:
        return base.health.page({"reloads": reloads.count, "mpc_ports": list(peers.rendezvous.ports.fixed)})

    server = Server(
        config,
        base.membership,
        base.certificates,
        queries,
        base.metrics,
        peer_routes={AGREEMENT: peers.agreement, WORKERS: peers.rendezvous},
        health=health,
        clock=base.parts.clock,
    )
    await base.stack.enter_async_context(server.listening(config.host, config.port))
    _LOG.info("%s listens on %s:%d", config.name, config.host, config.port)


def run(
    path: Path,
    *,
    stop_with_stdin: bool = False,
    executor: str = "",
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    parts: Parts | None = None,
) -> None:
    """Run the helper of a configuration file until SIGTERM, SIGINT or, optionally, the end of standard input."""
    start_logging(log_level, log_format)
    asyncio.run(_until_stopped(path, stop_with_stdin, executor, parts))


async def _until_stopped(path: Path, stop_with_stdin: bool, executor: str, parts: Parts | None) -> None:
    loop = asyncio.get_running_loop()
    # Threads mostly wait: for the disk, or for the processes that open reports.
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "blocking"))
    stop, reload = stop_event(), asyncio.Event()
    # From the start: without a handler SIGHUP would end the process.
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    if stop_with_stdin:
        loop.add_reader(0, lambda: stop.set() if not os.read(0, 1024) else None)
    config = load_config(path)
    async with serving(config, parts, executor=executor) as running:
        write_process(config)
        reloading = asyncio.create_task(_reload_on(reload, path, running.reloads))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, running.ledger_lost], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        reloading.cancel()
        _LOG.info("%s stops", config.name)
        lost = running.ledger_lost.result() if running.ledger_lost.done() else None
    if stop_with_stdin:
        loop.remove_reader(0)
    if lost is not None:
        raise lost


async def _reload_on(requested: asyncio.Event, path: Path, reloads: SiteReloads) -> None:
    while True:
        await requested.wait()
        requested.clear()
        await asyncio.to_thread(reloads.reload, path)


def write_process(config: HelperConfig) -> None:
    """Record which process serves, for `trefoil helper reload`."""
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(config.data / PROCESS_FILE, f"{os.getpid()} {_start_of(os.getpid())}\n".encode(), 0o600)


def request_reload(config: HelperConfig) -> int:
    """Send SIGHUP to the helper of this configuration, and return its process id."""
    hint = "Start it: it reads its configuration then."
    try:
        number, start = (config.data / PROCESS_FILE).read_text().split()
        pid = int(number)
    except (OSError, ValueError):
        raise TrefoilError(f"no helper has run from {config.data}", hint, kind=ErrorKind.FILE_MISSING) from None
    # Process ids are reused, and this signal ends most programs.
    if _start_of(pid) != start:
        raise TrefoilError(f"the helper of {config.data} does not run", hint, kind=ErrorKind.UNAVAILABLE)
    try:
        os.kill(pid, signal.SIGHUP)
    except OSError as error:
        hint = "Run this as the user that the helper runs as."
        message = f"cannot signal the helper: {error.strerror}"
        raise TrefoilError(message, hint, kind=ErrorKind.FORBIDDEN) from None
    return pid


def _start_of(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; "none" if there is no such process."""
    try:
        # The command's name comes before, and may contain anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "none"
