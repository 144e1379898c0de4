"""What the commands of `trefoil device` do: open the database, run one call of the device, print and return the result.

In reading order: what a command measures (`MeasurementOptions`, `LabelRequest`), where the report is written
(`Destination`), which database and helper set are used, the calls of sites, and what only the person sees and controls.
Every function returns what `--json` writes.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from device import agent, services
from device.attribution import named_function
from device.budget import FilterKind, FilterState, report_sensitivity
from device.conversion import AttributionRequest, ConversionOptions
from device.dashboard.formatting import (
    LocalTime,
    describe_barrier,
    describe_clearing,
    describe_cost,
    describe_epoch_length,
)
from device.device import Device
from device.epoch import EpochCalendar
from device.errors import DatabaseUnavailable
from device.events import ConversionEventOptions, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import DeviceLimits, OwnSite
from device.overview import shortfall
from device.report import DebugReport, report_terms
from device.request import CheckedRequest, SideQuery, SideQueryForm
from device.schedule import DRAIN_SECONDS
from device.site import parse_site
from device.stores.instance import token_path
from device.stores.storage import ReportRecord, Side
from protocol.batch import BatchReader, BatchWriter
from protocol.cli.console import out, say
from protocol.cli.options import check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import remove_on_failure, write_atomically
from protocol.header import ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.querier.regression.features import FeatureEncoding, Record, append_record
from protocol.report import SealedReport
from protocol.units import DAY, nearest_micros, show

R = TypeVar("R")
JsonResult = dict[str, object]

# What SQLite keeps beside an open database.
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
_FILTER_NAMES = {
    FilterKind.SITE: "reports to this site",
    FilterKind.GLOBAL: "all sites together",
    FilterKind.IMPRESSION_SITE: "impressions on this site",
    FilterKind.ADVERTISER: "conversions on this site",
    FilterKind.SIDE_QUERY: "side queries of all sites",
}


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """What a conversion measures: the standard's call or, if `function` is set, the paper's attribution request."""

    options: ConversionOptions
    function: str | None = None
    form: SideQueryForm = SideQueryForm.GENERAL

    def __post_init__(self) -> None:
        if self.function is None and self.form is not SideQueryForm.GENERAL:
            raise _conflict("the last-touch flag is for last touch alone (Theorem 16)", "Give --function last.")
        if self.function is not None and (self.options.impression_sites or self.options.impression_callers):
            sites = "--impression-site and --impression-caller belong to the standard's call"
            raise _conflict(sites, "Leave --function out.")

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


def _new_action() -> str:
    """Return a name for the action of the user that a command stands for, for devices that count sites per action."""
    return secrets.token_hex(16)


def _conflict(message: str, hint: str) -> TrefoilError:
    return TrefoilError(message, hint, kind=ErrorKind.CONFLICTING_OPTIONS)


def parse_side_query_form(text: str) -> SideQueryForm:
    """Return the form of the side query that `--flag` names."""
    for form in (SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH):
        if form.value.replace(" ", "-") == text:
            return form
    raise TrefoilError(
        f"the flag has no form {text!r}", "The forms are general and last-touch.", kind=ErrorKind.UNKNOWN_NAME
    )


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """A publisher's question about one impression, and the file to which its features are appended."""

    options: LabelOptions
    records: Path
    visitor: str = ""

    @classmethod
    def of(
        cls, features: Path, fields: Sequence[str], records: Path, visitor: str, service: str, **options: Any
    ) -> LabelRequest:
        """Encode `fields` (name=value) by the features file; `options` are the other options of `LabelOptions`."""
        encoding, named = FeatureEncoding.load(features), {}
        for each in fields:
            name, equals, value = each.partition("=")
            if not equals:
                raise TrefoilError(f"{each!r} is not a field", "Write name=value.", kind=ErrorKind.MALFORMED)
            named[name] = value
        vector = encoding.encode(named, "the impression")
        return cls(LabelOptions(service, vector, encoding.cap, unit=encoding.unit, **options), records, visitor)


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

    def write(self, report: SealedReport) -> None:
        """Write the report. It is durable when this returns."""
        if not self.is_batch:
            write_atomically(self.path, report.encode())
            return
        with BatchWriter(self.path) as batch:
            batch.add(report)


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


