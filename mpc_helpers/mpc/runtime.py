"""The arithmetic engine: MPyC, contained. The only module that imports mpyc.

As shipped, MPyC 0.11 rewrites `sys.argv` and configures logging on import, unpickles what peers send, never ties a
certificate to a party, waits without timeout for a dead peer and stops the event loop on any error. The table is in
protocol/DESIGN.md, "MPyC". Here it has a fresh `Runtime` per session, our codec, our channels and our deadline, and the
first failure fails the whole session.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import socket
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeVar

from mpc_helpers.identity.tls import TlsIdentity
from mpc_helpers.mpc.channel import (
    MAX_FRAME,
    Channel,
    Intercept,
    OrderedInbox,
    check_payload,
    close_all,
    dumps,
    greet,
    loads,
    lost,
    memory_mesh,
    receive_at,
)
from mpc_helpers.mpc.links import Links, together
from mpc_helpers.mpc.session import MpcError, MpcSession, Peer, Progress, Stage, name_of
from protocol.errors import ErrorKind, ProtocolError
from protocol.field import P
from protocol.net.listening import cancel_all
from protocol.shares import PARTIES

T = TypeVar("T")

PAIR_KEY_SIZE = 16
THRESHOLD = 1
# A program sends a handful of messages per peer; more than this many unread ones are a flood.
MAX_UNREAD = 64
_DATA, _DONE, _ABORT, _STEP = 0, 1, 2, 3
_MAX_REASON = 200
_LABEL_SIZE = 8


@contextlib.contextmanager
def _contained_import() -> Iterator[None]:
    """Import MPyC without its side effects: on the arguments, the environment, root logging and the event loop."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    environment = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("MPYC_")}
    os.environ["MPYC_NOUVLOOP"] = "1"
    placeholder = logging.NullHandler()
    logging.root.addHandler(placeholder)  # with a handler in place, logging.basicConfig does nothing
    try:
        with _spare_loop(), warnings.catch_warnings():
            # MPyC 0.11 imports numpy.core, which numpy 2 has renamed.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.root.removeHandler(placeholder)
        for name in [name for name in os.environ if name.startswith("MPYC_")]:
            del os.environ[name]
        os.environ.update(environment)
        sys.argv = argv


@contextlib.contextmanager
def _spare_loop() -> Iterator[None]:
    """Give MPyC a spare event loop, of which it takes the exception handler; or restore the running loop's."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        spare = asyncio.new_event_loop()
        asyncio.set_event_loop(spare)
        try:
            yield
        finally:
            asyncio.set_event_loop(None)
            spare.close()
    else:
        handler = running.get_exception_handler()
        try:
            yield
        finally:
            running.set_exception_handler(handler)


with _contained_import():
    import mpyc.runtime
    from mpyc import asyncoro

    # Parsed once: building MPyC's argument parser takes as long as a handshake.
    _OPTIONS = mpyc._get_arg_parser().parse_args([])

_MODULES_WITH_RUNTIME = ("asyncoro", "sectypes", "mpctools", "seclists", "secpols", "secgroups", "random", "statistics")
_current: ContextVar[_Runtime] = ContextVar("mpyc runtime of this party")


class _CurrentRuntime:
    """A proxy in place of MPyC's global `runtime`: it forwards to the runtime of the party whose code is running."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current.get(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_current.get(), name, value)


class _Runtime(mpyc.runtime.Runtime):  # type: ignore[misc] # MPyC has no type information
    """One party of one session. Keeps its tasks, so that a session that fails leaves none behind."""

    def __init__(self, party: int, fail: Callable[[Exception], None]) -> None:
        options = copy.copy(_OPTIONS)
        options.threshold = THRESHOLD
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        super().__init__(party, [mpyc.runtime.Party(pid) for pid in range(PARTIES)], options)
        loop.set_exception_handler(handler)
        self.fail = fail
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def pair_keys(self) -> dict[tuple[int, int], bytes]:
        """The PRSS keys this party holds, by the pair that shares them."""
        return {pair: bytes(key) for pair, key in self._prss_keys.items()}


