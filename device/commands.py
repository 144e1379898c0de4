"""The commands of `trefoil device`: parse the options, call `device.actions`, write `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from device import actions, agent
from device.conversion import ConversionOptions
from device.events import ConversionEventOptions, ImpressionOptions
from device.request import SideQuery, SideQueryForm
from protocol.cli.console import say, write_json
from protocol.cli.options import JsonFile, WholeKappa
from protocol.errors import ErrorKind, TrefoilError

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
    json_file: JsonFile = None,
) -> None:
    """Create a device database. Other commands create one with the defaults if there is none.

    All of these are kept with the database and cannot be changed later.

    Example: trefoil device create --db ann.db --budget 0.5 --own-site hidden
    """
    limits = actions.chosen_limits(budget, global_budget, epoch_days, own_site, sites_per_action, delay_ms)
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
    write_json(json_file, actions.save_impression(db, site, options, intermediary))


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
    write_json(json_file, actions.save_conversion(db, site, options, intermediary))


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
    request = actions.LabelRequest.of(
        features,
        field,
        records,
        visitor,
        service,
        epsilon=epsilon,
        shown_ago=ago,
        advertisers=tuple(advertiser),
        window_days=window_days,
        labels=tuple(conversion_label or ()),
        side_query=SideQuery(kappa, SideQueryForm.ANY) if kappa else None,
    )
    write_json(json_file, actions.label(db, helpers, site, request, intermediary, batch))


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
    destination = actions.Destination.from_options(batch, report)
    measurement = actions.MeasurementOptions(options, function, actions.parse_side_query_form(flag))
    write_json(json_file, actions.convert(db, helpers, site, measurement, intermediary, destination))


@device.command()
def budget(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only this site's filters.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what every site has cost this device, week by week. Never show it to a site.

    Example: trefoil device budget --db ann.db
    """
    write_json(json_file, actions.show_budget(db, site))


@device.command()
def reports(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only reports to this site.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show which reports left this device: when, to whom and for how much ε. Their contents are not stored.

    Example: trefoil device reports --db ann.db
    """
    write_json(json_file, actions.show_reports(db, site))


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
    write_json(json_file, actions.clear(db, site or [], stored_data=stored_data, forget_visits=forget_visits))


@device.command()
def on(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement on again.

    Example: trefoil device on --db ann.db
    """
    write_json(json_file, actions.switch(db, True))


@device.command()
def off(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement off. While it is off every report is null, which no site can detect.

    Example: trefoil device off --db ann.db
    """
    write_json(json_file, actions.switch(db, False))


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
    write_json(json_file, actions.add_service(db, name, helpers))


@service.command("list")
def service_list(db: Database, json_file: JsonFile = None) -> None:
    """Show the helper sets that sites may choose on this device.

    Example: trefoil device service list --db ann.db
    """
    write_json(json_file, actions.show_services(db))


@service.command("renew")
def service_renew(name: Name, db: Database, helpers: ServiceHelpers, json_file: JsonFile = None) -> None:
    """Replace a set by the next one of the same three helpers: signed by all of them, with a higher number.

    Example: trefoil device service renew north --db ann.db --helpers helpers-2.json
    """
    write_json(json_file, actions.renew_service(db, name, helpers))


@service.command("remove")
def service_remove(name: Name, db: Database, json_file: JsonFile = None) -> None:
    """Stop trusting a helper set. Budgets stay as they are.

    Example: trefoil device service remove north --db ann.db
    """
    write_json(json_file, actions.remove_service(db, name))
