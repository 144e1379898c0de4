"""Many clients that post sealed reports to a collector, and remember what they were answered."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from protocol.header import NONCE_SPAN
from protocol.report import SealedReport

_RETRY_SECONDS = 0.05
# What may be tried again: the collector was busy, restarting, or its disk was.
_AGAIN = frozenset({429, 503, 507})


def copies(report: SealedReport, count: int) -> Iterator[SealedReport]:
    """Reports with nonces of their own. No collector can tell that they would not open."""
    for _ in range(count):
        nonce = os.urandom(NONCE_SPAN.stop - NONCE_SPAN.start)
        header = report.header[: NONCE_SPAN.start] + nonce + report.header[NONCE_SPAN.stop :]
        yield SealedReport(header, report.body, report.payloads)


@dataclass
class Posted:
    """What clients saw: digests that were acknowledged, and reports refused for good."""

    acknowledged: set[bytes] = field(default_factory=set)
    refused: dict[bytes, str] = field(default_factory=dict)
    tries: int = 0


def no_checks() -> ssl.SSLContext:
    """A client's context for a collector's self-signed certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def post_all(address: str, reports: list[SealedReport], clients: int, seconds: float, posted: Posted) -> None:
    """Every report until it is acknowledged or refused for good, which `posted` notes. Lost connections are retried."""
    queue = asyncio.Queue[SealedReport]()
    for report in reports:
        queue.put_nowait(report)
    connector = aiohttp.TCPConnector(limit=clients, ssl=no_checks())
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.timeout(seconds):
        await asyncio.gather(*(_client(session, address, queue, posted) for _ in range(clients)))


async def _client(
    session: aiohttp.ClientSession, address: str, queue: asyncio.Queue[SealedReport], posted: Posted
) -> None:
    while not queue.empty():
        report = queue.get_nowait()
        while not await _post(session, address, report, posted):
            await asyncio.sleep(_RETRY_SECONDS)


async def _post(session: aiohttp.ClientSession, address: str, report: SealedReport, posted: Posted) -> bool:
    posted.tries += 1
    try:
        async with session.post(address, data=report.encode(), allow_redirects=False) as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
    if response.status in (200, 201):
        posted.acknowledged.add(bytes.fromhex(answer["digest"]))
    elif response.status not in _AGAIN:
        posted.refused[report.digest] = answer["error"]
    return response.status not in _AGAIN
