"""A querier's own record: "unbiased for certain" is never said where a real device dropped an epoch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from device.budget import LossTerms
from device.conversion import ConversionOptions, floor_micros
from device.device import Device
from device.epoch import DeviceCoins
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from device.stores.storage import EpochOutcome
from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.errors import ErrorKind
from protocol.header import coarse_time
from protocol.querier.own_record import Assumptions, BiasStanding, OwnRecord, QueriedBatch
from protocol.querier.query_folder import QueryFolder
from protocol.querier.result import BiasBound, QueryResult
from protocol.querier.saved_query import QueryOptions, ReportSpan, SavedQuery, make_query, spans_of
from protocol.units import DAY, HOUR, MICROS
from tests.protocol.test_result import result
from tests.support import protocol_samples as samples
from tests.support.raising import raises

SHOP = "shop.example"
START = 1_900_000_800 // DAY * DAY
LIMITS = DeviceLimits(epoch_days=1, max_lookback_days=1, global_budget=2**52, impression_site_quota=2**52)


@dataclass(frozen=True)
class Asked:
    """One batch: when this device made its reports for it, at which ε and κ, and how long others went on with it."""

    times: tuple[int, ...]
    epsilon: float = 0.6
    kappa: int = 0
    until: int = 0
    asked: bool = True

    def batch(self, name: str) -> QueriedBatch:
        terms = LossTerms(self.epsilon, floor_micros(self.epsilon), 2, self.kappa)
        first, last = coarse_time(min(self.times)), coarse_time(max((*self.times, self.until)))
        span = ReportSpan(SHOP, first, last, terms.epsilon_micros, 2, self.kappa)
        return QueriedBatch(Path(name), (span,), (("00", None),) if self.asked else ())


@dataclass(frozen=True)
class Lived:
    """A device's life: its batches, what the querier must know of it, and whose reports lost an epoch."""

    batches: tuple[QueriedBatch, ...]
    assumptions: Assumptions
    dropped: frozenset[int]


def live(batches: tuple[Asked, ...], begins: int, data: bool, digits: int) -> Lived:
    """Run the reports on a real device whose days begin `begins` seconds after midnight."""
    clock = [START - DAY]
    store = MemoryStore(debug=True)
    store.fix_epoch_start(START - 5 * DAY + begins)
    device = Device(store, PlainSeal(), clock=lambda: clock[0], limits=LIMITS, coins=DeviceCoins(lambda: 0.0))
    calls = [(time, number) for number, batch in enumerate(batches) for time in batch.times]
    # Impressions, as number −1, at both ends of what every report can look at.
    seen = [(time - day * DAY, -1) for time, _ in calls for day in range(2 if data else 0)]
    dropped = set()
    for time, number in sorted([*calls, *seen]):
        clock[0] = time
        if number < 0:
            device.save_impression("news.example", ImpressionOptions(0))
            continue
        asked = batches[number]
        options = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=asked.epsilon, lookback_days=1, kappa=asked.kappa)
        device.measure_conversion(SHOP, options)
        if any(entry.outcome is EpochOutcome.OUT_OF_BUDGET for entry in device.reports()[-1].epochs):
            dropped.add(number)
    assumptions = Assumptions(max(len(batch.times) for batch in batches), lookback_days=1, epoch_days=1, digits=digits)
    named = tuple(batch.batch(str(number)) for number, batch in enumerate(batches))
    return Lived(named, assumptions, frozenset(dropped))


def at(day: int, hour: int, minute: int = 0, second: int = 0) -> int:
    return START + day * DAY + hour * HOUR + minute * 60 + second


# Chosen so that epochs are shared to the second: from A, two days less a second later is the last moment that is.
MOMENTS = (at(0, 10, 59, 59), at(1, 10, 15), at(2, 10, 15), at(2, 10, 59, 58), at(3, 9))
BEGINNINGS = (0, 10 * HOUR + 1800, 10 * HOUR + 3599)
THIRD = 0.3333333


