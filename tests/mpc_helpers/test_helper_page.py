"""`Helper.answer` as a page: which step follows which, how often, and what ends it. What it calls is made up here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpc_helpers import helper as helper_module
from mpc_helpers.agreement.negotiation import AgreementError, Attempt, AttemptTerms, Disputed
from mpc_helpers.helper import Helper
from mpc_helpers.identity.config import Limits
from mpc_helpers.ledger.attempt import AttemptOutcome, QueryName
from mpc_helpers.mpc.session import MpcError, Stage
from protocol.errors import ErrorKind
from protocol.field import Vector, from_integers
from protocol.status import QueryState
from tests.support import protocol_samples as samples
from tests.support.raising import raises

QUERY = samples.query()
PAGE = ["session", "admit", "agree", "spend", "sum", "noise", "open"]
# A second attempt admits nothing again.
AGAIN = ["session", "agree", "spend", "sum", "noise", "open"]

Ending = AttemptOutcome | Exception


@dataclass
class Everything:
    """Stands in for admission, agreement and sessions, and writes down what is called."""

    outcomes: list[Ending]
    before: AttemptOutcome = AttemptOutcome.ABORTED
    noise: list[Exception | None] = field(default_factory=list)
    late: Callable[[], bool] = lambda: False
    called: list[str] = field(default_factory=list)
    # How long it would wait for the other helpers, each time that it agrees.
    waits: list[float] = field(default_factory=list)
    states: list[QueryState] = field(default_factory=list)
    # The fewest accepted reports that it would go on with.
    minimum: int = 0
    # What `AdmittedColumn` offers to the page.
    digests: Any = field(default_factory=lambda: np.zeros((QUERY.batch_size, 32), dtype=np.uint8))
    hours: Any = field(default_factory=lambda: np.ones(QUERY.batch_size, dtype=np.uint32))
    debug: Any = field(default_factory=lambda: np.zeros(QUERY.batch_size, dtype=np.bool_))
    summed: Any = field(default_factory=lambda: np.ones(QUERY.batch_size, dtype=np.bool_))
    amounts: Any = None
    reasons: Any = field(default_factory=lambda: np.zeros(QUERY.batch_size, dtype=np.uint8))

    def rejections(self) -> dict[Any, int]:
        return {}

    def shamir_share(self, _: object) -> Vector:
        self.called.append("sum")
        return from_integers([0] * QUERY.length)

    @asynccontextmanager
    async def turn(self, _site: str) -> AsyncIterator[None]:
        yield

    async def admit(self, *_: object) -> Everything:
        self.called.append("admit")
        return self

    async def outcome(self, query_key: bytes) -> AttemptOutcome:
        assert query_key == QueryName.of(QUERY).key
        return self.before

    async def agree(self, terms: AttemptTerms, _batch: object, deadline: float) -> object:
        self.minimum = terms.minimum
        self.called.append("agree")
        self.waits.append(deadline - asyncio.get_running_loop().time())
        if self.late():
            raise AgreementError("too late")
        return object()

    @asynccontextmanager
    async def spend(self, _: object) -> AsyncIterator[Attempt]:
        self.called.append("spend")
        number = self.called.count("spend")
        accepted = np.ones(QUERY.batch_size, dtype=np.bool_)
        try:
            proposed, codes = (bytes(32),) * 3, np.zeros(QUERY.batch_size, dtype=np.uint8)
            ended = asyncio.Event()
            yield Attempt(bytes(32), QueryName.of(QUERY), number, accepted, ({}, {}, {}), ended, proposed, codes)
        except BaseException:
            self.called.append("given up")
            raise

    @property
    def ledger(self) -> Any:
        return SimpleNamespace(attempts=SimpleNamespace(draws=lambda _: self.called.count("noise")))

    async def offload(self, call: Callable[[], Any]) -> Any:
        return call()

    async def aborted_by(self, attempt: Attempt) -> int | None:
        return 1

    async def commit(self, attempt: Attempt, sealed: bytes) -> AttemptOutcome:
        self.called.append("open")
        assert sealed
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @asynccontextmanager
    async def session(self, *_: object) -> AsyncIterator[Everything]:
        self.called.append("session")
        yield self

    async def add(self, _attempt: Attempt, share: Vector, _seconds: float) -> Vector:
        self.called.append("noise")
        if self.noise and (failure := self.noise.pop(0)) is not None:
            raise failure
        return share

    async def enter(self, state: QueryState) -> None:
        self.states.append(state)

    def advance(self, _: int) -> None:
        return None


async def answer(
    everything: Any, now: Callable[[], int] = lambda: QUERY.deadline - 100, limits: Limits | None = None
) -> None:
    membership: Any = SimpleNamespace(party=0, identity=samples.IDENTITIES[0])
    async with asyncio.timeout(30):
        await Helper(membership, limits or Limits(), everything, everything, everything.session, now).answer(
            QUERY, Path("column"), everything
        )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait."""
    monkeypatch.setattr(helper_module, "RETRY_SECONDS", 0.0)


