"""Commands for queriers, and for the operators who put a helper set together. Bodies import what they need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from protocol.choices import NoiseChoice
from protocol.collector.commands import app as collector_app
from protocol.regression.commands import regression

app = typer.Typer(help="protocol")
app.add_typer(collector_app)
app.add_typer(regression, name="regression")
helper_set = typer.Typer(help="Put a helper set together, sign it, check it.", no_args_is_help=True)
app.add_typer(helper_set, name="helper-set")

SetFile = Annotated[Path, typer.Argument(help="The helper set file.")]


@app.command()
def query(
    reports: Annotated[Path, typer.Option(help="The batch of sealed reports.")],
    helpers: Annotated[Path, typer.Option(help="The signed helper set.")],
    site_key: Annotated[
        Path | None, typer.Option(help="The key that signs this site's queries.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of the answer; by default what the reports paid for.")
    ] = None,
    noise: NoiseChoice = "local",
    minimum: Annotated[int, typer.Option(help="Fewest reports worth an answer.")] = 1,
    tolerate: Annotated[float, typer.Option(help="Share of bad reports, 0 to 1, above which the query fails.")] = 0.1,
    seconds: Annotated[int, typer.Option(help="Until when the helpers may take, from now.")] = 600,
    new: Annotated[bool, typer.Option("--new", help="Ask a new query, though one on this batch was asked.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Show what was asked of this batch, and which answers the helpers hold.")
    ] = False,
    id_: Annotated[
        str, typer.Option("--id", help="Fetch the answer to an earlier query; the first digits of its id will do.")
    ] = "",
    withdraw: Annotated[
        bool,
        typer.Option("--withdraw", help="Take the newest query on this batch back, unless it was voted for."),
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="If the helpers refuse, show what each of them says.")
    ] = False,
    cutoff: Annotated[
        float | None, typer.Option(help="Judge the answer: the largest relative error that you accept, such as 0.05.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="The batch holds debug reports: their answer has no noise.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the answer as JSON; - for standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the answer, with error bars, into this image file.")] = None,
) -> None:
    """Ask three helpers for the noisy histogram of a batch. Run again after an interruption, it resumes.

    Example: trefoil query --reports batch --helpers helpers.json --site-key shop.key --json answer.json
    """
    from protocol.console import say, write_json
    from protocol.epsilon import entitlement
    from protocol.querier.listing import list_and_show
    from protocol.querier.plot import plot_result
    from protocol.querier.saved_query import QueryOptions
    from protocol.querier.verdict import check_cutoff, judge
    from protocol.querier.view import ask_and_show, detailed, fetch_and_show, permille, withdraw_and_show
    from protocol.query import NoiseMode

    quiet = json is not None and str(json) == "-"
    if cutoff is not None:
        check_cutoff(cutoff)
    if listed:
        write_json(json, list_and_show(reports, helpers, quiet=quiet))
        return
    if withdraw:
        withdraw_and_show(reports, helpers, site_key)
        return
    options = QueryOptions(
        epsilon_micros=None if epsilon is None else entitlement(epsilon),
        noise=NoiseMode(noise),
        minimum_reports=minimum,
        tolerated_bad_permille=permille(tolerate),
        seconds=seconds,
        debug=debug,
    )
    with detailed(details):
        if id_:
            result = fetch_and_show(reports, helpers, id_, quiet=quiet)
        else:
            result = ask_and_show(reports, helpers, site_key, options, int(_now()), new=new, quiet=quiet)
    judged = None if cutoff is None else judge(result, cutoff)
    if judged is not None and not quiet:
        say(judged.sentence())
    write_json(json, result.to_json() | ({} if judged is None else {"verdict": judged.to_json()}))
    if plot is not None:
        plot_result(plot, result)


@app.command()
def bias(
    batches: Annotated[list[Path], typer.Argument(help="All batches of the site, or the folder that they are in.")],
    per_device: Annotated[
        int, typer.Option(min=1, help="The most reports of one device that a batch holds; only you can know it.")
    ],
    budget: Annotated[float, typer.Option(help="ε that a device's epoch has for your site, at least.")] = 1.0,
    lookback_days: Annotated[int, typer.Option(min=1, help="How far back any report looks.")] = 30,
    epoch_days: Annotated[int, typer.Option(min=1, help="How long the epochs of devices are.")] = 7,
    digits: Annotated[
        int, typer.Option(min=0, max=6, help="Digits after the point of every ε that you asked for; 6 for any.")
    ] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the result as JSON; - for standard output.")] = None,
) -> None:
    """Say which answers budgets cannot have biased, by your own record alone. It asks nobody and costs nothing.

    Example: trefoil bias shop.batch --per-device 1
    """
    from protocol.console import write_json
    from protocol.epsilon import nearest_micros
    from protocol.querier.own_record import Knowledge
    from protocol.querier.record_view import record_and_show

    knowledge = Knowledge(per_device, nearest_micros(budget), lookback_days, epoch_days, digits)
    write_json(json, record_and_show(batches, knowledge, quiet=str(json) == "-"))


@helper_set.command("new")
def helper_set_new(
    path: SetFile,
    entry: Annotated[list[Path], typer.Option(help="A helper's public entry; three times, in order.")],
    number: Annotated[int, typer.Option(help="One more than the last set's.")] = 1,
) -> None:
    """Put three helpers' public entries together. The order makes them helper 1, 2 and 3.

    Example: trefoil helper-set new helpers.json --entry north.json --entry south.json --entry west.json
    """
    from protocol.console import say
    from protocol.set_files import put_together

    made = put_together(entry, number, path)
    say(f"digest: {made.digest.hex()}")
    say(f"fingerprint: {made.fingerprint}")
    say("Each operator compares it with the others by telephone, and signs.")


@helper_set.command("sign")
def helper_set_sign(path: SetFile, key: Annotated[Path, typer.Option(help="This helper's identity key.")]) -> None:
    """Sign a helper set as one of its three helpers.

    Example: trefoil helper-set sign helpers.json --key /etc/trefoil/identity.key
    """
    from protocol.console import say
    from protocol.set_files import add_signature

    signed = add_signature(path, key)
    say(f"signed set {signed.number}, digest {signed.digest.hex()}")
    say(f"fingerprint: {signed.fingerprint}")


@helper_set.command("join")
def helper_set_join(
    path: SetFile, copy: Annotated[list[Path], typer.Option(help="A signed copy; once for each.")]
) -> None:
    """Join copies of a set that were signed in different places into one file.

    Example: trefoil helper-set join helpers.json --copy north/helpers.json --copy south/helpers.json
    """
    from protocol.set_files import join

    join(copy, path)


@helper_set.command("verify")
def helper_set_verify(path: SetFile) -> None:
    """Check that all three helpers have signed, and show who they are.

    Example: trefoil helper-set verify helpers.json
    """
    from rich.table import Table

    from protocol.console import out
    from protocol.helper_set import HelperSet

    found = HelperSet.load_unverified(path)
    table = Table(title=f"helper set {found.number}, digest {found.digest.hex()[:16]}…")
    for heading in ("helper", "address", "identity key", "signed"):
        table.add_column(heading)
    for entry, signed in zip(found.helpers, found.have_signed(), strict=True):
        table.add_row(entry.name, entry.address, entry.identity_key.hex()[:16] + "…", "yes" if signed else "no")
    out.print(table)
    found.verify()


def _now() -> float:
    return time.time()  # noqa: TID251 - an edge: commands read the real clock
