"""Commands for those who run helpers. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.choices import JsonFile

if TYPE_CHECKING:
    from mpc_helpers.identity.config import HelperConfig
    from mpc_helpers.identity.membership import Membership

app = typer.Typer(help="mpc_helpers")
keygen = typer.Typer(help="Make keys.", no_args_is_help=True)
ledger = typer.Typer(help="Look after a helper's report ledger.", no_args_is_help=True)
app.add_typer(keygen, name="keygen")
alarm = typer.Typer(help="Look after a helper's alarm: failed proofs of joint noise.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")
app.add_typer(alarm, name="alarm")

ConfigFile = Annotated[Path, typer.Option("--config", help="The helper's configuration file.", show_default=False)]


@app.command()
def helper(
    config: ConfigFile,
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="End when standard input closes, as the launcher wants it.")
    ] = False,
    executor: Annotated[
        str, typer.Option(metavar="dask://HOST:PORT", help="Open reports on this dask cluster instead of here.")
    ] = "",
) -> None:
    """Run one helper until it is stopped.

    Example: trefoil helper --config /etc/trefoil/config.json
    """
    from mpc_helpers.service.daemon import run

    run(config, stop_with_stdin=stop_with_stdin, executor=executor)


@app.command()
def launch(
    folder: Annotated[Path, typer.Option("--dir", help="Where keys, ledgers and logs are kept.")],
    site: Annotated[list[str] | None, typer.Option(help="A site whose queries are answered; may be repeated.")] = None,
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65_535, help="The helpers' ports, given three times.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Make three helpers on this machine, start them, and show what they do until Ctrl-C.

    Example: trefoil launch --dir /tmp/trefoil --site shop.example
    """
    from mpc_helpers.local.view import launch_and_watch

    launch_and_watch(folder, sites=site or [], ports=port or [], now=_now(), json=json)


