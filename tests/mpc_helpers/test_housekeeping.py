"""What cannot be undone follows the clock only as far as it can be believed, and no fault ends the rounds."""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.local.launcher import Trio, health, prepare
from mpc_helpers.service import housekeeping
from mpc_helpers.service.housekeeping import MAX_ADVANCE, ClockDoubted, Housekeeping, LastRound, PeerClocks
from mpc_helpers.service.storage import Storage
from protocol.cli.app import app
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperEntry
from protocol.units import DAY, HOUR
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, three_helpers, until

NOW = 1_800_000_000
LIFETIME = 30 * DAY
# When the only key is past its use: 90 days for devices, and as long as reports live after that.
USELESS = NOW + 121 * DAY


@dataclass
class House:
    """One helper's housekeeping without the helper: a clock to set, and peers whose clocks say what they are told."""

    trio: Trio
    now: int = NOW
    ahead: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    # Peers that do not answer.
    silent: set[int] = field(default_factory=set)
    tidied: int = 0
    forgotten: list[int] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = load_config(self.trio.config_path(0))
        self.membership = load_membership(self.config, NOW)
        self.ledger = ReportLedger(self.config.ledger, owner_of(self.membership))
        self.peers = PeerClocks(self.membership, lambda: self.now)
        arguments = (self.ledger, cast(Storage, self), self.peers, self.ask_time, lambda: self.now)
        self.keeper = Housekeeping(self.config, self.membership, *arguments)

    async def tidy(self) -> None:
        self.tidied += 1
        if self.faults:
            raise self.faults.pop()

    async def forget(self, now: int) -> None:
        self.forgotten.append(now)

    async def ask_time(self, party: int) -> None:
        if party in self.silent:
            raise TrefoilError("no answer")
        if party in self.ahead:
            self.peers.heard(party, email.utils.formatdate(self.now + self.ahead[party], usegmt=True))

    async def round(self, now: int) -> None:
        self.now = now
        await self.keeper.round()

    @property
    def keys(self) -> int:
        return len(list(self.config.hpke_keys.iterdir()))

    @property
    def watermark(self) -> int:
        return self.ledger.reports.watermark


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(prepare(tmp_path / "trio", now=NOW))
    with closing(house.ledger):
        yield house


async def test_rounds_forget_and_destroy_as_time_goes_by(house: House) -> None:
    for start in (NOW, USELESS - DAY):
        LastRound(house.config.data).accept(start)
        for now in range(start, start + 2 * DAY, MAX_ADVANCE):
            await house.round(now)
            assert house.watermark == now - LIFETIME
            assert house.keys == len(house.membership.hpke) == int(now <= NOW + 120 * DAY)
    assert house.keys == 0


@pytest.mark.parametrize("wrong", [USELESS, NOW + MAX_ADVANCE + 1, 2**40])
async def test_a_clock_that_is_wrong_for_a_moment_does_no_harm(house: House, wrong: int) -> None:
    await house.round(NOW)
    house.ahead = {}  # peers say nothing new
    with raises(ErrorKind.CLOCK, ClockDoubted):
        await house.round(wrong)
    assert (house.keys, house.watermark) == (1, NOW - LIFETIME)
    assert house.tidied == 2  # what can be undone goes on
    assert house.forgotten == [NOW]  # answers are not erased by a clock that is doubted
    assert ["past the last round" in reason.text for reason in house.keeper.reasons()] == [True]
    await house.round(NOW + HOUR)
    assert (house.watermark, house.keeper.reasons()) == (NOW + HOUR - LIFETIME, [])


