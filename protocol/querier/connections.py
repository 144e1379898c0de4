"""HTTPS from the querier to three helpers: each under the certificate that the helper set pins, one deadline a request.

A helper may be bad. It gets a bounded time and a bounded number of bytes, it is never followed to another address, and
whatever is wrong with its answer is an error under its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Self

import aiohttp

from protocol.errors import ProtocolError
from protocol.helper_set import HelperSet
from protocol.json_message import decode_json
from protocol.permit import PERMIT_HEADER
from protocol.querier.query_failed import QueryFailed

MAX_ANSWER_BYTES = 2**22
_START_HINT = "Check that the helper runs and that helpers.json has its address; then ask again to resume."
_PIN_HINT = "Someone is in between, or the helper has a new certificate: fetch the new helper set."


class HelperConnections:
    """Run by a querier for one query. `seconds` is what a request may take, from connecting to its last byte."""

    def __init__(self, helper_set: HelperSet, seconds: float) -> None:
        self._helper_set = helper_set
        self._seconds = seconds
        # One object for each helper: aiohttp keeps a connection for whoever asks with the same one, and a connection
        # costs the helper more than an answer does.
        self._pins = [aiohttp.Fingerprint(helper.tls_pin) for helper in helper_set.helpers]
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No clock of aiohttp's own: every request is made under `_within`. Compressed answers could grow when unpacked.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, party: int, path: str) -> object:
        """The JSON that a helper answers."""
        return await self._within(self._seconds, party, "GET", path)

    async def put(self, party: int, path: str, body: bytes) -> object:
        """Send a small body."""
        return await self._within(self._seconds, party, "PUT", path, body)

    async def upload(
        self, party: int, path: str, pieces: AsyncIterator[bytes], size: int, permit: bytes, seconds: float
    ) -> object:
        """Send `size` bytes under a permit, which may take `seconds`."""
        headers = {"Content-Length": str(size), PERMIT_HEADER: permit.hex()}
        return await self._within(max(seconds, self._seconds), party, "PUT", path, pieces, headers)

    async def _within(
        self,
        seconds: float,
        party: int,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> object:
        name = self._helper_set.helpers[party].name
        try:
            async with asyncio.timeout(seconds):
                return await self._request(party, method, path, body, headers)
        except aiohttp.ServerFingerprintMismatch:
            message = f"{name} shows a certificate other than the pinned one"
            raise QueryFailed("connecting", (party,), message, _PIN_HINT) from None
        except TimeoutError:
            message = f"{name} does not answer within {seconds:g} s"
            raise QueryFailed("connecting", (party,), message, _START_HINT) from None
        except (aiohttp.ClientError, OSError) as error:
            message = f"{name} cannot be reached: {_reason(error)}"
            raise QueryFailed("connecting", (party,), message, _START_HINT, out_of_reach=True) from None

    async def _request(
        self,
        party: int,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None,
        headers: Mapping[str, str] | None,
    ) -> object:
        if self._session is None:
            raise ProtocolError("the connections are not open")
        helper = self._helper_set.helpers[party]
        async with self._session.request(
            method,
            helper.address.rstrip("/") + path,
            data=body,
            headers=headers,
            ssl=self._pins[party],
            # An address that a helper names is not one that the set names, and nothing there is pinned.
            allow_redirects=False,
        ) as response:
            return await _answer(response, helper.name, party)


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Why a helper cannot be reached, in words. What aiohttp says of it has objects of Python in it."""
    match error:
        case aiohttp.ClientConnectorError():
            return error.os_error.strerror or "no connection"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "it closed the connection before its answer was whole"
        case aiohttp.ClientResponseError():
            return "its answer is not HTTP"
        case OSError():
            return error.strerror or "the connection failed"
        case _:
            return "the connection failed"


async def _answer(response: aiohttp.ClientResponse, name: str, party: int) -> object:
    """A helper's JSON, bounded; an error it reports becomes ours, under its name."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > MAX_ANSWER_BYTES:
            message = f"{name} answers with more than {MAX_ANSWER_BYTES} bytes"
            raise QueryFailed("asking", (party,), message, http_status=response.status)
    try:
        stored = decode_json(bytes(raw))
    except ProtocolError as error:
        message = f"{name} answers with HTTP status {response.status} and what cannot be read: {error}"
        raise QueryFailed("asking", (party,), message, http_status=response.status) from None
    if response.status != 200:
        said = _text(stored, "error") or f"HTTP status {response.status}"
        hint = _text(stored, "hint")
        message = f"{name} answers: {said}"
        raise QueryFailed("asking", (party,), message, hint, http_status=response.status, said=said)
    return stored


def _text(stored: object, name: str) -> str:
    """A text that a helper may have put under this name."""
    value = stored.get(name) if isinstance(stored, dict) else None
    return value if isinstance(value, str) else ""
