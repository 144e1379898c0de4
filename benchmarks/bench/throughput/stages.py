"""Where the seconds of a query go, and where its processor time goes. Both add up to the total."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench.throughput.counters import Counters, HelperCounters
from mpc_helpers.service.processes import DAEMON
from protocol.status import QueryState

ADMIT_PARTS = ("check", "open", "expand", "sum", "residues")
# What a query goes through, in this order, as its querier sees it.
STAGES = ("transfer", *ADMIT_PARTS, "ledger", "agreement", "noise", "vote", "release", "waiting")
# What a helper's processes do, in the same order.
PROFILE = {
    "receive": "receive, hash and store columns",
    "check": "check headers",
    "open": "open payloads (HPKE), hash bodies",
    "expand": "expand seeds (AES)",
    "sum": "sum shares",
    "residues": "check shares of the numbers",
    "chunks": "hand chunks to processes and back",
    "ledger": "ledger",
    "agree": "agree, vote, answer (the daemon's rest)",
    "noise": "draw and add noise (MPC)",
}
_OPENING, _MPC = "opening reports", "fork server"

HelperSeconds = Mapping[QueryState, float]


def timeline(
    total: float, transfer: float, collect: float, states: Mapping[int, HelperSeconds], used: Counters
) -> dict[str, float]:
    """Seconds of each stage at the helper that was busy longest: one helper's day, so that its stages add up.

    Admitting does its parts chunk by chunk on several processes, so its seconds are divided as its processor time is.
    The ledger is asked while agreeing, so its seconds are taken from those; the rest of agreeing is mostly waiting for
    the other two. A helper that had its column first began while others still received theirs: such seconds count as
    its admitting. What is left is the querier's waiting between two questions.
    """
    slowest = max(states, key=lambda party: sum(states[party].values()))
    seconds, counters = states[slowest], used.helpers[slowest]
    cpu = {part: counters.admit.get(part, 0.0) for part in ADMIT_PARTS}
    admitting, all_cpu = seconds.get(QueryState.ADMITTING, 0.0), sum(cpu.values()) or 1.0
    agreeing = seconds.get(QueryState.AGREEING, 0.0)
    ledger = min(counters.ledger_seconds, agreeing)
    stages = {
        "transfer": transfer,
        **{part: admitting * spent / all_cpu for part, spent in cpu.items()},
        "ledger": ledger,
        "agreement": agreeing - ledger,
        "noise": seconds.get(QueryState.COMPUTING, 0.0),
        "vote": seconds.get(QueryState.VOTING, 0.0),
        "release": collect,
    }
    left = total - sum(stages.values())
    stages["transfer"] += min(0.0, left)
    return {**stages, "waiting": max(0.0, left)}


def profile(used: Counters, received: Counters) -> dict[str, float] | None:
    """Processor seconds of all three helpers, by what was done. None where a helper does not say what it used.

    `received` is what they had used when the querier had sent everything. Parts of opening and the ledger are timed
    where they happen; what their processes used beside them is the rest of each row's process. Processes are counted
    in hundredths of a second, so that in a small batch a rest can come out a little below zero.
    """
    if used.cpu_seconds is None or received.cpu_seconds is None:
        return None
    rows = [_profile_of(whole, early) for whole, early in zip(used.helpers, received.helpers, strict=True)]
    return {name: sum(row[name] for row in rows) for name in PROFILE}


def _profile_of(used: HelperCounters, received: HelperCounters) -> dict[str, float]:
    parts = {part: used.admit.get(part, 0.0) for part in ADMIT_PARTS}
    receive = received.processes.get(DAEMON, 0.0)
    opening, mpc = used.processes.get(_OPENING, 0.0), used.processes.get(_MPC, 0.0)
    others = sum(used.processes.values()) - opening - mpc
    return {
        "receive": receive,
        **parts,
        "chunks": opening - sum(parts.values()),
        "ledger": used.ledger_cpu_seconds,
        "agree": others - receive - used.ledger_cpu_seconds,
        "noise": mpc,
    }
