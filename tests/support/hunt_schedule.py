"""What goes wrong in one run of the hunt, and when: a function of its seed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.mpc.noisy_sum import PAIRWISE_DRAWS
from tests.support.commit_world import PAID, AskedQuery

# Of every query, in virtual seconds.
DEADLINE = 18.0
STEPS = (*Failpoint,)
# What every query goes through between its first reservation and its last vote, and where the interesting mistakes are.
UNDISTURBED = (
    Failpoint.RESERVE_AFTER_COMMIT,
    Failpoint.COMPUTE,
    Failpoint.VOTE_BEFORE_COMMIT,
    Failpoint.VOTE_AFTER_COMMIT,
    Failpoint.YES_SENT_TO_ONE,
    Failpoint.RELEASE_BEFORE_COMMIT,
    Failpoint.RELEASE_AFTER_COMMIT,
)
MIDWAY = (
    *UNDISTURBED,
    Failpoint.GIVE_UP_AFTER_COMMIT,
    Failpoint.RENOUNCE_AFTER_COMMIT,
    Failpoint.START_AFTER_SWEEP,
)


class HuntFault(Enum):
    """What happens to the helpers."""

    KILL = "kill -9"
    KILL_AT_FAILPOINT = "kill -9 at a step"
    PAUSE = "pause"
    PARTITION = "partition"
    FULL_DISK = "full disk"
    CLOCK_STEP = "clock step"
    ROTATION = "rotation"
    MPC_FAILS = "the MPC fails"


@dataclass(frozen=True, slots=True)
class Mishap:
    """One fault: at whom, when, and for how long.

    If `watched` is a party, it happens `at` seconds after that one reaches `failpoint` for the time `number`. `number`
    is also how many attempts fail; `hours` is how far a clock goes wrong.
    """

    fault: HuntFault
    party: int
    at: float = 0.0
    seconds: float = 0.0
    other: int = 0
    failpoint: Failpoint = Failpoint.COMPUTE
    number: int = 1
    watched: int | None = None
    hours: int = 0


class Lie(Enum):
    """What a malicious helper does with a message that its code would have sent."""

    DROP = "says nothing"
    REPLAY = "says something old"
    VOTE_YES = "votes YES"
    VOTE_NO = "votes NO"
    RENOUNCE = "renounces without a cause"
    OTHER_STATE = "knows nothing of an attempt"
    LEAVE_OUT = "leaves a report out"
    OTHER_SALT = "proposes with another salt"
    RAISE = "raises the number"
    OTHER_ATTEMPT = "reserves another attempt"


@dataclass(frozen=True, slots=True)
class MaliciousHelper:
    """One helper that lies: which, how, and how often. It tells each peer something else."""

    party: int
    lies: tuple[Lie, ...]
    often: float
    seed: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that happens in one run; `draws` is the limit of a query with pairwise noise."""

    seed: int
    queries: tuple[AskedQuery, ...]
    mishaps: tuple[Mishap, ...]
    loss: float
    draws: int | None
    malicious: MaliciousHelper | None = None

    def __str__(self) -> str:
        lines = [f"schedule of seed {self.seed}: loss {self.loss}, draws {self.draws}"]
        lines += [f"  query {query.name.key[0]} over {query.reports} takes {query.need}" for query in self.queries]
        lines += [f"  {self.malicious}"] if self.malicious else []
        return "\n".join([*lines, *(f"  {mishap}" for mishap in self.mishaps)])


def _mishap(rng: np.random.Generator) -> Mishap:
    party = int(rng.integers(3))
    fault = (*HuntFault,)[int(rng.integers(len(HuntFault)))]
    watched = int(rng.integers(3)) if rng.random() < 0.6 else None
    failpoints = MIDWAY if watched is not None or rng.random() < 0.5 else STEPS
    return Mishap(
        fault,
        party,
        # Most of what a query does undisturbed it does in the first second; most of a vote in a few hundredths.
        at=float(min(6.0, rng.exponential(0.8 if watched is None else 0.02))),
        seconds=float(rng.choice([0.3, 1.0, 2.5, 6.0])),
        other=(party + int(rng.integers(1, 3))) % 3,
        failpoint=failpoints[int(rng.integers(len(failpoints)))],
        number=int(rng.choice([1, 1, 1, 2, 2, 3, 4])),
        watched=watched,
        hours=int(rng.choice([-480, -2, 2, 5, 7, 480])),
    )


BATCHES: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1),), ((0, 1, 2),), ((0, 1), (1, 2)), ((0, 1), (0, 1)))


def schedule_of(seed: int) -> Schedule:
    """One to five mishaps among the eight kinds, on one or two queries."""
    rng = np.random.default_rng(seed)
    batches = BATCHES[int(rng.choice([0, 0, 0, 1, 2, 3]))]
    queries = tuple(AskedQuery.of(rank + 1, reports, DEADLINE) for rank, reports in enumerate(batches))
    mishaps = tuple(_mishap(rng) for _ in range(int(rng.integers(1, 6))))
    loss = float(rng.choice([0.0, 0.0, 0.0, 0.1, 0.25]))
    return Schedule(seed, queries, mishaps, loss, PAIRWISE_DRAWS if rng.random() < 0.5 else None)


def in_parts(schedule: Schedule) -> Schedule:
    """The same mishaps on three queries that overlap, of which most keep the rest."""
    rng = np.random.default_rng([schedule.seed, 29])
    batches = ((0, 1), (1, 2), (0, 1, 2))
    needs = [int(need) for need in rng.choice([200, 300, 500, 501, PAID], len(batches), p=[0.3, 0.2, 0.2, 0.2, 0.1])]
    queries = [AskedQuery.of(rank + 1, batches[rank], DEADLINE, needs[rank]) for rank in range(len(batches))]
    return dataclasses.replace(schedule, queries=tuple(queries))


def parts_schedule_of(seed: int) -> Schedule:
    """A malicious helper every other time."""
    return in_parts(malicious_schedule_of(seed) if seed % 2 else schedule_of(seed))


def malicious_schedule_of(seed: int) -> Schedule:
    """The schedule of the seed and a malicious helper, drawn apart: the mishaps are those of `schedule_of`."""
    rng = np.random.default_rng([seed, 25])
    chosen = rng.permutation(len(Lie))[: int(rng.integers(1, len(Lie) + 1))]
    lies = tuple((*Lie,)[place] for place in sorted(chosen.tolist()))
    often = float(rng.choice([0.05, 0.2, 0.5, 1.0]))
    malicious = MaliciousHelper(int(rng.integers(3)), lies, often, int(rng.integers(2**31)))
    return dataclasses.replace(schedule_of(seed), malicious=malicious)
