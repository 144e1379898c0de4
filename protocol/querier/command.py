"""`trefoil query`: run, list, fetch, withdraw and series. `trefoil query --reports …` is short for `query run`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from protocol.cli.console import picture_file, say, write_json
from protocol.cli.options import JsonFile, NoiseChoice, PlotPlace, left_out_place
from protocol.cli.stopping import keeping
from protocol.collector.batches import Every
from protocol.noise import NoiseMode
from protocol.querier.result import QueryResult, check_cutoff, judge, plot_result
from protocol.querier.saved_query import QueryOptions
from protocol.querier.series import ask_over_time
from protocol.querier.view import (
    ask_and_show,
    audit_and_show,
    fetch_and_show,
    list_and_show,
    list_left_out,
    permille,
    show_details,
    withdraw_and_show,
)
from protocol.units import entitlement

KEPT = (
    "A query that was sent is saved beside the batch, and the helpers go on with it. Run the same command again to "
    "fetch its answer, or take it back with: trefoil query withdraw"
)
GOES_ON = "Every answer so far is kept. Run the same command again: it resumes."


class QueryGroup(TyperGroup):
    """A group that takes `run` as the subcommand where the first argument is an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer's context, which differs by version
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


query = typer.Typer(
    cls=QueryGroup,
    no_args_is_help=True,
    help="Query three helpers for the noisy histogram of a batch; list, fetch and withdraw queries.\n\n"
    "trefoil query --reports FILE … is short for trefoil query run.\n\n"
    "Example: trefoil query --reports batch --helpers helpers.json --site-key shop.key --json answer.json",
)

Reports = Annotated[Path, Option(help="The batch of sealed reports.")]
Helpers = Annotated[Path, Option(help="The signed helper set.")]
SiteKey = Annotated[Path, Option(help="The key that signs this site's queries.", show_default=False)]
Epsilon = Annotated[float | None, Option(help="ε of the answer; by default what the reports paid for.")]
Minimum = Annotated[int, Option(min=1, help="The fewest valid reports to answer for.")]
Tolerate = Annotated[float, Option(help="The fraction of invalid reports, 0 to 1, above which the query fails.")]
Seconds = Annotated[int, Option(min=1, help="Time limit for the helpers, in seconds.")]
Details = Annotated[bool, Option("--details", help="If the helpers refuse, show the reason of each.")]
Cutoff = Annotated[
    float | None, Option(help="Judge the answer: the largest relative error that you accept, such as 0.05.")
]
LeftOut = Annotated[
    Path | None,
    Option(metavar="FILE", help="List the reports that were left out, and why, as CSV.", callback=left_out_place),
]
Kind = Annotated[str, Option(help="Which kind of reports to count; trefoil batch ls lists them.")]
Rest = Annotated[
    bool | None,
    Option(
        "--keep-rest/--use-up",
        help="Keep what the answer does not take of each report for later queries, or use the reports up.",
        show_default=False,
    ),
]
Debug = Annotated[bool, Option("--debug", help="The batch holds debug reports: their answer has no noise.")]


