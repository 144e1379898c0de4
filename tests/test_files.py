"""Files: whole or not at all, private from the start, and no daemon that needs a terminal library for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import TrefoilError
from protocol.files import read_private_file, write_atomically, write_private_file


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_and_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result"
    write_atomically(path, b"one")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o644)
    write_atomically(path, b"two", mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o600)


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_private_file(path, b"first")
    with pytest.raises(TrefoilError, match="exists already"):
        write_private_file(path, b"second")
    assert read_private_file(path) == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(TrefoilError, match=r"cannot write .*key: No space left"):
        write_private_file(tmp_path / "key", b"secret")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TrefoilError, match="cannot write"):
        write_private_file(tmp_path / "absent" / "key", b"secret")


def test_missing_and_unreadable_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(TrefoilError, match="there is no key file"):
        read_private_file(tmp_path / "absent")
    with pytest.raises(TrefoilError, match="cannot read"):
        read_private_file(tmp_path)


def test_a_daemon_needs_no_terminal_library() -> None:
    """A helper runs for months; what it never uses it does not load."""
    program = "import sys, mpc_helpers.service.daemon; print(*{name.split('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"rich", "typer", "click"} & set(ran.stdout.split()) == set()
