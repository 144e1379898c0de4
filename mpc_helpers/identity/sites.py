"""The sites in a helper's configuration file: added and removed by its operator, and checked with all the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpc_helpers.identity.config import ConfigError, Site, check_config, load_config, read_config
from protocol.files import write_atomically


def list_sites(path: Path) -> dict[str, Site]:
    """Who may ask."""
    return dict(load_config(path).sites)


def add_site(path: Path, site: str, key: str, callers: Sequence[str], *, replace: bool = False) -> None:
    """Register a site's key. One that is registered is replaced only if that is meant: its queries would end."""

    def add(sites: dict[str, Any]) -> None:  # Any: JSON, checked before it is written
        if site in sites and not replace:
            raise ConfigError(f"{site} is registered already", "Say --replace to give it this key.")
        sites[site] = {"key": key, "callers": list(callers) or [site]}

    _change(path, add)


def remove_site(path: Path, site: str) -> None:
    """Answer no queries of this site any more."""

    def remove(sites: dict[str, Any]) -> None:  # Any: as above
        if sites.pop(site, None) is None:
            raise ConfigError(f"{site} is not registered", "See: trefoil site list")

    _change(path, remove)


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    stored = read_config(path)
    check_config(stored, path)
    change(stored["sites"])
    check_config(stored, path)
    write_atomically(path, (json.dumps(stored, indent=2) + "\n").encode(), path.stat().st_mode & 0o777)
