"""`trefoil helper-set`, for the operators who put a helper set together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile
from protocol.helper_set import HelperSet, add_signature, assemble_set, join

helper_set = typer.Typer(help="Put a helper set together, sign it, check it.", no_args_is_help=True)

SetFile = Annotated[Path, typer.Argument(help="The helper set file.")]


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
    joined = join(copy, path)
    say(f"{sum(joined.have_signed())} of 3 helpers have signed {path}")
    write_json(json, _described(joined, path))


@helper_set.command("verify")
def helper_set_verify(path: SetFile, json: JsonFile = None) -> None:
    """Check that all three helpers have signed, and show who they are.

    Example: trefoil helper-set verify helpers.json
    """

    loaded = HelperSet.load_unverified(path)
    title = f"helper set {loaded.number}, digest {loaded.digest.hex()[:16]}…"
    table = Table("helper", "address", "identity key", "signed", title=title)
    for entry, signed in zip(loaded.helpers, loaded.have_signed(), strict=True):
        table.add_row(entry.name, entry.address, entry.identity_key.hex()[:16] + "…", "yes" if signed else "no")
    out.print(table)
    loaded.verify()
    write_json(json, _described(loaded, path))


def _described(helper_set: HelperSet, path: Path) -> dict[str, object]:
    helpers = [
        {"name": entry.name, "address": entry.address, "identity_key": entry.identity_key.hex(), "signed": signed}
        for entry, signed in zip(helper_set.helpers, helper_set.have_signed(), strict=True)
    ]
    named = {"file": str(path), "number": helper_set.number, "digest": helper_set.digest.hex()}
    return named | {"fingerprint": helper_set.fingerprint, "helpers": helpers}
