"""The alarm of joint noise: this helper's own failed checks, durable before any other party learns of them.

Among honest helpers no check ever fails, and a malicious helper passes one with probability below 2^−51.9. Its tries
must still be bounded: the file holds eight failures, and a helper whose file is full refuses joint noise until
its operator has cleared it. Only own checks count: a count of what peers claim would let one of them disable the mode.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mpc_helpers.mpc.session import MpcError, Stage
from protocol.errors import ErrorKind
from protocol.files import write_atomically

CAPACITY = 8
# The file has its full size from the start: a failure can be recorded even on a full disk.
_LINE = 128
_EMPTY = b" " * (_LINE - 1) + b"\n"
HINT = "Find out which helper is malicious, then run: trefoil alarm clear"


class FailedProofs:
    """A helper's file of failed checks, shared by its daemon and all of its workers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        """Create an empty file if there is none. Run by a daemon at start; never clears."""
        if not self._path.exists():
            write_atomically(self._path, CAPACITY * _EMPTY, 0o600)

    def failures(self) -> list[str]:
        """Return the failures since an operator last cleared the alarm, oldest first.

        Read without the lock, which a stopped worker may hold: a daemon must not block on it.
        """
        with _translate_errors(self._path), self._path.open("rb") as file:
            return _lines(file)

    def check_not_full(self) -> None:
        """Raise `MpcError` if the file is full: joint noise is then refused."""
        if len(self.failures()) >= CAPACITY:
            raise _too_many()

    def judge(self, holds: Callable[[], bool], about: str) -> bool:
        """Run one check and return its result. A failure is durable when this returns.

        Checks are serialised over all workers of this helper, and none runs while the file is full: with any number of
        concurrent sessions, no more than eight checks can ever fail.
        """
        with self._locked() as file:
            failed = len(_lines(file))
            if failed >= CAPACITY:
                raise _too_many()
            if holds():
                return True
            file.seek(failed * _LINE)
            file.write(about.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            return False

    def clear(self) -> list[str]:
        """Clear the alarm and return the failures. Run by an operator who has found their cause."""
        with self._locked() as file:
            cleared = _lines(file)
            file.seek(0)
            file.write(CAPACITY * _EMPTY)
            file.flush()
            os.fsync(file.fileno())
            return cleared

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with _translate_errors(self._path), self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Refuse if the file cannot be used: otherwise deleting it would lift the limit."""
    try:
        yield
    except OSError as error:
        message = f"the file of failed proofs {path} cannot be used: {error.strerror}"
        hint = "Restart this helper, which makes the file if it is missing."
        raise MpcError(Stage.PROOF, message, hint=hint, kind=ErrorKind.FILE_UNREADABLE) from None


def _lines(file: BinaryIO) -> list[str]:
    file.seek(0)
    lines = file.read(CAPACITY * _LINE).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _too_many() -> MpcError:
    message = f"this helper refuses joint noise: {CAPACITY} proofs of other helpers have failed here"
    return MpcError(Stage.PROOF, message, hint=HINT, kind=ErrorKind.DISABLED)
