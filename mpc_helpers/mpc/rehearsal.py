"""Sessions without secrets, in the process that workers are forked from.

A worker runs one session and ends. Whatever takes longer the first time (AES, numpy's functions, Python's own code,
which it rewrites as it runs) each worker would pay again. So it is done here, by three parties over memory. Nothing is
kept: shares of zero go in, keys come from the operating system, and what comes out is thrown away.
"""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import suppress
from fractions import Fraction

from mpc_helpers.mpc.channel import Intercept
from mpc_helpers.mpc.noisy_sum import ExactNoise
from mpc_helpers.mpc.runtime import run_three_in_one_process
from mpc_helpers.mpc.session import DIGEST_SIZE
from mpc_helpers.mpc.terms import SumKind, SumTerms
from protocol.shares import PARTIES

_RATE, _CHANGE, _BUCKETS = Fraction(1, 100), 100, 64
# Python takes a function for a frequent one when it is called the eighth time: three sessions of three parties.
_SESSIONS = 3 * (SumKind.JOINT,)
_SECONDS = 30.0


def rehearse() -> None:
    """Run before the first fork."""
    for kind in _SESSIONS:
        asyncio.run(session_of_zeros(SumTerms(kind, _RATE, _CHANGE, _BUCKETS)))
    # Memory that is given back comes as new pages to a worker. What is kept here would have to be copied there.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def session_of_zeros(
    terms: SumTerms, seconds: float = _SECONDS, intercept: Intercept | None = None, *, latency: float = 0.0
) -> None:
    """Three parties in this process, over memory. A failure of one is raised."""
    source, program = ExactNoise(), terms.kind.program
    sessions = [terms.session(party, bytes(DIGEST_SIZE), seconds) for party in range(PARTIES)]
    programs = [
        program.program(terms, [0] * terms.buckets, program.draw_ahead(terms, source), source, paced=False)
        for _ in range(PARTIES)
    ]
    for outcome in await run_three_in_one_process(sessions, programs, intercept, latency=latency):
        if isinstance(outcome, BaseException):
            raise outcome