def _tracked_task(coroutine: Coroutine[Any, Any, Any], *, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any]:
    """Start a task and keep a reference to it. Replaces `asyncio.Task` inside MPyC, which keeps none."""
    task = asyncio.Task(coroutine, loop=loop)
    tasks = _current.get().tasks
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _reconcile(declared: Any, task: asyncio.Task[Any]) -> None:
    """Fail the session if a task fails. Replaces MPyC's function of that name, which stops the event loop."""
    runtime = _current.get()
    runtime._pc_level -= 1
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        runtime.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    elif declared is not None:
        _fill(declared, task.result())


# MPyC's own name for it begins with two underscores and would be mangled inside a class; taken once, here.
_fill = vars(asyncoro)["__reconcile"]


def _install() -> None:
    """Put the proxy, the codec and the two replacements where MPyC looks for them."""
    for name in _MODULES_WITH_RUNTIME:
        setattr(sys.modules[f"mpyc.{name}"], "runtime", _CurrentRuntime())  # noqa: B010 - the module is chosen by name
    mpyc.runtime.pickle = SimpleNamespace(dumps=dumps, loads=loads)
    asyncoro.Task = _tracked_task
    asyncoro._reconcile = _reconcile


_install()


class _Exchanger:
    """The connection to a peer as MPyC sees it: payloads labelled by program counter, in any order."""

    def __init__(self, channel: Channel, session: MpcSession, fail: Callable[[Exception], None]) -> None:
        self.peer = channel.peer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = channel
        self._session = session
        self._fail = fail
        self._unread: dict[int, bytes] = {}
        self._wanted: dict[int, asyncio.Future[bytes]] = {}
        self.inbox = OrderedInbox(session.message_sizes.get(self.peer, {}))

    def send(self, label: int, payload: bytes) -> None:
        """Send a payload under its label. Called by MPyC."""
        self._channel.send(bytes([_DATA]) + label.to_bytes(_LABEL_SIZE, "big", signed=True) + payload)

    def receive(self, label: int) -> bytes | asyncio.Future[bytes]:
        """Return the payload if it has arrived, a future of it otherwise. Called by MPyC."""
        payload = self._unread.pop(label, None)
        if payload is not None:
            return payload
        if self.done.done():
            self._fail(lost(Stage.COMPUTE, self.peer, ProtocolError("finished without sending its part")))
        return self._wanted.setdefault(label, asyncio.get_running_loop().create_future())

    @property
    def awaited(self) -> bool:
        return bool(self._wanted) or self.inbox.awaited

    def post(self, step: int, body: bytes) -> None:
        self._channel.send(bytes([_STEP, step]) + body)

    def finish(self) -> None:
        """Tell the peer that this party has sent everything."""
        self._channel.send(bytes([_DONE]))

    def abort(self, reason: str) -> None:
        """Tell the peer why we abort, so that it does not blame us for what a third party did."""
        self._channel.send(bytes([_ABORT]) + reason.encode()[:_MAX_REASON])

    async def pump(self) -> None:
        """Deliver frames until the peer is done. If it disconnects first, fail everything pending at once."""
        try:
            while not self.done.done():
                self._deliver(await self._channel.receive(self._limit))
        except (OSError, ProtocolError) as error:
            self._fail(lost(Stage.COMPUTE, self.peer, error))

    @property
    def _limit(self) -> int:
        """Return the size limit of the next frame: with announced messages, the next one or an abort reason."""
        if not self._session.message_sizes:
            return MAX_FRAME
        return 1 + max(self.inbox.next_size, _MAX_REASON)

    def _deliver(self, frame: bytes) -> None:
        if frame == bytes([_DONE]):
            # What is still awaited will never come: fail now instead of at the deadline.
            if self._wanted or not self.inbox.complete:
                raise ProtocolError("finished without sending its part")
            self.done.set_result(None)
            return
        if frame[:1] == bytes([_ABORT]):
            reason = frame[1 : 1 + _MAX_REASON].decode(errors="replace")
            raise ConnectionError(f"it aborted and says: {reason if reason.isprintable() else '?'}")
        if frame[:1] == bytes([_STEP]):
            self.inbox.deliver(frame[1:])
            return
        # A program of announced steps sends nothing through MPyC, so such a frame is no part of it.
        if len(frame) <= 1 + _LABEL_SIZE or frame[0] != _DATA or self._session.message_sizes:
            raise ProtocolError("a frame of unknown kind", kind=ErrorKind.UNKNOWN_NAME)
        label = int.from_bytes(frame[1 : 1 + _LABEL_SIZE], "big", signed=True)
        payload = frame[1 + _LABEL_SIZE :]
        # Here, while the sender is known; MPyC decodes it later, where an error would blame nobody.
        check_payload(payload, self._session.buckets)
        if label in self._wanted:
            self._wanted.pop(label).set_result(payload)
        elif label in self._unread or len(self._unread) >= MAX_UNREAD:
            raise ProtocolError("more messages than the program reads", kind=ErrorKind.TOO_LARGE)
        else:
            self._unread[label] = payload


