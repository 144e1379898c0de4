"""Messages of announced size: in order, each once, of exactly that size, and each taken once."""

from __future__ import annotations

import asyncio

import pytest

from mpc_helpers.mpc.steps import StepInbox
from protocol.errors import ProtocolError


def inbox() -> StepInbox:
    return StepInbox({0: 2, 3: 4})


def standing(box: StepInbox) -> tuple[int, bool, bool, bool]:
    return box.next_size, box.awaited, box.complete, box.all_taken


@pytest.mark.parametrize("message", [b"", b"\0", b"\0a", b"\0abc", b"\3abcd", b"\1ab", b"\xffab"])
def test_anything_but_the_next_step_in_its_size_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="not step 0 of 2 bytes, which is next"):
        inbox().deliver(message)


async def test_steps_arrive_in_order_and_are_taken_once() -> None:
    box = inbox()
    assert standing(box) == (3, False, False, False)
    box.deliver(b"\0ab")
    with pytest.raises(ProtocolError, match="which is next"):
        box.deliver(b"\0ab")
    waiting = asyncio.create_task(box.take(3))
    await asyncio.sleep(0)
    assert standing(box) == (5, True, False, False)
    box.deliver(b"\3wxyz")
    assert await waiting == b"wxyz" and standing(box) == (0, False, True, False)
    assert await box.take(0) == b"ab" and standing(box) == (0, False, True, True)
    for step in (0, 3, 7):
        with pytest.raises(ProtocolError, match="was not announced, or was taken before"):
            await box.take(step)
    with pytest.raises(ProtocolError, match="after the last one"):
        box.deliver(b"\4")


async def test_a_message_for_a_program_that_was_stopped_does_no_harm() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take(0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    box.deliver(b"\0ab")
    assert not box.awaited
