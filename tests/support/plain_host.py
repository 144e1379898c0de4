"""The native messaging host before a device that does not seal, in memory, with a clock that a test sets.

It understands three more messages, which only a test's own worker sends: `control` makes a new device, `history` clears
a part of it, and `stored` lists the impressions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device.browser.host import Answer, Host, Message, Pipe
from device.device import Device
from device.stores.memory_store import MemoryStore
from device.web.conformance import CONFIG, PlainDevice, ScenarioConfig, plain_device

NOW = 1_900_000_000


class PlainHost(Host[tuple[int, ...]]):
    """A host whose device a test replaces."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe, self._opened_plain, lambda report: json.dumps(report).encode())
        self._now = NOW
        self._immediate |= {"control": self._control, "history": self._history, "stored": self._stored}

    @contextmanager
    def _opened_plain(self, _: str) -> Iterator[Device[tuple[int, ...]]]:
        yield self._new_device(ScenarioConfig.load(Path("no such file")))

    def _new_device(self, config: ScenarioConfig) -> PlainDevice:
        return plain_device(MemoryStore(debug=True), config.limits, config.coins, lambda: self._now)

    def _control(self, message: Message) -> Answer:
        self._now = message.get("now", NOW)
        if (scenarios := message.get("scenarios")) is not None:
            new = self._new_device(ScenarioConfig.load(Path(scenarios or "no such folder") / CONFIG))
            self.browser.device = new
        return {}

    def _history(self, message: Message) -> Answer:
        self.device.clear_browsing_history(message["sites"], forget_visits=message["forgetVisits"])
        return {}

    def _stored(self, message: Message) -> Answer:
        saved = [one.impression for one in self.device.overview().impressions]
        return {"stored": [[each.histogram_index, each.site, each.caller] for each in saved]}


if __name__ == "__main__":
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    PlainHost(Pipe(sys.stdin.buffer, sink)).run()
