"""What three helpers show to anyone: addresses, certificates, clocks, sets, releases and health, as findings.

A helper may be malicious: every page is read under its pinned certificate, within a time limit and a size limit, and
its texts are made printable.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import aiohttp

from mpc_helpers.identity import tls
from mpc_helpers.service.health import Concern, Expiry
from mpc_helpers.service.housekeeping import DOUBTED_DIFFERENCE, SHOWN_DIFFERENCE, seconds_ahead
from mpc_helpers.service.server import CONFIG_PATH
from mpc_helpers.service.transport import HEALTH_PATH, read_bounded
from protocol.errors import ErrorKind, TrefoilError, printable
from protocol.header import VERSION
from protocol.helper_set import HelperEntry, HelperSet
from protocol.noise import NoiseMode

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
    """The subject of a check: a concern of a health page (`service.health`), or one that is seen only from outside."""

    HELPER_SET = "helper set"
    KEY = "key"
    CERTIFICATE = "certificate"
    PORT = "port"
    PEER = "peer"
    CLOCK = "clock"
    LEDGER = "ledger"
    DATABASE = "database"
    DISK = "disk"
    CONFIGURATION = "configuration"
    SITE = "site"
    RELEASE = "release"
    PROOFS = "proofs"
    DISPUTE = "dispute"
    HOUSEKEEPING = "housekeeping"
    OTHER = "other"


# What to do where an error has no hint of its own; DEPLOY.md has more on each.
REMEDIES = {
    Subject.HELPER_SET: "Use the set that all three operators signed last, in every place.",
    Subject.KEY: "Its operator adds a key with trefoil keygen hpke; all three then sign a new set.",
    Subject.CERTIFICATE: "Its operator makes a new one with trefoil keygen tls; all three then sign a new set.",
    Subject.PORT: "Its operator checks that it runs and has this address. Then open it in every firewall between.",
    Subject.PEER: "Its operator and the peer's check that both run, and the firewall between them.",
    Subject.CLOCK: "Set the clock right (NTP). Where it is right: trefoil ledger accept-clock",
    Subject.LEDGER: "Never restore a ledger from a backup. See Backup in DEPLOY.md: rebuild it, or retire the keys.",
    Subject.DATABASE: "Its operator reads its log and looks after the database; the helper reconnects by itself.",
    Subject.DISK: "Its operator frees disk space. Never delete the ledger or a folder in data/queries.",
    Subject.CONFIGURATION: "Its operator corrects config.json, and reloads or restarts the helper.",
    Subject.SITE: "Ask its operator for: trefoil site add, then trefoil helper reload",
    Subject.RELEASE: "Bring all three helpers and this machine to the same release.",
    Subject.PROOFS: "The three operators compare trefoil alarm show, and then run trefoil alarm clear.",
    Subject.DISPUTE: "Keep its log and its ledger, and talk to the other operators: signatures prove who voted twice.",
    Subject.HOUSEKEEPING: "Its operator reads its log, which names the file or the disk error.",
    Subject.OTHER: "Its operator runs trefoil helper status.",
}


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
    return CheckResult(subject, place, severity, printable(text, LONGEST_TEXT), remedy or REMEDIES[subject])


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
        problem(Subject(reason.concern.value), HERE, reason.text, stops=reason.stops)
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


def _check_health(visit: Visit) -> list[CheckResult]:
    """Return the reasons on a health page, and an OK for each concern without one."""
    name, page = visit.helper.name, _object(visit.health)
    stored = page.get("reasons")
    reasons = [each for each in stored if isinstance(each, dict)] if isinstance(stored, list) else []
    if page and "ready" not in page:
        return [problem(Subject.OTHER, name, f"the health page of {name} cannot be read")]
    subjects = {subject.value: subject for subject in Subject}
    findings = [
        problem(
            subjects.get(str(each.get("concern")), Subject.OTHER),
            name,
            str(each.get("text", "")),
            stops=each.get("stops") is True,
        )
        for each in reasons
    ]
    silent = [concern for concern in Concern if concern.value not in {str(each.get("concern")) for each in reasons}]
    return findings + [ok(Subject(concern.value), name) for concern in silent if page]


def _check_modes(visits: Sequence[Visit]) -> list[CheckResult]:
    listed = [visit.config["noise"] for visit in visits if isinstance(visit.config.get("noise"), list)]
    common = [mode for mode in NoiseMode if all(mode.value in each for each in listed if isinstance(each, list))]
    if common:
        return []
    return [problem(Subject.CONFIGURATION, HERE, "no noise mode is in the noise_modes of all three helpers")]
