"""Where a command's results go, checked before its work begins: an hour's run must not end at a wrong file name."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from protocol.errors import TrefoilError

STANDARD_OUTPUT = Path("-")
PICTURES = (".png", ".svg", ".pdf")


def check_file(option: str, path: Path) -> None:
    """Refuse a name under which no file can be written."""
    if path.is_dir():
        raise TrefoilError(f"{option}: {path} is a folder", f"Give {option} the name of a file.")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that is none, or that cannot be made or written to."""
    there = next(each for each in (folder, *folder.parents, Path()) if os.path.lexists(each))
    if not there.is_dir():
        raise TrefoilError(f"{option}: {there} is not a folder", f"Give {option} another place.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TrefoilError(f"{option}: you may not write to {there}", f"Give {option} another place.")


def plot_place(path: Path | None) -> Path | None:
    """The place for pictures: a name with a picture's ending is a file, any other a folder."""
    if path is None:
        return None
    if find_spec("matplotlib") is None:
        raise TrefoilError("--plot needs matplotlib", "Install it with: pip install 'trefoil[experiments]'")
    if is_picture(path):
        check_file("--plot", path)
    elif path.suffix and not path.is_dir():
        raise TrefoilError(
            f"--plot: {path} is no picture's name", "Use a name that ends in .png, .svg or .pdf, or a folder."
        )
    else:
        check_folder("--plot", path)
    return path


def is_picture(path: Path) -> bool:
    """Whether a file of this name is a picture."""
    return path.suffix.lower() in PICTURES


def picture_file(place: Path, name: str, *, only: bool = True, ending: str = ".png") -> Path:
    """Where one picture of a command goes; `only` where it draws no other."""
    if not is_picture(place):
        return place / f"{name}{ending}"
    return place if only else place.with_name(f"{place.stem}-{name}{place.suffix}")
