"""The instance token: how a device database knows that it is the one it was, and not an older copy of it.

A small file beside the database holds a random token, the inode of the database file, and a counter that follows the
one inside. A database without its token, with another's, in another file, or behind its counter was copied or restored:
what it says was spent may be too little, so the device closes every epoch up to now. Whoever puts both files back in
place together, inode and all, is not noticed; nothing on the disk alone could.
"""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path

from protocol.errors import TrefoilError

TOKEN_SIZE = 16
_SIDECAR = struct.Struct(">8s16sQQ")
_MAGIC = b"TREFOIL1"


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

    def vouches_for(self, token: bytes, counter: int) -> bool:
        """Whether the database with this token and counter is the one that this file was last written for."""
        data = os.pread(self._file, _SIDECAR.size, 0)
        if len(data) != _SIDECAR.size:
            return False
        magic, known, inode, reached = _SIDECAR.unpack(data)
        return bool(magic == _MAGIC and known == token and inode == self._inode and counter >= reached)

    def follow(self, token: bytes, counter: int) -> None:
        """Note how far the database has come. Run after its transaction is on disk."""
        os.pwrite(self._file, _SIDECAR.pack(_MAGIC, token, self._inode, counter), 0)

    def replace(self, token: bytes, counter: int) -> None:
        """Take the database as this instance from now on; on disk when this returns."""
        self.follow(token, counter)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def fresh_token() -> bytes:
    """A token that no other database has."""
    return secrets.token_bytes(TOKEN_SIZE)
