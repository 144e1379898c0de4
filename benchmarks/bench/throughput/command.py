"""The body of `trefoil bench throughput`: refuse what cannot be, say how long it takes, measure, show and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench.throughput import view
from benchmarks.bench.throughput.grid import Extra, Grid, cells_of
from benchmarks.bench.throughput.measurement import ThroughputRun, measure_grid
from benchmarks.bench.throughput.spreadsheet import to_csv
from benchmarks.bench.throughput.target import GivenHelpers
from benchmarks.bench.throughput.yardstick import CORES
from benchmarks.origin import write_results
from protocol import console
from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.hpke import CLASSICAL, Suite
from protocol.places import check_file

# The bar counts tenths of a second of the estimate.
_TICKS = 10


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the results go, beside the page: refused before the work if they cannot be written."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.csv is not None:
            check_file("--csv", self.csv)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for on the command line."""

    reports: Sequence[int]
    buckets: Sequence[int]
    seed: int = 1
    repeat: int = 1
    suite: int | None = None
    unchecked: bool = False
    without: Sequence[Extra] = ()
    profile: bool = False
    helpers: Path | None = None
    site_key: Path | None = None
    site: str = "shop.example"
    spu_python: Path | None = None

    def given(self) -> GivenHelpers | None:
        """The helpers that were named, if any were."""
        if self.helpers is None and self.site_key is None:
            return None
        if self.helpers is None or self.site_key is None:
            raise TrefoilError("helpers that exist need both --helpers and --site-key", "Give both, or neither.")
        return GivenHelpers.load(self.helpers, self.site_key, self.site)

    def grid(self, given: GivenHelpers | None) -> Grid:
        """What is to be measured."""
        known = {suite.value: suite for suite in Suite}
        if self.suite is not None and self.suite not in known:
            raise TrefoilError(f"there is no cipher suite {self.suite}", f"Known are {sorted(known)}.")
        suite = CLASSICAL if self.suite is None else known[self.suite]
        if given is not None:
            if self.suite is not None and suite is not given.suite:
                raise TrefoilError(f"devices seal to these helpers in suite {given.suite.value}", "Leave --suite out.")
            suite = given.suite
        cells = cells_of(self.reports, self.buckets, suite, unchecked=self.unchecked)
        return Grid(cells, self.seed, self.repeat, frozenset(self.without), self.spu_python, self.profile)


def run(wishes: Wishes, outputs: Outputs) -> None:
    """All of the command."""
    given = wishes.given()
    grid = wishes.grid(given)
    grid.check_disk()
    console.err.print(view.estimate(grid), highlight=False)
    with console.progress("throughput", round(_TICKS * grid.seconds())) as advance:
        measured = measure_grid(grid, given, _ticking(advance))
    _show(measured, grid)
    if outputs.csv is not None:
        write_atomically(outputs.csv, to_csv(measured.points).encode())
    if outputs.plot is not None:
        from benchmarks.bench.throughput.plots import draw_all

        drawn = draw_all([point.to_json() for point in measured.points], CORES, outputs.plot)
        console.say(f"drawn: {', '.join(path.name for path in drawn)}")
    write_results(outputs.json, measured.to_json(), wishes.seed)


def _show(measured: ThroughputRun, grid: Grid) -> None:
    for table in view.tables(measured.points):
        console.out.print(table)
    for text in (*view.sentences(measured.points), view.left_out(grid)):
        if text:
            console.out.print(text, highlight=False)


def _ticking(advance: console.Advance) -> Callable[[float, str], None]:
    """Seconds of the estimate as whole steps of the bar, without losing the fractions."""
    left = 0.0

    def say(seconds: float, note: str) -> None:
        nonlocal left
        left += _TICKS * seconds
        whole = int(left)
        left -= whole
        advance(whole, note=note)

    return say
