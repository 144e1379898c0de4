"""The helpers that are measured: three processes started here, or three that exist, on whatever hosts they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench.throughput.counters import Counters
from benchmarks.bench.throughput.grid import SITE, Cell
from mpc_helpers.local.launcher import health, launched_helpers
from protocol.errors import TrefoilError
from protocol.helper_set import HelperSet
from protocol.hpke import Suite
from protocol.keys import IdentityKey, load_identity


@dataclass(frozen=True, slots=True)
class Target:
    """Three helpers that run, and the site that may ask them."""

    helper_set: HelperSet
    site_key: IdentityKey = field(repr=False)
    site: str = SITE

    def counters(self) -> Counters:
        """What each has used so far."""
        return Counters.read(self.helper_set)


@dataclass(frozen=True, slots=True)
class GivenHelpers:
    """Helpers that exist. Each batch spends only reports that the benchmark made itself."""

    target: Target

    @classmethod
    def load(cls, helpers: Path, site_key: Path, site: str) -> GivenHelpers:
        """Refuses before any work what cannot be read, and helpers that do not answer."""
        helper_set = HelperSet.load(helpers)
        silent = [helper.name for helper in helper_set.helpers if not health(helper, 5.0)]
        if silent:
            raise TrefoilError(f"{' and '.join(silent)} cannot be reached", f"Are the helpers of {helpers} running?")
        return cls(Target(helper_set, load_identity(site_key), site))

    @property
    def suite(self) -> Suite:
        """The one that devices would seal in now."""
        return self.target.helper_set.sealing_keys(now())[0].suite


@contextlib.contextmanager
def target_for(cell: Cell, given: GivenHelpers | None, folder: Path) -> Iterator[Target]:
    """Those that were given, or three of its own for each cell, gone afterwards."""
    if given is not None:
        yield given.target
        return
    options = {"unchecked_histograms": not cell.checked}
    with launched_helpers(folder, now=now(), sites={SITE: [SITE]}, options=options, suite=cell.suite) as helpers:
        yield Target(helpers.helper_set, helpers.site_key(SITE))


def now() -> int:
    """In seconds since 1970."""
    return int(time.time())  # noqa: TID251 - an edge: the benchmark runs now
