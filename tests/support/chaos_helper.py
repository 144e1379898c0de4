"""A helper daemon with failpoints, for tests only: `python -m tests.support.chaos_helper CONFIG`.

It is the installed daemon in every respect but its constructor arguments: the step callback, the clock and the pace.
What is to go wrong is read from `chaos.json` beside the configuration each time a step of COMMIT.md is reached, and
struck off before it happens, so that a helper that comes back goes on with the rest of the plan. The check of reports'
numbers writes nothing, so it has no steps in COMMIT.md; its messages are watched instead. `weather.json` says how
things are around it at the moment: how far its clock is off, and which peers it cannot reach. Only tests write it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mpc_helpers.agreement.agreement import Agreement
from mpc_helpers.agreement.messages import Body, Show
from mpc_helpers.agreement.peers import Peers, RetryPolicy
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.service import daemon
from mpc_helpers.service.daemon import Parts, run
from mpc_helpers.service.transport import PeerError, Transport
from protocol.errors import TrefoilError
from protocol.files import write_atomically

RETRY = RetryPolicy(first_delay=0.02, max_agree_delay=0.2, max_poll_delay=0.3, reply_timeout=1.5)
PLAN = "chaos.json"
WEATHER = "weather.json"
FIRED = "chaos.log"


class Fault(Enum):
    """What may happen at a step."""

    KILL_DAEMON = "kill -9 daemon"
    KILL_WORKER = "kill -9 worker"
    STOP_DAEMON = "SIGSTOP daemon"
    STOP_WORKER = "SIGSTOP worker"
    FILL_DISK = "full disk"


class CheckFailpoint(Enum):
    """Moments in the check of reports' numbers."""

    SHOW = "before asking for blocks"
    SHOWN = "blocks computed, answer not sent"


Moment = Failpoint | CheckFailpoint


def moment(name: str) -> Moment:
    """By the name that a plan has it under."""
    return CheckFailpoint[name] if name in CheckFailpoint.__members__ else Failpoint[name]


@dataclass(frozen=True)
class ArmedFault:
    """One thing that goes wrong, the next time its step is reached."""

    step: str
    action: str

    @classmethod
    def of(cls, step: Moment, action: Fault) -> ArmedFault:
        return cls(step.name, action.name)


@dataclass(frozen=True)
class Chaos:
    """What one helper has before it: failpoints in order, and how far its clock is off."""

    plan: tuple[ArmedFault, ...] = ()
    skew: int = 0

    @classmethod
    def load(cls, folder: Path) -> Chaos:
        with contextlib.suppress(FileNotFoundError):
            stored = json.loads((folder / PLAN).read_bytes())
            return cls(tuple(ArmedFault(**entry) for entry in stored["plan"]), stored["skew"])
        return cls()

    def save(self, folder: Path) -> None:
        write_atomically(folder / PLAN, json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class Weather:
    """What is around one helper now: seconds by which its clock is off, and the peers that it cannot reach."""

    skew: int = 0
    cut: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Weather:
        with contextlib.suppress(FileNotFoundError):
            stored = json.loads((folder / WEATHER).read_bytes())
            return cls(stored["skew"], tuple(stored["cut"]))
        return cls()

    def save(self, folder: Path) -> None:
        write_atomically(folder / WEATHER, json.dumps(asdict(self)).encode())


class CutTransport(Transport):
    """The way to the peers, while there is one."""

    folder: Path

    async def _exchange(self, party: int, *request: Any) -> bytes:
        if party in Weather.load(self.folder).cut:
            raise PeerError(f"helper {party + 1} cannot be reached: no route", party=party)
        return await super()._exchange(party, *request)


def workers_of(daemon: int) -> list[int]:
    """The worker processes that a daemon's fork server has forked and that are still there."""
    fork_servers = [child for child in _children(daemon) if b"mpc_helpers.mpc.fork_server_main" in _command(child)]
    return [worker for fork_server in fork_servers for worker in _children(fork_server)]


def _children(parent: int) -> list[int]:
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name: the state, where a Z has ended already, and the parent.
                state, of = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(of) == parent and state != "Z":
                    children.append(int(entry.name))
    return children


def _command(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


class Failpoints:
    """The step callback. Ledgers call it from threads of their own, so the plan is read under a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def reach(self, step: Moment) -> None:
        with self._lock:
            chaos = Chaos.load(self._folder)
            if not chaos.plan or chaos.plan[0].step != step.name:
                return
            Chaos(chaos.plan[1:], chaos.skew).save(self._folder)
            action = Fault[chaos.plan[0].action]
            targets = self._targets(action)
            with (self._folder / FIRED).open("a") as log:
                log.write(f"{step.name} {action.name} {len(targets)}\n")
            self._act(action, targets)

    def now(self) -> int:
        """The clock, as wrong as the plan wants it."""
        return int(time.time()) + Chaos.load(self._folder).skew + Weather.load(self._folder).skew

    def _targets(self, action: Fault) -> list[int]:
        if action in (Fault.KILL_WORKER, Fault.STOP_WORKER):
            return workers_of(os.getpid())
        return [os.getpid()]

    def _act(self, action: Fault, targets: list[int]) -> None:
        if action is Fault.FILL_DISK:
            # Every write beyond the first byte of a file fails from here on; the test makes room again from outside.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            return
        what = signal.SIGKILL if action in (Fault.KILL_DAEMON, Fault.KILL_WORKER) else signal.SIGSTOP
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, what)


def watch_check(failpoints: Failpoints) -> None:
    """Let the plan act where blocks are asked for and where they are shown; the list of their hashes goes before."""
    call, answer = Peers.call, Agreement._answer_show

    async def watched_call(self: Peers, party: int, body: Body) -> Body | None:
        if isinstance(body, Show) and body.blocks:
            failpoints.reach(CheckFailpoint.SHOW)
        return await call(self, party, body)

    async def watched_answer(self: Agreement, question: Show) -> Body:
        reply = await answer(self, question)
        if question.blocks:
            failpoints.reach(CheckFailpoint.SHOWN)
        return reply

    Peers.call = watched_call  # type: ignore[method-assign]  # a wiretap
    Agreement._answer_show = watched_answer  # type: ignore[method-assign]  # the same


def main() -> None:
    config = Path(sys.argv[1])
    failpoints = Failpoints(config.parent)
    watch_check(failpoints)
    CutTransport.folder = config.parent
    setattr(daemon, "Transport", CutTransport)  # noqa: B010  (mypy: not exported; no argument reaches it)
    try:
        run(
            config,
            stop_with_stdin=True,
            parts=Parts(clock=failpoints.now, failpoint=failpoints.reach, retry=RETRY),
        )
    except TrefoilError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
