"""The commands of `trefoil browser`: install, status, uninstall."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from device.agent import system_clock
from device.browser import install as installation
from device.browser.profiles import data_folder
from device.limits import TREFOIL_SERVICE
from protocol.cli.console import say, write_json
from protocol.cli.options import JsonFile

browser = typer.Typer(help="Put your device into your own Chromium, Chrome or Edge.", no_args_is_help=True)

Browsers = Annotated[
    list[str] | None,
    typer.Option("--browser", metavar="NAME", help="chromium, chrome or edge; repeatable.", show_default="those found"),
]
_STEPS = """\
Two steps are left, in each browser:
  1. Open chrome://extensions and switch "Developer mode" on.
  2. Click "Load unpacked" and choose {folder}
     If it is loaded already, click the arrow on its card, which loads it again.
Measurement stays off until you switch it on: a page that opens then lets you."""


@browser.command()
def install(
    names: Browsers = None,
    helpers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A helper set to trust, in all of your browsers.")
    ] = None,
    service: Annotated[str, typer.Option(metavar="NAME", help="The name by which sites choose it.")] = TREFOIL_SERVICE,
    json_file: JsonFile = None,
) -> None:
    """Copy the extension, let your browsers start your device, and say what is left to do. Run it again to update.

    Example: trefoil browser install --browser chromium --helpers helpers.json
    """
    data, kinds = data_folder(), installation.chosen_browsers(names or [])
    program = installation.host_program()
    if helpers is not None:
        installation.trust(data, service, helpers, system_clock())
    folder = installation.copy_extension(data)
    manifests = {kind.label: str(installation.write_manifest(kind, program)) for kind in kinds}
    for label, manifest in manifests.items():
        say(f"{label} may start your device: {manifest}")
    say(f"The extension is in {folder}\n\n{_STEPS.format(folder=folder)}")
    write_json(
        json_file,
        {
            "extension": str(folder),
            "id": installation.extension_id(),
            "host": str(program),
            "manifests": manifests,
            "services": installation.installed_services(data),
        },
    )


@browser.command()
def status(names: Browsers = None, json_file: JsonFile = None) -> None:
    """Check everything between a page and your device, and start the host once; exit code 1 if something is missing.

    Example: trefoil browser status
    """
    checks = installation.checks(data_folder(), installation.chosen_browsers(names or []))
    for check in checks:
        say(f"{'well   ' if check.well else 'MISSING'}  {check.name}: {check.message}")
    write_json(json_file, {"checks": [asdict(check) for check in checks]})
    if not all(check.well for check in checks):
        raise typer.Exit(1)


@browser.command()
def uninstall(
    names: Browsers = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete all devices and the helper sets they trust.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Remove the extension's folder and the way to your device. Your devices stay, with what they remember.

    A device that is made after --forget measures nothing of the weeks until then: their budgets may be spent.

    Example: trefoil browser uninstall --forget
    """
    data = data_folder()
    kinds = installation.chosen_browsers(names) if names else list(installation.BrowserKind)
    # First: it is refused while a browser has a device open, and then nothing is removed.
    devices = installation.forget_devices(data) if forget else 0
    removed = [installation.remove_manifest(kind) for kind in kinds]
    # Other browsers may still use the folder.
    removed.append(None if names else installation.remove_extension(data))
    paths = [str(path) for path in removed if path is not None]
    for path in paths:
        say(f"removed {path}")
    if forget:
        say(f"deleted {devices} device{'' if devices == 1 else 's'}, and the helper sets they trust")
    if paths:
        say("Remove Trefoil in chrome://extensions, too.")
    elif not forget:
        say("There was nothing to remove.")
    write_json(json_file, {"removed": paths, "devices": devices})