class Engine:
    """The operations that a program may use. Values are vectors of `buckets` numbers, of which shares are local."""

    def __init__(self, session: MpcSession, runtime: _Runtime, exchangers: Sequence[_Exchanger]) -> None:
        self.session = session
        self._runtime = runtime
        self._exchangers = {exchanger.peer: exchanger for exchanger in exchangers}
        self._secure_field = runtime.SecFld(modulus=P)

    @property
    def party(self) -> int:
        """This party's number: 0, 1 or 2; its Shamir point is party + 1."""
        return self.session.party

    def pair_key(self, lacking: int) -> bytes:
        """Return the PRSS key of the two parties other than `lacking`, drawn for this session by the lower of them.

        One party alone may have chosen it. What it decides must be bound to a nonce that all three fixed later
        (`joint_nonce`), or be one of three parts of which an honest pair drew one (`joint.layout`).
        """
        low, high = (party for party in range(PARTIES) if party != lacking)
        return self._runtime.pair_keys[low, high]

    async def exchange(self, mine: bytes) -> list[bytes]:
        """Send a short byte string to both others and return all three, by party."""
        received = await self._runtime.transfer(mine)
        if not all(isinstance(item, bytes) for item in received):
            raise ProtocolError("a vector where bytes belong", kind=ErrorKind.WRONG_TYPE)
        return list(received)

    def post(self, peer: int, step: int, body: bytes) -> None:
        """Send a message of the size that the session announces for this step."""
        self._exchangers[peer].post(step, body)

    async def take(self, peer: int, step: int) -> bytes:
        """Return what `peer` sends in this step, of exactly the announced size."""
        return await self._exchangers[peer].inbox.take(step)

    def vector(self, local: Sequence[int]) -> Any:
        """Return this party's Shamir shares as MPyC's type. Python integers only: numpy's wrap silently."""
        if len(local) != self.session.buckets or not all(type(value) is int for value in local):
            message = f"a vector has {self.session.buckets} Python integers"
            raise ProtocolError(message, kind=ErrorKind.WRONG_TYPE)
        return self._secure_field.array(self._secure_field.field.array(list(local)))

    def deal(self, secret: Sequence[int]) -> list[Any]:
        """Secret-share our own vector among all three and return the vectors that the three parties dealt."""
        return list(self._runtime.input(self.vector(secret)))

    async def shares(self, vector: Any) -> list[int]:
        """Return this party's Shamir shares of a vector. Nothing is opened."""
        return list(map(int, (await self._runtime.gather(vector)).value.tolist()))


Program = Callable[[Engine], Awaitable[T]]


