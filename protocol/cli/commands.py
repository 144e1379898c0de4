"""`trefoil bias`, and `trefoil helper-set` for the operators who put a helper set together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.cli.options import JsonFile

if TYPE_CHECKING:
    from protocol.helper_set import HelperSet

app = typer.Typer(help="protocol")
helper_set = typer.Typer(help="Put a helper set together, sign it, check it.", no_args_is_help=True)
app.add_typer(helper_set, name="helper-set")

SetFile = Annotated[Path, typer.Argument(help="The helper set file.")]


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
    json: JsonFile = None,
) -> None:
    """Show which answers spent budgets cannot have biased, from your own batches alone. It costs no budget.

    Example: trefoil bias shop.batch --per-device 1
    """
    from protocol.cli.console import write_json
    from protocol.errors import ErrorKind, TrefoilError
    from protocol.querier.own_record import Assumptions
    from protocol.querier.record_view import record_and_show
    from protocol.units import nearest_micros

    if not budget > 0:
        raise TrefoilError(
            f"--budget must be above 0, not {budget}", "Devices have 1 for each site.", kind=ErrorKind.OUT_OF_RANGE
        )
    assumptions = Assumptions(per_device, nearest_micros(budget), lookback_days, epoch_days, digits)
    write_json(json, record_and_show(batches, assumptions))


@helper_set.command("new")
def helper_set_new(
    path: SetFile,
    entry: Annotated[list[Path], typer.Option(help="A helper's public entry; three times, in order.")],
    number: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="One more than the last set's.")] = 1,
    json: JsonFile = None,
) -> None:
    """Put three helpers' public entries together. The order makes them helper 1, 2 and 3.

    Example: trefoil helper-set new helpers.json --entry north.json --entry south.json --entry west.json
    """
    from protocol.cli.console import say, write_json
    from protocol.helper_set import assemble_set

    made = assemble_set(entry, number, path)
    say(f"digest: {made.digest.hex()}")
    say(f"fingerprint: {made.fingerprint}")
    say("Each operator compares it with the others by telephone, and signs.")
    write_json(json, _described(made, path))


@helper_set.command("sign")
def helper_set_sign(
    path: SetFile, key: Annotated[Path, typer.Option(help="This helper's identity key.")], json: JsonFile = None
) -> None:
    """Sign a helper set as one of its three helpers.

    Example: trefoil helper-set sign helpers.json --key /etc/trefoil/identity.key
    """
    from protocol.cli.console import say, write_json
    from protocol.helper_set import add_signature

    signed = add_signature(path, key)
    say(f"signed set {signed.number}, digest {signed.digest.hex()}")
    say(f"fingerprint: {signed.fingerprint}")
    write_json(json, _described(signed, path))


@helper_set.command("join")
def helper_set_join(
    path: SetFile,
    copy: Annotated[list[Path], typer.Option(help="A signed copy; once for each.")],
    json: JsonFile = None,
) -> None:
    """Join copies of a set that were signed in different places into one file.

    A set that is in the file already is joined too.

    Example: trefoil helper-set join helpers.json --copy north/helpers.json --copy south/helpers.json
    """
    from protocol.cli.console import say, write_json
    from protocol.helper_set import join

    joined = join(copy, path)
    say(f"{sum(joined.have_signed())} of 3 helpers have signed {path}")
    write_json(json, _described(joined, path))


@helper_set.command("verify")
def helper_set_verify(path: SetFile, json: JsonFile = None) -> None:
    """Check that all three helpers have signed, and show who they are.

    Example: trefoil helper-set verify helpers.json
    """
    from rich.table import Table

    from protocol.cli.console import out, write_json
    from protocol.helper_set import HelperSet

    loaded = HelperSet.load_unverified(path)
    table = Table(title=f"helper set {loaded.number}, digest {loaded.digest.hex()[:16]}…")
    for heading in ("helper", "address", "identity key", "signed"):
        table.add_column(heading)
    for entry, signed in zip(loaded.helpers, loaded.have_signed(), strict=True):
        table.add_row(entry.name, entry.address, entry.identity_key.hex()[:16] + "…", "yes" if signed else "no")
    out.print(table)
    loaded.verify()
    write_json(json, _described(loaded, path))


def _described(helper_set: HelperSet, path: Path) -> dict[str, object]:
    """Return a helper set as `--json` writes it."""
    helpers = [
        {"name": entry.name, "address": entry.address, "identity_key": entry.identity_key.hex(), "signed": signed}
        for entry, signed in zip(helper_set.helpers, helper_set.have_signed(), strict=True)
    ]
    named = {"file": str(path), "number": helper_set.number, "digest": helper_set.digest.hex()}
    return named | {"fingerprint": helper_set.fingerprint, "helpers": helpers}
