"""`trefoil doctor`: everything that a querier or an operator can check about three helpers without asking a query.

From a querier's place: the helper set, each helper over the network, and whether each has registered her key. From an
operator's place also the own files, ledger, disk and ports, and the peers' MPC ports. Nothing is changed, here or at a
helper. A helper may be malicious: every page is read under its pinned certificate, within a time limit and a size
limit, and its texts are made printable.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

import aiohttp

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger.ledger import engine_at
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.mpc.links import listen
from mpc_helpers.service.health import Concern, Expiry
from mpc_helpers.service.housekeeping import DOUBTED_DIFFERENCE, SHOWN_DIFFERENCE, seconds_ahead
from mpc_helpers.service.server import CONFIG_PATH, MetricsAccess
from mpc_helpers.service.storage import MEGABYTE
from mpc_helpers.service.transport import HEALTH_PATH, read_bounded
from mpc_helpers.service.workers import announced_ports, blocked_ports, ranges
from protocol.errors import ErrorKind, TrefoilError, printable
from protocol.header import VERSION
from protocol.helper_set import HelperEntry, HelperSet
from protocol.hpke import CLASSICAL, PrivateKey
from protocol.keys import IdentityKey
from protocol.noise import NoiseMode
from protocol.querier.connections import HelperConnections
from protocol.querier.failure import QueryFailed
from protocol.query import Query, SignedQuery
from protocol.shares import PARTIES

HERE = "here"
SECONDS = 10.0
LONGEST_PAGE = 2**20
LONGEST_TEXT = 300


class Severity(Enum):
    """The outcome of one check. A fault stops queries, or will keep this helper from starting."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Subject(Enum):
    """The subject of a check: a concern of a health page (`service.health`), or one that is seen only from outside.

    Each has what to do where an error has no hint of its own; DEPLOY.md has more on each.
    """

    def __new__(cls, text: str, _remedy: str) -> Self:
        subject = object.__new__(cls)
        subject._value_ = text
        return subject

    def __init__(self, _text: str, remedy: str) -> None:
        self.remedy = remedy

    HELPER_SET = "helper set", "Use the set that all three operators signed last, in every place."
    KEY = "key", "Its operator adds a key with trefoil keygen hpke; all three then sign a new set."
    CERTIFICATE = "certificate", "Its operator makes a new one with trefoil keygen tls; all three then sign a new set."
    PORT = "port", "Its operator checks that it runs and has this address. Then open it in every firewall between."
    PEER = "peer", "Its operator and the peer's check that both run, and the firewall between them."
    CLOCK = "clock", "Set the clock right (NTP). Where it is right: trefoil ledger accept-clock"
    LEDGER = "ledger", "Never restore a ledger from a backup. See Backup in DEPLOY.md: rebuild it, or retire the keys."
    DATABASE = "database", "Its operator reads its log and looks after the database; the helper reconnects by itself."
    DISK = "disk", "Its operator frees disk space. Never delete the ledger or a folder in data/queries."
    CONFIGURATION = "configuration", "Its operator corrects config.json, and reloads or restarts the helper."
    SITE = "site", "Ask its operator for: trefoil site add, then trefoil helper reload"
    RELEASE = "release", "Bring all three helpers and this machine to the same release."
    PROOFS = "proofs", "The three operators compare trefoil alarm show, and then run trefoil alarm clear."
    DISPUTE = "dispute", "Keep its log and its ledger, and ask the other operators: signatures prove who voted twice."
    HOUSEKEEPING = "housekeeping", "Its operator reads its log, which names the file or the disk error."
    OTHER = "other", "Its operator runs trefoil helper status."


_NAMED = {subject.value: subject for subject in Subject}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check and its outcome. `place` is "here" or a helper's name."""

    subject: Subject
    place: str
    severity: Severity
    text: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        line = {"subject": self.subject.value, "place": self.place, "severity": self.severity.value}
        return {**line, "text": self.text, "remedy": self.remedy}


def ok(subject: Subject, place: str, text: str = "") -> CheckResult:
    return CheckResult(subject, place, Severity.OK, text)


def problem(subject: Subject, place: str, text: str, remedy: str = "", *, stops: bool = True) -> CheckResult:
    """Return a fault, or a warning if it does not stop queries, with what to do about it."""
    severity = Severity.FAULT if stops else Severity.WARNING
    return CheckResult(subject, place, severity, printable(text, LONGEST_TEXT), remedy or subject.remedy)


def fault_of(subject: Subject, place: str, error: TrefoilError) -> CheckResult:
    return problem(subject, place, str(error), error.hint)


