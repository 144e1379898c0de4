"""What the commands of `trefoil device` do, and what they tell the person."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from device import agent
from device.asked import Asked
from device.checked_request import CheckedRequest
from device.conversion import AttributionRequest
from device.dashboard.words import epoch_length_words
from device.device import Device
from device.epoch import EpochCalendar
from device.impression import ImpressionOptions
from device.privacy_filter import FilterKind, FilterState
from device.privacy_loss import report_sensitivity
from device.report import DebugReport, report_terms
from device.service_actions import opened_for, present
from device.shortfall import shortfall
from device.site import parse_site
from protocol.batch import BatchReader, BatchWriter
from protocol.console import out, say
from protocol.epsilon import show
from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.header import Header, ReportTerms, coarse_time
from protocol.helper_set import HelperSet
from protocol.places import check_file
from protocol.report import SealedReport

_KINDS = {
    FilterKind.SITE: "reports to this site",
    FilterKind.GLOBAL: "all sites together",
    FilterKind.IMPRESSION_SITE: "impressions on this site",
    FilterKind.ADVERTISER: "conversions on this site",
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a report is written: appended to a batch, or alone."""

    path: Path
    is_batch: bool

    @classmethod
    def chosen(cls, batch: Path | None, report: Path | None) -> Destination:
        """Exactly one of the two."""
        if batch is not None and report is None:
            return cls(batch, is_batch=True)
        if report is not None and batch is None:
            return cls(report, is_batch=False)
        raise TrefoilError("name one place for the report", "Give --batch FILE or --report FILE.")

    def check(self, request: CheckedRequest, helper_set: HelperSet, now: int) -> None:
        """Refuse, before the report is paid for, a place where it could not be written or a batch it would not fit."""
        check_file("--batch" if self.is_batch else "--report", self.path)
        if not self.is_batch or not self.path.exists() or not self.path.stat().st_size:
            return
        batch = BatchReader(self.path)
        if len(batch):
            first = Header.decode(batch[0].header)
            terms = first.terms
            wanted = report_terms(request, now, debug=terms.debug)
            if _shape(terms) != _shape(wanted):
                raise TrefoilError(
                    f"{self.path} holds reports to {terms.site} with {terms.buckets} buckets of {terms.unit}, "
                    f"at most {terms.cap} each, and κ = {terms.kappa}",
                    _how_to_fit(terms, wanted),
                )
            suite = helper_set.sealing_keys(coarse_time(now))[0].suite
            if (first.helper_set, first.suite) != (helper_set.digest, suite):
                raise TrefoilError(
                    f"{self.path} holds reports to another helper set than the one of {request.service} now",
                    "Keep one file for each aggregation service, and begin a new one when its set is renewed.",
                )

    def write(self, report: SealedReport) -> None:
        """On disk when this returns."""
        if not self.is_batch:
            write_atomically(self.path, report.encode())
            return
        with BatchWriter(self.path) as batch:
            batch.add(report)


def _shape(terms: ReportTerms) -> tuple[object, ...]:
    """What all reports of a batch have in common."""
    return (terms.site, terms.caller, terms.buckets, terms.unit, terms.kappa, terms.cap, terms.spread)


def _how_to_fit(batch: ReportTerms, wanted: ReportTerms) -> str:
    """The options for a report of the batch's shape, where options are all that differs."""
    keep = "Keep one file per site, caller, unit, number of buckets, largest value and κ."
    if (batch.site, batch.caller, batch.spread) != (wanted.site, wanted.caller, wanted.spread) or not batch.cap:
        return keep
    # A file may come from anyone, and people copy what a hint says into a shell.
    unit = shlex.quote(batch.unit)
    options = f"--buckets {batch.buckets} --unit {unit} --max-value {batch.cap} --kappa {batch.kappa}"
    return f"{keep} To add to this one give {options}"


def save_impression(db: Path, site: str, options: ImpressionOptions, intermediary: str | None) -> dict[str, object]:
    """Save one impression, on a device that is made if need be."""
    with present(db), agent.opened(db) as device:
        device.save_impression(site, options, intermediary=intermediary)
    say(f"saved an impression on {parse_site(site)} for bucket {options.histogram_index}")
    return {"site": parse_site(site), "bucket": options.histogram_index}


