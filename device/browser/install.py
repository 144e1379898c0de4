"""Install the extension and the native messaging host for a person's browsers, say how they are, and remove them.

A browser finds the host by a manifest in its own folder, which names the program and the one extension that may start
it. The extension is copied to a folder of the person's, from where the browser loads it unpacked, together with the
dashboard's style sheet and the list of helper sets that pages can see.
"""

from __future__ import annotations

import contextlib
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
from device.browser.profiles import data_folder, databases, locked_profiles, profiles_folder, services_folder
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
    """The browsers that take the extension, with their folders on Linux, on macOS and in the registry of Windows."""

    CHROMIUM = "chromium", "chromium", "Chromium", r"Software\Chromium"
    CHROME = "chrome", "google-chrome", "Google/Chrome", r"Software\Google\Chrome"
    EDGE = "edge", "microsoft-edge", "Microsoft Edge", r"Software\Microsoft\Edge"

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def user_data(self) -> Path:
        """Return the folder in which the browser keeps its profiles and, on Linux and macOS, looks for hosts."""
        _, linux, macos, _ = self.value
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / macos
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / linux

    @property
    def registry_key(self) -> str:
        return rf"{self.value[3]}\NativeMessagingHosts\{NAME}"

    @property
    def confined(self) -> bool:
        """Return whether the browser looks like a Snap or Flatpak, which may start no program outside of itself."""
        program = shutil.which(self.value[1]) or ""
        return program.startswith(("/snap/", "/var/lib/flatpak/")) or "/.local/share/flatpak/" in program


def chosen_browsers(names: list[str]) -> list[BrowserKind]:
    """Return the browsers of these names, or without any those that have been used on this machine."""
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
    chosen = [kinds[name] for name in names] or [kind for kind in BrowserKind if _is_used(kind)]
    if not chosen:
        raise TrefoilError(
            "no browser was found: none of Chromium, Chrome and Edge has been used by you on this machine",
            "Name the one that you will use with --browser chromium.",
            kind=ErrorKind.FILE_MISSING,
        )
    return chosen


def _is_used(kind: BrowserKind) -> bool:
    if sys.platform == "win32":
        import winreg

        try:
            winreg.CloseKey(winreg.OpenKey(winreg.HKEY_CURRENT_USER, kind.value[3]))
        except OSError:
            return False
        return True
    return kind.user_data.is_dir()


def manifest_path(kind: BrowserKind, user_data: Path | None = None) -> Path:
    """Return where the native manifest for a browser lies; `user_data` is for one started with --user-data-dir."""
    if sys.platform == "win32" and user_data is None:
        return data_folder() / f"{NAME}.{kind.label}.json"
    return (user_data or kind.user_data) / "NativeMessagingHosts" / f"{NAME}.json"


def extension_folder(data: Path) -> Path:
    return data / "extension"


def extension_id() -> str:
    """Return the id that browsers derive from the key in the extension's manifest, wherever it is loaded from."""
    digest = sha256(b64decode(_manifest(EXTENSION)["key"])).hexdigest()[:32]
    return "".join(chr(ord("a") + int(digit, 16)) for digit in digest)


def _manifest(folder: Path) -> dict[str, str]:
    content: dict[str, str] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
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
    draft = folder.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(EXTENSION, draft)
    for name in ("style.css", "trefoil.svg"):
        shutil.copyfile(STATIC / name, draft / name)
    (draft / "services.js").write_text(services_script(installed_services(data)), encoding="utf-8")
    # A browser that is running reads the files again when it starts, or when the person asks for it.
    old = folder.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


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
        "allowed_origins": [f"chrome-extension://{extension_id()}/"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    if sys.platform == "win32" and user_data is None:
        import winreg

        winreg.SetValue(winreg.HKEY_CURRENT_USER, kind.registry_key, winreg.REG_SZ, str(path))
    return path


def remove_manifest(kind: BrowserKind) -> Path | None:
    """Remove a browser's manifest; return where it was."""
    path = manifest_path(kind)
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(FileNotFoundError):
            winreg.DeleteKey(winreg.HKEY_CURRENT_USER, kind.registry_key)
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
    """Delete the devices of all profiles and return their number. None is deleted while a browser has one open."""
    with locked_profiles(data):
        count = len(databases(data))
        shutil.rmtree(profiles_folder(data), ignore_errors=True)
    return count


@dataclass(frozen=True, slots=True)
class InstallCheck:
    """One line of `trefoil browser status`: what was looked at, whether it is well, and what to say of it."""

    name: str
    well: bool
    message: str


def checks(data: Path, kinds: list[BrowserKind]) -> list[InstallCheck]:
    """Look at everything that must be in place for a page to reach this person's device."""
    return [
        _check_extension(data),
        *(check for kind in kinds for check in _check_manifest(kind)),
        InstallCheck("helper sets", bool(installed_services(data)), ", ".join(installed_services(data)) or "none yet"),
        InstallCheck("devices", True, f"{len(databases(data))} in {profiles_folder(data)}"),
    ]


def _check_extension(data: Path) -> InstallCheck:
    folder, wanted = extension_folder(data), _manifest(EXTENSION)["version"]
    if not (folder / "manifest.json").exists():
        return InstallCheck("extension", False, f"not in {folder}; run: trefoil browser install")
    version = _manifest(folder)["version"]
    if version != wanted or any(_differs(path, folder) for path in EXTENSION.iterdir()):
        return InstallCheck(
            "extension", False, f"{folder} has another version than this Trefoil; run: trefoil browser install"
        )
    return InstallCheck("extension", True, f"version {version} in {folder}")


def _differs(path: Path, folder: Path) -> bool:
    copy = folder / path.name
    return path.name != "services.js" and (not copy.exists() or copy.read_bytes() != path.read_bytes())


def _check_manifest(kind: BrowserKind) -> list[InstallCheck]:
    path = manifest_path(kind)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        program, origins = Path(content["path"]), content["allowed_origins"]
    except FileNotFoundError:
        return [InstallCheck(kind.label, False, f"no {path}; run: trefoil browser install --browser {kind.label}")]
    except (OSError, ValueError, KeyError, TypeError):
        return [
            InstallCheck(kind.label, False, f"{path} is damaged; run: trefoil browser install --browser {kind.label}")
        ]
    if origins != [f"chrome-extension://{extension_id()}/"]:
        return [InstallCheck(kind.label, False, f"{path} is for another extension; run: trefoil browser install")]
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
