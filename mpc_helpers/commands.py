"""Commands for those who run helpers. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from protocol.choices import JsonFile

if TYPE_CHECKING:
    from mpc_helpers.identity.config import HelperConfig
    from mpc_helpers.identity.membership import Membership

app = typer.Typer(help="mpc_helpers")
keygen = typer.Typer(help="Make keys.", no_args_is_help=True)
ledger = typer.Typer(help="Look after a helper's report ledger.", no_args_is_help=True)
site = typer.Typer(help="Who may ask a helper.", no_args_is_help=True)
# Its help is that of running a helper, below.
running = typer.Typer()
app.add_typer(running, name="helper")
app.add_typer(keygen, name="keygen")
app.add_typer(site, name="site")
alarm = typer.Typer(help="Look after a helper's alarm: failed proofs of joint noise.", no_args_is_help=True)
app.add_typer(ledger, name="ledger")
app.add_typer(alarm, name="alarm")

LevelName = Literal["debug", "info", "warning", "error"]
FormatName = Literal["text", "json"]
ConfigFile = Annotated[Path, typer.Option("--config", help="The helper's configuration file.", show_default=False)]


@running.callback(invoke_without_command=True)
def helper(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="The helper's configuration file.", show_default=False)
    ] = None,
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="End when standard input closes, as the launcher wants it.")
    ] = False,
    executor: Annotated[
        str, typer.Option(metavar="tls://HOST:PORT", help="Open reports on this dask cluster instead of here.")
    ] = "",
    log_level: Annotated[
        LevelName, typer.Option("--log-level", help="From which level on lines are written.")
    ] = "info",
    log_format: Annotated[FormatName, typer.Option("--log-format", help="Lines for people, or for programs.")] = "text",
) -> None:
    """Run one helper until it is stopped. SIGHUP makes it read its configuration again.

    Example: trefoil helper --config /etc/trefoil/config.json
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("which helper? Name its configuration file.", param_hint="--config")
    from mpc_helpers.service.daemon import RunOptions, run
    from mpc_helpers.service.logs import LogFormat, LogLevel

    run(config, RunOptions(stop_with_stdin, executor, LogLevel(log_level), LogFormat(log_format)))


@running.command("reload")
def helper_reload(config: ConfigFile, json: JsonFile = None) -> None:
    """Have a running helper read its configuration again: sites, helper sets and everything else in it.

    New sites are used at once. For other changes the helper builds its parts again, and its queries go on by
    themselves. What cannot be used changes nothing.

    Example: trefoil helper reload --config /etc/trefoil/config.json
    """
    from mpc_helpers.local.status import reload_and_look
    from protocol.console import say, write_json

    loaded, membership = _load(config)
    found = reload_and_look(loaded, membership.helper_set.helpers[membership.party])
    say(found)
    write_json(json, {"reloaded": found})


@running.command("status")
def helper_status(
    helper_set: Annotated[
        Path | None, typer.Option("--set", help="The helper set whose helpers to look at.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Or a helper's configuration, which names its set.")
    ] = None,
    which: Annotated[list[int] | None, typer.Option("--helper", help="Only helper 1, 2 or 3; may be repeated.")] = None,
    json: JsonFile = None,
) -> None:
    """Show how helpers are, and what their operators should look at. Exit code 75 if one is not ready.

    Example: trefoil helper status --set helpers.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.local.status import look_at, table_of
    from protocol.console import out, write_json
    from protocol.helper_set import HelperSet

    if (helper_set is None) == (config is None):
        raise typer.BadParameter("name the helpers by --set or by --config.")
    path = helper_set if helper_set is not None else load_config(config or Path()).helper_set
    found = look_at(HelperSet.load(path), which or [])
    out.print(table_of(found))
    write_json(json, [each.to_json() for each in found])
    if not all(each.ready for each in found):
        raise typer.Exit(75)


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


@keygen.command("tls")
def keygen_tls(
    name: Annotated[str, typer.Option(help="The host, or what people call the helper.")],
    folder: Annotated[Path, typer.Option("--dir", help="A folder without tls.key; private to its user.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="For how many days it is valid.")] = 825,
    entry: Annotated[
        Path | None, typer.Option(help="A helper's public entry, whose pin becomes this one's for the next set.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Make a TLS key and a certificate that it signs itself: for a collector, or to renew a helper's.

    Example: trefoil keygen tls --name shop.example --dir /etc/trefoil-collector
    """
    from mpc_helpers.identity.keygen import renew_certificate
    from mpc_helpers.identity.tls import make_identity
    from protocol.console import say, write_json
    from protocol.files import made_together
    from protocol.places import check_folder

    check_folder("--dir", folder)
    with made_together(folder / "tls.key", folder / "tls.crt"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = make_identity(folder, name, _now(), days=days)
    say(f"certificate:  {made.certificate}")
    say(f"private key:  {made.key}")
    say(f"pin:          {made.pin.hex()}")
    if entry is not None:
        renew_certificate(entry, made)
        say(f"public entry: {entry}")
    write_json(json, {"certificate": str(made.certificate), "private_key": str(made.key), "pin": made.pin.hex()})


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


@site.command("add")
def site_add(
    name: Annotated[str, typer.Argument(metavar="SITE", help="The site, for example shop.example.")],
    config: ConfigFile,
    key: Annotated[str, typer.Option(help="Its public key in hexadecimal, as trefoil keygen site prints it.")],
    caller: Annotated[
        list[str] | None, typer.Option(help="Who may ask for it; may be repeated. The site itself by default.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a registered site this key and these callers.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Register a site, whose queries are answered from the next reload on.

    Example: trefoil site add shop.example --key 3f0c... --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.sites import add_site
    from protocol.console import say, write_json

    add_site(config, name, key, caller or [], replace=replace)
    say(f"registered {name}; a running helper takes it up with: trefoil helper reload --config {config}")
    write_json(json, {"registered": name})


@site.command("remove")
def site_remove(
    name: Annotated[str, typer.Argument(metavar="SITE", help="The site.")], config: ConfigFile, json: JsonFile = None
) -> None:
    """Answer no new queries of a site, from the next reload on.

    Example: trefoil site remove shop.example --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.sites import remove_site
    from protocol.console import say, write_json

    remove_site(config, name)
    say(f"removed {name}; a running helper forgets it with: trefoil helper reload --config {config}")
    write_json(json, {"removed": name})


@site.command("list")
def site_list(config: ConfigFile, json: JsonFile = None) -> None:
    """Show who may ask.

    Example: trefoil site list --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.sites import list_sites
    from protocol.console import say, write_json

    found = sorted(list_sites(config).items())
    for name, each in found:
        say(f"{name}  key {each.key.hex()}  callers {', '.join(sorted(each.callers))}")
    write_json(json, {name: {"key": each.key.hex(), "callers": sorted(each.callers)} for name, each in found})


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
