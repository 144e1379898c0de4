"""The alarm of joint noise: this helper's own failed checks, on disk before anyone hears of them.

Among honest helpers no check ever fails, and a cheat passes one with chance below 2^−51.9. So what bounds a cheater is
how often it may try: this file has room for eight failures, and a helper whose file is full refuses joint noise until
its operator has cleared it. Only own checks count: counting what peers say would let one of them shut the service down.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mpc_helpers.mpc.session import MpcError, Stage
from protocol.files import write_atomically

ROOM = 8
# Every line has its place from the start: a disk that is full cannot keep a failure from being written.
_LINE = 128
_EMPTY = b" " * (_LINE - 1) + b"\n"
HINT = "Find out which helper cheats, then run: trefoil alarm clear"


class FailedProofs:
    """A helper's file of failed checks, shared by its daemon and all of its workers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        """Run by a daemon that starts: an empty file, if there is none. Clearing is not done here."""
        if not self._path.exists():
            write_atomically(self._path, ROOM * _EMPTY, 0o600)

    def standing(self) -> list[str]:
        """What failed since an operator last cleared the alarm, oldest first.

        Read without the lock, which a worker that was stopped may hold: a daemon must not wait for it.
        """
        with _clear_errors(self._path), self._path.open("rb") as file:
            return _lines(file)

    def check_room(self) -> None:
        """Refuse joint noise while the file is full."""
        if len(self.standing()) >= ROOM:
            raise _too_many()

    def judge(self, holds: Callable[[], bool], about: str) -> bool:
        """Run one check. If it fails, that is on disk when this returns.

        One check at a time in all workers of this helper, and none while the file is full: however many sessions are
        under way at once, no more than eight checks can ever fail.
        """
        with self._locked() as file:
            failed = len(_lines(file))
            if failed >= ROOM:
                raise _too_many()
            if holds():
                return True
            file.seek(failed * _LINE)
            file.write(about.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            return False

    def clear(self) -> list[str]:
        """Run by an operator who knows why. Gives what was standing."""
        with self._locked() as file:
            cleared = _lines(file)
            file.seek(0)
            file.write(ROOM * _EMPTY)
            file.flush()
            os.fsync(file.fileno())
            return cleared

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with _clear_errors(self._path), self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """No file, no check: else whoever removes it removes the limit."""
    try:
        yield
    except OSError as error:
        message = f"the file of failed proofs {path} cannot be used: {error.strerror}"
        hint = "Restart this helper, which makes the file if it is missing."
        raise MpcError(Stage.PROOF, message, hint=hint) from None


def _lines(file: BinaryIO) -> list[str]:
    file.seek(0)
    lines = file.read(ROOM * _LINE).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _too_many() -> MpcError:
    message = f"this helper refuses joint noise: {ROOM} proofs of other helpers have failed here"
    return MpcError(Stage.PROOF, message, hint=HINT)
