"""Commands for operators of helpers. Bodies import what they need, so that `trefoil --help` stays quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from protocol.cli.console import out, say, write_json
from protocol.cli.options import JsonFile, check_file, check_folder

if TYPE_CHECKING:
    from mpc_helpers.identity.config import HelperConfig
    from mpc_helpers.identity.membership import Membership

app = typer.Typer(help="mpc_helpers")
keygen = typer.Typer(help="Create keys.", no_args_is_help=True)
ledger = typer.Typer(help="Manage a helper's report ledger.", no_args_is_help=True)
site = typer.Typer(help="Manage the sites that a helper answers.", no_args_is_help=True)
# Its help is that of `helper`, below.
running = typer.Typer()
app.add_typer(running, name="helper")
app.add_typer(keygen, name="keygen")
app.add_typer(site, name="site")
alarm = typer.Typer(help="Manage a helper's alarm: failed proofs of joint noise.", no_args_is_help=True)
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
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input closes; used by the launcher.")
    ] = False,
    executor: Annotated[
        str, typer.Option(metavar="tls://HOST:PORT", help="Open reports on this dask cluster instead of here.")
    ] = "",
    log_level: Annotated[
        LevelName, typer.Option("--log-level", help="The lowest level of log lines to write.")
    ] = "info",
    log_format: Annotated[FormatName, typer.Option("--log-format", help="The format of log lines.")] = "text",
) -> None:
    """Run one helper until it is stopped. SIGHUP makes it reload its sites.

    Example: trefoil helper --config /etc/trefoil/config.json
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise typer.BadParameter("which helper? Name its configuration file.", param_hint="--config")
    from mpc_helpers.service.daemon import run

    run(config, stop_with_stdin=stop_with_stdin, executor=executor, log_level=log_level, log_format=log_format)


@running.command("reload")
def helper_reload(config: ConfigFile, json: JsonFile = None) -> None:
    """Have a running helper reload the sites of its configuration. Other changes need a restart.

    A restart resumes every query. A file that cannot be used changes nothing.

    Example: trefoil helper reload --config /etc/trefoil/config.json
    """
    from mpc_helpers.local.view import reload_and_report

    loaded, membership = _load(config)
    outcome = reload_and_report(loaded, membership.helper_set.helpers[membership.party])
    say(outcome)
    write_json(json, {"reloaded": outcome})


@running.command("status")
def helper_status(
    helper_set: Annotated[
        Path | None, typer.Option("--set", help="The helper set whose helpers to show.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Or a helper's configuration, which names its set.")
    ] = None,
    which: Annotated[list[int] | None, typer.Option("--helper", help="Only helper 1, 2 or 3; may be repeated.")] = None,
    json: JsonFile = None,
) -> None:
    """Show the health of helpers, and what needs their operators' attention. Exit code 75 if one is not ready.

    Example: trefoil helper status --set helpers.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.local.view import look_at, table_of
    from protocol.helper_set import HelperSet

    if (helper_set is None) == (config is None):
        raise typer.BadParameter("name the helpers by --set or by --config.")
    path = helper_set if helper_set is not None else load_config(config or Path()).helper_set
    helpers = look_at(HelperSet.load(path), which or [])
    out.print(table_of(helpers))
    write_json(json, [each.to_json() for each in helpers])
    if not all(each.ready for each in helpers):
        raise typer.Exit(75)


@app.command()
def doctor(
    helpers: Annotated[
        Path | None, typer.Option(help="As a querier: the helper set to check.", show_default=False)
    ] = None,
    site: Annotated[str, typer.Option(help="As a querier: also check that this site is registered.")] = "",
    site_key: Annotated[
        Path | None, typer.Option(help="The private key that signs the site's queries.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="As an operator: the helper's configuration.", show_default=False)
    ] = None,
    json: JsonFile = None,
) -> None:
    """Check the ports, clocks, keys, helper set, ledgers and disks of three helpers, and say what to do.

    Changes nothing. Exit code 1 if something is to be mended here, 75 if at another helper, 0 if nothing stops a query.

    Example: trefoil doctor --config /etc/trefoil/config.json
    """
    import asyncio

    from mpc_helpers.local.doctor import SiteKey, examine_as_operator, examine_as_querier
    from mpc_helpers.local.view import show_examination
    from protocol.cli.app import Exit
    from protocol.keys import load_identity

    if (helpers is None) == (config is None):
        raise typer.BadParameter("a querier gives --helpers, an operator --config.")
    if bool(site) != (site_key is not None) or (site and helpers is None):
        raise typer.BadParameter("--site and --site-key go together, with --helpers.")
    if config is not None:
        examination = asyncio.run(examine_as_operator(config, _now))
    else:
        registered = SiteKey(site, load_identity(site_key)) if site_key else None
        examination = asyncio.run(examine_as_querier(helpers or Path(), registered, _now))
    show_examination(examination)
    write_json(json, examination.to_json())
    if examination.faults:
        raise typer.Exit(Exit.MISTAKE if examination.own_faults else Exit.TRY_AGAIN)


@app.command()
def launch(
    folder: Annotated[Path, typer.Option("--dir", help="The directory for keys, ledgers and logs.")],
    site: Annotated[list[str] | None, typer.Option(help="A site whose queries are answered; may be repeated.")] = None,
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65_535, help="The helpers' ports, given three times.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Create three helpers on this machine, run them, and show their state until Ctrl-C.

    Example: trefoil launch --dir /tmp/trefoil --site shop.example
    """
    from mpc_helpers.local.view import launch_and_watch

    launch_and_watch(folder, sites=site or [], ports=port or [], now=_now(), json=json)


