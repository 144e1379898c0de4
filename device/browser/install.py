"""Install the extension and the native messaging host for a person's browsers, say how they are, and remove them.

A browser finds the host by a manifest in its own folder, which names the program and the one extension that may start
it. The extension is copied to a folder of the person's, from where the browser loads it unpacked, together with the
dashboard's style sheet and the list of helper sets that pages can see.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from base64 import b64decode
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path

from device import services
from device.agent import stored_limits
from device.browser.profiles import databases, locked_profiles, profiles_folder, services_folder
from device.dashboard.markup import STATIC
from device.stores.memory_store import MemoryStore
from protocol.errors import ErrorKind, TrefoilError
from protocol.files import write_atomically
from protocol.helper_set import HelperSet

NAME = "org.trefoil.device"
HOST = "trefoil-browser-host"
EXTENSION = Path(__file__).parent / "extension"
START_SECONDS = 60
_SERVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_LENGTH = struct.Struct("=I")


class BrowserKind(Enum):
    """The browsers that take the extension, with their folders on Linux and on macOS."""

    CHROMIUM = "chromium", "chromium", "Chromium"
    CHROME = "chrome", "google-chrome", "Google/Chrome"
    EDGE = "edge", "microsoft-edge", "Microsoft Edge"

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def user_data(self) -> Path:
        """Return the folder in which the browser keeps its profiles and looks for hosts."""
        _, linux, macos = self.value
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / macos
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / linux

    @property
    def confined(self) -> bool:
        """Return whether the browser looks like a Snap or Flatpak, which may start no program outside of itself."""
        program = shutil.which(self.value[1]) or ""
        return program.startswith(("/snap/", "/var/lib/flatpak/")) or "/.local/share/flatpak/" in program


def chosen_browsers(names: list[str]) -> list[BrowserKind]:
    """Return the browsers of these names, or without any those that have been used on this machine."""
    if sys.platform == "win32":
        raise TrefoilError(
            "the device does not run on Windows yet: its locks are those of Unix",
            "Use Linux or macOS.",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    if "firefox" in names:
        raise TrefoilError(
            "Firefox is not supported yet: it does not say which document has called",
            "Choose chromium, chrome or edge with --browser.",
            kind=ErrorKind.UNKNOWN_NAME,
        )
    kinds = {kind.label: kind for kind in BrowserKind}
    if unknown := [name for name in names if name not in kinds]:
        raise TrefoilError(
            f"--browser: there is no browser {unknown[0][:99]!r}",
            f"Choose {', '.join(kinds)}.",
            kind=ErrorKind.UNKNOWN_NAME,
        )
    chosen = [kinds[name] for name in names] or [kind for kind in BrowserKind if kind.user_data.is_dir()]
    if not chosen:
        raise TrefoilError(
            "no browser was found: none of Chromium, Chrome and Edge has been used by you on this machine",
            "Name the one that you will use with --browser chromium.",
            kind=ErrorKind.FILE_MISSING,
        )
    return chosen


def manifest_path(kind: BrowserKind, user_data: Path | None = None) -> Path:
    """Return where the native manifest for a browser lies; `user_data` is for one started with --user-data-dir."""
    return (user_data or kind.user_data) / "NativeMessagingHosts" / f"{NAME}.json"


def extension_folder(data: Path) -> Path:
    return data / "extension"


def extension_id() -> str:
    """Return the id that browsers derive from the key in the extension's manifest, wherever it is loaded from."""
    digest = sha256(b64decode(_manifest()["key"])).hexdigest()[:32]
    return "".join(chr(ord("a") + int(digit, 16)) for digit in digest)


def _allowed_origins() -> list[str]:
    return [f"chrome-extension://{extension_id()}/"]


def _manifest() -> dict[str, str]:
    content: dict[str, str] = json.loads((EXTENSION / "manifest.json").read_text(encoding="utf-8"))
    return content


def host_program() -> Path:
    """Return the console script of this installation, which a native manifest names by its absolute path."""
    scripts = Path(sysconfig.get_path("scripts"))
    program = shutil.which(HOST, path=str(scripts)) or shutil.which(HOST)
    if program is None:
        raise TrefoilError(
            f"{HOST} is not installed beside this Python",
            "Install Trefoil again: pip install --force-reinstall trefoil, or pip install -e . in a checkout.",
            kind=ErrorKind.FILE_MISSING,
        )
    return Path(program).absolute()


def trust(data: Path, name: str, helpers: Path, now: int) -> None:
    """Keep a helper set under `name` for all devices of this person; a later one must be of the same helpers."""
    if not _SERVICE.fullmatch(name):
        raise TrefoilError(
            f"--service: {name[:99]!r} cannot be the name of a file",
            "Use letters, digits, dots, - and _.",
            kind=ErrorKind.MALFORMED,
        )
    helper_set = HelperSet.load(helpers)
    kept = services_folder(data) / f"{name}.json"
    store = MemoryStore().services
    if kept.exists():
        store.keep(name, kept.read_bytes())
        services.renew(store, name, helper_set, now)
    else:
        services.add(store, name, helper_set, now)
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(kept, store.all()[name])


def installed_services(data: Path) -> list[str]:
    """Return the names of the helper sets that can be read."""
    names = []
    for path in sorted(services_folder(data).glob("*.json")):
        try:
            HelperSet.load(path)
        except TrefoilError:
            continue
        names.append(path.stem)
    return names


