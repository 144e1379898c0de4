"""Commands on a device database. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from device import service_commands
from device.dashboard.command import dashboard
from protocol.choices import JsonFile

app = typer.Typer(help="device")
device = typer.Typer(help="Act as one person's device.", no_args_is_help=True)
app.add_typer(device, name="device")
device.add_typer(service_commands.service, name="service")

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The device database.", show_default=False)]
Site = Annotated[str, typer.Argument(help="The site of the page; a subdomain stands for its site.", show_default=False)]
Intermediary = Annotated[str | None, typer.Option(help="The site of the frame or script that calls, if another.")]
LookbackDays = Annotated[int | None, typer.Option(help="How far back to look.", show_default="as far as kept")]
_FUNCTIONS = (
    "The paper's request instead of the standard's call: last, first, equal, last-n, slots, or module:function for "
    "your own."
)
FunctionName = Annotated[str | None, typer.Option(metavar="NAME", help=_FUNCTIONS)]
Service = Annotated[str, typer.Option(metavar="NAME", help="Whose helpers the report is sealed to.")]
Helpers = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Their helper set, where the device holds none.", show_default=False),
]


@device.command()
def create(
    db: Database,
    debug: Annotated[
        bool, typer.Option("--debug", help="A debug device: only debug queries take its reports.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Make a new device database. Other commands make a plain one by themselves where there is none.

    Example: trefoil device create --db ann.db --debug
    """
    from device import agent
    from protocol.console import say, write_json

    agent.create(db, debug=debug)
    say(f"{db} is a new {'debug ' if debug else ''}device")
    write_json(json_file, {"database": str(db), "debug": debug})


