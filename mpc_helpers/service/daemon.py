"""The daemon: one helper put together from its configuration, serving until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from aiohttp import web

from mpc_helpers.admission.admit import Admission
from mpc_helpers.admission.chunk import Spent
from mpc_helpers.admission.cluster import Workplace, workplace
from mpc_helpers.admission.ingest import Ingested
from mpc_helpers.admission.pool import Pool
from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.hooks import Hooks, Pace
from mpc_helpers.agreement.messages import longest_message
from mpc_helpers.agreement.parties import Parties
from mpc_helpers.helper import Helper, Sessions
from mpc_helpers.identity.config import ConfigError, HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger.attempt import Step
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.mpc import noise
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.service.clocks import PeerClocks
from mpc_helpers.service.expiry import Expiry
from mpc_helpers.service.figures import show_disk, show_ledger, show_process
from mpc_helpers.service.health import Concern, Health, Reason
from mpc_helpers.service.housekeeping import Housekeeping
from mpc_helpers.service.intake import Intake, QueryDesk
from mpc_helpers.service.logs import LogFormat, LogLevel, start_logging
from mpc_helpers.service.metrics import Metrics
from mpc_helpers.service.peer_watch import PeerWatch
from mpc_helpers.service.policy import Policy
from mpc_helpers.service.processes import count_processes
from mpc_helpers.service.registry import QueryRegistry
from mpc_helpers.service.reloading import Loaded, Reloads, read_again, write_process
from mpc_helpers.service.rendezvous import Rendezvous
from mpc_helpers.service.runs import QueryRuns
from mpc_helpers.service.server import OpenPages, PeerDoor, PeerRoute, Server
from mpc_helpers.service.storage import Storage
from mpc_helpers.service.transport import Certificates, Transport
from mpc_helpers.service.uploads import Uploads
from mpc_helpers.service.worker_sessions import WorkerSessions
from protocol.errors import Rejection, TrefoilError
from protocol.header import VERSION
from protocol.listening.connections import ConnectionLimits, Connections
from protocol.listening.listener import Listener
from protocol.listening.seldom import Seldom
from protocol.stopping import stop_event

_LOG = logging.getLogger("trefoil.daemon")
# What a stranger's bad HTTP makes the library say.
_HTTP_LOG = logging.getLogger("trefoil.http")
_HTTP_LOG.addFilter(Seldom())
# The last part of the peers' address (SPEC, section 8).
AGREEMENT = "agreement"
WORKERS = "workers"
SHUTDOWN_SECONDS = 2.0
# From a connection's start, or its last answer, to the end of a request's headers, however slowly they come. Longer
# than the 15 s for which a peer keeps an idle connection, so that none is closed while it is taken up again.
HEADER_SECONDS = 30.0
THREADS = 32

Clock = Callable[[], int]


def _nothing(_: Step) -> None:
    """What happens at a crash point of an installed helper."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What tests put in place of the real thing. An installed helper always runs with the defaults."""

    clock: Clock = lambda: int(time.time())  # noqa: TID251 - an edge: the daemon reads the real clock
    step: Callable[[Step], None] = _nothing
    sessions: Callable[
        [HelperConfig, Membership, Certificates, Rendezvous], contextlib.AbstractAsyncContextManager[Sessions]
    ] = WorkerSessions
    pace: Pace | None = None

    def answer_sent(self) -> None:
        """The last byte of a share has left."""
        self.step(Step.ANSWER_AFTER_SEND)


@dataclass(frozen=True, slots=True)
class Running:
    """A helper that serves."""

    loaded: Loaded
    policy: Policy
    intake: Intake
    desk: QueryDesk
    health: Health


@dataclass(frozen=True, slots=True)
class _Ground:
    """What everything else of one helper stands on. What `stack` closes, it closes in the reverse order."""

    config: HelperConfig
    parts: Parts
    stack: contextlib.AsyncExitStack
    membership: Membership
    ledger: ReportLedger
    certificates: Certificates
    metrics: Metrics
    health: Health
    # Told how many reports are dropped, by reason.
    rejected: Callable[[Mapping[Rejection, int]], None]

    @classmethod
    def open(cls, config: HelperConfig, parts: Parts, stack: contextlib.AsyncExitStack) -> _Ground:
        """Check the configuration, and open the ledger: it outlives everything that writes to it."""
        membership = load_membership(config, parts.clock())
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        ledger = ReportLedger(config.ledger, owner_of(membership), step=parts.step)
        stack.callback(ledger.close)
        certificates = Certificates(membership, config.tls, config.data)
        metrics = Metrics()
        count_processes(metrics)
        return cls(config, parts, stack, membership, ledger, certificates, metrics, Health(), _rejections(metrics))


