"""Bodies of posts on their way into memory: bounded in size, in time and all together.

Many slow or huge posts at a time must not keep others out: when there is no room, the one that has been arriving for
longest goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from protocol.batch import MAX_BODY, MAX_HEADER
from protocol.collector.limits import NotTaken, Refused

MAX_POST = MAX_HEADER + MAX_BODY + 2**13
# From the first byte to the last: a slow client costs one connection, not for long.
BODY_SECONDS = 30.0
# All bodies that arrive or wait for the disk. Filing one takes a few times its size for moments.
MAX_HELD = 2**26


@dataclass(eq=False, slots=True)
class _Arriving:
    """One body: how much of it is here, and the clock that can end it."""

    size: int
    clock: asyncio.Timeout


class PostBodies:
    """Run by a collector. `most` bounds the bytes of all bodies together."""

    def __init__(self, most: int = MAX_HELD) -> None:
        self._most = most
        self._held = 0
        self._arriving: dict[_Arriving, None] = {}

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body; its room is taken until the block ends. `NotTaken` if it is too large, too slow, or cut."""
        if (request.content_length or 0) > MAX_POST:
            raise _too_large()
        one = _Arriving(0, asyncio.timeout(BODY_SECONDS))
        self._arriving[one] = None
        try:
            async with one.clock:
                pieces = [piece async for piece in self._pieces(request, one)]
            del self._arriving[one]
            yield b"".join(pieces)
        except (TimeoutError, ConnectionError):
            raise NotTaken(Refused.SLOW, "the report took too long to arrive", "Post it again in one piece.") from None
        finally:
            self._arriving.pop(one, None)
            self._held -= one.size

    async def _pieces(self, request: web.Request, one: _Arriving) -> AsyncIterator[bytes]:
        async for piece in request.content.iter_any():
            one.size += len(piece)
            self._held += len(piece)
            if one.size > MAX_POST:
                raise _too_large()
            self._make_room()
            yield piece

    def _make_room(self) -> None:
        over = self._held - self._most
        for oldest in self._arriving:
            if over <= 0:
                return
            over -= oldest.size
            # One that is on its way out already has had its time.
            if not oldest.clock.expired():
                oldest.clock.reschedule(0)


def _too_large() -> NotTaken:
    return NotTaken(Refused.MALFORMED, f"a report has at most {MAX_POST} bytes")
