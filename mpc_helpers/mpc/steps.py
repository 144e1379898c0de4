"""Messages of announced size: what a program expects of one peer beside MPyC's own messages.

Steps come in order, each once, each of exactly the size that the session announces. Anything else is refused as soon as
its first bytes are read, so a peer cannot make us keep, or wait for, what the program would not use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from protocol.errors import ProtocolError

STEP_SIZE = 1


class StepInbox:
    """The announced messages of one peer, on their way from its channel to the program."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._coming = deque(sorted(sizes.items()))
        self._untaken = set(sizes)
        self._arrived: dict[int, bytes] = {}
        self._awaited: dict[int, asyncio.Future[bytes]] = {}

    @property
    def next_size(self) -> int:
        """The size of the next message, its step included; 0 if all have come."""
        return STEP_SIZE + self._coming[0][1] if self._coming else 0

    @property
    def awaited(self) -> bool:
        """Whether the program waits for a message."""
        return bool(self._awaited)

    @property
    def complete(self) -> bool:
        """Whether everything that was announced has arrived."""
        return not self._coming

    @property
    def all_taken(self) -> bool:
        """Whether the program has looked at everything that was announced."""
        return not self._untaken

    def deliver(self, message: bytes) -> None:
        """A message from the peer: step and body."""
        if not self._coming:
            raise ProtocolError("a step after the last one")
        step, size = self._coming[0]
        if message[:STEP_SIZE] != bytes([step]) or len(message) != STEP_SIZE + size:
            raise ProtocolError(f"not step {step} of {size} bytes, which is next")
        self._coming.popleft()
        body = message[STEP_SIZE:]
        waiting = self._awaited.pop(step, None)
        if waiting is None:
            self._arrived[step] = body
        elif not waiting.done():  # cancelled, when the session fails for another reason
            waiting.set_result(body)

    async def take(self, step: int) -> bytes:
        """The body of a step, once. The session's deadline bounds the wait."""
        if step not in self._untaken:
            raise ProtocolError(f"step {step} was not announced, or was taken before")
        self._untaken.remove(step)
        if step in self._arrived:
            return self._arrived.pop(step)
        self._awaited[step] = asyncio.get_running_loop().create_future()
        return await self._awaited[step]