def copy_extension(data: Path) -> Path:
    """Put the extension of this version into the person's folder, whole or not at all."""
    folder = extension_folder(data)
    draft, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    for path in (draft, old):
        shutil.rmtree(path, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, content in _extension_files(data).items():
        (draft / name).write_bytes(content)
    # A browser that is running reads the files again when it starts, or when the person asks for it.
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _extension_files(data: Path) -> dict[str, bytes]:
    """Return what the copy of the extension contains, by name."""
    paths = (*EXTENSION.iterdir(), STATIC / "style.css", STATIC / "trefoil.svg")
    files = {path.name: path.read_bytes() for path in paths}
    return files | {"services.js": services_script(installed_services(data)).encode()}


def services_script(names: list[str]) -> str:
    """Return services.js. The list is read synchronously by pages, so nothing that is asked for later can bring it."""
    return f"globalThis.__trefoil = {{ services: {json.dumps(names)} }};\n"


def write_manifest(kind: BrowserKind, program: Path, user_data: Path | None = None) -> Path:
    """Let a browser start the host, for this extension alone."""
    path = manifest_path(kind, user_data)
    content = {
        "name": NAME,
        "description": "Trefoil: one person's device",
        "path": str(program),
        "type": "stdio",
        "allowed_origins": _allowed_origins(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def remove_manifest(kind: BrowserKind) -> Path | None:
    """Remove a browser's manifest; return where it was."""
    path = manifest_path(kind)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    return path


def remove_extension(data: Path) -> Path | None:
    """Remove the copy of the extension; return where it was."""
    folder = extension_folder(data)
    if not folder.exists():
        return None
    shutil.rmtree(folder)
    return folder


def forget_devices(data: Path) -> int:
    """Delete the devices of all profiles and what they trust; return their number. None may be open in a browser.

    Their locks stay, so that a later device begins closed: the person's week has paid for reports already.
    """
    with locked_profiles(data):
        count = len(databases(data))
        for folder in profiles_folder(data).glob("*/"):
            shutil.rmtree(folder)
        shutil.rmtree(services_folder(data), ignore_errors=True)
    return count


@dataclass(frozen=True, slots=True)
class InstallCheck:
    """One line of `trefoil browser status`: what was looked at, whether it is well, and what to say of it."""

    name: str
    well: bool
    message: str


def checks(data: Path, kinds: list[BrowserKind]) -> list[InstallCheck]:
    """Look at everything that must be in place for a page to reach this person's device."""
    names = installed_services(data)
    listed = ", ".join(names) or "none yet; run: trefoil browser install --helpers FILE"
    return [
        _check_extension(data),
        *(check for kind in kinds for check in _check_manifest(kind)),
        InstallCheck("helper sets", bool(names), listed),
        _check_devices(data),
    ]


def _check_extension(data: Path) -> InstallCheck:
    folder = extension_folder(data)
    try:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    except OSError:
        return InstallCheck("extension", False, f"not in {folder}; run: trefoil browser install")
    if files != _extension_files(data):
        return InstallCheck("extension", False, f"{folder} is not of this Trefoil; run: trefoil browser install")
    return InstallCheck("extension", True, f"version {_manifest()['version']} in {folder}")


def _check_devices(data: Path) -> InstallCheck:
    """Read the settings of every device: one that is damaged keeps its browser without the API."""
    paths = databases(data)
    for path in paths:
        try:
            stored_limits(path)
        except TrefoilError as error:
            return InstallCheck("devices", False, f"{path} cannot be opened: {error}")
    return InstallCheck("devices", True, f"{len(paths)} in {profiles_folder(data)}")


def _check_manifest(kind: BrowserKind) -> list[InstallCheck]:
    path, advice = manifest_path(kind), f"run: trefoil browser install --browser {kind.label}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        program, origins = Path(content["path"]), content["allowed_origins"]
    except FileNotFoundError:
        return [InstallCheck(kind.label, False, f"no {path}; {advice}")]
    except (OSError, ValueError, KeyError, TypeError):
        return [InstallCheck(kind.label, False, f"{path} is damaged; {advice}")]
    if origins != _allowed_origins():
        return [InstallCheck(kind.label, False, f"{path} is for another extension; {advice}")]
    checked = [InstallCheck(kind.label, True, str(path)), _check_host(program)]
    if kind.confined:
        message = "it is confined (Snap or Flatpak) and may not be able to start the host; use another package of it"
        checked.append(InstallCheck(f"{kind.label} package", False, message))
    return checked


def _check_host(program: Path) -> InstallCheck:
    """Start the host once and ask what no device is needed for: any answer shows that it runs."""
    question = json.dumps({"id": 1, "kind": "closed", "tab": 0}).encode()
    try:
        run = subprocess.run(
            [program, "status"],
            input=_LENGTH.pack(len(question)) + question,
            capture_output=True,
            timeout=START_SECONDS,
            check=True,
        )
        answer = json.loads(run.stdout[_LENGTH.size :])
    except (OSError, subprocess.SubprocessError, ValueError):
        return InstallCheck("host", False, f"{program} does not start; run: trefoil browser install")
    return InstallCheck("host", answer.get("id") == 1, str(program))
