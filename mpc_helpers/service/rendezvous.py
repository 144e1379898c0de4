"""Where the workers of one attempt find each other: every daemon tells both others the port of its worker.

A port is no secret and no promise: workers prove themselves to each other by certificate, session and parameters.
Ports are told only once all three have reserved, so that a query waiting for its peers needs no worker yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from protocol.errors import TrefoilError
from protocol.wire import HASH_SIZE, Reader, Writer

RETRY_SECONDS = 0.1
# Attempts whose ports are remembered per peer; a peer that announces more makes us forget its own oldest.
MAX_REMEMBERED = 1024

Send = Callable[[int, bytes], Awaitable[bytes]]


class Rendezvous:
    """Run by a daemon for all its queries. `send` delivers to a peer, or raises what may be tried again."""

    def __init__(self, peers: Sequence[int], send: Send) -> None:
        self._send = send
        self._heard: dict[int, OrderedDict[bytes, int]] = {peer: OrderedDict() for peer in peers}
        self._news = asyncio.Condition()

    async def receive(self, peer: int, message: bytes) -> bytes | None:
        """A peer tells where its worker for an attempt listens. Nothing to answer."""
        reader = Reader(message)
        attempt_id, port = reader.fixed(HASH_SIZE), reader.uint(2)
        reader.finish()
        heard = self._heard[peer]
        async with self._news:
            heard[attempt_id] = port
            while len(heard) > MAX_REMEMBERED:
                heard.popitem(last=False)
            self._news.notify_all()
        return None

    async def meet(self, attempt_id: bytes, port: int) -> Mapping[int, int]:
        """Tell both peers our worker's port until they have it, and wait for theirs. The caller holds the deadline."""
        message = Writer().fixed(attempt_id, HASH_SIZE).uint(port, 2).done()
        telling = [asyncio.create_task(self._tell(peer, message)) for peer in self._heard]
        try:
            async with self._news:
                await self._news.wait_for(lambda: not self.missing(attempt_id))
            await asyncio.gather(*telling)
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
        return {peer: heard.pop(attempt_id) for peer, heard in self._heard.items()}

    def missing(self, attempt_id: bytes) -> list[int]:
        """The peers whose worker for this attempt has not been heard of."""
        return [peer for peer, heard in self._heard.items() if attempt_id not in heard]

    async def _tell(self, peer: int, message: bytes) -> None:
        while True:
            with contextlib.suppress(TrefoilError):
                await self._send(peer, message)
                return
            await asyncio.sleep(RETRY_SECONDS)
