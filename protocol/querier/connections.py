"""HTTPS from the querier to three helpers, each under the certificate that the helper set pins.

A helper may be malicious: every request has a time limit, every response a size limit, redirects are not followed, and
every malformed response is an error that names the helper.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Self

import aiohttp

from protocol.errors import ErrorKind, ProtocolError
from protocol.helper_set import HelperSet
from protocol.net.json_message import decode_json
from protocol.querier.failure import QueryFailed
from protocol.query import PERMIT_HEADER

MAX_ANSWER_BYTES = 2**22
_START_HINT = "Check that the helper runs and that helpers.json has its address; then run the command again to resume."
_PIN_HINT = "Someone intercepts the connection, or the helper has a new certificate: fetch the new helper set."


class HelperConnections:
    """The connections of one query. `seconds` limits each request, from connecting to the last byte."""

    def __init__(self, helper_set: HelperSet, seconds: float) -> None:
        self._helper_set = helper_set
        self._seconds = seconds
        # One object per helper: aiohttp reuses a connection only for the same object, and a TLS handshake costs the
        # helper more than a response does.
        self._pins = [aiohttp.Fingerprint(helper.tls_pin) for helper in helper_set.helpers]

    async def __aenter__(self) -> Self:
        # `_request` sets the time limit. No compression: a response could be a decompression bomb.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, party: int, path: str) -> object:
        return await self._request(self._seconds, party, "GET", path)

    async def put(self, party: int, path: str, body: bytes) -> object:
        return await self._request(self._seconds, party, "PUT", path, body)

    async def upload(
        self, party: int, path: str, pieces: AsyncIterator[bytes], size: int, permit: bytes, seconds: float
    ) -> object:
        """Send `size` bytes under a permit, within `seconds`, and return the JSON of the response."""
        headers = {"Content-Length": str(size), PERMIT_HEADER: permit.hex()}
        return await self._request(max(seconds, self._seconds), party, "PUT", path, pieces, headers)

    async def _request(
        self,
        seconds: float,
        party: int,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> object:
        helper = self._helper_set.helpers[party]
        name, url = helper.name, helper.address.rstrip("/") + path
        try:
            async with (
                asyncio.timeout(seconds),
                # No redirects: the set pins nothing for an address that only the helper names.
                self._session.request(
                    method, url, data=body, headers=headers, ssl=self._pins[party], allow_redirects=False
                ) as response,
            ):
                return await _read_response(response, name, party)
        except aiohttp.ServerFingerprintMismatch:
            message = f"{name} shows a certificate other than the pinned one"
            raise QueryFailed("connecting", (party,), message, _PIN_HINT, kind=ErrorKind.WRONG_KEY) from None
        except TimeoutError:
            message = f"{name} does not respond within {seconds:g} s"
            raise QueryFailed("connecting", (party,), message, _START_HINT, kind=ErrorKind.TIMEOUT) from None
        except (aiohttp.ClientError, OSError) as error:
            message = f"{name} cannot be reached: {_reason(error)}"
            raise QueryFailed(
                "connecting", (party,), message, _START_HINT, unreachable=True, kind=ErrorKind.UNREACHABLE
            ) from None


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Return why a helper is unreachable; aiohttp's own messages contain Python objects."""
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


async def _read_response(response: aiohttp.ClientResponse, name: str, party: int) -> object:
    """Return the JSON of a response of bounded size; raise the error that it reports, with the helper's name."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > MAX_ANSWER_BYTES:
            message = f"{name} responds with more than {MAX_ANSWER_BYTES} bytes"
            raise QueryFailed("asking", (party,), message, http_status=response.status, kind=ErrorKind.TOO_LARGE)
    try:
        stored = decode_json(bytes(raw))
    except ProtocolError as error:
        message = f"{name} responds with HTTP status {response.status} and a malformed body: {error}"
        raise QueryFailed("asking", (party,), message, http_status=response.status, kind=ErrorKind.MALFORMED) from None
    if response.status != 200:
        reason = _text(stored, "error") or f"HTTP status {response.status}"
        hint = _text(stored, "hint")
        message = f"{name} answers: {reason}"
        raise QueryFailed("asking", (party,), message, hint, http_status=response.status, reason=reason)
    return stored


def _text(stored: object, name: str) -> str:
    value = stored.get(name) if isinstance(stored, dict) else None
    return value if isinstance(value, str) else ""