@dataclass(slots=True)
class Visit:
    """What one helper showed. Without a certificate it was not reached, and the rest is empty."""

    helper: HelperEntry
    certificate: bytes = b""
    config: Mapping[str, object] = field(default_factory=dict)
    health: bytes = b""
    # Seconds by which its clock is ahead of ours.
    ahead: int | None = None
    findings: list[CheckResult] = field(default_factory=list)


async def visit_all(helper_set: HelperSet, clock: Callable[[], int]) -> list[Visit]:
    # No compression: a page could be a decompression bomb.
    async with aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as session:
        return list(await asyncio.gather(*(_visit(session, helper, clock) for helper in helper_set.helpers)))


async def _visit(session: aiohttp.ClientSession, helper: HelperEntry, clock: Callable[[], int]) -> Visit:
    visit, (host, port) = Visit(helper), helper.endpoint
    try:
        visit.certificate = await tls.fetch_certificate(host, port, helper.tls_pin, SECONDS)
    except TrefoilError as error:
        subject = Subject.CERTIFICATE if error.kind is ErrorKind.WRONG_KEY else Subject.PORT
        visit.findings.append(fault_of(subject, helper.name, error))
        return visit
    visit.findings.append(ok(Subject.PORT, helper.name, f"{host}:{port} answers"))
    try:
        async with asyncio.timeout(SECONDS):
            visit.health, date = await _get(session, helper, HEALTH_PATH)
            visit.ahead = seconds_ahead(date, clock())
            page, _ = await _get(session, helper, CONFIG_PATH)
        visit.config = _object(page)
    except (aiohttp.ClientError, OSError, TrefoilError) as error:
        # A timeout is an OSError, without a text.
        text = f"{helper.name} does not show its health: {error or 'no response'}"
        visit.findings.append(problem(Subject.PORT, helper.name, text))
    return visit


async def _get(session: aiohttp.ClientSession, helper: HelperEntry, path: str) -> tuple[bytes, str]:
    """Return a page of bounded size and its date, under the pinned certificate and without following redirects."""
    pin, where = aiohttp.Fingerprint(helper.tls_pin), helper.address.rstrip("/") + path
    async with session.get(where, ssl=pin, allow_redirects=False) as reply:
        return await read_bounded(reply.content, LONGEST_PAGE), reply.headers.get("Date", "")


def _object(page: bytes) -> Mapping[str, object]:
    """Return a JSON object that a helper may have filled with anything; empty if it is none."""
    try:
        stored = json.loads(page)
    except ValueError:
        return {}
    return stored if isinstance(stored, dict) else {}


def compare(
    helper_set: HelperSet, visits: Sequence[Visit], clock: Callable[[], int], own: int | None = None
) -> list[CheckResult]:
    """Return what the visits showed, each helper alone and all three beside each other.

    Helper `own` runs on this machine, so that its clock says nothing about ours.
    """
    findings = [finding for visit in visits for finding in visit.findings]
    findings += _check_clocks([visit for party, visit in enumerate(visits) if party != own])
    findings += _check_expiry(helper_set, visits, clock)
    for visit in visits:
        if visit.certificate:
            findings += _check_set(helper_set, visit)
            findings += _check_health(visit)
    return findings + _check_modes(visits)


def _check_clocks(visits: Sequence[Visit]) -> list[CheckResult]:
    """Compare the helpers' clocks with ours. If two or more differ from ours and not from each other, ours is wrong."""
    ahead = {visit.helper.name: visit.ahead for visit in visits if visit.ahead is not None}
    spread = max(ahead.values(), default=0) - min(ahead.values(), default=0)
    if len(ahead) > 1 and spread <= SHOWN_DIFFERENCE < min(map(abs, ahead.values())):
        text = f"this machine's clock is {_apart(-next(iter(ahead.values())))} that of all helpers"
        return [problem(Subject.CLOCK, HERE, text, "Set this machine's clock right (NTP).")]
    return [
        problem(Subject.CLOCK, name, f"the clock of {name} is {_apart(seconds)} this machine's", stops=stops)
        if abs(seconds) > SHOWN_DIFFERENCE
        else ok(Subject.CLOCK, name, f"{abs(seconds)} s from this machine's")
        for name, seconds in ahead.items()
        for stops in [abs(seconds) > DOUBTED_DIFFERENCE]
    ]


def _apart(ahead: int) -> str:
    return f"{abs(ahead)} s {'ahead of' if ahead > 0 else 'behind'}"


