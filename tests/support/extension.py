"""The extension in real Chromium, with the host behind it and any number of https sites on one loopback port."""

from __future__ import annotations

import base64
import datetime
import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from playwright.sync_api import BrowserContext, Frame, Page, Playwright, Worker

from device.browser import install
from device.browser.install import BrowserKind
from tests.support.browser import CHROMIUM, WAIT_SECONDS
from tests.support.processes import ROOT

T = TypeVar("T")
PLAIN_HOST = "tests.support.plain_host"
REAL_HOST = "device.browser.host"
ID = install.extension_id()
Header = tuple[str, str]


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
        self.pages: dict[str, Answer | Callable[[Request], Answer]] = {"/": Answer(), "/told": Answer("")}
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

    def told(self) -> list[Any]:
        """What pages have told their own server, as JSON, in order; each is returned once."""
        told = [json.loads(request.body) for request in self.requests if request.path == "/told"]
        self.requests[:] = [request for request in self.requests if request.path != "/told"]
        return told

    def wait_told(self, count: int) -> list[Any]:
        told: list[Any] = []

        def enough() -> bool:
            told.extend(self.told())
            return len(told) >= count

        wait_for(enough)
        return told

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


@dataclass
class Installation:
    """What `trefoil browser install` makes for one browser, in folders of a test's own. The host is started by a
    script, which notes the process and sets its environment.
    """

    folder: Path
    host: str = PLAIN_HOST
    services: Sequence[str] = ("trefoil",)
    environment: Mapping[str, str] = field(default_factory=dict)
    # Folders of other extensions that the person has.
    others: Sequence[Path] = ()

    @property
    def user_data(self) -> Path:
        return self.folder / "user data"

    @property
    def data(self) -> Path:
        """The folder of the person's devices."""
        return self.folder / "trefoil"

    def prepare(self) -> None:
        install.copy_extension(self.data)
        (install.extension_folder(self.data) / "services.js").write_text(install.services_script(list(self.services)))
        install.write_manifest(BrowserKind.CHROMIUM, self._script(), self.user_data)
        preferences = self.user_data / "Default" / "Preferences"
        preferences.parent.mkdir(parents=True)
        preferences.write_text(json.dumps({"extensions": {"ui": {"developer_mode": True}}}))

    def _script(self) -> Path:
        path = self.folder / "host.sh"
        settings = {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(self.folder), **self.environment}
        exports = [f"export {name}='{value}'" for name, value in settings.items()]
        note, run = f"echo $$ >> '{self.folder}/started'", f"exec '{sys.executable}' -m {self.host} \"$@\""
        path.write_text("\n".join(["#!/bin/sh", *exports, note, f"{run} 2>> '{self.folder}/errors'", ""]))
        path.chmod(0o755)
        return path

    @property
    def processes(self) -> list[int]:
        """The hosts that were started, by their ids."""
        started = self.folder / "started"
        return [int(line) for line in started.read_text().split()] if started.exists() else []

    @property
    def errors(self) -> str:
        errors = self.folder / "errors"
        return errors.read_text() if errors.exists() else ""

    @property
    def flags(self) -> list[str]:
        extensions = ",".join(map(str, [install.extension_folder(self.data), *self.others]))
        return [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--password-store=basic", f"--disable-extensions-except={extensions}", f"--load-extension={extensions}"),
        ]


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
    if not installation.user_data.exists():
        installation.prepare()
    context = playwright.chromium.launch_persistent_context(
        installation.user_data,
        executable_path=CHROMIUM,
        # Not Playwright's own headless mode, which has no extensions.
        headless=False,
        args=[*installation.flags, *sites.flags],
        ignore_default_args=["--disable-back-forward-cache"],
    )
    context.set_default_timeout(WAIT_SECONDS * 1000)
    try:
        yield Person(context, sites, installation)
    finally:
        context.close()


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
