"""Ctrl-C while a sealed message is opened is Ctrl-C. The library makes a bad message of it, which blames its sender."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from cryptography.exceptions import InvalidTag

from protocol import hpke
from protocol.errors import ProtocolError
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey
from tests.support.processes import ROOT

SECONDS = 60
INFO = b"what it is bound to"
TRIES = 20
# Prints how each interrupted loop of opens ended. Without the mend 7 of 10 end as a bad message: all of them right by
# chance has a probability below 10^-20.
INTERRUPTED = f"""
import signal, threading, time
from protocol.hpke import PrivateKey, Suite

signal.signal(signal.SIGINT, signal.default_int_handler)
main = threading.main_thread().ident

def interrupt():
    time.sleep(0.002)
    signal.pthread_kill(main, signal.SIGINT)

for suite in Suite:
    key = PrivateKey.generate(suite)
    sealed = key.public.seal(b"message", {INFO!r})
    for _ in range({TRIES}):
        try:
            threading.Thread(target=interrupt).start()
            while True:
                key.open(sealed, {INFO!r})
        except BaseException as error:
            print(type(error).__name__)
"""


def test_an_interruption_is_one_wherever_it_comes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["KeyboardInterrupt"] * 2 * TRIES, "")


@dataclass
class InterruptedOnce:
    """Stands for the library: an interruption in the first call, or a message that is bad in every call."""

    bad: bool = False
    calls: int = 0

    def decrypt(self, *_: object, **__: object) -> bytes:
        self.calls += 1
        if self.bad or self.calls == 1:
            raise InvalidTag
        return b"message"


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGINT has a handler, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("suite", [CLASSICAL, POST_QUANTUM])
def test_a_bad_message_is_one_after_a_second_look(suite: hpke.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    key = PrivateKey.generate(suite)
    with pytest.raises(ProtocolError, match="does not open"):
        key.open(bytes(suite.overhead), INFO)
    for library, error in ((InterruptedOnce(), KeyboardInterrupt), (InterruptedOnce(bad=True), ProtocolError)):
        monkeypatch.setitem(hpke._HPKE, suite, library)
        with pytest.raises(error):
            key.open(b"", INFO)
        assert library.calls == 2


def in_a_thread(open_it: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(open_it).result()


def with_nobody_to_interrupt(open_it: Callable[[], object]) -> None:
    """As in the processes that open a helper's reports."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        open_it()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("run", [in_a_thread, with_nobody_to_interrupt])
def test_a_bad_report_costs_a_helper_one_try(
    run: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = InterruptedOnce(bad=True)
    monkeypatch.setitem(hpke._HPKE, CLASSICAL, library)
    key = PrivateKey.generate(CLASSICAL)
    with pytest.raises(ProtocolError):
        run(lambda: key.open(b"", INFO))
    assert library.calls == 1
