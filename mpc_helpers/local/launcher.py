"""Three helpers on this machine: created once in a directory, started together, stopped together.

Used by `trefoil launch`, the demo, benchmarks and tests. A party that holds all three keys can read every report, so
this is for trying Trefoil out, not for measuring anyone.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpc_helpers.identity import keygen, tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.ledger import engine_at
from mpc_helpers.ledger.rebuild import create as create_ledger
from mpc_helpers.mpc.links import listen
from protocol.errors import ErrorKind, TrefoilError
from protocol.header import check_site
from protocol.helper_set import HelperEntry, HelperSet, write_set
from protocol.hpke import CLASSICAL, Suite
from protocol.keys import IdentityKey, load_identity, save_identity
from protocol.noise import NoiseMode
from protocol.shares import PARTIES

HOST = "127.0.0.1"
DEFAULT_SITE = "shop.example"
START_SECONDS = 60.0
STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
_ROOT = Path(__file__).resolve().parents[2]
# Lines of multiprocessing's resource tracker follow a kill and do not explain it: not shown as the last error.
_NO_REASON = "resource_tracker"


class HelperEnded(TrefoilError):
    """A helper exited although we had not stopped it. Started again, it resumes its queries."""

    kind = ErrorKind.UNAVAILABLE

    retryable = True


@dataclass(frozen=True, slots=True)
class Trio:
    """A directory with the configuration of three helpers, and the keys of the sites they answer."""

    folder: Path

    @property
    def helper_set_path(self) -> Path:
        return self.folder / "helpers.json"

    @property
    def helper_set(self) -> HelperSet:
        return HelperSet.load(self.helper_set_path)

    def helper_folder(self, party: int) -> Path:
        return self.folder / f"helper-{party + 1}"

    def config_path(self, party: int) -> Path:
        return self.helper_folder(party) / keygen.CONFIG_NAME

    def log_path(self, party: int) -> Path:
        return self.helper_folder(party) / "helper.log"

    def site_key_path(self, site: str) -> Path:
        return self.folder / "sites" / f"{site}.key"


def prepare(
    folder: Path,
    *,
    now: int,
    sites: Mapping[str, Sequence[str]] | None = None,
    ports: Sequence[int] | None = None,
    options: Mapping[str, object] | None = None,
    suite: Suite = CLASSICAL,
) -> Trio:
    """Create what is missing in the directory. `sites` maps each site to the callers that may query for it.

    `options` are further fields of the helpers' configuration files; `suite` is that of newly created keys. Fails while
    helpers run from the directory: their own ports would look taken, and be replaced.
    """
    sites = sites or {DEFAULT_SITE: [DEFAULT_SITE]}
    for site in sites:
        check_site(site)
    trio = Trio(folder.absolute())
    with _locked(trio):
        if not trio.helper_set_path.exists():
            _make_helpers(trio, now, list(ports or _free_ports(PARTIES)), suite)
        else:
            _move_if_taken(trio, ports)
        registered = {site: _register(trio, site, callers) for site, callers in sites.items()}
        for party, helper in enumerate(trio.helper_set.helpers):
            _configure(trio, party, helper, registered, options or {}, now)
    return trio


def _make_helpers(trio: Trio, now: int, ports: list[int], suite: Suite) -> None:
    entries = [
        keygen.make_keys(trio.helper_folder(party), f"helper-{party + 1}", f"https://{HOST}:{port}", now, suite=suite)
        for party, port in enumerate(ports)
    ]
    _write_set(trio, HelperSet(1, (entries[0], entries[1], entries[2])))


def _write_set(trio: Trio, helper_set: HelperSet) -> None:
    for party in range(PARTIES):
        helper_set = helper_set.signed_by(load_identity(trio.helper_folder(party) / "identity.key"))
    write_set(trio.helper_set_path, helper_set)


def _move_if_taken(trio: Trio, ports: Sequence[int] | None) -> None:
    """Replace ports that another program has taken since; addresses are not part of the set's digest."""
    helper_set = trio.helper_set
    old = [helper.endpoint[1] for helper in helper_set.helpers]
    new = list(ports) if ports else [port if _is_free(port) else _free_ports(1)[0] for port in old]
    if new == old:
        return
    moved = [
        replace(helper, address=f"https://{HOST}:{port}") for helper, port in zip(helper_set.helpers, new, strict=True)
    ]
    _write_set(trio, HelperSet(helper_set.number + 1, (moved[0], moved[1], moved[2])))


