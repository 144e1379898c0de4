"""Chromium with the extension, and a host of the caller's choice behind it: for measurements and for tests."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results.origin import ROOT
from device.browser import install
from device.browser.install import BrowserKind
from device.limits import TREFOIL_SERVICE

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Playwright

CHROMIUM = shutil.which("chromium")


@dataclass
class Installation:
    """What `trefoil browser install` makes for one browser, in folders of its own.

    The host is a module of Python with its arguments. A script starts it, which notes the process and sets its
    environment.
    """

    folder: Path
    host: str
    environment: Mapping[str, str] = field(default_factory=dict)
    # Folders of other extensions that the person has.
    others: Sequence[Path] = ()

    @property
    def user_data(self) -> Path:
        return self.folder / "user data"

    @property
    def data(self) -> Path:
        """Return the folder of the person's devices."""
        return self.folder / "trefoil"

    def prepare(self) -> None:
        extension = install.copy_extension(self.data)
        (extension / "services.js").write_text(install.services_script([TREFOIL_SERVICE]))
        install.write_manifest(BrowserKind.CHROMIUM, self._script(), self.user_data)
        preferences = self.user_data / "Default" / "Preferences"
        preferences.parent.mkdir(parents=True)
        preferences.write_text(json.dumps({"extensions": {"ui": {"developer_mode": True}}}))

    def _script(self) -> Path:
        path = self.folder / "host.sh"
        settings = {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(self.folder), **self.environment}
        exports = [f"export {name}='{value}'" for name, value in settings.items()]
        note, run = f"echo $$ >> '{self.folder}/started'", f"exec '{sys.executable}' -m {self.host} \"$@\""
        path.write_text("\n".join(["#!/bin/sh", *exports, note, f"{run} 2>> '{self.folder}/errors'", ""]))
        path.chmod(0o755)
        return path

    @property
    def processes(self) -> list[int]:
        """Return the ids of the hosts that were started."""
        started = self.folder / "started"
        return [int(line) for line in started.read_text().split()] if started.exists() else []

    @property
    def errors(self) -> str:
        errors = self.folder / "errors"
        return errors.read_text() if errors.exists() else ""

    @property
    def flags(self) -> list[str]:
        extensions = ",".join(map(str, [install.extension_folder(self.data), *self.others]))
        return [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            *("--password-store=basic", f"--disable-extensions-except={extensions}", f"--load-extension={extensions}"),
        ]


@contextmanager
def launched(playwright: Playwright, installation: Installation, flags: Sequence[str] = ()) -> Iterator[BrowserContext]:
    """Start a browser in which the extension is installed."""
    if not installation.user_data.exists():
        installation.prepare()
    context = playwright.chromium.launch_persistent_context(
        installation.user_data,
        executable_path=CHROMIUM,
        # Not Playwright's own headless mode, which has no extensions.
        headless=False,
        args=[*installation.flags, *flags],
        ignore_default_args=["--disable-back-forward-cache"],
    )
    try:
        yield context
    finally:
        context.close()