@device.command()
def impression(
    site: Site,
    db: Database,
    bucket: Annotated[int, typer.Option(help="The histogram bucket that credit for this impression goes to.")],
    match_value: Annotated[int, typer.Option(help="A number that conversions can ask for, such as a campaign.")] = 0,
    conversion_site: Annotated[list[str] | None, typer.Option(help="Only these sites may use it; repeatable.")] = None,
    conversion_caller: Annotated[list[str] | None, typer.Option(help="Only these may ask; repeatable.")] = None,
    lifetime_days: Annotated[int, typer.Option(help="For how long it may be used.")] = 30,
    priority: Annotated[int, typer.Option(help="Higher comes first when credit is divided.")] = 0,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Save an impression: an ad was shown on SITE.

    Example: trefoil device impression news.example --db ann.db --bucket 2 --conversion-site shop.example
    """
    from device import actions
    from device.impression import ImpressionOptions
    from protocol.console import write_json

    sites, callers = tuple(conversion_site or ()), tuple(conversion_caller or ())
    options = ImpressionOptions(bucket, match_value, sites, callers, lifetime_days, priority)
    write_json(json_file, actions.save_impression(db, site, options, intermediary))


@device.command()
def conversion(
    site: Site,
    db: Database,
    publisher: Annotated[list[str], typer.Option(help="A site that may learn of it; repeatable.")],
    label: Annotated[int, typer.Option(help="A number for what it was, in your own meaning.")] = 0,
    lifetime_days: Annotated[int, typer.Option(help="For how long it may be used.")] = 30,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Save a conversion on SITE, so that publishers can learn which of their impressions lead to one.

    Example: trefoil device conversion shop.example --db ann.db --publisher news.example
    """
    from device import display_actions
    from device.conversion_event import ConversionEventOptions
    from protocol.console import write_json

    options = ConversionEventOptions(tuple(publisher), label, lifetime_days)
    write_json(json_file, display_actions.save_conversion(db, site, options, intermediary))


@device.command()
def label(
    site: Site,
    db: Database,
    features: Annotated[Path, typer.Option(metavar="FILE", help="The features file (trefoil regression features).")],
    field: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="A field of the impression; repeatable.")],
    ago: Annotated[int, typer.Option(help="How many seconds ago the impression was shown.")],
    advertiser: Annotated[list[str], typer.Option(help="Whose conversions count; repeatable.")],
    batch: Annotated[Path, typer.Option(metavar="FILE", help="Append the report to this batch.")],
    records: Annotated[Path, typer.Option(metavar="FILE", help="Append what was handed in to this file.")],
    epsilon: Annotated[float, typer.Option(help="The privacy budget that the query asks for.")] = 0.25,
    window_days: Annotated[int, typer.Option(help="Conversions count for so many days, which must be over.")] = 7,
    conversion_label: Annotated[list[int] | None, typer.Option(help="Only these labels count; repeatable.")] = None,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query; 0 is off.")] = 0,
    visitor: Annotated[str, typer.Option(help="Your own name for a visitor that you measure more than once.")] = "",
    service: Service = "trefoil",
    helpers: Helpers = None,
    intermediary: Intermediary = None,
    json_file: JsonFile = None,
) -> None:
    """Ask whether a conversion followed an impression that SITE showed; write the sealed report.

    Example: trefoil device label news.example --db ann.db --helpers helpers.json --features features.json
    --field advertiser=shop.example --field hour=20 --ago 700000 --advertiser shop.example --batch news.batch
    --records news.records
    """
    from device import display_actions
    from device.side_query import SideQuery, SideQueryForm
    from protocol.console import write_json

    labelled = display_actions.Labelled.of(
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
    write_json(json_file, display_actions.label(db, helpers, site, labelled, intermediary, batch))


@device.command()
def convert(
    site: Site,
    db: Database,
    buckets: Annotated[int, typer.Option(help="How many buckets the histogram has.")],
    batch: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the report to this batch.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report alone to this file.")] = None,
    value: Annotated[int, typer.Option(help="What the conversion is worth, in whole units.")] = 1,
    max_value: Annotated[int, typer.Option(help="The most any conversion of the query is worth.")] = 1,
    epsilon: Annotated[float, typer.Option(help="The privacy budget that the query asks for.")] = 1.0,
    credit: Annotated[list[float] | None, typer.Option(help="Shares for the last touches; repeatable.")] = None,
    lookback_days: LookbackDays = None,
    match_value: Annotated[list[int] | None, typer.Option(help="Use only impressions with these; repeatable.")] = None,
    impression_site: Annotated[list[str] | None, typer.Option(help="Only from these sites; repeatable.")] = None,
    impression_caller: Annotated[list[str] | None, typer.Option(help="Only saved by these; repeatable.")] = None,
    unit: Annotated[str, typer.Option(help="What a unit of value is, for people.")] = "count",
    function: FunctionName = None,
    kappa: Annotated[int, typer.Option(help="Weight of the bias side query, in your unit; 0 is off.")] = 0,
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
    from device import actions
    from device.asked import Asked, flag_form
    from device.conversion import ConversionOptions
    from protocol.console import write_json
    from protocol.errors import TrefoilError

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
            f"--value {value} is more than --max-value {max_value}", "Noise is made for --max-value: raise it, or cut."
        )
    destination = actions.Destination.chosen(batch, report)
    asked = Asked(options, function, flag_form(flag))
    write_json(json_file, actions.convert(db, helpers, site, asked, intermediary, destination))


@device.command()
def budget(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only what concerns this site.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what every site has cost this device, week by week. For its person's eyes only.

    Example: trefoil device budget --db ann.db
    """
    from device import actions
    from protocol.console import write_json

    write_json(json_file, actions.show_budget(db, site))


@device.command()
def reports(
    db: Database,
    site: Annotated[str | None, typer.Option(help="Only what this site had.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show which reports left this device: when, to whom and for how much ε. What was in them is written nowhere.

    Example: trefoil device reports --db ann.db
    """
    from device.released import show_reports
    from protocol.console import write_json

    write_json(json_file, show_reports(db, site))


@device.command()
def clear(
    db: Database,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; repeatable.")] = None,
    stored_data: Annotated[bool, typer.Option("--stored-data", help="Only what the sites themselves stored.")] = False,
    forget_visits: Annotated[
        bool, typer.Option("--forget-visits", help="Forget them; closes every epoch so far to everyone.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Clear history: of some sites or of all. None of it brings budget back.

    Example: trefoil device clear --db ann.db --site shop.example

    Example: trefoil device clear --db ann.db --forget-visits
    """
    from device import actions
    from protocol.console import write_json

    write_json(json_file, actions.clear(db, site or [], stored_data=stored_data, forget_visits=forget_visits))


@device.command()
def on(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement on again.

    Example: trefoil device on --db ann.db
    """
    from device import actions
    from protocol.console import write_json

    write_json(json_file, actions.switch(db, True))


@device.command()
def off(db: Database, json_file: JsonFile = None) -> None:
    """Switch measurement off. While it is off every report is null, and no site can tell.

    Example: trefoil device off --db ann.db
    """
    from device import actions
    from protocol.console import write_json

    write_json(json_file, actions.switch(db, False))


device.command()(dashboard)