class _Party:
    """One run of one program by one party over two channels."""

    def __init__(self, session: MpcSession, channels: list[Channel], progress: Progress) -> None:
        self._session = session
        self._channels = channels
        self._progress = progress
        self._failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._runtime = _Runtime(session.party, self._fail)
        self._exchangers: list[_Exchanger] = []

    async def run(self, program: Program[T]) -> T:
        """Greet, exchange pair keys, run the program, and finish."""
        # Set in the task that runs this party; the tasks MPyC starts from it inherit it.
        _current.set(self._runtime)
        self._progress.enter(Stage.HELLO, self._session.peers)
        # Both greetings before either key: a party that only one of us would reject must not get a key from the other.
        await together([greet(self._session, channel, self._progress) for channel in self._channels])
        self._progress.enter(Stage.KEYS, [peer for peer in self._session.peers if peer < self._session.party])
        await together([self._exchange_key(channel) for channel in self._channels])
        # Not before the keys have arrived: a pump would take a key for a frame of the program.
        pumps = [asyncio.create_task(exchanger.pump()) for exchanger in self._connect_runtime()]
        try:
            return await self._compute(program)
        except MpcError as error:
            for exchanger in self._exchangers:
                exchanger.abort(str(error))
            raise
        finally:
            # Include MPyC's tasks: one that waits for a peer would outlive the session and its channels.
            await cancel_all([*pumps, *self._runtime.tasks])
            self._failure.cancel()

    async def _exchange_key(self, channel: Channel) -> None:
        """Send or receive the pair key. As in MPyC, the lower party picks it. Both greetings were checked before."""
        pair = (min(channel.peer, self._session.party), max(channel.peer, self._session.party))
        if self._session.party == pair[0]:
            channel.send(self._runtime.pair_keys[pair])
            return
        key = await receive_at(Stage.KEYS, channel, PAIR_KEY_SIZE)
        if len(key) != PAIR_KEY_SIZE:
            raise MpcError(Stage.KEYS, f"{name_of(channel.peer)} sent a short pair key", party=channel.peer)
        self._runtime._prss_keys[pair] = key
        self._progress.waiting.discard(channel.peer)

    def _connect_runtime(self) -> list[_Exchanger]:
        self._exchangers = [_Exchanger(channel, self._session, self._fail) for channel in self._channels]
        for exchanger in self._exchangers:
            self._runtime.parties[exchanger.peer].protocol = exchanger
        return self._exchangers

    async def _compute(self, program: Program[T]) -> T:
        self._progress.enter(Stage.COMPUTE, ())
        result = await self._unless_failed(program(Engine(self._session, self._runtime, self._exchangers)))
        if not all(exchanger.inbox.all_taken for exchanger in self._exchangers):
            raise MpcError(Stage.COMPUTE, "the program ended without taking every message of its peers")
        self._progress.enter(Stage.FINISH, ())
        # Return only when both peers are done too: no helper votes for a sum that another lacks.
        for exchanger in self._exchangers:
            exchanger.finish()
        await self._unless_failed(asyncio.gather(*(exchanger.done for exchanger in self._exchangers)))
        return result

    async def _unless_failed(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise the session's failure if that comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            # Checked first: if both are done, the result may depend on what failed.
            if self._failure.done():
                self._failure.result()
            return await task
        except ProtocolError as error:
            raise MpcError(self._progress.stage, f"while {self._progress.stage.text}: {error}") from error
        finally:
            # Before the task is cancelled, which clears what it waits for: a timeout names the missing peers.
            self._progress.waiting = {item.peer for item in self._exchangers if item.awaited or not item.done.done()}
            await cancel_all([task])

    def _fail(self, error: Exception) -> None:
        """Record the session's failure. Only the first counts: the others follow from it."""
        if self._failure.done():
            return
        if not isinstance(error, MpcError):
            error = MpcError(self._progress.stage, f"a peer sent what the program cannot use: {error}")
        self._failure.set_exception(error)


async def _within(session: MpcSession, progress: Progress, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a context of its own (the proxy needs one per party), with the session's deadline."""
    task = asyncio.create_task(work)
    try:
        async with asyncio.timeout(session.seconds):
            return await task
    except TimeoutError:
        raise progress.timed_out(session.seconds) from None


async def run_party(
    session: MpcSession,
    peers: Sequence[Peer],
    identity: TlsIdentity,
    listener: socket.socket,
    program: Program[T],
) -> T:
    """Run one session over TLS with the two peers. `peers` has all three parties, by number. Run by a worker."""
    progress = Progress()
    links = Links(session, peers, identity, listener)

    async def work() -> T:
        return await _Party(session, await links.open(progress), progress).run(program)

    try:
        return await _within(session, progress, work())
    finally:
        await links.close()


async def run_over_channels(session: MpcSession, channels: list[Channel], program: Program[T]) -> T:
    """Run one session over existing channels (`memory_mesh`)."""
    progress = Progress()

    async def work() -> T:
        return await _Party(session, channels, progress).run(program)

    try:
        return await _within(session, progress, work())
    finally:
        await close_all(channels)


async def run_three_in_one_process(
    sessions: Sequence[MpcSession],
    programs: Sequence[Program[T]],
    intercept: Intercept | None = None,
    *,
    latency: float = 0.0,
) -> list[T | BaseException]:
    """Run all three parties here, over memory, and return each one's result or error. Not for production."""
    mesh = memory_mesh(intercept, latency=latency)
    parties = zip(sessions, mesh, programs, strict=True)
    return await asyncio.gather(*(run_over_channels(*party) for party in parties), return_exceptions=True)
