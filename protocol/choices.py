"""What a person may choose on a command line, as words: light enough that `trefoil --help` loads nothing for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.console import out
from protocol.noise_mode import NoiseMode
from protocol.places import STANDARD_OUTPUT, check_file, plot_place

NoiseChoice = Annotated[NoiseMode, typer.Option("--noise", help="How the helpers make the noise.")]


def json_place(context: typer.Context, path: Path | None) -> Path | None:
    """The place for a JSON document. Where that is standard output, nothing else is printed there by this command."""
    if path == STANDARD_OUTPUT:
        out.quiet = True
        context.call_on_close(lambda: setattr(out, "quiet", False))
    elif path is not None:
        check_file("--json", path)
    return path


def left_out_place(path: Path | None) -> Path | None:
    """A file that can be written, before reports are spent."""
    if path is not None:
        check_file("--left-out", path)
    return path


# How the library begins after a parameter's name.
OF_A_PARAMETER = ("must be", "has more than", "names ")
# What the library calls what a person gives as an option.
OPTION_NAMES = {
    "histogram_index": "--bucket",
    "histogram_size": "--buckets",
    "buckets": "--buckets",
    "match_value": "--match-value",
    "match_values": "--match-value",
    "conversion_sites": "--conversion-site",
    "conversion_callers": "--conversion-caller",
    "impression_sites": "--impression-site",
    "impression_callers": "--impression-caller",
    "lifetime_days": "--lifetime-days",
    "lookback_days": "--lookback-days",
    "window_days": "--window-days",
    "priority": "--priority",
    "value": "--value",
    "max_value": "--max-value",
    "query_sensitivity": "--max-value",
    "epsilon": "--epsilon",
    "credit": "--credit",
    "unit": "--unit",
    "kappa": "--kappa",
    "κ": "--kappa",
    "label": "--label",
    "labels": "--conversion-label",
    "publishers": "--publisher",
    "advertisers": "--advertiser",
    "shown_ago": "--ago",
    "participation": "--participation",
    "scale": "--scale",
}


def with_option(message: str) -> str:
    """What a mistake says, beginning with the option that a person gave, not with the parameter that it became."""
    name, _, rest = message.partition(" ")
    return f"{OPTION_NAMES[name]} {rest}" if name in OPTION_NAMES and rest.startswith(OF_A_PARAMETER) else message


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON; - is standard output, and then nothing else is printed there.",
        callback=json_place,
    ),
]

PlotPlace = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="PLACE",
        help="Draw the result: a file (.png, .svg or .pdf), or a folder for every picture.",
        callback=plot_place,
    ),
]
