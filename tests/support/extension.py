"""The extension in real Chromium, with the host behind it and any number of https sites on one loopback port."""

from __future__ import annotations

import base64
import datetime
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from playwright.sync_api import BrowserContext, Frame, Page, Playwright, Worker
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from benchmarks.workloads.chromium import CHROMIUM, Installation, launched
from device.browser import install
from tests.support.browser import WAIT_SECONDS
from tests.support.processes import started

PLAIN_HOST = "tests.support.plain_host"
REAL_HOST = "device.browser.host"
ID = install.extension_id()
Header = tuple[str, str]
MEASURE = """navigator.attribution
  .measureConversion({ aggregationService: "trefoil", histogramSize: 4, epsilon: 0.001 })
  .then((result) => result.report.length, (error) => error.name)"""
SAVE = "navigator.attribution.saveImpression({ histogramIndex: 1 }).then(() => 'saved', (error) => error.name)"


class Answer(NamedTuple):
    """What a site answers to one path."""

    body: str | bytes = "<!doctype html><title>A page</title>"
    headers: Sequence[Header] = ()
    status: int = 200


class Request(NamedTuple):
    """What a site was asked."""

    method: str
    host: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Sites:
    """Every name that ends in .example, served over https by one process. `pages` are by path, or by host and path."""

    def __init__(self, folder: Path) -> None:
        self.pages: dict[str, Answer | Callable[[Request], Answer]] = {"/": Answer()}
        self.requests: list[Request] = []
        self._pem, self._key_hash = _certificate(folder)
        handler = type("Handler", (_Handler,), {"sites": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._pem)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def flags(self) -> list[str]:
        """What makes a browser believe in them."""
        rules = f"MAP *.example 127.0.0.1:{self.port}"
        return [f"--host-resolver-rules={rules}", f"--ignore-certificate-errors-spki-list={self._key_hash}"]

    def answer(self, request: Request) -> Answer:
        path = request.path.split("?")[0]
        found = self.pages.get(request.host + path) or self.pages.get(path) or Answer("no such page", status=404)
        return found(request) if callable(found) else found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: browsers drop connections as they like."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    sites: Sites

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        host = (self.headers.get("host") or "").split(":")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, host, self.path, headers, body)
        self.sites.requests.append(request)
        answer = self.sites.answer(request)
        data = answer.body.encode() if isinstance(answer.body, str) else answer.body
        self.send_response(answer.status)
        if not any(name.lower() == "content-type" for name, _ in answer.headers):
            self.send_header("Content-Type", "text/html; charset=utf-8")
        for name, value in (*answer.headers, ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_OPTIONS = _respond  # noqa: N815 - the names of the standard library

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _certificate(folder: Path) -> tuple[Path, str]:
    """A certificate of our own, and the hash by which a browser is told to accept its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("*.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "certificate.pem"
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return path, base64.b64encode(sha256(public).digest()).decode()


@contextmanager
def https_sites(folder: Path) -> Iterator[Sites]:
    sites = Sites(folder)
    try:
        yield sites
    finally:
        sites.close()


class Person:
    """One person's browser with the extension."""

    def __init__(self, context: BrowserContext, sites: Sites, installation: Installation) -> None:
        self.context = context
        self.sites = sites
        self.installation = installation
        self._tabs: dict[str, Page] = {}

    @property
    def worker(self) -> Worker:
        return self.worker_at(f"chrome-extension://{ID}/")

    def worker_at(self, address: str) -> Worker:
        """The service worker whose address begins so."""
        found = [worker for worker in self.context.service_workers if worker.url.startswith(address)]
        wanted = lambda worker: worker.url.startswith(address)  # noqa: E731
        return found[0] if found else self.context.wait_for_event("serviceworker", wanted)

    def ask(self, kind: str, **fields: Any) -> Any:
        """Ask the host as the extension itself does."""
        return self.worker.evaluate("(message) => device.ask(message)", {"kind": kind, **fields})

    def wait_ready(self, scripts: int = 2) -> None:
        """Wait until pages have the API, or no page has it."""
        count = "chrome.scripting.getRegisteredContentScripts().then((scripts) => scripts.length)"
        wait_for(lambda: self.worker.evaluate(count) == scripts)

    def open(self, address: str) -> Page:
        """A new tab, as if the person had entered its address."""
        page = self.context.new_page()
        page.goto(address)
        return page

    def open_by_script(self, address: str) -> Page:
        """A tab in which nobody has acted. Opened once more if it stays empty, as one did on a busy machine."""
        page = self._created(address)
        try:
            page.wait_for_url(address)
        except PlaywrightTimeout:
            page.close()
            page = self._created(address)
            page.wait_for_url(address)
        return page

    def _created(self, address: str) -> Page:
        with self.context.expect_page() as opened:
            self.worker.evaluate("(url) => chrome.tabs.create({ url }).then(() => null)", address)
        return opened.value

    def stored(self) -> list[tuple[int, str, str]]:
        """The impressions of a device that does not seal: index, site and caller."""
        return [tuple(each) for each in self.ask("stored")["stored"]]

    def tab(self, address: str) -> Page:
        """A tab that stays open for every later use of the same address."""
        if address not in self._tabs:
            self._tabs[address] = self.open(address)
        return self._tabs[address]

    def own_page(self, name: str, *, tab_url: str | None = None, width: int = 1280, dark: bool = False) -> Page:
        """A page of the extension. The popup is told that the person looks at a tab with `tab_url`."""
        page = self.context.new_page()
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="reduce")
        if tab_url is not None:
            page.add_init_script(f"chrome.tabs.query = async () => [{{ url: {json.dumps(tab_url)}, id: 1 }}]")
        page.goto(f"chrome-extension://{ID}/{name}")
        return page


