"""The commands of `trefoil device`: the calls of sites, what only the person sees and controls, and helper sets.

Each opens the database, runs one call of the device, prints the result and writes it to `--json`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from device import agent, services
from device.actions import (
    Destination,
    MeasurementOptions,
    chosen_limits,
    conflict,
    ensure_database,
    open_for_service,
)
from device.budget import FilterKind, FilterState, report_sensitivity
from device.conversion import AttributionRequest, ConversionOptions
from device.dashboard.formatting import (
    LocalTime,
    describe_barrier,
    describe_clearing,
    describe_cost,
    describe_epoch_length,
)
from device.epoch import EpochCalendar
from device.errors import DatabaseUnavailable
from device.events import ConversionEventOptions, ImpressionOptions
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.overview import Overview, shortfall
from device.report import DebugReport
from device.request import SideQuery, SideQueryForm
from device.schedule import DRAIN_SECONDS
from device.site import parse_site
from device.stores.storage import ReportRecord, Side
from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile, WholeKappa, check_file
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet
from protocol.querier.regression.features import FeatureEncoding, Record, append_record
from protocol.report import SealedReport
from protocol.units import show

app = typer.Typer(help="device")
device = typer.Typer(help="Act as one person's device.", no_args_is_help=True)
service = typer.Typer(help="Choose which helper sets this device trusts, by name.", no_args_is_help=True)
app.add_typer(device, name="device")
device.add_typer(service, name="service")

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The device database.", show_default=False)]
Site = Annotated[str, typer.Argument(help="The site of the page; a subdomain counts as its site.", show_default=False)]
Intermediary = Annotated[str | None, typer.Option(help="The site of the calling frame or script, if another.")]
LookbackDays = Annotated[int | None, typer.Option(help="Days to look back.", show_default="as far as stored")]
_FUNCTIONS = (
    "Attribution function of the paper's request, instead of the standard's call: last, first, equal, last-n, slots, "
    "or your own as module:function."
)
FunctionName = Annotated[str | None, typer.Option(metavar="NAME", help=_FUNCTIONS)]
Service = Annotated[str, typer.Option(metavar="NAME", help="The aggregation service to seal the report to.")]
Helpers = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Their helper set, if the device holds none of that name.", show_default=False),
]
_FORMS = {"general": SideQueryForm.GENERAL, "last-touch": SideQueryForm.LAST_TOUCH}
_FILTER_NAMES = {
    FilterKind.SITE: "reports to this site",
    FilterKind.GLOBAL: "all sites together",
    FilterKind.IMPRESSION_SITE: "impressions on this site",
    FilterKind.ADVERTISER: "conversions on this site",
    FilterKind.SIDE_QUERY: "side queries of all sites",
}
JsonResult = dict[str, object]


@device.command()
def create(
    db: Database,
    debug: Annotated[
        bool, typer.Option("--debug", help="A debug device: only debug queries accept its reports.")
    ] = False,
    budget: Annotated[float, typer.Option(help="ε of one site for each epoch.")] = 1.0,
    global_budget: Annotated[float, typer.Option(help="ε of all sites together; quotas are parts of it.")] = 8.0,
    epoch_days: Annotated[int, typer.Option(help="Days of an epoch.")] = 7,
    own_site: Annotated[str, typer.Option(help="A site's own ads: counted, or hidden from its reports.")] = "counted",
    sites_per_action: Annotated[int | None, typer.Option(help="Sites that may call on one action of the user.")] = None,
    delay_ms: Annotated[int, typer.Option(help="Milliseconds from a call to its report.")] = 1000,
    processor_ms: Annotated[int, typer.Option(help="Processor milliseconds of every report; 0: what it needs.")] = 50,
    json_file: JsonFile = None,
) -> None:
    """Create a device database. Other commands create one with the defaults if there is none.

    All of these are kept with the database and cannot be changed later.

    Example: trefoil device create --db ann.db --budget 0.5 --own-site hidden
    """
    limits = replace(
        chosen_limits(budget, global_budget, own_site),
        epoch_days=epoch_days,
        sites_per_action=sites_per_action,
        delay_ms=delay_ms,
        processor_ms=processor_ms,
    )
    agent.create(db, debug=debug, limits=limits)
    say(f"{db} is a new {'debug ' if debug else ''}device")
    write_json(json_file, {"database": str(db), "debug": debug, "settings": limits.settings()})


@device.command()
def impression(
    site: Site,
    db: Database,
    bucket: Annotated[int, typer.Option(help="The histogram bucket that receives credit for this impression.")],
    match_value: Annotated[int, typer.Option(help="A number to select impressions by, such as a campaign.")] = 0,
    conversion_site: Annotated[list[str] | None, typer.Option(help="Only these sites may use it; repeatable.")] = None,
    conversion_caller: Annotated[list[str] | None, typer.Option(help="Only these callers may; repeatable.")] = None,
    lifetime_days: Annotated[int, typer.Option(help="Days for which it may be used.")] = 30,
    priority: Annotated[int, typer.Option(help="Impressions of higher priority get credit first.")] = 0,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Save an impression: an ad was shown on SITE.

    Example: trefoil device impression news.example --db ann.db --bucket 2 --conversion-site shop.example
    """
    sites, callers = tuple(conversion_site or ()), tuple(conversion_caller or ())
    options = ImpressionOptions(bucket, match_value, sites, callers, lifetime_days, priority)
    kept = _save(db, site, options, intermediary)
    if kept:
        say(f"saved an impression on {parse_site(site)} for bucket {bucket}")
    write_json(json_file, {"site": parse_site(site), "bucket": bucket, "kept": kept})


