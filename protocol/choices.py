"""What a person may choose on a command line, as words: light enough that `trefoil --help` loads nothing for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.console import out
from protocol.noise_mode import NoiseMode
from protocol.places import STANDARD_OUTPUT, check_file, plot_place

NoiseChoice = Annotated[NoiseMode, typer.Option("--noise", help="How the helpers make the noise.")]


def json_place(path: Path | None) -> Path | None:
    """The place for a JSON document. Where that is standard output, nothing else is printed there."""
    out.quiet = path == STANDARD_OUTPUT
    if path is not None and not out.quiet:
        check_file("--json", path)
    return path


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
