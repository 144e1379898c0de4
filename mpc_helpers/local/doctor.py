"""`trefoil doctor`: everything that a querier or an operator can check about three helpers without asking a query.

From a querier's place: the helper set, each helper over the network, and whether each has registered her key. From an
operator's place also the own files, ledger, disk and ports, and the peers' MPC ports. Nothing is changed, here or at a
helper.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger.ledger import engine_at
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.local.visits import (
    HERE,
    SECONDS,
    CheckResult,
    Severity,
    Subject,
    Visit,
    compare,
    fault_of,
    ok,
    problem,
    visit_all,
)
from mpc_helpers.mpc.links import listen
from mpc_helpers.service.server import MetricsAccess
from mpc_helpers.service.storage import MEGABYTE
from mpc_helpers.service.workers import announced_ports, blocked_ports, ranges
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.hpke import CLASSICAL, PrivateKey
from protocol.keys import IdentityKey
from protocol.noise import NoiseMode
from protocol.querier.connections import HelperConnections
from protocol.querier.failure import QueryFailed
from protocol.query import Query, SignedQuery
from protocol.shares import PARTIES

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
