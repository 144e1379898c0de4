"""The hunt with real processes: `python -m tests.support.hunt_rounds --seed 1 --rounds 200 --out hunt-real.json`.

In each round three daemons answer a query over fresh reports while one to four things happen to them: SIGKILL, SIGSTOP,
a partition, a full disk, a clock that goes wrong, a renewal of the helper set, SIGKILL at a failpoint. Then all is well
again, and the query must be answered exactly. Every few rounds the ledgers and all that ever left are audited.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from protocol.errors import TrefoilError
from protocol.files import write_atomically
from protocol.shares import PARTIES
from protocol.units import HOUR
from tests.support.chaos_helper import ArmedFault, Fault, Weather
from tests.support.chaos_trio import REPORTS, ChaosTrio, chaos_trio, start_all, stop_all
from tests.support.hunt import commit
from tests.support.hunt_schedule import UNDISTURBED, HuntFault, Mishap
from tests.support.renewal import renew

AUDIT_EVERY = 20
GIVE_UP_SECONDS = 240.0
# A renewal restarts everyone, so it is rarer than the others.
_KINDS = (
    *(2 * (HuntFault.KILL, HuntFault.KILL_AT_FAILPOINT, HuntFault.PAUSE, HuntFault.PARTITION)),
    *(2 * (HuntFault.FULL_DISK, HuntFault.CLOCK_STEP)),
    HuntFault.ROTATION,
)


def mishaps_of(seed: int) -> list[Mishap]:
    """What happens in the round of this seed, in order."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(int(rng.integers(1, 5))):
        party = int(rng.integers(PARTIES))
        made.append(
            Mishap(
                _KINDS[int(rng.integers(len(_KINDS)))],
                party,
                at=float(rng.uniform(0.0, 2.0)),
                seconds=float(rng.choice([0.3, 1.0, 2.5])),
                other=(party + int(rng.integers(1, PARTIES))) % PARTIES,
                failpoint=UNDISTURBED[int(rng.integers(len(UNDISTURBED)))],
                hours=int(rng.choice([-480, -2, 2, 7, 480])),
            )
        )
    return sorted(made, key=lambda mishap: mishap.at)


