"""`trefoil live`. The body imports what it needs, so that `trefoil --help` stays quick."""

from __future__ import annotations

from typing import Annotated

import typer

from protocol.choices import JsonFile


def live(
    port: Annotated[
        int, typer.Option(min=0, max=65_528, help="The first of eight neighbouring ports; 0 takes any that are free.")
    ] = 8730,
    seed: Annotated[
        int, typer.Option(min=0, help="What the simulated crowd clicks and buys. Never used for keys or noise.")
    ] = 1,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the start page in your browser at once.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Click an ad, buy the shoes, and watch the report, the three helpers and your budget, in your own browser.

    Example: trefoil live --open
    """
    from benchmarks.live.live import run

    run(port=port, seed=seed, open_browser=open_browser, json_file=json_file)
