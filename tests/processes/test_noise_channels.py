"""Nothing that leaves three real helpers moves with the noise: no metric, log line, size or time.

The scale is 2^28, at which the sampler of an earlier release took tens of milliseconds for each multiple of the scale.
`make load` runs all of it: 200 queries in each mode, and 200 with a planted leak of 10 ms for noise as large as the
scale, which must be seen. `make test` runs a few queries of each, which shows that the channels are read, no more.

If a figure does not depend on the noise, each order of the noise is equally likely. A mode compares a few hundred
figures with the noise of the answer and with that of the helper itself, at a joint risk of 10^−7 of a false failure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest

from mpc_helpers.local.launcher import Launched, fetch, launched, prepare
from mpc_helpers.mpc.fork_server_main import session_of_zeros
from mpc_helpers.mpc.noisy_sum import SumKind, SumTerms
from protocol.noise import NoiseMode
from protocol.querier.ask import Querier
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.shares import PARTIES
from tests.mpc_helpers.test_noise import correlated
from tests.support.exposition import read_exposition
from tests.support.figures import keep
from tests.support.three_helpers import SITE, real_now, seal_all, terms, write_batch
from tests.support.watched_helper import DRAWN, LEAK, read_drawn

SCALE = 2**28
ALL = os.environ.get("TREFOIL_LOAD") == "all"
DRAWS = 200 if ALL else 3
RISK = 1e-7
COMMAND = (sys.executable, "-m", "tests.support.watched_helper")
# A metric may be a tenth of a second old.
FRESH_SECONDS = 0.15

Figures = dict[str, float]


@dataclass
class Watch:
    """Three helpers, and what was seen of each query: figures of each helper, of the querier, and the noise."""

    running: Launched
    folder: Path
    seen: list[Figures] = field(default_factory=list)
    # The size of the noise in each answer, and of what each helper drew for it; empty in `joint`, where none knows any.
    total: list[float] = field(default_factory=list)
    own: list[list[float]] = field(default_factory=lambda: [[] for _ in range(PARTIES)])

    def query(self, mode: NoiseMode) -> None:
        """Ask about one null report, and note everything that can be noticed of it."""
        trio, number = self.running.trio, len(self.seen)
        paid = terms(1, sensitivity=SCALE)
        batch = write_batch(self.folder / f"batch-{number}", seal_all([[0]], paid, trio.helper_set))
        asked = make_query(
            batch, QueryOptions(noise=mode, seconds=120), trio.helper_set, self.running.site_key(SITE), real_now()
        )
        before, drawn, logs = self._metrics(), self._drawn(), self._log_sizes()
        start = time.monotonic()
        result = asyncio.run(Querier(trio.helper_set).ask(asked, batch))
        figures = {"seconds to the answer": time.monotonic() - start}
        time.sleep(FRESH_SECONDS)
        after = self._metrics()
        figures |= {name: value - before.get(name, 0.0) for name, value in after.items()}
        for party in range(PARTIES):
            address = f"/v1/queries/{asked.query.digest.hex()}"
            figures |= _named(party, self._status(party, address))
            figures |= _named(party, self._log(party, logs[party]))
        self.seen.append(figures)
        self.total.append(abs(result.answer.histogram[0]))
        for own, values, earlier in zip(self.own, self._drawn(), drawn, strict=True):
            own += [sum(map(abs, values[len(earlier) :]))] if len(values) > len(earlier) else []

    def _metrics(self) -> Figures:
        figures: Figures = {}
        for party, helper in enumerate(self.running.helper_set.helpers):
            for name, family in read_exposition(fetch(helper, "/metrics", 30).decode()).items():
                figures |= _named(party, {f"{name} {dict(labels)}": value for labels, value in family.samples.items()})
        return figures

    def _status(self, party: int, address: str) -> Figures:
        helper = self.running.helper_set.helpers[party]
        status, answer = fetch(helper, address, 30), fetch(helper, f"{address}/answer", 30)
        seconds = {f"status: {stage}": spent for stage, spent in json.loads(status)["seconds"].items()}
        return {"bytes of the status": len(status), "bytes of the answer": len(answer), **seconds}

    def _log(self, party: int, offset: int) -> Figures:
        """Return the number, size and times of the lines since `offset`, and every number in them."""
        text = self.running.trio.log_path(party).read_bytes()[offset:].decode()
        lines = [json.loads(line) for line in text.splitlines()]
        figures: Figures = {"lines of the log": len(lines), "bytes of the log": len(text)}
        for place, line in enumerate(lines):
            name = f"line {place} {line['logger']}"
            figures[f"{name}: milliseconds"] = _milliseconds(line["time"]) - _milliseconds(lines[0]["time"])
            figures |= {f"{name}: {key}": value for key, value in line.items() if isinstance(value, int | float)}
        return figures

    def _log_sizes(self) -> list[int]:
        return [self.running.trio.log_path(party).stat().st_size for party in range(PARTIES)]

    def _drawn(self) -> list[list[int]]:
        return [read_drawn(self.running.trio.helper_folder(party) / DRAWN) for party in range(PARTIES)]

    def figures(self) -> Mapping[str, list[float]]:
        """Return every figure with its value in each query, and −1 where there was none."""
        names = sorted({name for figures in self.seen for name in figures})
        return {name: [figures.get(name, -1.0) for figures in self.seen] for name in names}

    def leaks(self) -> list[str]:
        """Return the figures that are correlated with noise."""
        figures = self.figures()
        pairs = [(name, values, self.total) for name, values in figures.items()]
        for party, own in enumerate(self.own):
            mine = itertools.compress(figures.items(), (name.startswith(f"helper-{party + 1} ") for name in figures))
            pairs += [(name, values, own) for name, values in mine if own]
        return sorted({name for name, values, noise in pairs if correlated(values, noise, RISK / len(pairs))})


def _named(party: int, figures: Figures) -> Figures:
    return {f"helper-{party + 1} {name}": value for name, value in figures.items()}


def _milliseconds(text: str) -> float:
    """Return the time of day of a log line."""
    hours, minutes, seconds = text.removesuffix("Z").partition("T")[2].split(":")
    return 1000 * (3600 * int(hours) + 60 * int(minutes) + float(seconds))


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    options = {"processes": 0, "unchecked_histograms": True, "noise_modes": [mode.value for mode in NoiseMode]}
    trio = prepare(folder / "trio", now=real_now(), sites={SITE: [SITE]}, options=options)
    with launched(trio, COMMAND) as running:
        yield Watch(running, folder)


@pytest.mark.parametrize("mode", NoiseMode)
def test_nothing_that_leaves_a_helper_moves_with_the_noise(
    tmp_path: Path, mode: NoiseMode, show: Callable[[str], None]
) -> None:
    with watched(tmp_path) as watch:
        for _ in range(DRAWS):
            watch.query(mode)
    # Each of the three draws for itself in `local`, and for two pairs in `pairwise`.
    assert [len(own) for own in watch.own] == [0 if mode is NoiseMode.JOINT else DRAWS] * PARTIES
    figures = watch.figures()
    for part in ("trefoil_process_cpu_seconds", "status: computing", "bytes of the answer", "queries: seconds"):
        assert sum(part in name for name in figures) >= PARTIES, part
    if not ALL:
        return
    moving = sum(len(set(values)) > 1 for values in figures.values())
    show(f"{mode.value}: {DRAWS} draws, {len(figures)} figures, {moving} of which move")
    keep(f"noise-channels-{mode.value}", "make load", {"draws": DRAWS, "figures": len(figures), "moving": moving})
    assert watch.leaks() == []


@pytest.mark.skipif(not ALL, reason="`make load` plants a leak; a correlation takes 200 draws")
def test_a_leak_of_10_ms_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Callable[[str], None]) -> None:
    """Processor time of workers, in the figures of the fork server, as an earlier release exported them."""
    monkeypatch.setenv(LEAK, "10")
    with watched(tmp_path) as watch:
        for _ in range(DRAWS):
            watch.query(NoiseMode.LOCAL)
    leaks = watch.leaks()
    show(f"seen: {leaks}")
    assert {f"helper-{party + 1}" for party in range(PARTIES)} <= {name.split(" ")[0] for name in leaks}
    assert all("fork server" in name for name in leaks if "cpu" in name)


@pytest.mark.parametrize("kind", [SumKind.LOCAL, SumKind.PAIRWISE, SumKind.JOINT])
async def test_what_workers_send_has_one_size_whatever_is_drawn(kind: SumKind) -> None:
    """Frame by frame, as a peer and an observer of the network see it."""
    sizes: set[tuple[tuple[tuple[int, int, int], int], ...]] = set()
    for _ in range(DRAWS if ALL else 10):
        sent: Counter[tuple[int, int, int]] = Counter()

        def count(sender: int, receiver: int, frame: bytes, sent: Counter[tuple[int, int, int]] = sent) -> bytes:
            sent[sender, receiver, len(frame)] += 1
            return frame

        await session_of_zeros(SumTerms(kind, Fraction(1, SCALE), SCALE, 1), 60.0, count)
        sizes.add(tuple(sorted(sent.items())))
    assert len(sizes) == 1
