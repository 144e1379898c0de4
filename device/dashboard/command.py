"""`trefoil device dashboard`. The body imports what it needs, so that `trefoil --help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import JsonFile


def dashboard(
    db: Annotated[Path, typer.Option("--db", metavar="FILE", help="The device database.", show_default=False)],
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port on this machine; 0 takes any that is free.")
    ] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in your browser at once.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show what measurement has cost this person, on a page that only this machine's browser can open.

    Example: trefoil device dashboard --db ann.db --open
    """
    from device.dashboard.serve import run

    run(db, port=port, open_browser=open_browser, json_file=json_file)
