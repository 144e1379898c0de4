"""The keys of stored shares, in files outside the database: with its key a share is erased, wherever its bytes are.

PostgreSQL overwrites nothing: a share that was set to NULL stays in its pages, its log, its archives and standbys. So
each share is encrypted there under a random key of its own, and the key is a file that is overwritten and removed. A
host that takes over does not have the files of the first: there an attempt that was voted or released ends without this
helper's share, and its reports stay spent. That errs on the side of privacy, and costs the answers in flight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mpc_helpers.ledger.engine import LedgerError
from protocol.errors import ErrorKind
from protocol.files import PRIVATE, write_atomically

_KEY_SIZE = 32
_NONCE_SIZE = 12


class ShareKeys:
    """One file for each stored share. Without a folder shares are stored as they are: SQLite overwrites the erased."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def seal(self, attempt_id: bytes, share: bytes) -> bytes:
        """Return the share as it is stored; its key is durable.

        A vote whose commit was in doubt may be repeated. So a key that exists is used again.
        """
        if self._folder is None:
            return share
        path = self._folder / attempt_id.hex()
        try:
            if not path.exists():
                write_atomically(path, os.urandom(_KEY_SIZE), PRIVATE)
            key = path.read_bytes()
        except OSError as error:
            message = f"cannot write the key of a share: {error.strerror}"
            raise LedgerError(
                message, f"Free disk space, or repair the disk of {path}.", kind=ErrorKind.NO_SPACE
            ) from None
        nonce = os.urandom(_NONCE_SIZE)
        return nonce + AESGCM(key).encrypt(nonce, share, attempt_id)

    def open(self, attempt_id: bytes, stored: bytes | None) -> bytes | None:
        """Return the share, or None if it was erased or its key is at another host."""
        if self._folder is None or stored is None:
            return stored
        path = self._folder / attempt_id.hex()
        try:
            key = path.read_bytes()
            return AESGCM(key).decrypt(stored[:_NONCE_SIZE], stored[_NONCE_SIZE:], attempt_id)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, InvalidTag) as error:
            message = f"cannot open a stored share with the key {path}"
            hint = "Repair the disk; or remove that file, and the attempt ends without this helper's share."
            raise LedgerError(message, hint, kind=ErrorKind.FILE_DAMAGED) from error

    def erase(self, attempt_id: bytes) -> None:
        """Overwrite and remove a key. Best effort: `erase_unless` tries again when the helper starts."""
        if self._folder is not None:
            _erase(self._folder / attempt_id.hex())

    def erase_unless(self, stored: Callable[[bytes], bool]) -> None:
        """Erase the keys of attempts whose share is not stored, as a crash or a vote that was refused leaves them."""
        for path in [] if self._folder is None or not self._folder.exists() else list(self._folder.iterdir()):
            with suppress(ValueError):
                if not stored(bytes.fromhex(path.name)):
                    _erase(path)


def _erase(path: Path) -> None:
    with suppress(OSError):
        with path.open("r+b") as file:
            file.write(bytes(_KEY_SIZE))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
