"""Every command there is, found in the tree itself, so that a new one is tested from its first day."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import trefoil


def commands() -> dict[str, Any]:
    """Commands by what a person types, in the order of the story. Any: typer's class differs by version."""
    return dict(_below(trefoil.tree(), ()))


def _below(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _below(each, (*names, name))
    else:
        yield " ".join(names), command


def options(command: Any) -> dict[str, Any]:
    """A command's parameters by what a person types."""
    return {name: each for each in command.params for name in each.opts if name.startswith("-")}