@dataclass
class Rounds:
    """Plays rounds on one trio and counts."""

    trio: ChaosTrio
    weather: list[Weather] = field(default_factory=lambda: [Weather()] * PARTIES)
    happened: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)

    def play(self, seed: int) -> None:
        """One round: whatever happens, the answer is the truth."""
        began = time.monotonic()
        mishaps = mishaps_of(seed)
        for party in range(PARTIES):
            failpoints = [m for m in mishaps if m.party == party and m.fault is HuntFault.KILL_AT_FAILPOINT]
            self.trio.arm(party, *(ArmedFault.of(mishap.failpoint, Fault.KILL_DAEMON) for mishap in failpoints))
        try:
            answer = asyncio.run(self._answered(mishaps))
            if answer != [1] * REPORTS:
                self.wrong[seed] = f"the answer is {answer}"
        except (TrefoilError, TimeoutError) as error:
            self.wrong[seed] = f"not answered: {error}"
        for party in range(PARTIES):
            self.happened[HuntFault.KILL_AT_FAILPOINT.value] += len(self.trio.fired(party))
            self.trio.arm(party)
        self.seconds.append(time.monotonic() - began)

    def audit(self, seed: int) -> None:
        """Stop everyone and count every report."""
        stop_all(self.trio)
        if found := self.trio.audit():
            self.wrong[seed] = "; ".join(found)
        start_all(self.trio)

    async def _answered(self, mishaps: list[Mishap]) -> list[int]:
        # Made before anything happens to a clock or a set.
        asked = self.trio.new_query(seconds=3000)
        happening = [asyncio.create_task(self._befall(mishap)) for mishap in mishaps]
        try:
            return await self.trio.answer(asked, seconds=GIVE_UP_SECONDS)
        finally:
            await asyncio.gather(*happening)

    async def _befall(self, mishap: Mishap) -> None:
        await asyncio.sleep(mishap.at)
        party = mishap.party
        match mishap.fault:
            case HuntFault.KILL:
                self._signal(party, signal.SIGKILL)
            case HuntFault.PAUSE:
                stopped = self._signal(party, signal.SIGSTOP)
                await asyncio.sleep(mishap.seconds)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)
            case HuntFault.PARTITION:
                self._cut(party, mishap.other, cut=True)
                await asyncio.sleep(mishap.seconds)
                self._cut(party, mishap.other, cut=False)
            case HuntFault.FULL_DISK:
                pid = self._limit(party, 1)
                await asyncio.sleep(mishap.seconds)
                self._limit(party, resource.RLIM_INFINITY, pid)
            case HuntFault.CLOCK_STEP:
                self._change(party, replace(self.weather[party], skew=mishap.hours * HOUR))
                await asyncio.sleep(mishap.seconds)
                self._change(party, replace(self.weather[party], skew=0))
            case HuntFault.ROTATION:
                renew(self.trio.running.trio)
                for each in range(PARTIES):
                    # Killed, not asked to end: its supervisor starts it again with what is on disk now.
                    self._signal((party + each) % PARTIES, signal.SIGKILL)
                    await asyncio.sleep(mishap.seconds)
            case HuntFault.KILL_AT_FAILPOINT | HuntFault.MPC_FAILS:
                return
        self.happened[mishap.fault.value] += 1

    def _signal(self, party: int, what: signal.Signals) -> int:
        process = self.trio.helper(party).process
        if process is None or process.poll() is not None:
            return 0
        os.kill(process.pid, what)
        return process.pid

    def _limit(self, party: int, size: int, pid: int = 0) -> int:
        """How long a file of a helper may be; of the same process again, if it is still there."""
        process = self.trio.helper(party).process
        if process is None or process.poll() is not None or pid not in (0, process.pid):
            return -1
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return process.pid

    def _cut(self, one: int, other: int, *, cut: bool) -> None:
        for party, peer in ((one, other), (other, one)):
            others = set(self.weather[party].cut) - {peer}
            self._change(party, replace(self.weather[party], cut=tuple(sorted(others | ({peer} if cut else set())))))

    def _change(self, party: int, weather: Weather) -> None:
        self.weather[party] = weather
        weather.save(self.trio.running.trio.helper_folder(party))

    def record(self, header: dict[str, object]) -> dict[str, object]:
        return {
            **header,
            "rounds": len(self.seconds),
            "mishaps": dict(sorted(self.happened.items())),
            "processes_ended": sum(self.trio.ended.values()),
            "reports": len(self.trio.reports),
            "violations": len(self.wrong),
            "wrong": {str(seed): text for seed, text in self.wrong.items()},
            "seconds": round(sum(self.seconds), 1),
            "longest_round_seconds": round(max(self.seconds, default=0.0), 1),
        }


def hunt_rounds(folder: Path, seeds: range, out: Path | None = None, of_commit: str = "") -> Rounds:
    """Rounds for these seeds, audited now and then and at the end."""
    header: dict[str, object] = {
        "command": f"python -m tests.support.hunt_rounds --seed {seeds.start} --rounds {len(seeds)}",
        "commit": of_commit,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "first_seed": seeds.start,
    }
    with chaos_trio(folder) as trio:
        rounds = Rounds(trio)
        for seed in seeds:
            rounds.play(seed)
            if (seed - seeds.start) % AUDIT_EVERY == AUDIT_EVERY - 1 or seed == seeds[-1] or seed in rounds.wrong:
                rounds.audit(seed)
            if out is not None:
                write_atomically(out, (json.dumps(rounds.record(header), indent=1) + "\n").encode())
                sys.stderr.write(f"round {seed}: {rounds.seconds[-1]:.1f} s {rounds.wrong.get(seed, '')}\n")
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="where the tree is a copy without its history")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(options.seed, options.seed + options.rounds)
        rounds = hunt_rounds(Path(folder), seeds, options.out, options.commit or commit())
    return 1 if rounds.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
