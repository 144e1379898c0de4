"""Pictures, for whoever has matplotlib: drawn without a display, and written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.places import is_picture

DOTS_PER_INCH = 130
# The same figures give the same file, whenever they are drawn.
_UNDATED = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def new_figure(width: float, height: float) -> Any:  # Any: matplotlib has no types
    """An empty figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TrefoilError("drawing needs matplotlib", "Install it with: pip install 'trefoil[experiments]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(path: Path, figure: Any) -> None:  # Any: matplotlib has no types
    """Write a figure in the format that its name says."""
    if not is_picture(path):
        raise TrefoilError(f"cannot draw {path}", "Use a name that ends in .png, .svg or .pdf.")
    ending, drawn = path.suffix.lower(), io.BytesIO()
    figure.savefig(drawn, format=ending[1:], dpi=DOTS_PER_INCH, metadata=_UNDATED[ending])
    try:
        write_atomically(path, drawn.getvalue())
    except OSError as error:
        raise TrefoilError(f"cannot draw {path}: {error.strerror}", "Give the picture another place.") from None
