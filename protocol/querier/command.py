"""`trefoil query`. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from protocol.choices import JsonFile, NoiseChoice, PlotPlace, left_out_place
from protocol.errors import TrefoilError
from protocol.noise_mode import NoiseMode
from protocol.querier.every import Every

if TYPE_CHECKING:
    from protocol.querier.saved_query import QueryOptions
    from protocol.querier.worth import QueryResult

SiteKey = Annotated[Path | None, Option(help="The key that signs this site's queries.", show_default=False)]
Epsilon = Annotated[float | None, Option(help="ε of the answer; by default what the reports paid for.")]
Minimum = Annotated[int, Option(min=1, help="Fewest reports worth an answer.")]
Tolerate = Annotated[float, Option(help="Share of bad reports, 0 to 1, above which the query fails.")]
Seconds = Annotated[int, Option(min=1, help="Until when the helpers may take, from now.")]
New = Annotated[bool, Option("--new", help="Ask a new query, though one on this batch was asked.")]
Listed = Annotated[
    bool, Option("--list", help="Show what was asked of this batch, and which answers the helpers hold.")
]
Id = Annotated[str, Option("--id", help="Fetch the answer to an earlier query; the first digits of its id will do.")]
Withdraw = Annotated[
    bool, Option("--withdraw", help="Take the newest query on this batch back, unless it was voted for.")
]
Details = Annotated[bool, Option("--details", help="If the helpers refuse, show what each of them says.")]
Cutoff = Annotated[
    float | None, Option(help="Judge the answer: the largest relative error that you accept, such as 0.05.")
]
Each = Annotated[
    Every | None,
    Option("--every", help="Reports are a folder of trefoil collect: ask about each day or week that is over, once."),
]
Kind = Annotated[str, Option(help="Which kind of reports; trefoil batch ls names them. Only with --every.")]
LeftOut = Annotated[
    Path | None,
    Option(metavar="FILE", help="List the reports that were left out, and why, as CSV.", callback=left_out_place),
]
Debug = Annotated[bool, Option("--debug", help="The batch holds debug reports: their answer has no noise.")]

KEPT = (
    "The query is saved beside the batch, and the helpers go on with it. Run the same command again to fetch its "
    "answer, or with --withdraw to take it back."
)

_KIND_HINT = "Give --every day as well, or cut the reports by kind first: trefoil batch split --by kind"

GOES_ON = "Every answer that came is kept. Run the same command again: it goes on where it stopped."


def query(
    reports: Annotated[Path, Option(help="The batch of sealed reports.")],
    helpers: Annotated[Path, Option(help="The signed helper set.")],
    site_key: SiteKey = None,
    epsilon: Epsilon = None,
    noise: NoiseChoice = NoiseMode.LOCAL,
    minimum: Minimum = 1,
    tolerate: Tolerate = 0.1,
    seconds: Seconds = 600,
    new: New = False,
    listed: Listed = False,
    id_: Id = "",
    withdraw: Withdraw = False,
    details: Details = False,
    cutoff: Cutoff = None,
    debug: Debug = False,
    every: Each = None,
    kind: Kind = "",
    left_out: LeftOut = None,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Ask three helpers for the noisy histogram of a batch. Run again after an interruption, it resumes.

    Example: trefoil query --reports batch --helpers helpers.json --site-key shop.key --json answer.json
    """
    from protocol.console import write_json
    from protocol.epsilon import entitlement
    from protocol.querier.listing import list_and_show
    from protocol.querier.saved_query import QueryOptions
    from protocol.querier.view import one_errand, permille, withdraw_and_show

    one_errand(
        {"--list": listed, "--withdraw": withdraw, "--id": bool(id_), "--new": new, "--every": every is not None}
    )
    if kind and every is None:
        raise TrefoilError("--kind chooses among a collector's reports, which only --every asks about", _KIND_HINT)
    micros = None if epsilon is None else entitlement(epsilon)
    options = QueryOptions(micros, noise, minimum, permille(tolerate), seconds, debug)
    finish = _Finish(cutoff, plot, left_out, reports, helpers)
    asking = _Asking(reports, helpers, site_key, options, details)
    document: object
    if every is not None:
        document = asking.over_time(every, kind, finish)
    elif listed:
        document = list_and_show(reports, helpers)
    elif withdraw:
        document = withdraw_and_show(reports, helpers, site_key)
    else:
        document = finish(asking.once(id_, new=new))
    write_json(json, document)


@dataclass(frozen=True, slots=True)
class _Asking:
    """What is asked, and of whom."""

    reports: Path
    helpers: Path
    site_key: Path | None
    options: QueryOptions
    details: bool

    def once(self, digits: str, *, new: bool) -> QueryResult:
        """The answer to an earlier query of whose id there are digits, or to the one on the whole batch."""
        from protocol.querier.view import ask_and_show, detailed, fetch_and_show
        from protocol.stopping import keeping

        with detailed(self.details), keeping(KEPT):
            if digits:
                return fetch_and_show(self.reports, self.helpers, digits)
            return ask_and_show(self.reports, self.helpers, self.site_key, self.options, _now(), new=new)

    def over_time(self, every: Every, kind: str, finish: _Finish) -> dict[str, object]:
        """The answers to every period of a collector's folder."""
        from protocol.querier.series_view import ask_over_time
        from protocol.querier.view import detailed
        from protocol.stopping import keeping

        if finish.left_out is not None or finish.cutoff is not None:
            raise TrefoilError("--every goes with neither --left-out nor --cutoff", "Give the batch of one period.")
        with detailed(self.details), keeping(GOES_ON):
            where = (self.reports, self.helpers, self.site_key)
            return ask_over_time(*where, self.options, _now, every=every, kind=kind, plot=finish.plot)


@dataclass(frozen=True, slots=True)
class _Finish:
    """What is done with an answer once it is there; checked before it is asked for."""

    cutoff: float | None
    plot: Path | None
    left_out: Path | None
    reports: Path
    helpers: Path

    def __post_init__(self) -> None:
        from protocol.querier.verdict import check_cutoff

        if self.cutoff is not None:
            check_cutoff(self.cutoff)

    def __call__(self, result: QueryResult) -> dict[str, object]:
        """Judge and draw it; returns it for programs."""
        from protocol.console import say
        from protocol.places import picture_file
        from protocol.querier.left_out_list import list_left_out
        from protocol.querier.plot import plot_result
        from protocol.querier.verdict import judge

        document = result.to_json()
        if self.cutoff is not None:
            judged = judge(result, self.cutoff)
            say(judged.sentence())
            document["verdict"] = judged.to_json()
        if self.left_out is not None:
            list_left_out(self.left_out, result, self.reports, self.helpers)
        if self.plot is not None:
            plot_result(picture_file(self.plot, "answer"), result)
        return document


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