def chosen_limits(
    budget: float, global_budget: float, epoch_days: int, own_site: str, sites_per_action: int | None, delay_ms: int
) -> DeviceLimits:
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
        epoch_days=epoch_days,
        own_site=rules[own_site],
        sites_per_action=sites_per_action,
        delay_ms=delay_ms,
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


def save_impression(db: Path, site: str, options: ImpressionOptions, intermediary: str | None) -> JsonResult:
    """Save one impression."""
    with ensure_database(db), agent.opened(db) as device:
        kept: Future[bool] = Future()
        device.save_impression(site, options, intermediary=intermediary, action=_new_action(), kept=kept)
        is_kept = _wait_until_kept(kept, device)
    if is_kept:
        say(f"saved an impression on {parse_site(site)} for bucket {options.histogram_index}")
    return {"site": parse_site(site), "bucket": options.histogram_index, "kept": is_kept}


def _wait_until_kept(kept: Future[bool], device: Device[R]) -> bool:
    """Return whether a save was stored. To the person an error may say what it must not say to a site."""
    try:
        is_kept = kept.result(DRAIN_SECONDS)
    except TimeoutError:
        is_kept = False
    if not is_kept and device.overview().enabled:
        raise DatabaseUnavailable("nothing was saved: the device database could not be written in time", "Retry later.")
    if not is_kept:
        say("measurement is off: nothing was saved")
    return is_kept


def convert(
    db: Path,
    helpers: Path | None,
    site: str,
    measurement: MeasurementOptions,
    intermediary: str | None,
    destination: Destination,
) -> JsonResult:
    """Measure one conversion and write its report."""
    with open_for_service(db, helpers, measurement.options.aggregation_service) as (helper_set, device):
        now, before = agent.system_clock(), device.overview()
        request = measurement.on(device, now)
        conversion = request.checked(parse_site(site), parse_site(intermediary or site), before.limits)
        destination.check(conversion, helper_set, now)
        report = device.measure_conversion(site, request, intermediary=intermediary, action=_new_action())
        overview = device.overview()
    sealed = report.sealed if isinstance(report, DebugReport) else report
    destination.write(sealed)
    size = len(sealed.encode())
    say(f"wrote a sealed report of {size} bytes to {destination.path}")
    if isinstance(request, AttributionRequest):
        bound = report_sensitivity(request.value, request.buckets, len(request.epochs))
        say(f"one week can move it by at most {bound}, and noise is made for {request.query_sensitivity} (Theorem 18)")
    warning = shortfall(conversion, overview)
    if (len(before.reports), before.reports[-1:]) == (len(overview.reports), overview.reports[-1:]):
        # To a site it looks like any other; its person may know that it is worth another try.
        warning = "this report is null: the device had no time to read anything for it, and nothing was paid"
    if warning is not None:
        say(warning)
    result: JsonResult = {"report": sealed.digest.hex(), "bytes": size, "file": str(destination.path)}
    return result | {"shortfall": warning} | _debug_histogram(report)


def save_conversion(db: Path, site: str, options: ConversionEventOptions, intermediary: str | None) -> JsonResult:
    """Save one conversion event, for its publishers to learn of."""
    with ensure_database(db), agent.opened(db) as device:
        kept: Future[bool] = Future()
        device.save_conversion(site, options, intermediary=intermediary, action=_new_action(), kept=kept)
        is_kept = _wait_until_kept(kept, device)
    publishers = sorted(parse_site(publisher) for publisher in options.publishers)
    if is_kept:
        say(f"saved a conversion on {parse_site(site)} that {', '.join(publishers)} may learn of")
    return {"site": parse_site(site), "publishers": publishers, "label": options.label, "kept": is_kept}


def label(
    db: Path, helpers: Path | None, site: str, request: LabelRequest, intermediary: str | None, batch: Path
) -> JsonResult:
    """Measure whether a conversion followed an impression; write the report, and its features beside it."""
    options, destination = request.options, Destination(batch, is_batch=True)
    check_file("--records", request.records)
    with open_for_service(db, helpers, options.aggregation_service) as (helper_set, device):
        checked = options.checked(parse_site(site), parse_site(intermediary or site), device.overview().limits)
        destination.check(checked, helper_set, agent.system_clock())
        report = device.measure_impression(site, options, intermediary=intermediary, action=_new_action())
    sealed = report.sealed if isinstance(report, DebugReport) else report
    # The record first: a record without a report is harmless, but a report without a record could not be fitted.
    append_record(request.records, Record(sealed.digest, tuple(options.features), request.visitor))
    destination.write(sealed)
    size = len(sealed.encode())
    say(f"wrote a sealed report of {size} bytes to {batch}, and its features to {request.records}")
    result: JsonResult = {"report": sealed.digest.hex(), "bytes": size, "file": str(batch)}
    return result | _debug_histogram(report)