def _check_expiry(helper_set: HelperSet, visits: Sequence[Visit], clock: Callable[[], int]) -> list[CheckResult]:
    """Return the reasons that helpers themselves would give, and whether a device could seal a report now."""
    certificates = {party: visit.certificate for party, visit in enumerate(visits) if visit.certificate}
    findings = [
        problem(_NAMED[reason.concern.value], HERE, reason.text, stops=reason.stops)
        for reason in Expiry(helper_set, lambda: certificates, clock).reasons()
    ]
    try:
        helper_set.sealing_keys(clock())
    except TrefoilError as error:
        findings.append(fault_of(Subject.KEY, HERE, error))
    else:
        findings.append(ok(Subject.KEY, HERE, "devices can seal reports to all three"))
    for party, certificate in certificates.items():
        until = time.strftime("%Y-%m-%d", time.gmtime(tls.ends(certificate)))
        name = helper_set.helpers[party].name
        findings.append(ok(Subject.CERTIFICATE, name, f"the pinned one, until {until}"))
    return findings


def _check_set(helper_set: HelperSet, visit: Visit) -> list[CheckResult]:
    name, stored = visit.helper.name, visit.config.get("helper_set")
    theirs = stored if isinstance(stored, dict) else {}
    number, same = theirs.get("number"), theirs.get("digest") == helper_set.digest.hex()
    older = isinstance(number, int) and number < helper_set.number
    if same and number == helper_set.number:
        findings = [ok(Subject.HELPER_SET, name, f"it runs set {number}")]
    else:
        text = f"{name} runs set {number}, and this is set {helper_set.number}"
        remedy = f"The operator of {name} restarts it with the new set." if older else "Fetch the newer helpers.json."
        # Where only addresses or certificates changed, reports and queries of both sets are answered.
        findings = [problem(Subject.HELPER_SET, name, text, remedy, stops=not same)]
    if visit.config.get("version") != VERSION:
        text = f"{name} speaks version {visit.config.get('version')} of the protocol, and this is {VERSION}"
        return [*findings, problem(Subject.RELEASE, name, text)]
    return [*findings, ok(Subject.RELEASE, name, f"version {VERSION} of the protocol")]


def reasons_on(page: Mapping[str, object] | None) -> list[tuple[str, str, bool]]:
    """Return concern, text, and whether it stops queries, of each reason on a health page, which may have anything."""
    stored = page.get("reasons") if page else None
    reasons = [each for each in stored if isinstance(each, dict)] if isinstance(stored, list) else []
    return [
        (str(each.get("concern")), printable(str(each.get("text", "")), LONGEST_TEXT), each.get("stops") is True)
        for each in reasons
    ]


def _check_health(visit: Visit) -> list[CheckResult]:
    """Return the reasons on a health page, and an OK for each concern without one."""
    name, page = visit.helper.name, _object(visit.health)
    if page and "ready" not in page:
        return [problem(Subject.OTHER, name, f"the health page of {name} cannot be read")]
    reasons = reasons_on(page)
    stated = {concern for concern, _, _ in reasons}
    return [
        *(problem(_NAMED.get(each, Subject.OTHER), name, text, stops=stops) for each, text, stops in reasons),
        *(ok(_NAMED[concern.value], name) for concern in Concern if page and concern.value not in stated),
    ]


def _check_modes(visits: Sequence[Visit]) -> list[CheckResult]:
    listed = [visit.config["noise"] for visit in visits if isinstance(visit.config.get("noise"), list)]
    common = [mode for mode in NoiseMode if all(mode.value in each for each in listed if isinstance(each, list))]
    if common:
        return []
    return [problem(Subject.CONFIGURATION, HERE, "no noise mode is in the noise_modes of all three helpers")]


# The examination from either place.

# The HTTP status of a query whose key is not registered.
FORBIDDEN = 403
# Errors of files that are not about a key.
_SUBJECTS = {
    ErrorKind.WRONG_HELPER_SET: Subject.HELPER_SET,
    ErrorKind.BAD_SIGNATURE: Subject.HELPER_SET,
    ErrorKind.INCONSISTENT: Subject.HELPER_SET,
    ErrorKind.WRONG_KEY: Subject.CERTIFICATE,
}


