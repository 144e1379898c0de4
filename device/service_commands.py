"""`trefoil device service`: which helper sets a device trusts. Bodies import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import JsonFile

service = typer.Typer(help="Choose which helper sets this device trusts, by name.", no_args_is_help=True)

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The device database.", show_default=False)]
Name = Annotated[str, typer.Argument(help="The name by which sites choose it.", show_default=False)]
Helpers = Annotated[Path, typer.Option(metavar="FILE", help="The signed helper set.", show_default=False)]


@service.command("add")
def service_add(name: Name, db: Database, helpers: Helpers, json_file: JsonFile = None) -> None:
    """Trust a helper set, so that sites may choose it. Two of its three helpers together could read reports.

    Example: trefoil device service add north --db ann.db --helpers helpers.json
    """
    from device import service_actions
    from protocol.console import write_json

    write_json(json_file, service_actions.add(db, name, helpers))


@service.command("list")
def service_list(db: Database, json_file: JsonFile = None) -> None:
    """Show the helper sets that sites may choose on this device.

    Example: trefoil device service list --db ann.db
    """
    from device import service_actions
    from protocol.console import write_json

    write_json(json_file, service_actions.show(db))


@service.command("renew")
def service_renew(name: Name, db: Database, helpers: Helpers, json_file: JsonFile = None) -> None:
    """Take the next set of the same three helpers: signed by all of them, with a higher number.

    Example: trefoil device service renew north --db ann.db --helpers helpers-2.json
    """
    from device import service_actions
    from protocol.console import write_json

    write_json(json_file, service_actions.renew(db, name, helpers))


@service.command("remove")
def service_remove(name: Name, db: Database, json_file: JsonFile = None) -> None:
    """Trust a helper set no longer. Budgets stay as they are.

    Example: trefoil device service remove north --db ann.db
    """
    from device import service_actions
    from protocol.console import write_json

    write_json(json_file, service_actions.remove(db, name))