def _debug_histogram(report: agent.Report) -> JsonResult:
    if not isinstance(report, DebugReport):
        return {}
    say(f"debug: the histogram is {list(report.histogram)}")
    return {"histogram": list(report.histogram)}


def add_service(db: Path, name: str, helpers: Path) -> JsonResult:
    """Trust a signed helper set under a new name."""
    helper_set = HelperSet.load(helpers)
    with ensure_database(db), agent.opened_store(db) as store, store.transaction():
        services.add(store.services, name, helper_set, agent.system_clock())
    say(f"sites may now choose {name}: {_helper_names(helper_set)}")
    return _service_to_json(name, helper_set)


def renew_service(db: Path, name: str, helpers: Path) -> JsonResult:
    """Replace a service's set by the next one of the same three helpers. Idempotent."""
    helper_set = HelperSet.load(helpers)
    with agent.opened_store(db) as store, store.transaction():
        changed = services.renew(store.services, name, helper_set, agent.system_clock())
    say(f"{name} has set {helper_set.number} {'now' if changed else 'already'}")
    return _service_to_json(name, helper_set) | {"changed": changed}


def remove_service(db: Path, name: str) -> JsonResult:
    """Stop trusting the helper set of `name`."""
    with agent.opened_store(db) as store, store.transaction():
        services.remove(store.services, name)
    say(f"sites can no longer choose {name}")
    return {"removed": name}


def show_services(db: Path) -> JsonResult:
    """List the services with their helpers, and whether a report could be sealed to each now."""
    with agent.opened_store(db) as store, store.transaction():
        names, sets = list(store.services.all()), services.trusted_sets(store.services)
    table = Table("service", "set", "helpers", "reports can be sealed")
    for name in names:
        helper_set = sets.get(name)
        if helper_set is None:
            table.add_row(name, "-", "-", "no: it is damaged; remove it and add it again")
        else:
            table.add_row(name, str(helper_set.number), _helper_names(helper_set), _sealing_status(helper_set))
    out.print(table if names else "this device holds no helper set: trefoil device service add", highlight=False)
    return {"services": [_service_to_json(name, sets[name]) for name in names if name in sets]}


def _helper_names(helper_set: HelperSet) -> str:
    return ", ".join(helper.name for helper in helper_set.helpers)


def _sealing_status(helper_set: HelperSet) -> str:
    try:
        suite = helper_set.sealing_keys(agent.system_clock())[0].suite
    except TrefoilError as error:
        return f"no: {error}"
    return f"yes, in suite {suite.value}"


def _service_to_json(name: str, helper_set: HelperSet) -> JsonResult:
    return {
        "name": name,
        "number": helper_set.number,
        "digest": helper_set.digest.hex(),
        "helpers": [helper.name for helper in helper_set.helpers],
    }


def show_budget(db: Path, site: str | None) -> JsonResult:
    """Show what every filter of the device, or of one site, has paid."""
    with agent.opened(db) as device:
        states, overview = device.budget(), device.overview()
    calendar, limits = overview.calendar, overview.limits
    say(_describe_settings(limits))
    only = None if site is None else parse_site(site)
    states = [state for state in states if only in (None, state.site)]
    if calendar is None or not states:
        say("no cost is on record" if only is None else f"no cost of {only} is on record")
    else:
        out.print(_budget_table(states, calendar), highlight=False)
    if closed := describe_barrier(overview, LocalTime(UTC)):
        say(closed)
    return {
        "settings": limits.settings(),
        "epoch_start": None if calendar is None else calendar.start,
        "epoch_seconds": None if calendar is None else calendar.length,
        "filters": [] if calendar is None else [_filter_to_json(state, calendar) for state in states],
    }


