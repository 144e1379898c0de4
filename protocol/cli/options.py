"""Options that several commands share, and the checks of output paths that run before a command starts its work.

An experiment of an hour must not fail at the end for a mistyped file name: `--json`, `--plot` and `--left-out` are
checked when the command line is parsed.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from protocol.cli.console import STANDARD_OUTPUT, is_picture, not_installed, out
from protocol.errors import ErrorKind, TrefoilError
from protocol.noise import NoiseMode

_START_BYTES = 64


def check_file(option: str, path: Path) -> None:
    """Raise an error naming `option` if no file can be written at `path`."""
    if path.is_dir():
        raise TrefoilError(
            f"{option}: {path} is a folder", f"Give {option} the name of a file.", kind=ErrorKind.WRONG_FILE
        )
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise an error naming `option` if `folder` is not a folder, or cannot be created or written to."""
    existing = next(each for each in (folder, *folder.parents, Path()) if os.path.lexists(each))
    hint = f"Give {option} another path."
    if not existing.is_dir():
        raise TrefoilError(f"{option}: {existing} is not a folder", hint, kind=ErrorKind.WRONG_FILE)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise TrefoilError(f"{option}: you may not write to {existing}", hint, kind=ErrorKind.FILE_PERMISSIONS)


def check_result(option: str, path: Path, begins: str) -> None:
    """Check an output file, which may replace an earlier result and nothing else: no batch, key or helper set.

    `begins` is a pattern for the first bytes of such a result.
    """
    check_file(option, path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
        # Keys and saved queries are JSON too, but private, and results are not.
        private = not path.stat().st_mode & 0o077
        if private or not re.match(begins.encode(), start):
            raise TrefoilError(
                f"{option}: {path} is {'a private file' if private else 'no earlier result'}, and would be replaced",
                f"Give {option} another name, or move that file away.",
                kind=ErrorKind.FILE_EXISTS,
            )


def json_place(context: typer.Context, path: Path | None) -> Path | None:
    """Check `--json`. For standard output, silence everything else that the command prints there."""
    if path == STANDARD_OUTPUT:
        out.quiet = True
        context.call_on_close(lambda: setattr(out, "quiet", False))
    elif path is not None:
        # A helper set and a features file are JSON, and no result.
        check_result("--json", path, r'\s*[\[{](?!\s*"trefoil_(helper_set|features)")')
    return path


def whole_kappa(value: str | int) -> int:
    """Parse κ: a number everywhere, and outside of experiments a whole one."""
    try:
        number = float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number") from None
    if not number.is_integer():
        raise TrefoilError(
            f"--kappa is a whole number of the value's unit here, not {value}",
            "Use a finer unit: cents instead of euros.",
            kind=ErrorKind.INVALID_VALUE,
        )
    return int(number)


def plot_place(path: Path | None) -> Path | None:
    """Check `--plot`: a name that ends as an image is a file, any other a folder."""
    if path is None:
        return None
    if find_spec("matplotlib") is None:
        raise not_installed("--plot needs matplotlib")
    if is_picture(path):
        check_file("--plot", path)
    elif path.suffix and not path.is_dir():
        raise TrefoilError(
            f"--plot: {path} is no picture's name",
            "Use a name that ends in .png, .svg or .pdf, or a folder.",
            kind=ErrorKind.INVALID_VALUE,
        )
    else:
        check_folder("--plot", path)
    return path


def left_out_place(path: Path | None) -> Path | None:
    """Check `--left-out`, before the reports' one query is used up."""
    if path is not None:
        check_result("--left-out", path, "record,digest,")
    return path


KAPPA_HELP = "Weight of the bias side query (κ), in the value's unit; 0 is off."
WholeKappa = Annotated[int, typer.Option("--kappa", metavar="NUMBER", help=KAPPA_HELP, parser=whole_kappa)]

NoiseChoice = Annotated[
    NoiseMode,
    typer.Option(
        "--noise",
        metavar="MODE",
        help=f"How the helpers make the noise: {', '.join(mode.value for mode in NoiseMode)}.",
    ),
]

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the result as JSON. Without FILE it goes to standard output, and nothing else is printed there.",
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