@keygen.command("helper")
def keygen_helper(
    name: Annotated[str, typer.Option(help="What people call this helper.")],
    address: Annotated[str, typer.Option(help="Where others reach it, as https://host:port.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where its keys are kept; private to its user.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="For how many days devices may seal to its key.")] = 90,
    suite: Annotated[int, typer.Option(min=1, max=2, help="Cipher suite of its key: 2 is post-quantum.")] = 1,
    json: JsonFile = None,
) -> None:
    """Make a new helper's keys and a configuration to fill in. Prints where its public entry for the set is.

    Example: trefoil keygen helper --name north --address https://north.example:8443 --dir /etc/trefoil
    """
    from mpc_helpers.identity.keygen import make_helper
    from protocol.console import say, write_json
    from protocol.hpke import Suite
    from protocol.places import check_folder

    check_folder("--dir", folder)
    entry = make_helper(folder, name, address, _now(), days=days, suite=Suite(suite))
    say(f"public entry:  {entry}")
    say("Give it to whoever makes the helper set: trefoil helper-set new")
    write_json(json, {"entry": str(entry), "folder": str(folder)})


@keygen.command("hpke")
def keygen_hpke(
    folder: Annotated[Path, typer.Option("--dir", help="Where the helper's keys are kept.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="For how many days devices may seal to the new key.")] = 90,
    suite: Annotated[int, typer.Option(min=1, max=2, help="Cipher suite of the new key: 2 is post-quantum.")] = 1,
    json: JsonFile = None,
) -> None:
    """Add an HPKE key to a helper, and to its public entry, before the old one expires.

    Example: trefoil keygen hpke --dir /etc/trefoil
    """
    from mpc_helpers.identity.keygen import renew_entry
    from protocol.console import say, write_json
    from protocol.hpke import Suite

    entry = renew_entry(folder, _now(), days, Suite(suite))
    say(f"public entry:  {entry}")
    write_json(json, {"entry": str(entry), "folder": str(folder)})


@keygen.command("site")
def keygen_site(
    path: Annotated[Path, typer.Argument(help="The new key file.")],
    json: JsonFile = None,
) -> None:
    """Make the key that signs a site's queries, and print what helpers' operators register.

    Example: trefoil keygen site shop.key
    """
    from protocol.console import say, write_json
    from protocol.keys import IdentityKey, save_identity

    key = IdentityKey.generate()
    save_identity(path, key)
    say(f"private key:  {path}")
    say(f"public key:   {key.public.hex()}")
    write_json(json, {"private_key": str(path), "public_key": key.public.hex()})


@ledger.command("create")
def ledger_create(config: ConfigFile, json: JsonFile = None) -> None:
    """Create a new helper's ledger, once, before its first start.

    Never to replace a ledger that was lost: reports it counted would be counted again.

    Example: trefoil ledger create --config /etc/trefoil/config.json
    """
    from mpc_helpers.ledger.rebuild import create
    from protocol.console import say, write_json

    loaded, membership = _load(config)
    create(loaded, membership)
    say(f"created {loaded.ledger}")
    write_json(json, {"ledger": str(loaded.ledger)})


@ledger.command("export")
def ledger_export(
    config: ConfigFile,
    lost_by: Annotated[int, typer.Option(min=1, max=3, help="The helper that lost its ledger: 1, 2 or 3.")],
    path: Annotated[Path, typer.Option("--out", help="The file to write and hand over.")],
    json: JsonFile = None,
) -> None:
    """Write what a peer that lost its ledger needs. Stop this helper first.

    Example: trefoil ledger export --config config.json --lost-by 2 --out for-helper-2
    """
    from mpc_helpers.ledger.rebuild import export
    from protocol.console import say, write_json
    from protocol.places import check_file

    loaded, membership = _load(config)
    check_file("--out", path)
    export(loaded, membership, lost_by - 1, path)
    say(f"wrote {path}; hand it to the operator of helper {lost_by}")
    write_json(json, {"file": str(path), "lost_by": lost_by})


@ledger.command("rebuild")
def ledger_rebuild(
    config: ConfigFile,
    entries: Annotated[list[Path], typer.Option(help="What a peer exported; once for each of the two.")],
    json: JsonFile = None,
) -> None:
    """Make a lost ledger again: everything that either peer holds counts as spent.

    Example: trefoil ledger rebuild --config config.json --entries from-helper-1 --entries from-helper-3
    """
    from mpc_helpers.ledger.rebuild import rebuild
    from protocol.console import say, write_json

    loaded, membership = _load(config)
    rebuild(loaded, membership, entries, _now())
    say(f"rebuilt {loaded.ledger}; both other operators now run: trefoil ledger accept-peer")
    write_json(json, {"ledger": str(loaded.ledger)})


@ledger.command("accept-peer")
def ledger_accept_peer(
    config: ConfigFile,
    helper: Annotated[int, typer.Option(min=1, max=3, help="The helper with the rebuilt ledger: 1, 2 or 3.")],
    json: JsonFile = None,
) -> None:
    """Believe a peer again whose ledger was lost and rebuilt. Stop this helper first.

    Both other operators must have seen the rebuilding: a ledger that went back is refused for a reason.

    Example: trefoil ledger accept-peer --config config.json --helper 2
    """
    from mpc_helpers.ledger.rebuild import accept_peer
    from protocol.console import say, write_json

    loaded, membership = _load(config)
    accept_peer(loaded, membership, helper - 1)
    say(f"helper {helper} is believed again")
    write_json(json, {"accepted": helper})


@ledger.command("accept-clock")
def ledger_accept_clock(config: ConfigFile, json: JsonFile = None) -> None:
    """Say that this machine's clock is right, after a pause so long that the helper doubts it. It need not be stopped.

    By the clock a helper forgets old reports and destroys old keys, and neither can be undone: look at the time first.

    Example: trefoil ledger accept-clock --config config.json
    """
    from mpc_helpers.service.clocks import LastRound
    from protocol.console import say, write_json

    loaded, _ = _load(config)
    now = _now()
    LastRound(loaded.data).accept(now)
    say(f"accepted: it is {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC")
    write_json(json, {"accepted": now})


def _load(path: Path) -> tuple[HelperConfig, Membership]:
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.identity.membership import load_membership

    config = load_config(path)
    return config, load_membership(config, _now())


@alarm.command("show")
def alarm_show(config: ConfigFile, json: JsonFile = None) -> None:
    """Show which proofs of other helpers have failed at this one. None ever fails among honest helpers.

    Example: trefoil alarm show --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.mpc.failed_proofs import ROOM, FailedProofs
    from protocol.console import say, write_json

    standing = FailedProofs(load_config(config).failed_proofs).standing()
    for line in standing:
        say(line)
    say(f"{len(standing)} of {ROOM} failures that this helper bears")
    write_json(json, {"failed": standing, "room": ROOM})


@alarm.command("clear")
def alarm_clear(config: ConfigFile, json: JsonFile = None) -> None:
    """Run joint noise again after failed proofs. The helper may go on running.

    Each failure was a helper that cheated, or a defect. Clear only when you know which, with the other operators: every
    eight failures add 2^-49 to the delta of an answer.

    Example: trefoil alarm clear --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.mpc.failed_proofs import FailedProofs
    from protocol.console import say, write_json

    cleared = FailedProofs(load_config(config).failed_proofs).clear()
    say(f"cleared {len(cleared)} failed proofs")
    write_json(json, {"cleared": cleared})


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