@dataclass(frozen=True, slots=True)
class SiteKey:
    """A site and the key that signs its queries."""

    site: str
    key: IdentityKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and the places that the caller can mend: this machine and, for an operator, the own helper."""

    findings: tuple[CheckResult, ...]
    own_places: frozenset[str]

    @property
    def faults(self) -> list[CheckResult]:
        return [each for each in self.findings if each.severity is Severity.FAULT]

    @property
    def own_faults(self) -> list[CheckResult]:
        """Faults that others cannot mend: a retry does not help.

        That the own helper misses a peer is not one of them if something is wrong with another helper.
        """
        own = [each for each in self.faults if each.place in self.own_places]
        elsewhere = len(own) < len(self.faults)
        return [each for each in own if not (elsewhere and each.subject is Subject.PEER)]

    def to_json(self) -> dict[str, object]:
        return {"healthy": not self.faults, "findings": [each.to_json() for each in self.findings]}


async def examine_as_querier(path: Path, site: SiteKey | None, clock: Callable[[], int]) -> Examination:
    """Check a helper set and its three helpers; with `site`, also whether each has registered its key."""
    helper_set = HelperSet.load_unverified(path)
    findings = [*_check_signatures(helper_set), *compare(helper_set, await visit_all(helper_set, clock), clock)]
    if site is not None:
        findings += await _check_site(helper_set, site)
    return Examination(_without_repeats(findings), frozenset({HERE}))


async def examine_as_operator(path: Path, clock: Callable[[], int]) -> Examination:
    """Check one helper's files, disk and ports, and all three helpers of its set."""
    try:
        config = load_config(path)
    except TrefoilError as error:
        return Examination((fault_of(Subject.CONFIGURATION, HERE, error),), frozenset({HERE}))
    findings = [ok(Subject.CONFIGURATION, HERE, f"{path} can be used")]
    try:
        helper_set = HelperSet.load_unverified(config.helper_set)
    except TrefoilError as error:
        return Examination((*findings, fault_of(Subject.HELPER_SET, HERE, error)), frozenset({HERE}))
    findings += _check_signatures(helper_set)
    findings += await asyncio.to_thread(_check_files, config, clock())
    visits = await visit_all(helper_set, clock)
    own = next((party for party, helper in enumerate(helper_set.helpers) if helper.name == config.name), None)
    findings += compare(helper_set, visits, clock, own)
    if own is not None:
        findings += [] if visits[own].certificate else _check_free_ports(config)
        findings += await _probe_peers(visits[own + 1 :])
    return Examination(_without_repeats(findings), frozenset({HERE, config.name}))