def _describe_settings(limits: DeviceLimits) -> str:
    actions = "any number of sites" if limits.sites_per_action is None else f"{limits.sites_per_action} sites"
    return (
        f"this device: ε = {show(limits.site_budget)} for a site and {show(limits.global_budget)} for all, "
        f"every {describe_epoch_length(limits.epoch_length)}; own ads {limits.own_site.value}; {actions} on one action"
        f"; reports {limits.delay_ms} ms after their calls"
    )


def _budget_table(states: Sequence[FilterState], calendar: EpochCalendar) -> Table:
    table = Table("site", "what", f"{describe_epoch_length(calendar.length)} (UTC)", "spent ε", "of ε")
    for state in states:
        spent, capacity = show(state.spent), show(state.capacity)
        table.add_row(state.site or "-", _FILTER_NAMES[state.kind], calendar.dates(state.epoch), spent, capacity)
    return table


def _filter_to_json(state: FilterState, calendar: EpochCalendar) -> JsonResult:
    first, last = calendar.bounds(state.epoch)
    return {
        "kind": state.kind.name.lower(),
        "site": state.site,
        "epoch": state.epoch,
        "from": first.isoformat(),
        "to": last.isoformat(),
        "spent_micros": state.spent,
        "capacity_micros": state.capacity,
    }


def show_reports(db: Path, site: str | None) -> JsonResult:
    """Show the log of reports, oldest first. It holds neither their contents nor anything that identifies one."""
    only = None if site is None else parse_site(site)
    with agent.opened(db) as device:
        records = [record for record in device.reports() if only in (None, record.site)]
        closed = describe_barrier(device.overview(), LocalTime(UTC))
    if records:
        out.print(_reports_table(records))
    else:
        say("no report is on record" if only is None else f"no report to {only} is on record")
    if closed:
        say(closed)
    return {"reports": [_record_to_json(record) for record in records]}


def _reports_table(records: list[ReportRecord]) -> Table:
    table = Table("when (UTC)", "to whom", "asked by", "about")
    table.add_column("ε asked for", justify="right")
    table.add_column("what it cost")
    for record in records:
        when = datetime.fromtimestamp(record.time, UTC)
        about = "impressions" if record.side is Side.ADVERTISER else "conversions"
        epsilon = show(record.epsilon_micros)
        table.add_row(
            f"{when:%Y-%m-%d %H:%M}", record.site, record.caller, about, epsilon, describe_cost(record.epochs)
        )
    return table


def _record_to_json(record: ReportRecord) -> JsonResult:
    return {
        "time": record.time,
        "site": record.site,
        "caller": record.caller,
        "side": record.side.name.lower(),
        "epsilon_micros": record.epsilon_micros,
        "sensitivity": record.query_sensitivity,
        "epochs": [
            {"epoch": entry.epoch, "outcome": entry.outcome.name.lower(), "paid_micros": entry.paid}
            for entry in record.epochs
        ],
    }


def clear(db: Path, sites: Sequence[str], *, stored_data: bool, forget_visits: bool) -> JsonResult:
    """Clear sites, only what they stored, or the visits of some sites or of all."""
    if stored_data and (forget_visits or not sites):
        raise _conflict("--stored-data clears what named sites stored, and nothing else", "Name them with --site.")
    if not (sites or forget_visits):
        hint = "Name sites with --site, or forget everything with --forget-visits."
        raise TrefoilError("say what to clear", hint, kind=ErrorKind.MISSING_OPTION)
    names = [parse_site(site) for site in sites]
    with agent.opened(db) as device:
        if forget_visits:
            device.clear_browsing_history(names, forget_visits=True)
        for site in [] if forget_visits else names:
            device.clear_impressions_for_site(site) if stored_data else device.clear_site(site)
    lines = [f"cleared {site}: {describe_clearing(site)}" for site in names]
    if forget_visits:
        lines = [f"cleared {', '.join(names) or 'everything'}: every week up to now is closed to all sites"]
    elif stored_data:
        lines = [f"cleared what {', '.join(names)} had stored; budgets are as before"]
    for line in lines:
        say(line)
    return {"cleared": "stored data" if stored_data else "visits" if forget_visits else "sites", "sites": names}


def switch(db: Path, state: bool) -> JsonResult:
    """Switch measurement on or off."""
    with agent.opened(db) as device:
        device.enable() if state else device.disable()
    say(f"measurement is {'on' if state else 'off'}")
    return {"measuring": state}