@keygen.command("helper")
def keygen_helper(
    name: Annotated[str, typer.Option(help="The name of this helper.")],
    address: Annotated[str, typer.Option(help="Where others reach it, as https://host:port.")],
    folder: Annotated[Path, typer.Option("--dir", help="The directory for its keys; private to its user.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity of its HPKE key, in days.")] = 90,
    suite: Annotated[int, typer.Option(min=1, max=2, help="Cipher suite of its key: 2 is post-quantum.")] = 1,
    json: JsonFile = None,
) -> None:
    """Create a new helper's keys and a configuration to fill in. Prints the path of its public entry for the set.

    Example: trefoil keygen helper --name north --address https://north.example:8443 --dir /etc/trefoil
    """
    from mpc_helpers.identity.keygen import make_helper
    from protocol.hpke import Suite

    check_folder("--dir", folder)
    entry = make_helper(folder, name, address, _now(), days=days, suite=Suite(suite))
    say(f"public entry:  {entry}")
    say("All three entries go into the helper set: trefoil helper-set new")
    write_json(json, {"entry": str(entry), "folder": str(folder)})


@keygen.command("hpke")
def keygen_hpke(
    folder: Annotated[Path, typer.Option("--dir", help="The directory of the helper's keys.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity of the new key, in days.")] = 90,
    suite: Annotated[int, typer.Option(min=1, max=2, help="Cipher suite of the new key: 2 is post-quantum.")] = 1,
    json: JsonFile = None,
) -> None:
    """Add an HPKE key to a helper, and to its public entry, before the old one expires.

    Example: trefoil keygen hpke --dir /etc/trefoil
    """
    from mpc_helpers.identity.keygen import renew_entry
    from protocol.hpke import Suite

    entry = renew_entry(folder, _now(), days, Suite(suite))
    say(f"public entry:  {entry}")
    write_json(json, {"entry": str(entry), "folder": str(folder)})


