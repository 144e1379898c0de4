"""`trefoil device reports`: what the log says about the reports that left. For its person's eyes only."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from device import agent
from device.dashboard.words import cost_words
from device.site import parse_site
from device.storage import ReportRecord, Side
from protocol.console import out, say
from protocol.epsilon import show


def show_reports(db: Path, site: str | None) -> dict[str, object]:
    """The log of reports, oldest first. It holds neither what was in one nor anything to recognise it by."""
    wanted = None if site is None else parse_site(site)
    with agent.opened(db) as device:
        records = [record for record in device.reports() if wanted in (None, record.site)]
    if records:
        out.print(_table(records))
    else:
        say("no report has left this device" if wanted is None else f"no report has left this device for {wanted}")
    return {"reports": [_to_json(record) for record in records]}


def _table(records: list[ReportRecord]) -> Table:
    table = Table("when (UTC)", "to whom", "asked by", "about")
    table.add_column("ε asked for", justify="right")
    table.add_column("what it cost")
    for record in records:
        when = datetime.fromtimestamp(record.time, UTC)
        about = "impressions" if record.side is Side.ADVERTISER else "conversions"
        asked = show(record.epsilon_micros)
        table.add_row(f"{when:%Y-%m-%d %H:%M}", record.site, record.caller, about, asked, cost_words(record.epochs))
    return table


def _to_json(record: ReportRecord) -> dict[str, object]:
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