def worlds() -> Iterator[tuple[tuple[Asked, ...], int]]:
    """Every way to place two or three batches on the moments, and the few shapes that a wrong rule would get wrong."""
    for first, second in product(MOMENTS, repeat=2):
        yield (Asked((first,)), Asked((second,))), 3
        yield (Asked((first,), until=at(4, 0)), Asked((second,))), 3
        yield (Asked((first,), asked=False), Asked((second,))), 3
        yield (Asked((first,), 0.4, kappa=1), Asked((second,), 0.4, kappa=1)), 3
        yield (Asked((first, second)), Asked((at(3, 9),), 0.2)), 3
    for three in product(MOMENTS, repeat=3):
        yield tuple(Asked((time,), 0.5) for time in three), 3
        yield tuple(Asked((time,), THIRD) for time in three), 6


@pytest.fixture(scope="module")
def lives() -> list[Lived]:
    return [
        live(batches, begins, data, digits)
        for (batches, digits), begins, data in product(worlds(), BEGINNINGS, (True, False))
        # Without data only a side query costs anything.
        if data or any(batch.kappa for batch in batches)
    ]


def contradicted(lives: list[Lived], rule: type[OwnRecord]) -> tuple[int, int]:
    """How often a rule says "certain", and how often a device had dropped an epoch all the same."""
    said = wrong = 0
    for life in lives:
        record = rule(SHOP, life.batches, life.assumptions)
        for number, batch in enumerate(life.batches):
            if record.certain(batch):
                said += 1
                wrong += number in life.dropped
    return said, wrong


def test_certain_is_never_said_where_a_device_dropped_an_epoch(lives: list[Lived]) -> None:
    said, wrong = contradicted(lives, OwnRecord)
    reports = sum(len(life.batches) for life in lives)
    assert wrong == 0
    # Not for want of saying anything, and not for want of drops.
    assert said > reports / 4
    assert sum(len(life.dropped) for life in lives) > 300


