"""`trefoil browser install`, `status` and `uninstall` in an empty home; what the extension and the wheel contain."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from device.browser import install, profiles
from device.browser.install import EXTENSION, BrowserKind
from protocol.cli import app as cli
from protocol.errors import ErrorKind
from tests.support.processes import ROOT
from tests.support.protocol_samples import HELPER_SET
from tests.support.raising import raises

FILES = sorted(path.name for path in EXTENSION.iterdir())
PROFILE = "0" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without anything, on Linux, and a host that can be started."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / install.HOST
    program.write_text(f"#!/bin/sh\ncd '{ROOT}' && exec '{sys.executable}' -m device.browser.host \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(install, "host_program", lambda: program)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def trefoil(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Run `trefoil browser`; its exit code and its JSON."""
    code = cli.run(["browser", *arguments, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def kind_of(result: tuple[int, Any]) -> str:
    code, document = result
    assert code == 1 and document["error"]["hint"]
    kind: str = document["error"]["kind"]
    return kind


def test_install_status_uninstall(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, config = home / ".local/share/trefoil", home / ".config"
    helpers = home / "helpers.json"
    helpers.write_text(json.dumps(HELPER_SET.to_json()))
    code, result = trefoil("install", "--browser", "chromium", "--browser", "edge", capsys=capsys)
    assert code == 0 and result["extension"] == str(data / "extension")
    manifest = json.loads((config / "chromium/NativeMessagingHosts/org.trefoil.device.json").read_text())
    assert manifest["allowed_origins"] == [f"chrome-extension://{install.extension_id()}/"]
    assert Path(manifest["path"]).is_absolute() and manifest["type"] == "stdio"
    assert (config / "microsoft-edge/NativeMessagingHosts/org.trefoil.device.json").exists()
    copied = sorted(path.name for path in (data / "extension").iterdir())
    assert copied == sorted([*FILES, "style.css", "trefoil.svg"])

    # Without a name: the browsers that have a folder.
    code, result = trefoil("status", capsys=capsys)
    well = {check["name"]: check["well"] for check in result["checks"]}
    assert code == 1
    assert well == {
        "extension": True,
        "chromium": True,
        "edge": True,
        "host": True,
        "helper sets": False,
        "devices": True,
    }

    code, result = trefoil("uninstall", "--browser", "edge", capsys=capsys)
    assert code == 0 and len(result["removed"]) == 1 and (data / "extension").exists()
    code, result = trefoil("uninstall", capsys=capsys)
    assert code == 0 and len(result["removed"]) == 2
    assert not list(config.rglob("*.json")) and not (data / "extension").exists()
    assert trefoil("uninstall", capsys=capsys) == (0, {"removed": [], "devices": 0})


def test_status_names_what_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> set[str]:
        code, result = trefoil("status", "--browser", "chrome", capsys=capsys)
        assert code == 1
        return {check["name"] for check in result["checks"] if not check["well"]} - {"helper sets"}

    assert wrong() == {"extension", "chrome"}
    trefoil("install", "--browser", "chrome", capsys=capsys)
    assert wrong() == set()
    data = profiles.data_folder()
    folder = install.extension_folder(data)

    def damaged() -> set[str]:
        """What is wrong beside the browsers, without starting the host."""
        return {check.name for check in install.checks(data, []) if not check.well} - {"helper sets"}

    for name in ("worker.js", "style.css", "services.js", "manifest.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_text("{")
        assert damaged() == {"extension"}
        (folder / name).write_bytes(kept)
    with profiles.opened_profile(data, PROFILE):
        assert damaged() == set()
    (database,) = profiles.databases(data)
    database.write_bytes(b"no database")
    assert damaged() == {"devices"}
    database.unlink()
    (folder / "added.js").write_text("// by somebody else")
    manifest = install.manifest_path(BrowserKind.CHROME)
    for damage in ("{", "[]", '{"path": "/nowhere", "allowed_origins": []}'):
        manifest.write_text(damage)
        assert wrong() == {"extension", "chrome"}
    install.write_manifest(BrowserKind.CHROME, home / "no such program")
    assert wrong() == {"extension", "host"}
    install.write_manifest(BrowserKind.CHROME, Path("/bin/true"))
    assert wrong() == {"extension", "host"}


def test_a_wrong_browser_gets_an_error_and_nothing_is_written(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind_of(trefoil("install", capsys=capsys)) == "file_missing"
    assert kind_of(trefoil("install", "--browser", "firefox", capsys=capsys)) == "unknown_name"
    assert kind_of(trefoil("install", "--browser", "lynx", capsys=capsys)) == "unknown_name"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        assert kind_of(trefoil("install", "--browser", "chrome", capsys=capsys)) == "missing_dependency"
    arguments = ("install", "--browser", "chrome", "--helpers", str(home / "none.json"))
    assert kind_of(trefoil(*arguments, capsys=capsys)).startswith("file")
    assert list(home.iterdir()) == []


def test_helper_sets_of_a_person(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name cannot lead out of its folder, and a set is replaced by its own helpers' next one alone."""
    helpers, data = home / "helpers.json", home / "data"
    helpers.write_text(json.dumps(HELPER_SET.to_json()))
    now = HELPER_SET.helpers[0].hpke_keys[0].not_before + 1
    for name in ("../x", "a/b", ".hidden", ""):
        with raises(ErrorKind.MALFORMED):
            install.trust(data, name, helpers, now)
    assert not data.exists()
    install.trust(data, "north", helpers, now)
    install.trust(data, "north", helpers, now)
    assert install.installed_services(data) == ["north"]
    (profiles.services_folder(data) / "damaged.json").write_text("{")
    script = (install.copy_extension(data) / "services.js").read_text()
    assert script == 'globalThis.__trefoil = { services: ["north"] };\n'


def test_devices_stay_unless_they_are_to_be_forgotten(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = profiles.data_folder()
    with profiles.opened_profile(data, PROFILE):
        assert kind_of_busy(capsys) == "busy"
    assert trefoil("uninstall", capsys=capsys)[0] == 0 and len(profiles.databases(data)) == 1
    sqlite3.connect(profiles.databases(data)[0]).close()
    profiles.services_folder(data).mkdir()
    assert trefoil("uninstall", "--forget", capsys=capsys) == (0, {"removed": [], "devices": 1})
    assert profiles.databases(data) == [] and not profiles.services_folder(data).exists()
    # It would have a second budget for this week.
    with profiles.opened_profile(data, "f" * 32) as device:
        assert device.overview().barrier is not None and not device.overview().enabled


def kind_of_busy(capsys: pytest.CaptureFixture[str]) -> str:
    code, document = trefoil("uninstall", "--forget", capsys=capsys)
    assert code != 0
    kind: str = document["error"]["kind"]
    return kind


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("darwin", BrowserKind.CHROMIUM, "Library/Application Support/Chromium/NativeMessagingHosts"),
        ("darwin", BrowserKind.CHROME, "Library/Application Support/Google/Chrome/NativeMessagingHosts"),
        ("darwin", BrowserKind.EDGE, "Library/Application Support/Microsoft Edge/NativeMessagingHosts"),
        ("linux", BrowserKind.CHROME, ".config/google-chrome/NativeMessagingHosts"),
    ],
)
def test_where_each_browser_looks(
    home: Path, monkeypatch: pytest.MonkeyPatch, platform: str, kind: BrowserKind, expected: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert install.manifest_path(kind).parent == home / expected


def test_the_extension_asks_for_these_permissions_and_no_others() -> None:
    manifest = json.loads((EXTENSION / "manifest.json").read_text())
    assert set(manifest["permissions"]) == {
        *("nativeMessaging", "scripting", "storage", "webNavigation", "webRequest", "history")
    }
    assert manifest["host_permissions"] == ["https://*/*"]
    assert manifest["incognito"] == "not_allowed"
    assert not {"content_scripts", "web_accessible_resources", "externally_connectable"} & set(manifest)
    policy = manifest["content_security_policy"]["extension_pages"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert f'version = "{manifest["version"]}"' in (ROOT / "pyproject.toml").read_text()


def test_every_file_that_is_named_is_there_and_every_file_is_named() -> None:
    text = "".join(path.read_text() for path in EXTENSION.iterdir())
    copied = {"style.css", "trefoil.svg"}
    named = set(re.findall(r'"([\w.]+\.(?:js|html|css|svg))"', text))
    assert named - copied == set(FILES) - {"manifest.json"}


@pytest.mark.parametrize("path", sorted(EXTENSION.glob("*.js")), ids=lambda path: path.name)
def test_scripts_are_strict_and_bring_no_code_from_elsewhere(path: Path) -> None:
    script = path.read_text()
    assert not re.search(
        r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|import\(", script
    )
    assert not re.search(r"https?://(?!\*/)", script) and "console." not in script
    assert '"use strict";' in script or path.name == "services.js"


@pytest.mark.parametrize("path", sorted(EXTENSION.glob("*.html")), ids=lambda path: path.name)
def test_pages_have_no_script_or_style_of_their_own(path: Path) -> None:
    page = path.read_text()
    assert re.findall(r"<script(?! src=\"\w+\.js\" defer></script>)", page) == []
    assert "<style" not in page and " style=" not in page and " on" + "click" not in page


def test_nothing_keeps_the_extension_out_of_a_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "/device" in build["include"] and not [path for path in build["exclude"] if "device" in path]
    ignored = subprocess.run(["git", "check-ignore", *EXTENSION.iterdir()], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""


@pytest.mark.skipif("TREFOIL_LOAD" not in os.environ, reason="half a minute: make load builds a wheel")
def test_a_wheel_has_the_extension_and_its_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if built.returncode != 0 and "hatchling" in built.stderr:
        pytest.skip("no wheel can be built here: hatchling cannot be installed")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        scripts = next(archive.read(name) for name in names if name.endswith("entry_points.txt")).decode()
    assert {f"device/browser/extension/{name}" for name in FILES} <= set(names)
    assert "device/dashboard/static/style.css" in names
    assert "trefoil-browser-host = device.browser.host:main" in scripts
