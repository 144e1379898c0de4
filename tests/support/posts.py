"""Clients that post sealed reports to a collector and remember its answers, and strangers who want to shut it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from protocol.collector.server import MAX_POST
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


TRY_SECONDS = 20.0


@dataclass(frozen=True)
class Collector:
    """A collector that runs as a process of its own."""

    port: int
    pid: int
    folder: Path

    @property
    def address(self) -> str:
        return f"https://127.0.0.1:{self.port}/reports"

    def memory_mb(self) -> float:
        return self._status("VmRSS")

    def peak_mb(self) -> float:
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def disk_mb(self) -> float:
        return sum(path.stat().st_size for path in self.folder.iterdir()) / 2**20

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def connected(collector: Collector, count: int, first: Callable[[int], bytes]) -> AsyncIterator[None]:
    """`count` connections, each of which sends `first` of its number and is then silent."""
    writers: list[asyncio.StreamWriter] = []

    async def one(number: int) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with asyncio.timeout(TRY_SECONDS):
                _, writer = await asyncio.open_connection("127.0.0.1", collector.port, ssl=no_checks())
                writers.append(writer)
                writer.write(first(number))
                await writer.drain()

    try:
        for start in range(0, count, 50):
            await asyncio.gather(*(one(number) for number in range(start, min(start + 50, count))))
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


def _head(*lines: str) -> bytes:
    return "\r\n".join(("POST /reports HTTP/1.1", "Host: x", *lines, "", "")).encode()


def silent(_: int) -> bytes:
    """Nothing after the handshake."""
    return b""


def half_a_header(_: int) -> bytes:
    """A request that is never finished."""
    return _head()[:-2]


def a_byte_of_much(_: int) -> bytes:
    """A body that promises much and never comes."""
    return _head(f"Content-Length: {MAX_POST}") + b"x"


def all_but_the_last_byte(_: int) -> bytes:
    """As much memory as one post may have, held for as long as it may."""
    return _head(f"Content-Length: {MAX_POST}") + bytes(MAX_POST - 1)


def endless_pieces(_: int) -> bytes:
    """A body without a length, twice as long as any report."""
    return _head("Transfer-Encoding: chunked") + b"10000\r\n%b\r\n" % bytes(2**16) * (2 * MAX_POST // 2**16)


def ten_gigabytes(_: int) -> bytes:
    """A body of which the length alone says enough."""
    return _head("Content-Length: 10000000000") + bytes(2**16)


def bomb(_: int) -> bytes:
    """A kilobyte that unpacks to a thousand."""
    packed = gzip.compress(bytes(2**24))
    return _head("Content-Encoding: gzip", f"Content-Length: {len(packed)}") + packed


def deep_path(number: int) -> bytes:
    """Addresses that are not there, as long as HTTP allows."""
    return b"GET /" + b"../%d/" % number * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"


def long_headers(number: int) -> bytes:
    """More headers than anyone needs."""
    return _head(*(f"X-{line}: {'y' * 4000}" for line in range(64)), f"Content-Type: {number}/{number}")


ATTACKS: tuple[Callable[[int], bytes], ...] = (
    silent,
    half_a_header,
    a_byte_of_much,
    all_but_the_last_byte,
    endless_pieces,
    ten_gigabytes,
    bomb,
    deep_path,
    long_headers,
)


async def posted_honestly(collector: Collector, body: bytes, seconds: float = TRY_SECONDS) -> int:
    """How many tries it took one client to have its report stored; it gives up after `seconds`."""
    tries = 0
    async with asyncio.timeout(seconds):
        while True:
            tries += 1
            with contextlib.suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(collector.address, data=body, ssl=no_checks()) as response,
                ):
                    if response.status in (200, 201):
                        return tries
            await asyncio.sleep(0.1)
