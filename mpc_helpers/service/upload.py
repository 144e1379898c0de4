"""A column on its way to disk: whole and with what was signed for it, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from mpc_helpers.admission.column import ColumnDraft
from mpc_helpers.service.refusal import Refusal, Trouble
from protocol.batch import ColumnLayout, column_layout
from protocol.field import ELEMENT_SIZE
from protocol.query import Query
from protocol.report import header_size, payload_size

_WRITE_BYTES = 2**18


def check_size(query: Query, party: int, size: int) -> None:
    """Refuse a column of another size before it is read."""
    expected = _layout(query, party).file_size(query.batch_size)
    if size != expected:
        raise Refusal(
            Trouble.TOO_LARGE,
            f"the column has {size} bytes; this query's takes {expected}",
            "Cut the column from the batch that the query was made for, for this helper.",
        )


async def store_column(query: Query, party: int, path: Path, pieces: AsyncIterator[bytes]) -> None:
    """Put the pieces together at `path`, if they are the column that the query was signed for."""
    try:
        with ColumnDraft(path, _layout(query, party), query.batch_size) as draft:
            async for piece in _gathered(pieces):
                await asyncio.to_thread(draft.add, piece)
            if await asyncio.to_thread(draft.keep, query.batch_root, query.columns[party]):
                return
    except OSError as error:
        raise Refusal(Trouble.DISK, f"this helper cannot store the column: {error.strerror}") from None
    raise Refusal(
        Trouble.CHANGED,
        "the column is not the one that the query was signed for",
        "Upload the column cut from that batch.",
    )


def _layout(query: Query, party: int) -> ColumnLayout:
    header, body = header_size(query.unit, query.site, query.caller, query.shape), query.shape.explicit
    return column_layout(party, header, ELEMENT_SIZE * body, payload_size(query.suite))


async def _gathered(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces as they come, put together into ones that are worth handing to a thread."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _WRITE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
