"""What the commands of `trefoil device` share: what is measured, where the report goes, which database is used."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from device import agent, services
from device.attribution import named_function
from device.budget import report_sensitivity
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.limits import DeviceLimits, OwnSite
from device.report import report_terms
from device.request import CheckedRequest, SideQuery, SideQueryForm
from device.stores.instance import token_path
from protocol.batch import BatchReader, BatchWriter
from protocol.cli.console import say
from protocol.cli.options import check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import remove_on_failure, write_atomically
from protocol.header import ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.report import SealedReport
from protocol.units import DAY, nearest_micros

R = TypeVar("R")
# What SQLite keeps beside an open database.
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """What a conversion measures: the standard's call or, if `function` is set, the paper's attribution request."""

    options: ConversionOptions
    function: str | None = None
    form: SideQueryForm = SideQueryForm.GENERAL

    def __post_init__(self) -> None:
        if self.function is None and self.form is not SideQueryForm.GENERAL:
            raise conflict("the last-touch flag is for last touch alone (Theorem 16)", "Give --function last.")
        if self.function is not None and (self.options.impression_sites or self.options.impression_callers):
            sites = "--impression-site and --impression-caller belong to the standard's call"
            raise conflict(sites, "Leave --function out.")

    def on(self, device: Device[R], now: int) -> ConversionOptions | AttributionRequest:
        """Return what `Device.measure_conversion` takes. A request covers every epoch that the lookback touches."""
        options = self.options
        if self.function is None:
            return options
        limits = device.overview().limits
        days = min(options.lookback_days or limits.max_lookback_days, limits.max_lookback_days)
        return AttributionRequest(
            epochs=device.calendar().window(now - days * DAY, now),
            epsilon=options.epsilon,
            buckets=options.histogram_size,
            value=options.value,
            query_sensitivity=report_sensitivity(options.max_value, options.histogram_size, epochs=2),
            function=named_function(self.function, options.credit),
            match_values=options.match_values,
            side_query=SideQuery(options.kappa, self.form) if options.kappa else None,
            unit=options.unit,
            aggregation_service=options.aggregation_service,
        )


def conflict(message: str, hint: str) -> TrefoilError:
    return TrefoilError(message, hint, kind=ErrorKind.CONFLICTING_OPTIONS)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a report is written: appended to a batch, or alone in a file."""

    path: Path
    is_batch: bool

    @classmethod
    def from_options(cls, batch: Path | None, report: Path | None) -> Destination:
        """Require exactly one of `--batch` and `--report`."""
        if batch is not None and report is None:
            return cls(batch, is_batch=True)
        if report is not None and batch is None:
            return cls(report, is_batch=False)
        kind = ErrorKind.MISSING_OPTION if batch is None else ErrorKind.CONFLICTING_OPTIONS
        raise TrefoilError("name one place for the report", "Give --batch FILE or --report FILE.", kind=kind)

    def check(self, request: CheckedRequest, helper_set: HelperSet, now: int) -> None:
        """Raise, before the report is paid for, if the file is unwritable or a batch of another shape or helper set."""
        check_file("--batch" if self.is_batch else "--report", self.path)
        if not self.is_batch or not self.path.exists() or not self.path.stat().st_size:
            return
        batch = BatchReader(self.path)
        first = batch.first_header()
        if first is None:
            return
        terms = first.terms
        wanted = report_terms(request, now, debug=terms.debug)
        if _shape(terms) != _shape(wanted):
            raise TrefoilError(
                f"{self.path} holds reports to {terms.site} with {terms.buckets} buckets of {terms.unit}, "
                f"at most {terms.cap} each, and κ = {terms.kappa}",
                _matching_options(terms, wanted),
                kind=ErrorKind.INCONSISTENT,
            )
        suite = helper_set.sealing_keys(coarse_time(now))[0].suite
        if (first.helper_set, first.suite) != (helper_set.digest, suite):
            raise TrefoilError(
                f"{self.path} holds reports to another helper set than the current one of {request.service}",
                "Keep one file for each aggregation service, and begin a new one when its set is renewed.",
                kind=ErrorKind.WRONG_HELPER_SET,
            )

    @contextmanager
    def opened(self) -> Iterator[Callable[[SealedReport], None]]:
        """Yield the function that writes the report, which is durable at the end. A batch is locked from here on."""
        if not self.is_batch:
            yield lambda report: write_atomically(self.path, report.encode())
            return
        with remove_on_failure(self.path), BatchWriter(self.path) as batch:
            yield batch.add


def _shape(terms: ReportTerms) -> tuple[object, ...]:
    """Return what all reports of a batch have in common."""
    return (terms.site, terms.caller, terms.buckets, terms.unit, terms.kappa, terms.cap, terms.spread)


def _matching_options(batch: ReportTerms, wanted: ReportTerms) -> str:
    """Return a hint that names the options of the batch's shape, if options are all that differs."""
    keep = "Keep one file per site, caller, unit, number of buckets, largest value and κ."
    if (batch.site, batch.caller, batch.spread) != (wanted.site, wanted.caller, wanted.spread) or not batch.cap:
        return keep
    # The file may come from an adversary, and people paste hints into a shell.
    unit = shlex.quote(batch.unit)
    options = f"--buckets {batch.buckets} --unit {unit} --max-value {batch.cap} --kappa {batch.kappa}"
    return f"{keep} To add to this one give {options}"


def chosen_limits(budget: float, global_budget: float, own_site: str) -> DeviceLimits:
    """Return the limits of a new device. Quotas keep their parts of the budget of all sites: a half and two eighths."""
    rules = {rule.value: rule for rule in OwnSite}
    if own_site not in rules:
        raise TrefoilError(
            f"there is no rule {own_site!r} for a site's own ads",
            "Give counted or hidden.",
            kind=ErrorKind.UNKNOWN_NAME,
        )
    everyone = nearest_micros(global_budget)
    return DeviceLimits(
        site_budget=nearest_micros(budget),
        global_budget=everyone,
        impression_site_quota=max(1, everyone // 2),
        advertiser_quota=max(1, everyone // 8),
        side_query_quota=max(1, everyone // 8),
        own_site=rules[own_site],
    )


@contextmanager
def ensure_database(db: Path) -> Iterator[None]:
    """Create the database if there is none, and remove it again if the block fails.

    If a database was lost but its token is left, keep the new one: it records what may have been spent.
    """
    if db.exists():
        yield
        return
    token = token_path(db)
    files = () if token.exists() else (db, token, *(db.with_name(db.name + suffix) for suffix in SQLITE_SUFFIXES))
    with remove_on_failure(*files):
        agent.create(db)
        yield
    say(f"{db} is a new device")


@contextmanager
def open_for_service(db: Path, helpers: Path | None, service: str) -> Iterator[tuple[HelperSet, Device[agent.Report]]]:
    """Open the device, created if need be, and yield it with the helper set of `service`."""
    with ensure_database(db):
        helper_set = select_helper_set(db, helpers, service)
        with agent.opened(db, helper_set, service=service) as device:
            yield helper_set, device


def select_helper_set(db: Path, helpers: Path | None, service: str) -> HelperSet:
    """Return the device's helper set for `service`, or `helpers` if it has none of that name."""
    with agent.opened_store(db) as store, store.transaction():
        sets = services.trusted_sets(store.services)
    if helpers is not None:
        sets = services.with_given(sets, service, HelperSet.load(helpers))
    return sets[DeviceLimits(aggregation_services=frozenset(sets)).check_service(service)]
