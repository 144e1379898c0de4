"""Files that are written whole or not at all, and private files that only their owner can read.

Apart from `console`, so that a helper's daemon, which has nobody to show anything to, needs no terminal library.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.errors import TrefoilError

PRIVATE = 0o600


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, durable before it shows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _draft(path, data, mode) as draft:
            draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # Of the file that was wanted, not of its draft.
        error.filename, error.filename2 = str(path), None
        raise


def write_private_file(path: Path, data: bytes) -> None:
    """Create a file only its owner can read. Refuses to replace one: a lost key cannot be had back."""
    try:
        with _draft(path, data, PRIVATE) as draft:
            # A link, unlike a rename, fails where there is a file already.
            os.link(draft, path)
            draft.unlink()
            _sync_folder(path.parent)
    except FileExistsError:
        raise TrefoilError(f"{path} exists already", "Move it away first; keys are never overwritten.") from None
    except OSError as error:
        raise TrefoilError(f"cannot write {path}: {error.strerror}") from None


def read_private_file(path: Path) -> bytes:
    """Read a private file, unless others could have read or changed it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise TrefoilError(
                    f"{path} can be read by others (mode {mode:04o})", f"If it is the right file, run: chmod 600 {path}"
                )
            return file.read()
    except FileNotFoundError:
        raise TrefoilError(f"there is no key file {path}", "Make one with: trefoil keygen") from None
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}") from None


@contextmanager
def made_together(*paths: Path) -> Iterator[None]:
    """What the block makes at `paths`, all of it or nothing: those that were not there before go again if it fails."""
    new = [path for path in paths if not os.path.lexists(path)]
    folders = sorted({folder for path in new for folder in path.parents if not folder.exists()}, reverse=True)
    try:
        yield
    except BaseException:
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for folder in folders:
            # One that somebody else uses by now stays.
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _draft(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """`data` in a file of its own beside `path`, on disk; gone again if the block does not put it in place."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """A name is durable when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