def _rejections(metrics: Metrics) -> Callable[[Mapping[Rejection, int]], None]:
    reasons = [reason.value for reason in Rejection]
    count = metrics.counter("trefoil_reports_rejected_total", "reports this helper dropped, by reason", reason=reasons)

    def rejected(counts: Mapping[Rejection, int]) -> None:
        for reason, amount in counts.items():
            count(amount, reason=reason.value)

    return rejected


@dataclass(frozen=True, slots=True)
class _Peers:
    """The two other helpers, and all that is said to them."""

    transport: Transport
    clocks: PeerClocks
    watch: PeerWatch
    agreement: Agreement
    rendezvous: Rendezvous


@contextlib.asynccontextmanager
async def serving(
    config: HelperConfig, parts: Parts | None = None, *, executor: str = "", reloads: Reloads | None = None
) -> AsyncIterator[Running]:
    """Run one helper: recover, then listen, then go on with what was under way."""
    reloads = reloads or Reloads()
    async with contextlib.AsyncExitStack() as stack:
        ground = _Ground.open(config, parts or Parts(), stack)
        peers = await _reach_peers(ground)
        # Before listening: a peer must never hear "working" about an attempt that nobody works on any more.
        await peers.agreement.recover()
        place = stack.enter_context(workplace(executor, config.processes))
        failed_proofs = _failed_proofs(ground)
        helper = await _helper(ground, peers, place)
        desk = _desk(ground, helper)
        stack.push_async_callback(desk.runs.close)
        policy = Policy(ground.membership, config, failed_proofs, ground.parts.clock)
        intake = Intake(policy, desk, helper, ground.parts.clock, answer_sent=ground.parts.answer_sent)
        keeper = _housekeeping(ground, peers, desk)
        ground.health.sources.append(reloads.reasons)
        page = lambda: ground.health.page({**intake.summary(), "reloads": reloads.count})  # noqa: E731
        await _open_door(ground, peers, intake, page)
        # After listening: a peer that hears from us first asks our door how far our ledger has come.
        await desk.runs.resume()
        for task in (keeper.run(), peers.watch.run()):
            stack.callback(asyncio.create_task(task).cancel)
        if isinstance(place.executor, Pool):
            place.executor.warm_up()
        yield Running(Loaded(config, ground.membership), policy, intake, desk, ground.health)


async def _reach_peers(ground: _Ground) -> _Peers:
    config, membership, metrics = ground.config, ground.membership, ground.metrics
    clocks = PeerClocks(membership, ground.parts.clock)
    longest = longest_message(config.limits.maximum_reports)
    transport = Transport(membership, ground.certificates, config.limits.peer_seconds, longest, clocks.heard)
    await ground.stack.enter_async_context(transport)
    agreement = _agreement(ground, transport)
    ground.stack.push_async_callback(agreement.close)
    watch = PeerWatch(membership, transport.ask_time)
    rendezvous = Rendezvous(membership.peers, lambda party, message: transport.send(party, WORKERS, message))
    metrics.gauge("trefoil_peer_up", "whether each peer answered when it was last asked", watch.gauge)
    metrics.gauge("trefoil_peer_clock_seconds", "how far each peer's clock is ahead of this one", clocks.gauge)
    carried = "bytes sent to the other helpers and answered"
    metrics.counted("trefoil_peer_bytes_total", carried, lambda: {(): transport.carried})
    names = [helper.name for helper in membership.helper_set.helpers]
    metrics.gauge(
        "trefoil_ledger_alarms",
        "helpers whose ledger is not believed, this one among them",
        lambda: {(("helper", name),): float(party in agreement.alarms) for party, name in enumerate(names)},
    )
    ground.health.sources += [watch.reasons, lambda: _alarms(agreement)]
    return _Peers(transport, clocks, watch, agreement, rendezvous)


def _alarms(agreement: Agreement) -> list[Reason]:
    return [Reason(Concern.LEDGER, text, stops=True) for text in agreement.alarms.texts.values()]


