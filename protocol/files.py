"""Atomic, durable file writes, and private files that only their owner can read.

Separate from `cli.console`, so that a helper's daemon needs no terminal library.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.errors import ErrorKind, TrefoilError

PRIVATE = 0o600
# Characters of a name that its temporary file has too: a name may be as long as the file system allows.
DRAFT_NAME = 40
# What a full disk, a quota and a limit on file sizes say.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FREE_SPACE = "Free some space, or choose another disk."


def unwritable(path: Path, error: OSError) -> TrefoilError:
    message = f"cannot write {path}: {error.strerror}"
    if error.errno in FULL:
        return TrefoilError(message, FREE_SPACE, kind=ErrorKind.NO_SPACE)
    return TrefoilError(message, kind=ErrorKind.FILE_UNWRITABLE)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically. The content is durable before the new name is visible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _draft(path, data, mode) as draft:
            draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # Name the file the caller asked for, not its temporary one.
        error.filename, error.filename2 = str(path), None
        raise


def write_private_file(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read. Never replace one: a lost key cannot be recovered."""
    try:
        with _draft(path, data, PRIVATE) as draft:
            # A link, unlike a rename, fails where there is a file already.
            os.link(draft, path)
            draft.unlink()
            _sync_folder(path.parent)
    except FileExistsError:
        raise TrefoilError(
            f"{path} exists already",
            "Move it away first; keys are never overwritten.",
            kind=ErrorKind.FILE_EXISTS,
        ) from None
    except OSError as error:
        raise unwritable(path, error) from None


def read_private_file(path: Path) -> bytes:
    """Return the content of a private file. Reject one that others could have read or changed."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise TrefoilError(
                    f"{path} can be read by others (mode {mode:04o})",
                    f"If it is the right file, run: chmod 600 {path}",
                    kind=ErrorKind.FILE_PERMISSIONS,
                )
            return file.read()
    except FileNotFoundError:
        raise TrefoilError(
            f"there is no key file {path}", "Make one with: trefoil keygen", kind=ErrorKind.FILE_MISSING
        ) from None
    except OSError as error:
        raise TrefoilError(f"cannot read {path}: {error.strerror}", kind=ErrorKind.FILE_UNREADABLE) from None


@contextmanager
def remove_on_failure(*paths: Path) -> Iterator[None]:
    """If the block raises, remove those of `paths` that it created, and the folders it created for them."""
    new = [path for path in paths if not os.path.lexists(path)]
    folders = sorted({folder for path in new for folder in path.parents if not folder.exists()}, reverse=True)
    try:
        yield
    except BaseException:
        for path in new:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for folder in folders:
            # A folder that another process uses by now stays.
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _draft(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Yield a durable temporary file with `data` beside `path`; remove it if the block raises."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:DRAFT_NAME]}.")
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
    """Make a rename durable: a directory entry is durable only once its directory is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
