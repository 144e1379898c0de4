"""The instance token: how a device detects that its database was restored or copied.

A sidecar file beside the database holds a random token, the inode of the database file, a counter that follows the one
inside, and the time of the latest report. A database without its token, with another's, in another file, or behind its
counter was copied or restored: its record of spending may be too small, so the device closes every epoch up to now, or
up to that time if the clock was set back. Restoring both files together, inode included, goes undetected; no state on
the same disk could detect it.
"""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ErrorKind, TrefoilError

TOKEN_SIZE = 16
_SIDECAR = struct.Struct(">8s16sQQq")
_MAGIC = b"TREFOIL1"
_BEGINNING = -(2**63)


class _Sidecar(NamedTuple):
    """The sidecar's contents."""

    token: bytes
    inode: int
    counter: int
    latest: int


def last_report_beside(database: Path) -> int | None:
    """Return the time of the latest report of a database at this path, by the token it left; None without one.

    For an unreadable token, return when it was last written: it proves only that there was a database.
    """
    try:
        with token_path(database).open("rb") as file:
            token, written = _parse(file.read()), int(os.fstat(file.fileno()).st_mtime)
    except OSError:
        return None
    latest = written if token is None else token.latest
    return None if latest == _BEGINNING else latest


def token_path(database: Path) -> Path:
    return database.with_name(database.name + ".instance")


class InstanceToken:
    """The open sidecar. Writing the counter costs one system call and no sync.

    After a power failure the counter here may be behind the database; that is no sign of a copy. After `kill -9` it is
    behind by at most the transaction that was being committed.
    """

    def __init__(self, database: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(token_path(database), flags, 0o600)
            self._inode = database.stat().st_ino
        except OSError as error:
            raise TrefoilError(
                f"cannot use {token_path(database)}: {error.strerror}", kind=ErrorKind.FILE_UNWRITABLE
            ) from None
        self._latest = _BEGINNING

    def vouches_for(self, token: bytes, counter: int) -> bool:
        """Return whether this sidecar was last written for the database with this token and counter.

        A database without any transaction needs no sidecar: its creator is about to write one.
        """
        sidecar = self._read()
        if sidecar is None:
            return counter == 0
        return sidecar.token == token and sidecar.inode == self._inode and counter >= sidecar.counter

    def latest(self) -> int:
        """Return the time of the latest report of any database at this path."""
        sidecar = self._read()
        return self._latest if sidecar is None else max(self._latest, sidecar.latest)

    def saw(self, moment: int) -> None:
        """Record in memory that a report is made at `moment`; `follow` writes it."""
        self._latest = max(self._latest, moment)

    def follow(self, token: bytes, counter: int) -> None:
        """Write the database's counter. Run after its transaction is durable."""
        os.pwrite(self._file, _SIDECAR.pack(_MAGIC, token, self._inode, counter, self.latest()), 0)

    def replace(self, token: bytes, counter: int) -> None:
        """Bind this sidecar to the database durably."""
        self.follow(token, counter)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> _Sidecar | None:
        return _parse(os.pread(self._file, _SIDECAR.size, 0))


def _parse(data: bytes) -> _Sidecar | None:
    """Return the contents, or None if they are not a sidecar's."""
    if len(data) != _SIDECAR.size or not data.startswith(_MAGIC):
        return None
    return _Sidecar._make(_SIDECAR.unpack(data)[1:])


def fresh_token() -> bytes:
    return secrets.token_bytes(TOKEN_SIZE)