def _agreement(ground: _Ground, transport: Transport) -> Agreement:
    async def send(party: int, message: bytes) -> bytes | None:
        return await transport.send(party, AGREEMENT, message) or None

    parts = ground.parts
    parties, hooks = Parties.of(ground.membership), Hooks(step=parts.step, left_out=ground.rejected)
    return Agreement(ground.ledger, parties, send, pace=parts.pace, hooks=hooks)


def _failed_proofs(ground: _Ground) -> FailedProofs:
    failed = FailedProofs(ground.config.failed_proofs)
    failed.prepare()
    meaning = "proofs of joint noise that failed here and that no operator has cleared"
    ground.metrics.value("trefoil_failed_proofs", meaning, lambda: len(failed.standing()))

    def reasons() -> list[Reason]:
        count = len(failed.standing())
        text = f"{count} proofs of joint noise have failed: see trefoil alarm show"
        return [Reason(Concern.PROOFS, text)] if count else []

    ground.health.sources.append(reasons)
    return failed


async def _helper(ground: _Ground, peers: _Peers, place: Workplace) -> Helper:
    config, membership, parts = ground.config, ground.membership, ground.parts
    make_sessions = parts.sessions(config, membership, ground.certificates, peers.rendezvous)
    sessions = await ground.stack.enter_async_context(make_sessions)
    admission = _admission(ground, place)
    return Helper(membership, config.limits, admission, peers.agreement, sessions, parts.clock, step=parts.step)


def _admission(ground: _Ground, place: Workplace) -> Admission:
    stages = [part.name for part in fields(Spent)]
    spent = ground.metrics.counter(
        "trefoil_admit_cpu_seconds_total", "processor seconds of admitting reports, by part", part=stages
    )

    def admitted(ingested: Ingested) -> None:
        ground.rejected(ingested.rejections())
        for part, seconds in asdict(ingested.spent).items():
            spent(seconds, part=part)

    return Admission(
        ground.membership,
        place,
        lifetime=ground.config.report_lifetime,
        running=ground.config.limits.running,
        watermark=lambda: ground.ledger.reports.watermark,
        admitted=admitted,
    )


def _desk(ground: _Ground, helper: Helper) -> QueryDesk:
    config, party, clock, metrics = ground.config, ground.membership.party, ground.parts.clock, ground.metrics
    registry = QueryRegistry(ground.ledger.queries, config.data / "queries", clock)
    runs = QueryRuns(registry, helper, clock, metrics)
    lifetime = config.answer_lifetime
    storage = Storage(party, registry, helper, config.limits, config.data, clock, answer_lifetime=lifetime)
    uploads = Uploads(party, storage, clock, runs.start)
    metrics.gauge("trefoil_queries", "queries known to this helper, by state", registry.gauge)
    metrics.value("trefoil_uploads", "uploads of columns that are under way", lambda: len(uploads))
    show_disk(metrics, storage)
    ground.health.sources += [storage.reasons, registry.reasons]
    return QueryDesk(registry, storage, uploads, runs)


def _housekeeping(ground: _Ground, peers: _Peers, desk: QueryDesk) -> Housekeeping:
    config, membership, ledger, clock = ground.config, ground.membership, ground.ledger, ground.parts.clock
    keeper = Housekeeping(config, membership, ledger, desk.storage, peers.clocks, peers.transport.ask_time, clock)
    expiry = Expiry(membership, lambda: ground.certificates.known, clock)
    metrics = ground.metrics
    metrics.gauge(
        "trefoil_key_expiry_seconds", "when each HPKE key of the set ends, in seconds since 1970", expiry.keys
    )
    ends = "when each certificate of the set ends, in seconds since 1970"
    metrics.gauge("trefoil_certificate_expiry_seconds", ends, expiry.certificate_ends)
    show_ledger(metrics, ledger, config.ledger, lambda: keeper.rows)
    show_process(metrics, clock())
    metrics.gauge("trefoil_concerns", "what an operator should look at, by what it is about", ground.health.gauge)
    metrics.value("trefoil_ready", "whether nothing known stops a new query", lambda: float(ground.health.ready))
    ground.health.sources += [keeper.reasons, expiry.reasons]
    return keeper