@pytest.mark.parametrize("silent", [{1}, {1, 2}])
async def test_the_first_round_of_all_waits_for_both_peers(
    house: House, silent: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no last round to compare with, and they were heard earlier, when the clock was right."""
    for party in (1, 2):
        await house.ask_time(party)
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0.01)
    house.silent = silent
    with raises(ErrorKind.CLOCK, ClockDoubted):
        await house.round(USELESS)
    assert (house.keys, house.watermark, house.forgotten) == (1, 0, [])
    house.silent = set()
    await house.round(NOW)
    assert (house.keys, house.watermark, house.forgotten) == (1, NOW - LIFETIME, [NOW])
    house.silent = silent  # now there is a last round, and nobody is needed
    monkeypatch.setattr(housekeeping, "HEAR_SECONDS", 0.01)
    await house.round(NOW + HOUR)
    assert house.watermark == NOW + HOUR - LIFETIME


async def test_the_first_round_of_all_needs_both_clocks(house: House) -> None:
    """One of them may be malicious and agree with a wrong clock. An operator can decide, too."""
    house.ahead = {1: 0, 2: NOW - USELESS}
    with raises(ErrorKind.CLOCK, ClockDoubted):
        await house.round(USELESS)
    assert (house.keys, house.watermark) == (1, 0)
    LastRound(house.config.data).accept(NOW)
    await house.round(NOW)
    assert house.watermark == NOW - LIFETIME


async def test_a_clock_that_was_set_back_undoes_nothing_and_gains_nothing(house: House) -> None:
    await house.round(NOW + HOUR)
    await house.round(NOW - 5 * DAY)
    assert house.watermark == NOW + HOUR - LIFETIME
    with pytest.raises(ClockDoubted):
        await house.round(NOW + HOUR + MAX_ADVANCE + 1)
    await house.round(NOW + HOUR + MAX_ADVANCE)  # as far past the last round as ever


async def test_after_a_long_pause_an_operator_decides(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.round(NOW)
    later = NOW + 10 * DAY
    with pytest.raises(ClockDoubted):
        await house.round(later)
    monkeypatch.setattr("mpc_helpers.commands._now", lambda: later)
    done = CliRunner().invoke(app, ["ledger", "accept-clock", "--config", str(house.trio.config_path(0))])
    assert (done.exit_code, done.output) == (0, "accepted: it is 2027-01-25 08:00:00 UTC\n")
    await house.round(later + HOUR)
    assert house.watermark == later + HOUR - LIFETIME


async def test_a_lost_folder_does_not_make_a_wrong_clock_right(house: House) -> None:
    await house.round(NOW)
    (house.config.data / "last-round").unlink()
    with pytest.raises(ClockDoubted):
        await house.round(USELESS)
    (house.config.data / "last-round").write_text("nonsense")
    with raises(ErrorKind.FILE_DAMAGED, ClockDoubted):
        await house.round(NOW + HOUR)
    LastRound(house.config.data).accept(NOW)
    await house.round(NOW + HOUR)


async def test_two_peers_with_another_time_are_believed_one_is_shown(house: House) -> None:
    """One of any two peers is honest, so only both together can say that our clock is the wrong one."""
    await house.round(NOW)
    house.ahead = {1: 2 * HOUR}
    await house.round(NOW + HOUR)
    assert ["helper-2" in reason.text and "7200" in reason.text for reason in house.keeper.reasons()] == [True]
    house.ahead = {1: 2 * HOUR, 2: 30}
    await house.round(NOW + 2 * HOUR)
    house.ahead = {1: -2 * HOUR, 2: -3 * HOUR}
    with raises(ErrorKind.CLOCK, ClockDoubted):
        await house.round(NOW + 3 * HOUR)
    assert house.watermark == NOW + 2 * HOUR - LIFETIME
    house.ahead = {1: 1, 2: -2}
    await house.round(NOW + 3 * HOUR)
    assert house.keeper.reasons() == []


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_peer_s_date_may_be_anything(house: House, date: str) -> None:
    house.peers.heard(1, date)
    assert len(house.peers.warnings()) == (1 if "9999" in date else 0)


async def test_no_fault_ends_the_rounds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0.0)
    house.faults = [OSError("full"), ValueError("a defect"), ClockDoubted("doubted")]
    keeping = asyncio.create_task(house.keeper.run())
    await until(lambda: house.watermark != 0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert house.faults == []


async def test_a_fault_is_a_reason_until_the_next_round_has_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while that round runs: a rule that waits for two hours would begin anew."""
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0.0)
    outcomes = iter([OSError("full"), None, OSError("full"), ClockDoubted("doubted")])
    faulty: list[bool] = []

    async def tidy() -> None:
        faulty.append(bool(house.keeper.fault))
        if (error := next(outcomes, None)) is not None:
            raise error

    monkeypatch.setattr(house, "tidy", tidy)
    keeping = asyncio.create_task(house.keeper.run())
    await until(lambda: len(faulty) > 4)
    keeping.cancel()
    assert faulty[:5] == [False, True, False, True, False]


async def test_a_health_page_does_not_say_where_the_ledger_is(house: House, caplog: pytest.LogCaptureFixture) -> None:
    place = str(house.config.ledger)
    house.faults = [LedgerError(f"cannot use the ledger {place}: disk I/O error")]
    keeping = asyncio.create_task(house.keeper.run())
    await until(lambda: bool(house.keeper.reasons()))
    keeping.cancel()
    assert [place in reason.text for reason in house.keeper.reasons()] == [False]
    assert place in caplog.text


async def test_helpers_compare_their_clocks(tmp_path: Path) -> None:
    """Over real connections: the one that is ahead is shown by both others, and sees both of them behind.

    It is the first round of all three, so each of them doubts its clock.
    """
    async with three_helpers(tmp_path, start=False) as three:
        three.clocks[1] = lambda: real_now() + 2 * HOUR
        for party in range(3):
            await three.start(party)
        async with asyncio.timeout(60):
            while list(map(len, shown := await warnings(three))) != [2, 3, 2]:
                await asyncio.sleep(0.1)
    assert "helper-2" in shown[0][0]
    assert ["both peers" in said[-1] for said in shown] == [True] * 3


async def warnings(three: ThreeHelpers) -> list[list[str]]:
    """What the health page of each helper warns of."""

    def read(helper: HelperEntry) -> list[str]:
        page = health(helper)
        said = page["reasons"] if page else []
        assert isinstance(said, list)
        return [reason["text"] for reason in said if reason["concern"] == "clock"]

    return [await asyncio.to_thread(read, helper) for helper in three.helper_set.helpers]
