"""The instance token: how a device database knows that it is the one it was, and not an older copy of it.

A small file beside the database holds a random token, the inode of the database file, a counter that follows the one
inside, and the latest moment that anything was reported at. A database without its token, with another's, in another
file, or behind its counter was copied or restored: what it says was spent may be too little, so the device closes every
epoch up to now, or up to that moment if the clock was set back. Whoever puts both files back in place together, inode
and all, is not noticed; nothing on the disk alone could.
"""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

from protocol.errors import TrefoilError

TOKEN_SIZE = 16
_SIDECAR = struct.Struct(">8s16sQQq")
_MAGIC = b"TREFOIL1"
_BEGINNING = -(2**63)


class _Sidecar(NamedTuple):
    """The file's contents."""

    token: bytes
    inode: int
    counter: int
    latest: int


def last_report_beside(database: Path) -> int | None:
    """The latest moment that a database in this place reported at, by the token it left; None if there was none.

    A token that cannot be read says only that there was one: then it is the moment that it was last written.
    """
    try:
        with token_path(database).open("rb") as file:
            token, written = _parse(file.read()), int(os.fstat(file.fileno()).st_mtime)
    except OSError:
        return None
    latest = written if token is None else token.latest
    return None if latest == _BEGINNING else latest


def token_path(database: Path) -> Path:
    """Where the token of `database` is kept."""
    return database.with_name(database.name + ".instance")


class InstanceToken:
    """The open file with the token. Writing the counter costs one system call and no wait for the disk.

    After a power cut the counter here may be behind the database; that is no sign of a copy. After `kill -9` it is not
    behind by more than the transaction that was being finished.
    """

    def __init__(self, database: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(token_path(database), flags, 0o600)
            self._inode = database.stat().st_ino
        except OSError as error:
            raise TrefoilError(f"cannot use {token_path(database)}: {error.strerror}") from None
        self._latest = _BEGINNING

    def vouches_for(self, token: bytes, counter: int) -> bool:
        """Whether the database with this token and counter is the one that this file was last written for.

        A database that nothing was ever done with needs no voucher: its maker is about to write one.
        """
        known = self._read()
        if known is None:
            return counter == 0
        return known.token == token and known.inode == self._inode and counter >= known.counter

    def latest(self) -> int:
        """The latest moment that any database in this place reported at, as far as is known."""
        known = self._read()
        return self._latest if known is None else max(self._latest, known.latest)

    def saw(self, moment: int) -> None:
        """Something is being reported at `moment`."""
        self._latest = max(self._latest, moment)

    def follow(self, token: bytes, counter: int) -> None:
        """Note how far the database has come. Run after its transaction is on disk."""
        os.pwrite(self._file, _SIDECAR.pack(_MAGIC, token, self._inode, counter, self.latest()), 0)

    def replace(self, token: bytes, counter: int) -> None:
        """Take the database as this instance from now on; on disk when this returns."""
        self.follow(token, counter)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> _Sidecar | None:
        return _parse(os.pread(self._file, _SIDECAR.size, 0))


def _parse(data: bytes) -> _Sidecar | None:
    """What the file says, or None if it says nothing."""
    if len(data) != _SIDECAR.size or not data.startswith(_MAGIC):
        return None
    return _Sidecar._make(_SIDECAR.unpack(data)[1:])


def fresh_token() -> bytes:
    """A token that no other database has."""
    return secrets.token_bytes(TOKEN_SIZE)