@contextmanager
def browser_with(playwright: Playwright, sites: Sites, installation: Installation) -> Iterator[Person]:
    """A browser in which the extension is installed."""
    with launched(playwright, installation, sites.flags) as context:
        context.set_default_timeout(WAIT_SECONDS * 1000)
        yield Person(context, sites, installation)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; fail after a deadline."""
    deadline = time.monotonic() + 2 * WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


_CALL = """([method, options]) => navigator.attribution === undefined ? "no API" :
  navigator.attribution[method](options).then(
    (result) => (result.report ? JSON.parse(new TextDecoder().decode(result.report)) : null),
    (error) => (error instanceof DOMException ? { error: "DOMException", name: error.name } : error.name))"""


def call(frame: Page | Frame, method: str, options: object) -> Any:
    """Call the API in a frame. The outcome is as scenarios write it: numbers, an error's name, or None."""
    return frame.evaluate(_CALL, [method, options])


def quietly(page: Page, expression: str) -> Any:
    """Evaluate without a user's gesture: Playwright's own `evaluate` counts as one."""
    session = page.context.new_cdp_session(page)
    wanted = {"expression": expression, "userGesture": False, "awaitPromise": True, "returnByValue": True}
    result = session.send("Runtime.evaluate", wanted)
    session.detach()
    return result["result"].get("value")


def go(page: Page, address: str) -> None:
    """Navigate by script, without any action."""
    with page.expect_navigation(url=address):
        quietly(page, f"void setTimeout(() => {{ location.href = '{address}'; }})")


@contextmanager
def unwatched_browser(sites: Sites, installation: Installation) -> Iterator[Callable[[str], None]]:
    """A browser to whose pages no debugger is attached. What is yielded opens a tab, as an address that was entered."""
    installation.prepare()
    flags = [
        *installation.flags,
        *sites.flags,
        f"--user-data-dir={installation.user_data}",
        "--remote-debugging-port=0",
    ]
    port_file = installation.user_data / "DevToolsActivePort"

    def asked(method: str, path: str) -> str:
        url = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/{path}"
        with urlopen(UrlRequest(url, method=method), timeout=WAIT_SECONDS) as response:
            return bytes(response.read()).decode()

    def open_tab(address: str) -> None:
        # The extension's first page comes to the front when it opens, and a tab behind it prerenders nothing.
        wait_for(lambda: f"chrome-extension://{ID}/welcome.html" in asked("GET", "list"))
        asked("PUT", f"new?{address}")

    with started([str(CHROMIUM), *flags, "about:blank"]):
        # Its worker runs when it starts the host: from here on it sees what happens in tabs.
        wait_for(lambda: port_file.exists() and bool(installation.processes))
        yield open_tab
