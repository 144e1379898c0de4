"""One device for each profile of a browser: where it lies, and how it begins.

A new device is off until the person agrees. One that is made where another was made before begins closed: removing the
extension and adding it again must not renew the budgets of the week.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from device import agent, services
from device.device import Device
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperSet

DATABASE = "device.db"
# How long to wait for the host before this one, which the browser has told to end.
LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PROFILE = re.compile(r"[0-9a-f]{32}")


def data_folder() -> Path:
    """Return where a person's devices, the extension and its helper sets are kept."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Trefoil"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trefoil"


def profiles_folder(data: Path) -> Path:
    return data / "browser"


def services_folder(data: Path) -> Path:
    """Return the folder of helper sets that every device of this person trusts, each under the name of its file."""
    return data / "services"


def databases(data: Path) -> list[Path]:
    """Return the databases of all profiles, without drafts."""
    return sorted(path for path in profiles_folder(data).glob(f"*/{DATABASE}") if _PROFILE.fullmatch(path.parent.name))


@contextmanager
def opened_profile(data: Path, profile: str) -> Iterator[Device[agent.Report]]:
    """Open the device of a profile, and create it if there is none. One process at a time."""
    if not _PROFILE.fullmatch(profile):
        raise TrefoilError("this is not the name of a profile", kind=ErrorKind.MALFORMED)
    folder = profiles_folder(data)
    # Also where every device was deleted: what they have spent of this week is unknown just the same.
    made_before = folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder / f"{profile}.lock"):
        database = folder / profile / DATABASE
        if not database.exists():
            _create(folder / profile, closed=made_before)
        _trust(database, services_folder(data))
        with agent.opened(database) as device:
            yield device


@contextmanager
def locked_profiles(data: Path) -> Iterator[None]:
    """Hold the locks of all profiles, so that no browser has a device open."""
    with ExitStack() as locks:
        for path in profiles_folder(data).glob("*.lock"):
            locks.enter_context(_locked(path, wait=0))
        yield


@contextmanager
def _locked(path: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock of one profile: two hosts would spend side by side, and each with its own activations."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + (LOCK_SECONDS if wait is None else wait)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TrefoilError(
                        "a browser has the device of this profile open", "Close the browser first.", kind=ErrorKind.BUSY
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(file)


def _create(folder: Path, *, closed: bool) -> None:
    """Create a device beside its place, switched off, and move it there whole: no crash leaves one that is on."""
    draft = folder.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    agent.create(draft / DATABASE)
    with agent.opened(draft / DATABASE) as device:
        device.disable()
        if closed:
            device.clear_browsing_history(forget_visits=True)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _trust(database: Path, folder: Path) -> None:
    """Let the device hold the installed helper sets. One that it holds is renewed by its own three helpers only."""
    with agent.opened_store(database) as store, store.transaction():
        for path in sorted(folder.glob("*.json")):
            put: Callable[..., object] = services.renew if path.stem in store.services.all() else services.add
            with suppress(TrefoilError, OSError):
                put(store.services, path.stem, HelperSet.load(path), agent.system_clock())