async def _open_door(ground: _Ground, peers: _Peers, intake: Intake, page: Callable[[], dict[str, object]]) -> None:
    connections = Connections(ConnectionLimits.of_this_process())
    metrics = ground.metrics
    metrics.value("trefoil_connections", "connections that are open", lambda: len(connections))
    cut = "idle connections of strangers that were cut off"
    metrics.counted("trefoil_connections_cut_total", cut, lambda: {(): connections.cut_off})
    routes: dict[str, PeerRoute] = {AGREEMENT: peers.agreement, WORKERS: peers.rendezvous}
    longest = longest_message(ground.config.limits.maximum_reports)
    door = PeerDoor(ground.certificates.whose, routes, longest)
    pages = OpenPages(public_configuration(ground.config, ground.membership), metrics, page)
    server = Server(intake, door, pages, ground.parts.clock, connections)
    await ground.stack.enter_async_context(_listening(ground.config, server, ground.certificates, connections))


def public_configuration(config: HelperConfig, membership: Membership) -> dict[str, object]:
    """What anyone may know of this helper. Devices do not take their helper set from here."""
    return {
        "name": config.name,
        "party": membership.party + 1,
        "version": VERSION,
        "helper_set": {"number": membership.helper_set.number, "digest": membership.helper_set.digest.hex()},
        "noise": [mode.value for mode in config.noise_modes],
        "limits": {
            "minimum_reports": config.limits.minimum_reports,
            "maximum_reports": config.limits.maximum_reports,
            "seconds": config.limits.seconds,
            "buckets_times_scale": noise.MAX_BUCKETS_TIMES_SCALE,
        },
        "report_lifetime_days": config.report_lifetime_days,
        "answer_days": config.answer_days,
    }


@contextlib.asynccontextmanager
async def _listening(
    config: HelperConfig, server: Server, certificates: Certificates, connections: Connections
) -> AsyncIterator[None]:
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        logger=_HTTP_LOG,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=HEADER_SECONDS,
    )
    await runner.setup()
    if runner.server is None:
        raise TypeError("a runner that is set up has a server")
    listener = Listener(runner.server, certificates.server_context, connections, certificates.whose)
    try:
        try:
            await listener.open(config.host, config.port)
        except OSError as error:
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
            raise ConfigError(
                f"port {config.port} of {config.host} {what}", "Stop that program, or choose another."
            ) from None
        _LOG.info("%s listens on %s:%d", config.name, config.host, config.port)
        yield
    finally:
        await listener.close()
        await runner.cleanup()
        await listener.cut_the_rest()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a helper is run, beside what its configuration says."""

    stop_with_stdin: bool = False
    executor: str = ""
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.TEXT


def run(path: Path, options: RunOptions | None = None, *, parts: Parts | None = None) -> None:
    """Run the helper of a configuration file until SIGTERM, SIGINT or, if wanted, the end of standard input."""
    options = options or RunOptions()
    start_logging(options.log_level, options.log_format)
    asyncio.run(_until_stopped(path, options, parts or Parts()))


async def _until_stopped(path: Path, options: RunOptions, parts: Parts) -> None:
    loop = asyncio.get_running_loop()
    # Threads here mostly wait: for the disk, or for the processes that open reports.
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "blocking"))
    stop, reload = stop_event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    if options.stop_with_stdin:
        loop.add_reader(0, lambda: stop.set() if not os.read(0, 1024) else None)
    config: HelperConfig | None = load_config(path)
    before: HelperConfig | None = None
    reloads = Reloads()
    while config is not None:
        try:
            async with serving(config, parts, executor=options.executor, reloads=reloads) as running:
                write_process(config)
                if before is not None:
                    reloads.take("this helper's parts were built again for it")
                following = await _serve(path, running, reloads, parts.clock, stop, reload)
        except TrefoilError as error:
            if before is None:
                raise
            # What could be read cannot be served: a port that is taken, a ledger that is not there.
            reloads.refuse(error)
            config, before = before, None
            continue
        config, before = following, config
    if options.stop_with_stdin:
        loop.remove_reader(0)


async def _serve(
    path: Path, running: Running, reloads: Reloads, clock: Clock, stop: asyncio.Event, reload: asyncio.Event
) -> HelperConfig | None:
    """Until it is to stop (None), or to be built again for another configuration."""
    while True:
        waiting = [asyncio.create_task(event.wait()) for event in (stop, reload)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if stop.is_set():
            _LOG.info("%s stops", running.loaded.config.name)
            return None
        reload.clear()
        fresh = await read_again(path, running.loaded, running.policy, reloads, clock)
        if fresh is not None:
            return fresh