async def test_the_page() -> None:
    everything = Everything([AttemptOutcome.RELEASED])
    await answer(everything)
    assert everything.called == PAGE
    assert everything.states == [
        QueryState.ADMITTING,
        QueryState.AGREEING,
        QueryState.COMPUTING,
        QueryState.VOTING,
    ]


async def test_what_was_released_before_a_restart_is_not_attempted_again() -> None:
    everything = Everything([], before=AttemptOutcome.RELEASED)
    await answer(everything)
    assert everything.called == []


async def test_an_attempt_that_a_peer_gives_up_is_followed_by_another_with_its_own_noise() -> None:
    everything = Everything([AttemptOutcome.ABORTED, AttemptOutcome.RELEASED])
    await answer(everything)
    assert everything.called == [*PAGE, "given up", *AGAIN]


async def test_a_failure_in_the_mpc_gives_the_reports_back_before_the_next_attempt() -> None:
    everything = Everything([AttemptOutcome.RELEASED], noise=[MpcError(Stage.COMPUTE, "planted"), None])
    await answer(everything)
    assert everything.called == [*PAGE[:-1], "given up", *AGAIN]


async def test_a_dispute_ends_it() -> None:
    everything = Everything([Disputed(2)])
    with raises(ErrorKind.DISPUTED, Disputed) as disputed:
        await answer(everything)
    assert disputed.value.party == 2
    assert everything.called == [*PAGE, "given up"]


async def test_a_failed_agreement_says_what_went_wrong_before_and_whose_fault_it_was() -> None:
    everything = Everything([], noise=[MpcError(Stage.COMPUTE, "planted", party=1)])
    everything.late = lambda: everything.called.count("agree") == 2
    with raises(ErrorKind.ABORTED, AgreementError) as failed:
        await answer(everything)
    assert "before that: planted" in str(failed.value)
    assert failed.value.party == 1
    assert everything.called == [*PAGE[:-1], "given up", "session", "agree"]


async def test_no_attempt_begins_after_the_deadline() -> None:
    everything = Everything([])
    with raises(ErrorKind.EXPIRED, AgreementError):
        await answer(everything, now=lambda: QUERY.deadline)
    assert everything.called == []


async def test_a_clock_that_is_set_back_does_not_make_a_query_wait_longer() -> None:
    """Nor one that is set forward, which ends it."""
    for shift in (-1_000_000, 50):
        everything = Everything([AttemptOutcome.RELEASED])
        called = everything.called
        await answer(everything, now=lambda: QUERY.deadline - 100 + (shift if "admit" in called else 0))  # noqa: B023
        (wait,) = everything.waits
        assert wait <= 100 - max(0, shift)


async def test_a_helper_that_starts_with_its_clock_set_back_waits_no_longer_than_for_any_query() -> None:
    everything = Everything([AttemptOutcome.RELEASED])
    await answer(everything, now=lambda: QUERY.deadline - 1_000_000)
    (wait,) = everything.waits
    assert wait <= Limits().seconds


async def test_a_failure_at_the_deadline_is_the_reason() -> None:
    """The clock passes the deadline while the MPC runs."""
    everything = Everything([], noise=[MpcError(Stage.COMPUTE, "planted", party=1)])
    with pytest.raises(MpcError, match="planted"):
        await answer(everything, now=lambda: QUERY.deadline - (100 if "noise" not in everything.called else 0))
    assert everything.called == [*PAGE[:-1], "given up"]


async def test_the_operators_minimum_binds_the_reports_that_are_accepted() -> None:
    """Not only the size of the batch: the rest of it may be junk that everyone leaves out."""
    for least in (1, 7, QUERY.batch_size):
        everything = Everything([AttemptOutcome.RELEASED])
        await answer(everything, limits=Limits(minimum_reports=least))
        assert everything.minimum == least
