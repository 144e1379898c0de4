"""The daemon: one helper put together from its configuration, serving until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web

from mpc_helpers.admission.admit import Admission
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
from mpc_helpers.service.housekeeping import Housekeeping
from mpc_helpers.service.intake import Intake, QueryDesk
from mpc_helpers.service.metrics import Metrics
from mpc_helpers.service.policy import Policy
from mpc_helpers.service.processes import count_processes
from mpc_helpers.service.registry import QueryRegistry
from mpc_helpers.service.rendezvous import Rendezvous
from mpc_helpers.service.runs import QueryRuns
from mpc_helpers.service.server import OpenPages, PeerDoor, Server
from mpc_helpers.service.storage import Storage
from mpc_helpers.service.transport import Certificates, Transport
from mpc_helpers.service.uploads import Uploads
from mpc_helpers.service.worker_sessions import WorkerSessions
from protocol.listening.connections import ConnectionLimits, Connections
from protocol.listening.listener import Listener
from protocol.listening.seldom import Seldom
from protocol.report import VERSION
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


@dataclass(frozen=True, slots=True)
class Running:
    """A helper that serves."""

    intake: Intake
    desk: QueryDesk


@contextlib.asynccontextmanager
async def serving(config: HelperConfig, parts: Parts | None = None, *, executor: str = "") -> AsyncIterator[Running]:
    """Run one helper: recover, then listen, then go on with what was under way."""
    parts = parts or Parts()
    membership = load_membership(config, parts.clock())
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    failed_proofs = FailedProofs(config.failed_proofs)
    failed_proofs.prepare()
    metrics = Metrics()
    count_processes(metrics)
    longest = longest_message(config.limits.maximum_reports)
    # What is entered first is closed last: the ledger outlives everything that writes to it.
    async with contextlib.AsyncExitStack() as stack:
        ledger = ReportLedger(config.ledger, owner_of(membership), step=parts.step)
        stack.callback(ledger.close)
        certificates = Certificates(membership, config.tls, config.data)
        clocks = PeerClocks(membership, parts.clock)
        transport = await stack.enter_async_context(
            Transport(membership, certificates, config.limits.peer_seconds, longest, clocks.heard)
        )
        metrics.gauge("trefoil_peer_clock_seconds", "how far each peer's clock is ahead of this one", clocks.gauge)
        metrics.gauge(
            "trefoil_peer_bytes",
            "bytes sent to the other helpers and answered since the start",
            lambda: {(): transport.carried},
        )
        agreement = _agreement(membership, ledger, transport, parts)
        stack.push_async_callback(agreement.close)
        # Before listening: a peer must never hear "working" about an attempt that nobody works on any more.
        await agreement.recover()
        place = stack.enter_context(workplace(executor, config.processes))
        rendezvous = Rendezvous(membership.peers, lambda party, message: transport.send(party, WORKERS, message))
        sessions = await stack.enter_async_context(parts.sessions(config, membership, certificates, rendezvous))
        admission = _admission(config, membership, ledger, place, metrics)
        limits, clock = config.limits, parts.clock
        helper = Helper(membership, limits, admission, agreement, sessions, clock, step=parts.step)
        metrics.gauge(
            "trefoil_failed_proofs",
            "proofs of joint noise that failed here and that no operator has cleared",
            lambda: {(): len(failed_proofs.standing())},
        )
        desk = _desk(config, membership, ledger, helper, metrics, clock)
        stack.push_async_callback(desk.runs.close)
        policy = Policy(membership, config, failed_proofs, clock)
        intake = Intake(policy, desk, helper, clock, answer_sent=lambda: parts.step(Step.ANSWER_AFTER_SEND))
        peers = PeerDoor(certificates.whose, {AGREEMENT: agreement, WORKERS: rendezvous}, longest)
        keeper = Housekeeping(config, membership, ledger, desk.storage, clocks, transport.ask_time, parts.clock)
        pages = OpenPages(public_configuration(config, membership), metrics, keeper.warnings)
        connections = Connections(ConnectionLimits.of_this_process())
        metrics.gauge("trefoil_connections", "connections that are open", lambda: {(): len(connections)})
        cut = "idle connections of strangers that were cut off since the start"
        metrics.gauge("trefoil_connections_cut", cut, lambda: {(): connections.cut_off})
        server = Server(intake, peers, pages, parts.clock, connections)
        await stack.enter_async_context(_listening(config, server, certificates, connections))
        # After listening: a peer that hears from us first asks our door how far our ledger has come.
        await desk.runs.resume()
        keeping = asyncio.create_task(keeper.run())
        if isinstance(place.executor, Pool):
            place.executor.warm_up()
        stack.callback(keeping.cancel)
        yield Running(intake, desk)


def _agreement(membership: Membership, ledger: ReportLedger, transport: Transport, parts: Parts) -> Agreement:
    async def send(party: int, message: bytes) -> bytes | None:
        return await transport.send(party, AGREEMENT, message) or None

    return Agreement(ledger, Parties.of(membership), send, pace=parts.pace, hooks=Hooks(step=parts.step))


def _admission(
    config: HelperConfig, membership: Membership, ledger: ReportLedger, place: Workplace, metrics: Metrics
) -> Admission:
    count = metrics.counter("trefoil_reports_rejected_total", "reports this helper dropped, by reason")
    spent = metrics.counter("trefoil_admit_cpu_seconds_total", "processor seconds of admitting reports, by part")
    metrics.gauge(
        "trefoil_ledger_seconds",
        "seconds spent in the report ledger since the start",
        lambda: {(): ledger.seconds},
    )
    metrics.gauge(
        "trefoil_ledger_cpu_seconds",
        "processor seconds spent in the report ledger since the start",
        lambda: {(): ledger.cpu_seconds},
    )

    def admitted(ingested: Ingested) -> None:
        for reason, amount in ingested.rejections().items():
            count(amount, reason=reason.value)
        for part, seconds in asdict(ingested.spent).items():
            spent(seconds, part=part)

    return Admission(
        membership,
        place,
        lifetime=config.report_lifetime,
        running=config.limits.running,
        watermark=lambda: ledger.reports.watermark,
        admitted=admitted,
    )


def _desk(
    config: HelperConfig, membership: Membership, ledger: ReportLedger, helper: Helper, metrics: Metrics, clock: Clock
) -> QueryDesk:
    folder = config.data / "queries"
    registry = QueryRegistry(ledger.queries, folder, clock)
    runs = QueryRuns(registry, helper, clock, metrics)
    lifetime = config.answer_lifetime
    storage = Storage(membership.party, registry, helper, config.limits, config.data, clock, answer_lifetime=lifetime)
    metrics.gauge(
        "trefoil_queries",
        "queries known to this helper, by state",
        lambda: {(("state", state),): float(count) for state, count in registry.counts().items()},
    )
    return QueryDesk(registry, storage, Uploads(membership.party, storage, clock, runs.start), runs)


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


def run(path: Path, *, stop_with_stdin: bool = False, executor: str = "", parts: Parts | None = None) -> None:
    """Run the helper of a configuration file until SIGTERM, SIGINT or, if wanted, the end of standard input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(_until_told(load_config(path), stop_with_stdin, executor, parts))


async def _until_told(config: HelperConfig, stop_with_stdin: bool, executor: str, parts: Parts | None) -> None:
    loop = asyncio.get_running_loop()
    # Threads here mostly wait: for the disk, or for the processes that open reports.
    loop.set_default_executor(ThreadPoolExecutor(THREADS, "blocking"))
    stop = stop_event()
    if stop_with_stdin:
        loop.add_reader(0, lambda: stop.set() if not os.read(0, 1024) else None)
    async with serving(config, parts, executor=executor):
        await stop.wait()
        _LOG.info("%s stops", config.name)
    if stop_with_stdin:
        loop.remove_reader(0)