def _register(trio: Trio, site: str, callers: Sequence[str]) -> dict[str, object]:
    path = trio.site_key_path(site)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    if not path.exists():
        save_identity(path, IdentityKey.generate())
    return {"key": load_identity(path).public.hex(), "callers": list(callers) or [site]}


def _configure(
    trio: Trio,
    party: int,
    helper: HelperEntry,
    sites: Mapping[str, Mapping[str, object]],
    options: Mapping[str, object],
    now: int,
) -> None:
    """Write the configuration, keeping the sites of earlier runs, and create the ledger on the first one."""
    path = trio.config_path(party)
    earlier = json.loads(path.read_bytes())["sites"] if path.exists() else {}
    fields = {
        "host": HOST,
        "port": helper.endpoint[1],
        "helper_set": "../helpers.json",
        "sites": {**earlier, **sites},
        # Three helpers share this machine's cores.
        "processes": max(1, (os.cpu_count() or 1) // PARTIES),
        "noise_modes": [mode.value for mode in NoiseMode],
    }
    keygen.write_config(path.parent, helper.name, {**fields, **options})
    config = load_config(path)
    if not engine_at(config.ledger).exists() and not config.data.exists():
        create_ledger(config, load_membership(config, now))


def _free_ports(count: int) -> list[int]:
    """Return unused ports, all held while choosing so that they differ."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(listen(HOST)).getsockname()[1] for _ in range(count)]


def _is_free(port: int) -> bool:
    try:
        listen(HOST, port).close()
    except TrefoilError:
        return False
    return True


@dataclass(slots=True)
class HelperProcess:
    """One helper as a process. It ends with this process, because its standard input is a pipe from here."""

    trio: Trio
    party: int
    command: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process without waiting until it listens."""
        default = (sys.executable, "-m", "trefoil", "helper", "--stop-with-stdin", "--config")
        command = [*(self.command or default), str(self.trio.config_path(self.party))]
        with self.trio.log_path(self.party).open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=_ROOT, start_new_session=True
            )

    def wait_ready(self, deadline: float) -> None:
        """Wait until it responds. Raise an error with the end of its log if it exits or the deadline passes."""
        helper = self.trio.helper_set.helpers[self.party]
        while not health(helper):
            if self.process is None or self.process.poll() is not None:
                message = f"{helper.name} exited at once: {self.log_end()}"
                raise TrefoilError(message, self._see_log(), kind=ErrorKind.ABORTED)
            if time.monotonic() > deadline:
                message = f"{helper.name} does not respond: {self.log_end()}"
                raise TrefoilError(message, self._see_log(), kind=ErrorKind.TIMEOUT)
            time.sleep(POLL_SECONDS)

    def check_running(self) -> None:
        """Raise `HelperEnded`, with its exit status and the end of its log, if it has exited."""
        status = None if self.process is None else self.process.poll()
        if status is not None:
            name = self.trio.helper_set.helpers[self.party].name
            message = f"{name} {_describe_exit(status)}; the end of its log: {self.log_end()}"
            raise HelperEnded(message, f"Start all three again with the same command. {self._see_log()}")

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Terminate it, and kill it after a timeout."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process = None

    def log_end(self) -> str:
        """Return the last error in its log, or the last line."""
        try:
            text = self.trio.log_path(self.party).read_text(errors="replace")
        except OSError:
            text = ""
        lines = [line for line in text.strip().splitlines() if _NO_REASON not in line]
        errors = [line for line in lines[-5:] if line.startswith(("error:", "hint:"))]
        return " ".join(errors or lines[-1:]) or "it logged nothing"

    def _see_log(self) -> str:
        return f"Its log is {self.trio.log_path(self.party)}"


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def health(helper: HelperEntry, seconds: float = 2.0) -> dict[str, object] | None:
    """Return a helper's health page; None unless it responds under its pinned certificate."""
    try:
        stored = json.loads(fetch(helper, "/healthz", seconds))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return stored if isinstance(stored, dict) else None