def _without_repeats(findings: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """Return findings without what another place has said already, such as the end of one key on three pages."""
    seen: set[tuple[Subject, str]] = set()
    kept = []
    for each in findings:
        if each.severity is Severity.OK or (each.subject, each.text) not in seen:
            kept.append(each)
        seen.add((each.subject, each.text))
    return tuple(kept)


def _check_signatures(helper_set: HelperSet) -> list[CheckResult]:
    missing = [
        helper.name for helper, signed in zip(helper_set.helpers, helper_set.have_signed(), strict=True) if not signed
    ]
    if missing:
        text = f"the helper set is not signed by {', '.join(missing)}"
        return [problem(Subject.HELPER_SET, HERE, text, "Its operator runs: trefoil helper-set sign")]
    return [ok(Subject.HELPER_SET, HERE, f"set {helper_set.number}, signed by all three")]


async def _check_site(helper_set: HelperSet, site: SiteKey) -> list[CheckResult]:
    """Offer each helper a query whose deadline passed in 1970: it checks the key first, and then refuses the query.

    Nothing is stored, and nobody can use the query later.
    """
    nothing = bytes(32)
    query = Query(
        query_id=os.urandom(16),
        site=site.site,
        caller=site.site,
        epsilon_micros=1_000_000,
        sensitivity=2,
        buckets=1,
        kappa=0,
        unit="count",
        helper_set=helper_set.digest,
        batch_root=nothing,
        batch_size=1,
        answer_key=PrivateKey.generate(CLASSICAL).public.raw,
        noise=NoiseMode.LOCAL,
        minimum_reports=1,
        tolerated_bad_permille=0,
        deadline=1,
        columns=(nothing, nothing, nothing),
        cap=1,
        spread=1,
    )
    path, body = f"/v1/queries/{query.digest.hex()}", SignedQuery.sign(query, site.key).encode()
    async with HelperConnections(helper_set, SECONDS) as connections:
        replies = (connections.put(party, path, body) for party in range(PARTIES))
        outcomes = await asyncio.gather(*replies, return_exceptions=True)
    findings = []
    for helper, outcome in zip(helper_set.helpers, outcomes, strict=True):
        if isinstance(outcome, QueryFailed) and outcome.http_status == FORBIDDEN:
            findings.append(problem(Subject.SITE, helper.name, str(outcome)))
        elif isinstance(outcome, QueryFailed) and outcome.http_status:
            findings.append(ok(Subject.SITE, helper.name, f"the key of {site.site} is registered"))
    return findings


# What only an operator can check: the own files, disk and ports.


def _check_files(config: HelperConfig, now: int) -> list[CheckResult]:
    try:
        membership = load_membership(config, now)
    except TrefoilError as error:
        return [fault_of(_SUBJECTS.get(error.kind, Subject.KEY), HERE, error), *_check_disk(config)]
    findings = [ok(Subject.KEY, HERE, "the private keys of the set are here")]
    try:
        tls.server_context(config.tls)
        MetricsAccess.of(config)
    except TrefoilError as error:
        findings.append(fault_of(Subject.CERTIFICATE, HERE, error))
    findings.append(ok(Subject.SITE, HERE, f"{len(config.sites)} registered"))
    if not config.sites:
        text, remedy = "no site is registered: nobody can ask this helper", "Register one with: trefoil site add"
        findings.append(problem(Subject.SITE, HERE, text, remedy, stops=False))
    return [*findings, _check_ledger(config, membership), *_check_disk(config)]


def _check_ledger(config: HelperConfig, membership: Membership) -> CheckResult:
    place = config.ledger
    # SQLite leaves files of its own beside a ledger that it reads, and the helper could not use those of another user.
    if isinstance(place, Path) and place.exists() and place.stat().st_uid != os.geteuid():
        text, remedy = f"{place} was not checked: it belongs to another user", "Run this as the helper's user."
        return problem(Subject.LEDGER, HERE, text, remedy, stops=False)
    try:
        engine_at(place).check_readable(owner_of(membership))
    except TrefoilError as error:
        if error.kind is ErrorKind.BUSY:
            return ok(Subject.LEDGER, HERE, "open in the running helper, which checked it")
        return fault_of(Subject.LEDGER, HERE, error)
    return ok(Subject.LEDGER, HERE, "complete")


def _check_disk(config: HelperConfig) -> list[CheckResult]:
    """Check that the helper may write where its ledger and its columns are, and that space is left beyond the spare."""
    findings = []
    folders = [place.parent for place in (config.ledger,) if isinstance(place, Path)]
    for folder in dict.fromkeys((*folders, config.data)):
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            remedy = "Make the helper's user its owner, or run this as that user."
            findings.append(problem(Subject.DISK, HERE, f"{existing} cannot be written to", remedy))
    existing = next(each for each in (config.data, *config.data.parents) if each.exists())
    free, spare = shutil.disk_usage(existing).free // MEGABYTE, config.limits.spare_megabytes
    if free < spare:
        text = f"the disk of {existing} has {free} MB left, and spare_megabytes keeps {spare} for the ledger"
        return [*findings, problem(Subject.DISK, HERE, text)]
    return findings or [ok(Subject.DISK, HERE, f"{free} MB are free")]


def _check_free_ports(config: HelperConfig) -> list[CheckResult]:
    """Check that nobody else has the ports of a helper that does not answer."""
    wanted = [(config.host, config.port), *((config.mpc_host or config.host, port) for port in config.mpc_ports)]
    refused = {}
    for host, port in wanted:
        try:
            listen(host, port).close()
        except TrefoilError as error:
            refused[port] = str(error)
    if not refused:
        return [ok(Subject.PORT, HERE, "its ports are free")]
    why = f"port {ranges(list(refused))} cannot be used here: {next(iter(refused.values()))}"
    remedy = (
        "If the helper runs, look at its address and the firewall. If it does not, end the program that has the port, "
        "or correct host, mpc_host and mpc_ports in config.json."
    )
    return [problem(Subject.PORT, HERE, f"{config.name} does not answer at its address, and {why}", remedy)]


async def _probe_peers(above: Sequence[Visit]) -> list[CheckResult]:
    """Probe the MPC ports of the helpers that this one's workers connect to: those after it in the set."""
    findings = []
    for visit in above:
        (host, _), name = visit.helper.endpoint, visit.helper.name
        ports = announced_ports(visit.health)
        if blocked := await blocked_ports(host, ports):
            text = f"{name} cannot be reached at {host}:{ranges(blocked)}, which its mpc_ports list"
            findings.append(problem(Subject.PORT, HERE, text))
        elif ports:
            findings.append(ok(Subject.PORT, HERE, f"the MPC ports of {name} answer"))
        elif visit.certificate:
            text = f"{name} has no fixed mpc_ports, which no firewall rule can follow"
            findings.append(
                problem(Subject.PORT, name, text, "Its operator lists some in its config.json.", stops=False)
            )
    return findings