@device.command()
def conversion(
    site: Site,
    db: Database,
    publisher: Annotated[list[str], typer.Option(help="A site that may learn of it; repeatable.")],
    label: Annotated[int, typer.Option(help="A number for the kind of conversion, of your choice.")] = 0,
    lifetime_days: Annotated[int, typer.Option(help="Days for which it may be used.")] = 30,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Save a conversion on SITE, so that publishers can learn which of their impressions lead to one.

    Example: trefoil device conversion shop.example --db ann.db --publisher news.example
    """
    options = ConversionEventOptions(tuple(publisher), label, lifetime_days)
    kept = _save(db, site, options, intermediary)
    publishers = sorted(map(parse_site, publisher))
    if kept:
        say(f"saved a conversion on {parse_site(site)} that {', '.join(publishers)} may learn of")
    write_json(json_file, {"site": parse_site(site), "publishers": publishers, "label": label, "kept": kept})


def _save(db: Path, site: str, options: ImpressionOptions | ConversionEventOptions, intermediary: str | None) -> bool:
    """Save an event and return whether it is stored. To the person an error may say what it must not say to a site."""
    action, stored = _new_action(), Future[bool]()
    with ensure_database(db), agent.opened(db) as device:
        if isinstance(options, ImpressionOptions):
            device.save_impression(site, options, intermediary=intermediary, action=action, kept=stored)
        else:
            device.save_conversion(site, options, intermediary=intermediary, action=action, kept=stored)
        try:
            kept = stored.result(DRAIN_SECONDS)
        except TimeoutError:
            kept = False
        if not kept and device.overview().enabled:
            raise DatabaseUnavailable(
                "nothing was saved: the device database could not be written in time", "Retry later."
            )
    if not kept:
        say("measurement is off: nothing was saved")
    return kept


def _new_action() -> str:
    """Return a name for the action of the user that a command stands for, for devices that count sites per action."""
    return secrets.token_hex(16)


@device.command()
def label(
    site: Site,
    db: Database,
    features: Annotated[Path, typer.Option(metavar="FILE", help="The features file (trefoil regression features).")],
    field: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="A field of the impression; repeatable.")],
    ago: Annotated[int, typer.Option(help="Age of the impression in seconds.")],
    advertiser: Annotated[list[str], typer.Option(help="Whose conversions count; repeatable.")],
    batch: Annotated[Path, typer.Option(metavar="FILE", help="Append the report to this batch.")],
    records: Annotated[Path, typer.Option(metavar="FILE", help="Append the impression's features to this file.")],
    epsilon: Annotated[float, typer.Option(help="The privacy budget ε that the query requests.")] = 0.25,
    window_days: Annotated[int, typer.Option(help="Days in which a conversion counts; they must be over.")] = 7,
    conversion_label: Annotated[list[int] | None, typer.Option(help="Only these labels count; repeatable.")] = None,
    kappa: WholeKappa = 0,
    visitor: Annotated[str, typer.Option(help="Your name for a visitor measured more than once.")] = "",
    service: Service = "trefoil",
    helpers: Helpers = None,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Measure whether a conversion followed an impression that SITE showed; write the sealed report.

    Example: trefoil device label news.example --db ann.db --helpers helpers.json --features features.json
    --field advertiser=shop.example --field hour=20 --ago 700000 --advertiser shop.example --batch news.batch
    --records news.records
    """
    encoding = FeatureEncoding.load(features)
    options = LabelOptions(
        service,
        encoding.encode(_fields(field), "the impression"),
        encoding.cap,
        epsilon=epsilon,
        shown_ago=ago,
        advertisers=tuple(advertiser),
        window_days=window_days,
        labels=tuple(conversion_label or ()),
        side_query=SideQuery(kappa, SideQueryForm.ANY) if kappa else None,
        unit=encoding.unit,
    )
    destination = Destination(batch, is_batch=True)
    check_file("--records", records)
    with open_for_service(db, helpers, service) as (helper_set, device):
        checked = options.checked(parse_site(site), parse_site(intermediary or site), device.overview().limits)
        destination.check(checked, helper_set, agent.system_clock())
        before = device.overview()
        with destination.opened() as write:
            report = device.measure_impression(site, options, intermediary=intermediary, action=_new_action())
            # The record first: a record without a report is harmless, but a report without one could not be fitted.
            append_record(records, Record(_sealed(report).digest, tuple(options.features), visitor))
            write(_sealed(report))
        warning = _dropped(before, device.overview())
    result = _describe_report(report, destination)
    say(f"its features are in {records}")
    if warning is not None:
        say(warning)
    write_json(json_file, result | {"shortfall": warning})


def _fields(assignments: Sequence[str]) -> dict[str, str]:
    fields = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not equals:
            raise TrefoilError(f"{each!r} is not a field", "Write name=value.", kind=ErrorKind.MALFORMED)
        fields[name] = value
    return fields


def _sealed(report: agent.Report) -> SealedReport:
    return report.sealed if isinstance(report, DebugReport) else report


def _dropped(before: Overview, after: Overview) -> str | None:
    """Return what to say of a call that this device had no time for, which only its person may know."""
    if (len(before.reports), before.reports[-1:]) != (len(after.reports), after.reports[-1:]):
        return None
    return "this report is null: the device had no time to read anything for it, and nothing was paid"


def _describe_report(report: agent.Report, destination: Destination) -> JsonResult:
    """Say where a report was written, and return what `--json` says about it."""
    sealed = _sealed(report)
    size = len(sealed.encode())
    say(f"wrote a sealed report of {size} bytes to {destination.path}")
    result: JsonResult = {"report": sealed.digest.hex(), "bytes": size, "file": str(destination.path)}
    if isinstance(report, DebugReport):
        say(f"debug: the histogram is {list(report.histogram)}")
        result["histogram"] = list(report.histogram)
    return result


@device.command()
def convert(
    site: Site,
    db: Database,
    buckets: Annotated[int, typer.Option(help="Number of histogram buckets.")],
    batch: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the report to this batch.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report alone to this file.")] = None,
    value: Annotated[int, typer.Option(help="The value of the conversion, in whole units.")] = 1,
    max_value: Annotated[int, typer.Option(help="The largest value of any conversion of the query.")] = 1,
    epsilon: Annotated[float, typer.Option(help="The privacy budget ε that the query requests.")] = 1.0,
    credit: Annotated[list[float] | None, typer.Option(help="Credit weights of the last touches; repeatable.")] = None,
    lookback_days: LookbackDays = None,
    match_value: Annotated[list[int] | None, typer.Option(help="Use only impressions with these; repeatable.")] = None,
    impression_site: Annotated[list[str] | None, typer.Option(help="Only impressions on these; repeatable.")] = None,
    impression_caller: Annotated[list[str] | None, typer.Option(help="Only those saved by these; repeatable.")] = None,
    unit: Annotated[str, typer.Option(help="Name of the unit of value.")] = "count",
    function: FunctionName = None,
    kappa: WholeKappa = 0,
    flag: Annotated[str, typer.Option(help="Its form: general, or last-touch (with --function last).")] = "general",
    service: Service = "trefoil",
    helpers: Helpers = None,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Measure a conversion on SITE: attribute it, pay for it, and write the sealed report.

    Example: trefoil device convert shop.example --db ann.db --helpers helpers.json --buckets 4 --batch shop.batch

    Example: trefoil device convert shop.example --db ann.db --helpers helpers.json --buckets 4 --function first
    --kappa 1 --batch shop.batch

    Example: trefoil device convert shop.example --db ann.db --service north --buckets 4 --batch shop.batch
    """
    options = ConversionOptions(
        service,
        buckets,
        epsilon=epsilon,
        value=value,
        max_value=max_value,
        credit=credit or (1.0,),
        lookback_days=lookback_days,
        match_values=match_value or (),
        impression_sites=impression_site or (),
        impression_callers=impression_caller or (),
        unit=unit,
        kappa=kappa,
    )
    if value > max_value:
        raise TrefoilError(
            f"--value {value} is more than --max-value {max_value}",
            "The noise is scaled to --max-value: raise it, or clip the value.",
            kind=ErrorKind.OUT_OF_RANGE,
        )
    destination = Destination.from_options(batch, report)
    if flag not in _FORMS:
        hint = "The forms are general and last-touch."
        raise TrefoilError(f"the flag has no form {flag!r}", hint, kind=ErrorKind.UNKNOWN_NAME)
    measurement = MeasurementOptions(options, function, _FORMS[flag])
    with open_for_service(db, helpers, service) as (helper_set, device):
        now, before = agent.system_clock(), device.overview()
        request = measurement.on(device, now)
        checked = request.checked(parse_site(site), parse_site(intermediary or site), before.limits)
        destination.check(checked, helper_set, now)
        # The batch is locked before the report is paid for.
        with destination.opened() as write:
            made = device.measure_conversion(site, request, intermediary=intermediary, action=_new_action())
            write(_sealed(made))
        overview = device.overview()
    result = _describe_report(made, destination)
    if isinstance(request, AttributionRequest):
        bound = report_sensitivity(request.value, request.buckets, len(request.epochs))
        say(f"one week can move it by at most {bound}, and noise is made for {request.query_sensitivity} (Theorem 18)")
    warning = _dropped(before, overview) or shortfall(checked, overview)
    if warning is not None:
        say(warning)
    write_json(json_file, result | {"shortfall": warning})


@device.command()
def budget(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only this site's filters.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what every site has cost this device, week by week. Never show it to a site.

    Example: trefoil device budget --db ann.db
    """
    only = None if site is None else parse_site(site)
    with agent.opened(db) as device:
        overview = device.overview()
    calendar, limits = overview.calendar, overview.limits
    say(_describe_settings(limits))
    states = [state for state in overview.filters if only in (None, state.site)]
    if calendar is None or not states:
        say("no cost is on record" if only is None else f"no cost of {only} is on record")
    else:
        out.print(_budget_table(states, calendar), highlight=False)
    if closed := describe_barrier(overview, LocalTime(UTC)):
        say(closed)
    result = {
        "settings": limits.settings(),
        "epoch_start": None if calendar is None else calendar.start,
        "epoch_seconds": None if calendar is None else calendar.length,
        "filters": [] if calendar is None else [_filter_to_json(state, calendar) for state in states],
    }
    write_json(json_file, result)


def _describe_settings(limits: DeviceLimits) -> str:
    actions = "any number of sites" if limits.sites_per_action is None else f"{limits.sites_per_action} sites"
    return (
        f"this device: ε = {show(limits.site_budget)} for a site and {show(limits.global_budget)} for all, "
        f"every {describe_epoch_length(limits.epoch_length)}; own ads {limits.own_site.value}; {actions} on one action"
        f"; reports {limits.delay_ms} ms after their calls, for {limits.processor_ms} ms of processor time"
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


@device.command()
def reports(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only reports to this site.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show which reports left this device: when, to whom and for how much ε. Their contents are not stored.

    Example: trefoil device reports --db ann.db
    """
    only = None if site is None else parse_site(site)
    with agent.opened(db) as device:
        overview = device.overview()
    records = [record for record in overview.reports if only in (None, record.site)]
    if records:
        out.print(_reports_table(records))
    else:
        say("no report is on record" if only is None else f"no report to {only} is on record")
    if closed := describe_barrier(overview, LocalTime(UTC)):
        say(closed)
    write_json(json_file, {"reports": [_record_to_json(record) for record in records]})


def _reports_table(records: Sequence[ReportRecord]) -> Table:
    table = Table("when (UTC)", "to whom", "asked by", "about")
    table.add_column("ε asked for", justify="right")
    table.add_column("what it cost")
    for record in records:
        when = f"{datetime.fromtimestamp(record.time, UTC):%Y-%m-%d %H:%M}"
        about = "impressions" if record.side is Side.ADVERTISER else "conversions"
        epsilon, cost = show(record.epsilon_micros), describe_cost(record.epochs)
        table.add_row(when, record.site, record.caller, about, epsilon, cost)
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


@device.command()
def clear(
    db: Database,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; repeatable.")] = None,
    stored_data: Annotated[
        bool, typer.Option("--stored-data", help="Delete only what the sites stored; their budgets stay as they are.")
    ] = False,
    forget_visits: Annotated[
        bool, typer.Option("--forget-visits", help="Forget the visits as well; closes every past epoch to all sites.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Clear sites: delete what they stored, and let them measure nothing more of the weeks up to now.

    Spent budget is never restored.

    Example: trefoil device clear --db ann.db --site shop.example

    Example: trefoil device clear --db ann.db --forget-visits
    """
    names = [parse_site(each) for each in site or ()]
    if stored_data and (forget_visits or not names):
        raise conflict("--stored-data clears what named sites stored, and nothing else", "Name them with --site.")
    if not (names or forget_visits):
        hint = "Name sites with --site, or forget everything with --forget-visits."
        raise TrefoilError("say what to clear", hint, kind=ErrorKind.MISSING_OPTION)
    lines = [f"cleared {name}: {describe_clearing(name)}" for name in names]
    with agent.opened(db) as device:
        if forget_visits:
            device.clear_browsing_history(names, forget_visits=True)
            lines = [f"cleared {', '.join(names) or 'everything'}: every week up to now is closed to all sites"]
        elif stored_data:
            for name in names:
                device.clear_impressions_for_site(name)
            lines = [f"cleared what {', '.join(names)} had stored; budgets are as before"]
        else:
            for name in names:
                device.clear_site(name)
    for line in lines:
        say(line)
    cleared = "stored data" if stored_data else "visits" if forget_visits else "sites"
    write_json(json_file, {"cleared": cleared, "sites": names})


@device.command()
def on(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement on again.

    Example: trefoil device on --db ann.db
    """
    with agent.opened(db) as device:
        device.enable()
    say("measurement is on")
    write_json(json_file, {"measuring": True})


@device.command()
def off(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement off. While it is off every report is null, which no site can detect.

    Example: trefoil device off --db ann.db
    """
    with agent.opened(db) as device:
        device.disable()
    say("measurement is off")
    write_json(json_file, {"measuring": False})


@device.command()
def dashboard(
    db: Database,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port on this machine; 0 picks a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in your browser.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Serve a page that shows what measurement has cost this person, to a browser on this machine only.

    Example: trefoil device dashboard --db ann.db --open
    """
    from device.dashboard.server import run  # here: only this command needs an HTTP server

    run(db, port=port, open_browser=open_browser, json_file=json_file)


Name = Annotated[str, typer.Argument(help="The name by which sites choose it.", show_default=False)]
ServiceHelpers = Annotated[Path, typer.Option(metavar="FILE", help="The signed helper set.", show_default=False)]


@service.command("add")
def service_add(name: Name, db: Database, helpers: ServiceHelpers, json_file: JsonFile = None) -> None:
    """Trust a helper set, so that sites may choose it. Any two of its three helpers could collude to read reports.

    Example: trefoil device service add north --db ann.db --helpers helpers.json
    """
    helper_set = HelperSet.load(helpers)
    with ensure_database(db), agent.opened_store(db) as store, store.transaction():
        services.add(store.services, name, helper_set, agent.system_clock())
    say(f"sites may now choose {name}: {_helper_names(helper_set)}")
    write_json(json_file, _service_to_json(name, helper_set))


def _helper_names(helper_set: HelperSet) -> str:
    return ", ".join(helper.name for helper in helper_set.helpers)


def _service_to_json(name: str, helper_set: HelperSet) -> JsonResult:
    return {
        "name": name,
        "number": helper_set.number,
        "digest": helper_set.digest.hex(),
        "helpers": [helper.name for helper in helper_set.helpers],
    }


@service.command("list")
def service_list(db: Database, json_file: JsonFile = None) -> None:
    """Show the helper sets that sites may choose on this device.

    Example: trefoil device service list --db ann.db
    """
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
    write_json(json_file, {"services": [_service_to_json(name, sets[name]) for name in names if name in sets]})


def _sealing_status(helper_set: HelperSet) -> str:
    try:
        suite = helper_set.sealing_keys(agent.system_clock())[0].suite
    except TrefoilError as error:
        return f"no: {error}"
    return f"yes, in suite {suite.value}"


@service.command("renew")
def service_renew(name: Name, db: Database, helpers: ServiceHelpers, json_file: JsonFile = None) -> None:
    """Replace a set by the next one of the same three helpers: signed by all of them, with a higher number.

    Example: trefoil device service renew north --db ann.db --helpers helpers-2.json
    """
    helper_set = HelperSet.load(helpers)
    with agent.opened_store(db) as store, store.transaction():
        changed = services.renew(store.services, name, helper_set, agent.system_clock())
    say(f"{name} has set {helper_set.number} {'now' if changed else 'already'}")
    write_json(json_file, _service_to_json(name, helper_set) | {"changed": changed})


@service.command("remove")
def service_remove(name: Name, db: Database, json_file: JsonFile = None) -> None:
    """Stop trusting a helper set. Budgets stay as they are.

    Example: trefoil device service remove north --db ann.db
    """
    with agent.opened_store(db) as store, store.transaction():
        services.remove(store.services, name)
    say(f"sites can no longer choose {name}")
    write_json(json_file, {"removed": name})