@keygen.command("tls")
def keygen_tls(
    name: Annotated[str, typer.Option(help="The host, or the name of the helper.")],
    folder: Annotated[Path, typer.Option("--dir", help="A directory without tls.key; private to its user.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity of the certificate, in days.")] = 825,
    entry: Annotated[
        Path | None, typer.Option(help="A helper's public entry, to put the new pin into for the next set.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Create a TLS key and a self-signed certificate: for a collector, or to renew a helper's.

    Example: trefoil keygen tls --name shop.example --dir /etc/trefoil-collector
    """
    from mpc_helpers.identity.keygen import renew_certificate
    from mpc_helpers.identity.tls import make_identity
    from protocol.files import remove_on_failure

    check_folder("--dir", folder)
    with remove_on_failure(folder / "tls.key", folder / "tls.crt"):
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
    """Create the key that signs a site's queries, and print the public key for the helpers' operators.

    Example: trefoil keygen site shop.key
    """
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
        list[str] | None,
        typer.Option(help="A caller that may query for it; may be repeated. Default: the site."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a registered site this key and these callers.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Register a site. A running helper answers its queries after a reload.

    Example: trefoil site add shop.example --key 3f0c... --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import add_site

    add_site(config, name, key, caller or [], replace=replace)
    say(f"registered {name}; to apply it to a running helper: trefoil helper reload --config {config}")
    write_json(json, {"registered": name})


@site.command("remove")
def site_remove(
    name: Annotated[str, typer.Argument(metavar="SITE", help="The site.")], config: ConfigFile, json: JsonFile = None
) -> None:
    """Remove a site. A running helper refuses its queries after a reload.

    Example: trefoil site remove shop.example --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import remove_site

    remove_site(config, name)
    say(f"removed {name}; to apply it to a running helper: trefoil helper reload --config {config}")
    write_json(json, {"removed": name})


@site.command("list")
def site_list(config: ConfigFile, json: JsonFile = None) -> None:
    """Show the registered sites.

    Example: trefoil site list --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import load_config

    sites = sorted(load_config(config).sites.items())
    for name, each in sites:
        say(f"{name}  key {each.key.hex()}  callers {', '.join(sorted(each.callers))}")
    write_json(json, {name: {"key": each.key.hex(), "callers": sorted(each.callers)} for name, each in sites})


@ledger.command("create")
def ledger_create(config: ConfigFile, json: JsonFile = None) -> None:
    """Create a new helper's ledger, once, before its first start.

    Never to replace a lost ledger: reports it counted would be counted again.

    Example: trefoil ledger create --config /etc/trefoil/config.json
    """
    from mpc_helpers.ledger.rebuild import create

    loaded, membership = _load(config)
    create(loaded, membership)
    say(f"created {loaded.ledger}")
    write_json(json, {"ledger": str(loaded.ledger)})


@ledger.command("upgrade")
def ledger_upgrade(config: ConfigFile, json: JsonFile = None) -> None:
    """Upgrade a ledger that an earlier version of Trefoil wrote. Stop this helper first.

    It may be killed at any moment and run again. Peers notice nothing. There is no way back to the earlier version.

    Example: trefoil ledger upgrade --config /etc/trefoil/config.json
    """
    from mpc_helpers.ledger.rebuild import upgrade

    loaded, membership = _load(config)
    upgrade(loaded, membership)
    say(f"upgraded {loaded.ledger}")
    write_json(json, {"ledger": str(loaded.ledger)})


@ledger.command("take-over")
def ledger_take_over(config: ConfigFile, json: JsonFile = None) -> None:
    """Fence a helper whose host is dead or paused, so that another host can open the ledger in PostgreSQL.

    The fenced helper changes nothing any more, whatever it does when it wakes. Then start the helper here.

    Example: trefoil ledger take-over --config /etc/trefoil/config.json
    """
    from mpc_helpers.ledger.rebuild import take_over

    loaded, membership = _load(config)
    ended = take_over(loaded, membership)
    say(f"fenced; {ended} of its sessions ended: start this host's helper")
    write_json(json, {"ended": ended})


@ledger.command("check")
def ledger_check(config: ConfigFile, json: JsonFile = None) -> None:
    """Verify a ledger in full: all that is stored, and the whole chain of its moves. Stop this helper first.

    A helper that starts verifies only the last moves, so that its start takes no longer as the ledger grows.

    Example: trefoil ledger check --config /etc/trefoil/config.json
    """
    from mpc_helpers.ledger.rebuild import check

    loaded, membership = _load(config)
    head = check(loaded, membership)
    say(f"{loaded.ledger} is sound, with {head.sequence} moves")
    write_json(json, {"ledger": str(loaded.ledger), "moves": head.sequence})


@ledger.command("export")
def ledger_export(
    config: ConfigFile,
    lost_by: Annotated[int, typer.Option(min=1, max=3, help="The helper that lost its ledger: 1, 2 or 3.")],
    path: Annotated[Path, typer.Option("--out", help="The file to write for the peer.")],
    json: JsonFile = None,
) -> None:
    """Export the entries that a peer needs to rebuild its lost ledger. Stop this helper first.

    Example: trefoil ledger export --config config.json --lost-by 2 --out for-helper-2
    """
    from mpc_helpers.ledger.rebuild import export

    loaded, membership = _load(config)
    check_file("--out", path)
    export(loaded, membership, lost_by - 1, path)
    say(f"wrote {path}; send it to the operator of helper {lost_by}")
    write_json(json, {"file": str(path), "lost_by": lost_by})


@ledger.command("rebuild")
def ledger_rebuild(
    config: ConfigFile,
    entries: Annotated[list[Path], typer.Option(help="A file exported by a peer; once for each of the two.")],
    all_spent: Annotated[
        bool, typer.Option("--all-spent", help="Leave nothing of the reports in them: where a file is in doubt.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Rebuild a lost ledger: of each report is left the less of what both peers leave.

    Example: trefoil ledger rebuild --config config.json --entries from-helper-1 --entries from-helper-3
    """
    from mpc_helpers.ledger.rebuild import rebuild

    loaded, membership = _load(config)
    rebuild(loaded, membership, entries, _now(), all_spent=all_spent)
    say(f"rebuilt {loaded.ledger}; both other operators now run: trefoil ledger accept-peer")
    write_json(json, {"ledger": str(loaded.ledger)})


@ledger.command("accept-peer")
def ledger_accept_peer(
    config: ConfigFile,
    helper: Annotated[int, typer.Option(min=1, max=3, help="The helper with the rebuilt ledger: 1, 2 or 3.")],
    json: JsonFile = None,
) -> None:
    """Trust a peer again whose ledger was lost and rebuilt. Stop this helper first.

    Confirm with its operator that it was rebuilt: a ledger that was rolled back would count reports twice.

    Example: trefoil ledger accept-peer --config config.json --helper 2
    """
    from mpc_helpers.ledger.rebuild import accept_peer

    loaded, membership = _load(config)
    accept_peer(loaded, membership, helper - 1)
    say(f"helper {helper} is trusted again")
    write_json(json, {"accepted": helper})


@ledger.command("accept-clock")
def ledger_accept_clock(config: ConfigFile, json: JsonFile = None) -> None:
    """Confirm this machine's clock after a pause so long that the helper doubts it. The helper may keep running.

    A helper forgets old reports and destroys old keys by this clock, irreversibly: check the time first.

    Example: trefoil ledger accept-clock --config config.json
    """
    from mpc_helpers.service.housekeeping import LastRound

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
    """Show the failed proofs of other helpers. No proof of an honest helper fails.

    Example: trefoil alarm show --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.mpc.failed_proofs import CAPACITY, FailedProofs

    standing = FailedProofs(load_config(config).failed_proofs).failures()
    for line in standing:
        say(line)
    say(f"{len(standing)} of {CAPACITY} failures that this helper tolerates")
    write_json(json, {"failed": standing, "room": CAPACITY})


@alarm.command("clear")
def alarm_clear(config: ConfigFile, json: JsonFile = None) -> None:
    """Allow joint noise again after failed proofs. The helper may keep running.

    Each failure was a malicious helper or a defect. Find out which with the other operators before you clear: every
    eight failures add 2^-48.9 to the delta of an answer.

    Example: trefoil alarm clear --config /etc/trefoil/config.json
    """
    from mpc_helpers.identity.config import load_config
    from mpc_helpers.mpc.failed_proofs import FailedProofs

    cleared = FailedProofs(load_config(config).failed_proofs).clear()
    say(f"cleared {len(cleared)} failed proofs")
    write_json(json, {"cleared": cleared})


def _now() -> int:
    return int(time.time())  # noqa: TID251 - an edge: commands read the real clock