def test_it_is_said_unless_some_device_drops_one() -> None:
    """Tight: what is called unknown is a drop on a device whose days begin at the right second. A header says only the
    hour, so of two batches in one hour nobody knows which paid first; those pairs are left out.
    """
    pairs = [pair for pair in product(MOMENTS, repeat=2) if pair[0] // HOUR != pair[1] // HOUR]
    for pair in pairs:
        batches = tuple(Asked((time,)) for time in pair)
        found = [live(batches, begins, True, 3) for begins in (*range(0, DAY, 1799), *(time % DAY for time in pair))]
        record = OwnRecord(SHOP, found[0].batches, found[0].assumptions)
        for number, batch in enumerate(found[0].batches):
            assert record.certain(batch) != any(number in life.dropped for life in found)


class ForgetsTheEpochsLength(OwnRecord):
    def __init__(self, site: str, batches: tuple[QueriedBatch, ...], assumptions: Assumptions) -> None:
        super().__init__(site, batches, assumptions)
        self._reach = assumptions.lookback_days * DAY


class ForgetsTheLookback(OwnRecord):
    def __init__(self, site: str, batches: tuple[QueriedBatch, ...], assumptions: Assumptions) -> None:
        super().__init__(site, batches, assumptions)
        self._reach = assumptions.epoch_days * DAY


class ForgetsItself(OwnRecord):
    def certain(self, batch: QueriedBatch) -> bool:
        others = OwnRecord(self.site, [each for each in self.batches if each is not batch], self.assumptions)
        return all(
            others.load(start, batch.end) <= self.assumptions.budget
            for start in self._starts(batch.begun - self._reach + 1, batch.end)
        )


class CountsWholeBatchesOnly(OwnRecord):
    def load(self, begins: int, by: int) -> int:
        return sum(self._price(batch, begins) for batch in self.batches if batch.end <= by)


class CountsAnsweredBatchesOnly(OwnRecord):
    def load(self, begins: int, by: int) -> int:
        return sum(self._price(batch, begins) for batch in self.batches if batch.begun <= by and batch.queries)


class TakesDevicesForAlike(OwnRecord):
    """As if every device's epochs began at midnight."""

    def _starts(self, first: int, last: int) -> list[int]:
        return list(range(first // DAY * DAY, last + 1, DAY))


class TakesBatchesForPeople(OwnRecord):
    def __init__(self, site: str, batches: tuple[QueriedBatch, ...], assumptions: Assumptions) -> None:
        super().__init__(site, batches, replace(assumptions, per_device=1))


class TakesTheHourForTheMoment(OwnRecord):
    def __init__(self, site: str, batches: tuple[QueriedBatch, ...], assumptions: Assumptions) -> None:
        cut = [replace(one, spans=tuple(_Hours(*_fields(span)) for span in one.spans)) for one in batches]
        super().__init__(site, cut, assumptions)

    def certain(self, batch: QueriedBatch) -> bool:
        return super().certain(next(each for each in self.batches if each.path == batch.path))


class _Priced(OwnRecord):
    def _price(self, batch: QueriedBatch, begins: int) -> int:
        reached = [span for span in batch.spans if span.first - self._reach < begins <= span.end]
        return self.assumptions.per_device * max(map(self.price, reached), default=0)

    @staticmethod
    def price(span: ReportSpan) -> int:
        raise NotImplementedError


class ForgetsKappa(_Priced):
    @staticmethod
    def price(span: ReportSpan) -> int:
        return replace(span, kappa=0).most(3)


class TakesTheHeadersEpsilon(_Priced):
    @staticmethod
    def price(span: ReportSpan) -> int:
        return span.epsilon_micros * (span.sensitivity + span.kappa) // span.sensitivity


class _Hours(ReportSpan):
    @property
    def end(self) -> int:
        return self.last


def _fields(span: ReportSpan) -> tuple[str, int, int, int, int, int]:
    return span.site, span.first, span.last, span.epsilon_micros, span.sensitivity, span.kappa


WRONG_RULES = [
    ForgetsTheEpochsLength,
    ForgetsTheLookback,
    ForgetsItself,
    CountsWholeBatchesOnly,
    CountsAnsweredBatchesOnly,
    TakesDevicesForAlike,
    TakesBatchesForPeople,
    TakesTheHourForTheMoment,
    ForgetsKappa,
    TakesTheHeadersEpsilon,
]


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_is_contradicted_by_a_device(lives: list[Lived], rule: type[OwnRecord]) -> None:
    assert contradicted(lives, rule)[1] > 0


@pytest.mark.parametrize("sensitivity", [1, 2, 3, 10, 2**40])
@pytest.mark.parametrize("kappa", [0, 1, 7])
def test_no_device_charges_more_and_with_few_digits_none_less(sensitivity: int, kappa: int) -> None:
    """Against the device's own arithmetic in doubles: 0.3, as a float, has 299,999 micros in a header."""
    for thousandths in (1, 7, 100, 299, 300, 301, 333, 500, 700, 999, 1000, 1001, 4_294_000):
        exact = thousandths / 1000
        for epsilon in (exact, math.nextafter(exact, 0), exact + 3e-7, exact * (1 + 1e-9)):
            micros = floor_micros(epsilon)
            if not 0 < micros <= 4_294_000_000 or epsilon > 4294:
                continue
            charged = LossTerms(epsilon, micros, sensitivity, kappa).loss(sensitivity + kappa)
            span = ReportSpan(SHOP, 0, 0, micros, sensitivity, kappa)
            assert charged <= span.most(6) <= charged + 2 + 2 * kappa // sensitivity
            if epsilon == exact:
                assert span.most(3) == charged


def test_what_others_use_up_is_not_in_her_record() -> None:
    """The page says so: where all sites share a limit, "for certain" is about her own budget and nothing else."""
    clock = [START]
    device = Device(
        MemoryStore(debug=True), PlainSeal(), clock=lambda: clock[0], limits=replace(LIMITS, global_budget=MICROS)
    )
    device.save_impression("news.example", ImpressionOptions(0))
    options = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=1.0)
    assert sum(device.measure_conversion("other.example", options)) == 1
    assert sum(device.measure_conversion(SHOP, options)) == 0
    batch = Asked((START,), 1.0).batch("mine")
    assert OwnRecord(SHOP, [batch], Assumptions(1, lookback_days=1, epoch_days=1)).certain(batch)


def span(day: int, micros: int = 600_000, days: int = 0) -> ReportSpan:
    return ReportSpan(SHOP, START + day * DAY, START + (day + days) * DAY, micros, 2, 0)


def test_epochs_say_what_their_answers_say() -> None:
    """Two batches of 0.6 a day apart: what both reach is unknown until the second one's side query has spoken."""
    first = QueriedBatch(Path("a"), (span(0),), (("01", None),))
    second = QueriedBatch(Path("b"), (span(1),), (("02", None),))
    assumptions = Assumptions(1)
    record = OwnRecord(SHOP, [second, first], assumptions)
    assert [record.standing(batch, None) for batch in (first, second)] == [BiasStanding.CERTAIN, BiasStanding.UNKNOWN]
    assert max(row.load for row in record.epochs()) == 1_200_000
    assert {row.standing for row in record.epochs() if row.load > MICROS} == {BiasStanding.UNKNOWN}
    measured = replace(second, queries=(("02", BiasBound(12.5, 0.05)),))
    record = OwnRecord(SHOP, [first, measured], assumptions)
    assert record.standing(measured, measured.measured) is BiasStanding.MEASURED
    assert {(row.standing, row.bound) for row in record.epochs() if row.load > MICROS} == {
        (BiasStanding.MEASURED, 12.5)
    }


def test_far_apart_batches_share_no_epoch() -> None:
    """Thirty days back and seven of an epoch: reports 37 days and an hour apart cannot meet."""
    batches = [QueriedBatch(Path("a"), (span(0),)), QueriedBatch(Path("b"), (span(38),))]
    record = OwnRecord(SHOP, batches, Assumptions(1))
    assert all(record.certain(batch) for batch in batches)
    near = [batches[0], QueriedBatch(Path("b"), (span(36),))]
    assert not OwnRecord(SHOP, near, Assumptions(1)).certain(near[1])
    assert OwnRecord(SHOP, near, Assumptions(1, budget=2 * MICROS)).certain(near[1])


@pytest.mark.parametrize("wrong", [{"per_device": 0}, {"budget": 0}, {"lookback_days": 0}, {"digits": 7}])
def test_what_she_cannot_know_is_refused(wrong: dict[str, int]) -> None:
    with raises(ErrorKind.OUT_OF_RANGE):
        Assumptions(**{"per_device": 1, **wrong})


def batch_file(path: Path, epsilon: int, hour: int, count: int = 3) -> Path:
    terms = samples.terms(epsilon_micros=epsilon, time=samples.NOW + hour * HOUR)
    samples.write_batch(path, [samples.report(f"{path.name} {each}", promised=terms) for each in range(count)])
    os.utime(path, (samples.NOW, samples.NOW))
    return path


def test_spans_are_read_from_headers(tmp_path: Path) -> None:
    path = batch_file(tmp_path / "batch", 500_000, 0)
    later = [samples.report("late", promised=samples.terms(epsilon_micros=500_000, time=samples.NOW + 5 * HOUR))]
    dear = [samples.report("dear", promised=samples.terms(epsilon_micros=700_000, time=samples.NOW + HOUR))]
    mixed = samples.write_batch(tmp_path / "mixed", [*BatchReader(path), *later, *dear])
    terms = samples.terms()
    site, cost = terms.site, (terms.sensitivity, terms.kappa)
    assert spans_of(BatchReader(mixed)) == (
        ReportSpan(site, samples.NOW, samples.NOW + 5 * HOUR, 500_000, *cost),
        ReportSpan(site, samples.NOW + HOUR, samples.NOW + HOUR, 700_000, *cost),
    )


def ask(path: Path) -> SavedQuery:
    helper_set = samples.HELPER_SET
    return QueryFolder(path).keep(
        make_query(BatchReader(path), QueryOptions(), helper_set, samples.QUERIER, samples.NOW)
    )


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["bias", *arguments])
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def answered(saved: SavedQuery, **side_query: int) -> QueryResult:
    """An answer to a query over three reports; it measured no bias without a side query."""
    made, codes = result(1000, 10.0, **side_query), np.zeros(3, dtype=np.uint8)
    answer = replace(made.answer, counted=3, left_out=(codes, codes, codes))
    return replace(made, query=replace(made.query, query_id=saved.query.query_id), answer=answer)


def test_the_command_reads_a_folder_also_when_a_batch_is_gone(tmp_path: Path) -> None:
    first, second = batch_file(tmp_path / "a.batch", 600_000, 0), batch_file(tmp_path / "b.batch", 600_000, 30)
    saved = [ask(first), ask(second)]
    first.unlink()
    code, said = run(str(tmp_path), "--per-device", "1", "--json", "-")
    assert code == 0
    (site,) = json.loads(said)
    standings = {Path(row["batch"]).name: row["standing"] for row in site["answers"]}
    assert standings == {"a.batch": "not_answered", "b.batch": "not_answered"}
    assert run(str(tmp_path), "--per-device", "1")[1].count("no answer here") == 2
    for batch, each in zip((first, second), saved, strict=True):
        QueryFolder(batch).keep_result(answered(each))
    (site,) = json.loads(run(str(tmp_path), "--per-device", "1", "--json", "-")[1])
    standings = {Path(row["batch"]).name: row["standing"] for row in site["answers"]}
    assert standings == {"a.batch": "certain", "b.batch": "unknown"}
    noted = answered(saved[1], kappa=1, flags=3)
    QueryFolder(second).keep_result(noted)
    code, said = run(str(tmp_path), "--per-device", "1", "--json", "-")
    assert noted.bias is not None
    assert [row["bias_bound"] for row in json.loads(said)[0]["answers"]] == [None, noted.bias.bound]
    code, said = run(str(tmp_path), "--per-device", "1")
    assert code == 0
    for words in ("unbiased for certain", "measured: at most", "limits that all sites share"):
        assert words in said
    assert run(str(tmp_path), "--per-device", "2")[1].count("unbiased for certain") == 0


def test_a_batch_that_was_not_asked_counts_too(tmp_path: Path) -> None:
    batch_file(tmp_path / "a.batch", 600_000, 0)
    code, said = run(str(tmp_path), "--per-device", "1")
    assert code == 0 and "no query" in said
    second = batch_file(tmp_path / "b.batch", 600_000, 30)
    QueryFolder(second).keep_result(answered(ask(second)))
    (site,) = json.loads(run(str(tmp_path), "--per-device", "1", "--json", "-")[1])
    assert [row["standing"] for row in site["answers"]] == ["certain", "unknown"]


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tmp_path)], "there are no reports"),
        ([str(tmp_path / "none")], "there is no batch"),
    ):
        code, said = run(*arguments, "--per-device", "1")
        assert code == 1 and words in said


def test_a_saved_query_keeps_what_its_reports_could_cost(tmp_path: Path) -> None:
    saved = ask(batch_file(tmp_path / "a.batch", 600_000, 4))
    (loaded,) = QueryFolder(tmp_path / "a.batch").all()
    assert loaded.spans == saved.spans and len(loaded.spans) == 1
    assert Fraction(loaded.spans[0].epsilon_micros, MICROS) == Fraction(3, 5)