@query.command("run")
def run_query(
    reports: Reports,
    helpers: Helpers,
    site_key: SiteKey,
    epsilon: Epsilon = None,
    rest: Rest = None,
    noise: NoiseChoice = NoiseMode.LOCAL,
    minimum: Minimum = 1,
    tolerate: Tolerate = 0.1,
    seconds: Seconds = 600,
    new: Annotated[bool, Option("--new", help="Submit a new query, even if this batch was queried before.")] = False,
    kind: Kind = "",
    details: Details = False,
    cutoff: Cutoff = None,
    debug: Debug = False,
    left_out: LeftOut = None,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Query three helpers for the noisy histogram of a batch. Run again after an interruption, it resumes.

    Example: trefoil query run --reports batch --helpers helpers.json --site-key shop.key --json answer.json
    """
    options = QueryOptions(_micros(epsilon), noise, minimum, permille(tolerate), seconds, debug, kind, rest)
    output = _Output(cutoff, plot, left_out)
    with show_details(details), keeping(KEPT):
        result = ask_and_show(reports, helpers, site_key, options, _now(), new=new)
    write_json(json, output.write(result, reports, helpers))


@query.command("list")
def list_queries(reports: Reports, helpers: Helpers, json: JsonFile = None) -> None:
    """List the queries on a batch, and which answers the helpers still hold.

    Example: trefoil query list --reports batch --helpers helpers.json
    """
    write_json(json, list_and_show(reports, helpers))


@query.command("fetch")
def fetch_answer(
    reports: Reports,
    helpers: Helpers,
    id_: Annotated[str, Option("--id", help="The query's id; its first digits are enough.")],
    details: Details = False,
    cutoff: Cutoff = None,
    left_out: LeftOut = None,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Fetch the answer to an earlier query on a batch. Nothing is submitted.

    Example: trefoil query fetch --reports batch --helpers helpers.json --id 3fa2
    """
    output = _Output(cutoff, plot, left_out)
    with show_details(details), keeping(KEPT):
        result = fetch_and_show(reports, helpers, id_)
    write_json(json, output.write(result, reports, helpers))


@query.command("withdraw")
def withdraw_query(reports: Reports, helpers: Helpers, site_key: SiteKey, json: JsonFile = None) -> None:
    """Withdraw the newest query on a batch, unless the helpers have voted for it already.

    Example: trefoil query withdraw --reports batch --helpers helpers.json --site-key shop.key
    """
    write_json(json, withdraw_and_show(reports, helpers, site_key))


@query.command("audit")
def audit_answers(
    reports: Annotated[list[Path], typer.Argument(help="Batches that were queried.")], json: JsonFile = None
) -> None:
    """Add up, report by report, what released answers cost, and fail if it is more than was paid. Asks no helper.

    Example: trefoil query audit monday.batch tuesday.batch
    """
    write_json(json, audit_and_show(reports))


@query.command("series")
def query_series(
    reports: Annotated[Path, Option(help="The folder of trefoil collect.")],
    helpers: Helpers,
    site_key: SiteKey,
    every: Annotated[Every, Option("--every", help="The length of a period.")] = Every.DAY,
    kind: Kind = "",
    epsilon: Epsilon = None,
    rest: Rest = None,
    noise: NoiseChoice = NoiseMode.LOCAL,
    minimum: Minimum = 1,
    tolerate: Tolerate = 0.1,
    seconds: Seconds = 600,
    details: Details = False,
    debug: Debug = False,
    json: JsonFile = None,
    plot: PlotPlace = None,
) -> None:
    """Query each day or week of a collector's reports that is over, once. Run again, it resumes.

    Example: trefoil query series --reports collected --helpers helpers.json --site-key shop.key --every week
    """
    options = QueryOptions(_micros(epsilon), noise, minimum, permille(tolerate), seconds, debug, keeps_rest=rest)
    with show_details(details), keeping(GOES_ON):
        document = ask_over_time(reports, helpers, site_key, options, _now, every=every, kind=kind, plot=plot)
    write_json(json, document)


def _micros(epsilon: float | None) -> int | None:
    return None if epsilon is None else entitlement(epsilon)


@dataclass(frozen=True, slots=True)
class _Output:
    """What to do with an answer besides printing it; checked before the query is submitted."""

    cutoff: float | None
    plot: Path | None
    left_out: Path | None

    def __post_init__(self) -> None:
        if self.cutoff is not None:
            check_cutoff(self.cutoff)

    def write(self, result: QueryResult, reports: Path, helpers: Path) -> dict[str, object]:
        """Judge and draw the answer, list what was left out, and return the JSON document."""
        document = result.to_json()
        if self.cutoff is not None:
            verdict = judge(result, self.cutoff)
            say(verdict.sentence())
            document["verdict"] = verdict.to_json()
        if self.left_out is not None:
            list_left_out(self.left_out, result, reports, helpers)
        if self.plot is not None:
            plot_result(picture_file(self.plot, "answer"), result)
        return document


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