def fetch(helper: HelperEntry, page: str, seconds: float = 2.0) -> bytes:
    """Return a public resource of a helper, or raise `OSError`, also if its certificate is not the pinned one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin below is stronger
    host, port = helper.endpoint
    connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    try:
        connection.connect()
        if not tls.same_pin(connection.sock.getpeercert(binary_form=True), helper.tls_pin):
            raise ConnectionError(f"{helper.name} presents another certificate")
        connection.request("GET", page)
        return connection.getresponse().read(2**20)
    finally:
        connection.close()


@dataclass(slots=True)
class Launched:
    """Three running helpers."""

    trio: Trio
    helpers: list[HelperProcess]

    @property
    def helper_set(self) -> HelperSet:
        return self.trio.helper_set

    def site_key(self, site: str) -> IdentityKey:
        return load_identity(self.trio.site_key_path(site))

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        for helper in self.helpers:
            helper.wait_ready(deadline)

    def check_running(self) -> None:
        """Raise `HelperEnded` if one of them has exited: the two others answer nothing without it."""
        for helper in self.helpers:
            helper.check_running()

    def restart(self, party: int) -> None:
        self.helpers[party].stop()
        self.helpers[party].start()
        self.helpers[party].wait_ready(time.monotonic() + START_SECONDS)


@contextlib.contextmanager
def launched(trio: Trio, command: Sequence[str] = (), *, wait: bool = True) -> Iterator[Launched]:
    """Start the three helpers of a directory, and stop them at the end of the block.

    With `wait` off they may still be starting: call `wait_ready` before talking to them.
    """
    with _locked(trio):
        running = Launched(trio, [HelperProcess(trio, party, command) for party in range(PARTIES)])
        try:
            for helper in running.helpers:
                helper.start()
            if wait:
                running.wait_ready()
            yield running
        finally:
            for helper in running.helpers:
                if helper.process is not None:
                    helper.process.terminate()
            for helper in running.helpers:
                helper.stop()


@contextlib.contextmanager
def launched_helpers(
    folder: Path | str | None = None,
    *,
    now: int | None = None,
    sites: Mapping[str, Sequence[str]] | None = None,
    ports: Sequence[int] | None = None,
    options: Mapping[str, object] | None = None,
    suite: Suite = CLASSICAL,
) -> Iterator[Launched]:
    """Prepare a directory and start its three helpers: one call for tests, the demo, benchmarks and notebooks.

    Without `folder` they run in a temporary directory, which is deleted with all their state.

    >>> with trefoil.launched_helpers(sites={"shop.example": ["shop.example"]}) as helpers:  # doctest: +SKIP
    ...     trefoil.ask("shop.batch", helpers.helper_set, helpers.site_key("shop.example"))
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trefoil-")))
        now = int(time.time()) if now is None else now  # noqa: TID251 - an edge: real processes read the real clock
        trio = prepare(Path(folder), now=now, sites=sites, ports=ports, options=options, suite=suite)
        yield stack.enter_context(launched(trio))


@contextlib.contextmanager
def _locked(trio: Trio) -> Iterator[None]:
    """Lock the directory: a second launcher would start helpers on ledgers that are in use."""
    try:
        trio.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        message = f"cannot create the directory {trio.folder}: {error.strerror}"
        raise TrefoilError(message, kind=ErrorKind.FILE_UNWRITABLE) from None
    with (trio.folder / "launch.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message, hint = f"helpers are running from {trio.folder} already", "Stop that launcher first."
            raise TrefoilError(message, hint, kind=ErrorKind.BUSY) from None
        yield
