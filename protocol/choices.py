"""What a person may choose on a command line, as words: light enough that `trefoil --help` loads nothing for them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

NoiseName = Literal["local", "pairwise", "joint"]
NoiseChoice = Annotated[NoiseName, typer.Option("--noise", help="How the helpers make the noise.")]