def convert(
    db: Path,
    helpers: Path | None,
    site: str,
    asked: Asked,
    intermediary: str | None,
    destination: Destination,
) -> dict[str, object]:
    """Measure one conversion and write its report."""
    with opened_for(db, helpers, asked.options.aggregation_service) as (helper_set, device):
        now = agent.system_clock()
        wanted, limits = asked.on(device, now), device.overview().limits
        conversion = wanted.checked(parse_site(site), parse_site(intermediary or site), limits)
        destination.check(conversion, helper_set, now)
        report = device.measure_conversion(site, wanted, intermediary=intermediary)
        overview = device.overview()
    sealed = report.sealed if isinstance(report, DebugReport) else report
    destination.write(sealed)
    size = len(sealed.encode())
    say(f"wrote a sealed report of {size} bytes to {destination.path}")
    if isinstance(wanted, AttributionRequest):
        moved = report_sensitivity(wanted.value, wanted.buckets, len(wanted.epochs))
        say(f"one week can move it by at most {moved}, and noise is made for {wanted.query_sensitivity} (Theorem 18)")
    told = shortfall(conversion, overview)
    if told is not None:
        say(told)
    result: dict[str, object] = {"report": sealed.digest.hex(), "bytes": size, "file": str(destination.path)}
    result["shortfall"] = told
    if isinstance(report, DebugReport):
        say(f"debug: the histogram is {list(report.histogram)}")
        result["histogram"] = list(report.histogram)
    return result


def show_budget(db: Path, site: str | None) -> dict[str, object]:
    """What every filter of the device has paid."""
    with agent.opened(db) as device:
        states = device.budget()
        calendar = device.overview().calendar
    wanted = None if site is None else parse_site(site)
    shown = [state for state in states if wanted is None or state.site == wanted]
    if calendar is None or not shown:
        say("no site has cost this device anything yet" if wanted is None else f"{wanted} has cost this device nothing")
    else:
        out.print(_table(shown, calendar), highlight=False)
    return {
        "epoch_start": None if calendar is None else calendar.start,
        "epoch_seconds": None if calendar is None else calendar.length,
        "filters": [] if calendar is None else [_to_json(state, calendar) for state in shown],
    }


def _to_json(state: FilterState, calendar: EpochCalendar) -> dict[str, object]:
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


def clear(db: Path, sites: Sequence[str], *, stored_data: bool, forget_visits: bool) -> dict[str, object]:
    """Clear what the person asked for; each way at most one."""
    if stored_data and (forget_visits or not sites):
        raise TrefoilError("--stored-data clears what named sites stored, and nothing else", "Name them with --site.")
    if not (sites or forget_visits):
        raise TrefoilError("say what to clear", "Name sites with --site, or forget everything with --forget-visits.")
    with agent.opened(db) as device:
        _clear(device, sites, stored_data=stored_data, forget_visits=forget_visits)
    what = "stored data" if stored_data else "visits" if forget_visits else "budgets"
    say(f"cleared {what} of {', '.join(sites) or 'all sites'}")
    return {"cleared": what, "sites": [parse_site(site) for site in sites]}


def _clear(device: Device[agent.Report], sites: Sequence[str], *, stored_data: bool, forget_visits: bool) -> None:
    if not stored_data:
        device.clear_browsing_history(sites, forget_visits=forget_visits)
    else:
        for site in sites:
            device.clear_impressions_for_site(site)


def switch(db: Path, state: bool) -> dict[str, object]:
    """Switch measurement on or off."""
    with agent.opened(db) as device:
        device.enable() if state else device.disable()
    say(f"measurement is {'on' if state else 'off'}")
    return {"measuring": state}


def _table(states: Sequence[FilterState], calendar: EpochCalendar) -> Table:
    table = Table("site", "what", f"{epoch_length_words(calendar.length)} (UTC)", "spent ε", "of ε")
    for state in states:
        spent, capacity = show(state.spent), show(state.capacity)
        table.add_row(state.site or "-", _KINDS[state.kind], calendar.dates(state.epoch), spent, capacity)
    return table
