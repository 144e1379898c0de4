"""No request is an oracle: what a site is told of its options never depends on what the device holds.

Every number is checked before anything is looked at; whatever goes wrong afterwards becomes a null report that was
paid for. On both stores.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from benchmarks.experiments.small_worlds import NOW, PUBLISHER, QUERIER, Clock, PlainDevice
from device.attribution import LastNTouch
from device.budget import FilterKind, LossTerms
from device.conversion import AttributionRequest, Conversion, ConversionOptions
from device.device import Device
from device.errors import DatabaseError, DOMException, RangeError, StandardError
from device.events import ImpressionOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.request import SideQuery, SideQueryForm
from device.stores.instance import InstanceToken
from device.stores.sqlite_store import SqliteStore
from device.stores.storage import EpochOutcome, Store
from protocol.errors import ErrorKind, TrefoilError
from protocol.units import DAY, MAX_SENSITIVITY, MICROS
from tests.support.both_stores import Kind, fresh_store
from tests.support.raising import raises

ASKED = AttributionRequest([0, 1], epsilon=0.5, buckets=2, value=1, query_sensitivity=2)
STANDARD = ConversionOptions(TREFOIL_SERVICE, 2, epsilon=0.5, lookback_days=13)
SAVED = ImpressionOptions(0, match_value=7)
Options = AttributionRequest | ConversionOptions


def plain_device(store: Store, clock: Clock) -> PlainDevice:
    return Device(store, PlainSeal(), clock=clock)


@dataclass
class Person:
    """A device that holds one impression, or none."""

    device: PlainDevice
    store: Store

    def outcome(self, options: Options) -> tuple[int, ...] | str:
        """What the site is told: a report, or an error."""
        try:
            return self.device.measure_conversion(QUERIER, options)
        except TrefoilError as error:
            return f"{type(error).__name__}: {error}"

    def spent(self, kind: FilterKind = FilterKind.SITE) -> dict[int, int]:
        return {state.epoch: state.spent for state in self.device.budget() if state.kind is kind}


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@contextmanager
def two_people(kind: Kind) -> Iterator[tuple[Person, Person]]:
    """One who saw an ad in epoch 1, and one who saw none."""
    clock = Clock(NOW)
    with fresh_store(kind) as first, fresh_store(kind) as second:
        having, lacking = (Person(plain_device(store, clock), store) for store in (first, second))
        having.device.save_impression(PUBLISHER, SAVED)
        yield having, lacking


@pytest.fixture
def people(kind: Kind) -> Iterator[tuple[Person, Person]]:
    with two_people(kind) as both:
        yield both


@pytest.fixture(scope="module", params=list(Kind), ids=lambda kind: kind.value)
def untouched(request: pytest.FixtureRequest) -> Iterator[tuple[Person, Person]]:
    """The same two for many calls, none of which may leave a trace."""
    with two_people(request.param) as both:
        yield both


class Odd(int):
    """A number that compares as it likes."""

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


NUMBERS: Sequence[Any] = [
    0.5,
    -0.25,
    math.nan,
    math.inf,
    -math.inf,
    "1",
    None,
    True,
    [],
    10**30,
    -(10**30),
    b"1",
    1j,
    {},
]


def bad_requests() -> Iterator[tuple[str, AttributionRequest]]:
    """Every number of the paper's request, in every way that it can be wrong."""
    for name in ("buckets", "value", "query_sensitivity"):
        for number in NUMBERS:
            yield f"{name}={number!r}", replace(ASKED, **{name: number})
    for number in NUMBERS:
        if number != 0.5 and number is not None:
            yield f"epsilon={number!r}", replace(ASKED, epsilon=number)
        yield f"epochs=[{number!r}]", replace(ASKED, epochs=[number])
        yield f"epochs=[0, {number!r}]", replace(ASKED, epochs=[0, number])
        yield f"match_values=[{number!r}]", replace(ASKED, match_values=[number])
    yield "no list", replace(ASKED, epochs=3)  # type: ignore[arg-type]  # the point of the test
    yield "text", replace(ASKED, epochs="01")  # type: ignore[arg-type]  # the point of the test
    yield "many epochs", replace(ASKED, epochs=[0] * 1001)
    yield "far apart", replace(ASKED, epochs=[0, 5000])
    yield "far away", replace(ASKED, epochs=[2**40])
    yield "a negative match value", replace(ASKED, match_values=[-1])
    yield "a large match value", replace(ASKED, match_values=[2**32])
    yield "many match values", replace(ASKED, match_values=range(100))
    yield "more than SQLite has variables for", replace(ASKED, match_values=range(300_000))
    yield "no function", replace(ASKED, function=3)  # type: ignore[arg-type]  # the point of the test
    yield "no test", replace(ASKED, relevant=3)  # type: ignore[arg-type]  # the point of the test
    yield "much credit", replace(ASKED, function=LastNTouch((1.0,) * 5000))
    yield "a unit that is no text", replace(ASKED, unit=7)  # type: ignore[arg-type]  # the point of the test


def bad_options() -> Iterator[tuple[str, ConversionOptions]]:
    """The same for the standard's call."""
    for name in ("histogram_size", "value", "max_value", "lookback_days"):
        for number in NUMBERS:
            if name == "lookback_days" and number in (None, 10**30):
                continue
            yield f"{name}={number!r}", replace(STANDARD, **{name: number})
    for number in NUMBERS:
        if number != 0.5 and number is not None:
            yield f"epsilon={number!r}", replace(STANDARD, epsilon=number)
            yield f"credit=[{number!r}]", replace(STANDARD, credit=[number] if number != 10**30 else [10**400])
        yield f"match_values=[{number!r}]", replace(STANDARD, match_values=[number])
        yield f"impression_sites=[{number!r}]", replace(STANDARD, impression_sites=[number])
        if number not in (None, [], {}):
            yield f"match_values={number!r}", replace(STANDARD, match_values=number)
    yield "no text", replace(STANDARD, aggregation_service=[])  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("asked", [options for _, options in (*bad_requests(), *bad_options())])
def test_a_bad_number_is_refused_alike_with_data_or_without(untouched: tuple[Person, Person], asked: Options) -> None:
    having, lacking = untouched
    for person in untouched:
        with pytest.raises(StandardError):
            person.device.measure_conversion(QUERIER, asked)
        assert person.spent() == {} and list(person.device.reports()) == []
    assert having.outcome(asked) == lacking.outcome(asked)


def bad_impressions() -> Iterator[tuple[str, ImpressionOptions]]:
    for name in ("histogram_index", "match_value", "lifetime_days", "priority"):
        for number in NUMBERS:
            if not (name == "lifetime_days" and number == 10**30):
                yield f"{name}={number!r}", replace(SAVED, **{name: number})
    yield "sites that are none", replace(SAVED, conversion_sites=[3])  # type: ignore[list-item]  # the point of the test
    yield "text for a list", replace(SAVED, conversion_sites="shop.example")


@pytest.mark.parametrize("options", [options for _, options in bad_impressions()])
def test_a_bad_number_of_an_impression_is_refused(untouched: tuple[Person, Person], options: ImpressionOptions) -> None:
    for person, kept in zip(untouched, (1, 0), strict=True):
        with pytest.raises(StandardError):
            person.device.save_impression(PUBLISHER, options)
        assert len(person.device.overview().impressions) == kept


def test_a_number_that_lies_about_its_order_is_taken_by_its_value(people: tuple[Person, Person]) -> None:
    """What is checked is what is used."""
    having, lacking = people
    for person in people:
        with pytest.raises(RangeError):
            person.device.measure(QUERIER, replace(ASKED, value=Odd(2**50), query_sensitivity=Odd(2**50)))
    assert having.outcome(replace(ASKED, epochs=[Odd(1)])) == (1, 0)
    assert lacking.outcome(replace(ASKED, epochs=[Odd(1)])) == (0, 0)


def test_sites_that_are_no_text_are_refused(people: tuple[Person, Person]) -> None:
    for person in people:
        sites: list[Any] = [None, 3, [], b"shop.example"]
        for site in sites:
            with pytest.raises(DOMException):
                person.device.measure_conversion(site, STANDARD)
            with pytest.raises(DOMException):
                person.device.save_impression(site, SAVED)


# Side queries


class Shouts(SideQuery):
    """A side query of the querier's own making, whose flag is whatever it likes."""

    def flag(self, *_: object, **__: object) -> int:
        return MAX_SENSITIVITY


def test_a_side_querys_flag_is_zero_or_kappa_whatever_its_class_says(people: tuple[Person, Person]) -> None:
    """`SideQuery` may be subclassed; the flag is the engine's."""
    having, _ = people
    assert having.device.measure(QUERIER, replace(ASKED, side_query=Shouts(1))) == (1, 0, 0)


class ChecksItself(SideQuery):
    """Says of itself that it is in order, and is something else then."""

    @staticmethod
    def checked(asked: object) -> SideQuery:
        return Shouts(1)


class TwoFaced:
    """A number that is another one when it is asked for in another way."""

    def __index__(self) -> int:
        return 8 * DAY

    def __int__(self) -> int:
        return -8 * DAY


def test_the_number_that_was_checked_is_the_one_that_is_used() -> None:
    shown: Any = TwoFaced()
    asked = LabelOptions(TREFOIL_SERVICE, [1], 1, 0.5, shown, [PUBLISHER])
    assert asked.checked(QUERIER, QUERIER, DeviceLimits()).shown_ago == 8 * DAY


class Poses:
    """No side query at all, but it has all that one has."""

    kappa, form = 1, SideQueryForm.GENERAL

    def checked(self, *_: object) -> Poses:
        return self

    def flag(self, *_: object) -> int:
        return MAX_SENSITIVITY


def test_a_side_query_does_not_check_itself(people: tuple[Person, Person]) -> None:
    having, lacking = people
    assert having.device.measure(QUERIER, replace(ASKED, side_query=ChecksItself(1))) == (1, 0, 0)
    posing: Any = Poses()
    assert having.outcome(replace(ASKED, side_query=posing)) == "RangeError: side_query must be a SideQuery"
    assert lacking.outcome(replace(ASKED, side_query=posing)) == "RangeError: side_query must be a SideQuery"


class Cheap(ConversionOptions):
    """Options that say themselves what they cost: next to nothing."""

    def checked(self, site: str, caller: str, limits: DeviceLimits) -> Conversion:
        right = ConversionOptions.checked(self, site, caller, limits)
        return replace(right, loss_terms=LossTerms(1e-6, 1, MAX_SENSITIVITY))


class EqualsAnything(type):
    """Classes of it say that they are whatever they are compared with."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = type.__hash__


class Disguised(Cheap, metaclass=EqualsAnything):
    """The same, and hard to recognise."""


WRONG_KINDS: list[object] = [Cheap(TREFOIL_SERVICE, 2), Disguised(TREFOIL_SERVICE, 2), None, {}, "options", SAVED]


@pytest.mark.parametrize("options", WRONG_KINDS, ids=lambda options: type(options).__name__)
def test_options_are_of_our_own_classes(people: tuple[Person, Person], options: Any) -> None:
    """One of another class could be checked by its own rules. Nothing is charged, saved or logged."""
    for person in people:
        assert str(person.outcome(options)).startswith("RangeError: options must be ConversionOptions or Attribution")
        with raises(ErrorKind.WRONG_TYPE, RangeError):
            person.device.measure_impression(QUERIER, options)
        with raises(ErrorKind.WRONG_TYPE, RangeError):
            person.device.save_conversion(QUERIER, options)
        if options is not SAVED:
            with raises(ErrorKind.WRONG_TYPE, RangeError):
                person.device.save_impression(QUERIER, options)
        assert (person.spent(), list(person.device.reports())) == ({}, [])
    assert list(people[1].device.overview().impressions) == []


@pytest.mark.parametrize("kappa", [0.5, math.nan, math.inf, "1", None, True, 0, -1, 2**41])
def test_kappa_is_a_whole_number(kappa: Any) -> None:
    with pytest.raises(RangeError):
        SideQuery(kappa)


def test_a_form_that_is_none_is_refused() -> None:
    with raises(ErrorKind.WRONG_TYPE, RangeError):
        SideQuery(1, "general")  # type: ignore[arg-type]  # the point of the test


class SaysLater(SideQuery):
    """Passes the check of its own constructor, and says something else afterwards."""

    def __getattribute__(self, name: str) -> Any:
        return 2**50 if name == "kappa" else super().__getattribute__(name)


def test_kappa_is_checked_where_it_is_used(people: tuple[Person, Person]) -> None:
    for person in people:
        with pytest.raises(RangeError):
            person.device.measure(QUERIER, replace(ASKED, side_query=SaysLater(1, SideQueryForm.GENERAL)))


# Limits


WHOLE_LIMITS = [field.name for field in fields(DeviceLimits) if field.type in ("int", "int | None")]


@pytest.mark.parametrize("name", WHOLE_LIMITS)
@pytest.mark.parametrize("number", [math.nan, math.inf, 0.5, -1, "1", True, 2**80])
def test_a_limit_that_is_no_whole_number_is_refused(name: str, number: Any) -> None:
    """A budget of NaN would never be overdrawn: every comparison with it is false."""
    with raises(ErrorKind.OUT_OF_RANGE, TrefoilError) as refused:
        DeviceLimits(**{name: number})
    assert name in str(refused.value)


def test_services_are_names() -> None:
    with raises(ErrorKind.WRONG_TYPE):
        DeviceLimits(aggregation_services=frozenset([3]))  # type: ignore[list-item]  # the point of the test


# What goes wrong between BEGIN and COMMIT


def reached(people: tuple[Person, Person], place: str) -> Sequence[Person]:
    """Who comes to `place`: where nothing was found, there is nothing to read and nothing to keep."""
    return people[:1] if place in ("matching", "keep") else people


PLACES = ["matched_sites", "matching", "filters_of", "keep", "log"]
FAULTS: Sequence[Callable[[], BaseException]] = [
    lambda: MemoryError(),
    lambda: OverflowError("Python int too large to convert to SQLite INTEGER"),
    lambda: sqlite3.OperationalError("too many SQL variables"),
    lambda: RecursionError(),
    lambda: ValueError(),
    lambda: OSError(28, "No space left on device"),
]


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: Callable[[], BaseException]) -> None:
    """The next call of `name` fails; later ones work."""
    original, pending = getattr(owner, name), [fault()]

    def method(*given: Any, **named: Any) -> Any:
        if pending:
            raise pending.pop()
        return original(*given, **named)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("asked", [ASKED, STANDARD, replace(ASKED, side_query=SideQuery(1))])
def test_a_fault_is_a_null_report_that_was_paid_for(
    people: tuple[Person, Person],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    fault: Callable[[], BaseException],
    asked: Options,
) -> None:
    """A fault may have to do with what was found, so every epoch pays as if it had been its own data's doing."""
    for person in reached(people, place):
        fail_once(monkeypatch, person.store, place, fault)
        assert not any(person.device.measure_conversion(QUERIER, asked))
        charge = 750_000 if isinstance(asked, AttributionRequest) and asked.side_query else 500_000
        assert person.spent() == person.spent(FilterKind.GLOBAL) == {0: charge, 1: charge}
        (record,) = person.device.reports()
        assert {entry.outcome for entry in record.epochs} == {EpochOutcome.FAULT}
        assert [entry.paid for entry in record.epochs] == [charge, charge]


def test_a_fault_in_a_window_of_one_epoch_costs_the_largest_report(
    people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site pays for what a report can hold, as it would have without the fault, and not for twice that."""
    for person in people:
        fail_once(monkeypatch, person.store, "log", MemoryError)
        assert person.outcome(replace(STANDARD, lookback_days=1)) == (0, 0)
        assert (person.spent(), person.spent(FilterKind.GLOBAL)) == ({1: 250_000}, {1: 500_000})


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_is_ended_pays_first(
    people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch, place: str, fault: type[BaseException]
) -> None:
    for person in reached(people, place):
        fail_once(monkeypatch, person.store, place, fault)
        with pytest.raises(fault):
            person.device.measure_conversion(QUERIER, STANDARD)
        assert person.spent() == {0: 500_000, 1: 500_000}


def test_a_fault_while_measurement_is_off_costs_nothing(
    people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    for person in people:
        person.device.disable()
        fail_once(monkeypatch, person.store, "log", MemoryError)
        assert person.outcome(ASKED) == (0, 0)
        assert person.spent() == {}


@pytest.mark.parametrize("on", [True, False])
def test_a_fault_that_costs_nothing_is_logged_all_the_same(
    people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """Else the size of the database would show what was left of the budget, or that the device was off."""
    for person in people:
        person.device.clear_browsing_history([QUERIER], forget_visits=False)
        if not on:
            person.device.disable()
        fail_once(monkeypatch, person.store, "log", MemoryError)
        assert person.outcome(ASKED) == (0, 0)
        (record,) = person.device.reports()
        outcome = EpochOutcome.FAULT if on else EpochOutcome.NOT_MEASURED
        assert [(entry.outcome, entry.paid) for entry in record.epochs] == [(outcome, 0), (outcome, 0)]


def test_a_fault_that_stays_is_a_null_report_too(
    people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise DatabaseError("damaged")

    for person in people:
        monkeypatch.setattr(person.store, "filters_of", broken)
        assert person.outcome(ASKED) == person.outcome(STANDARD) == (0, 0)


@pytest.mark.parametrize("place", ["save", "census"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_while_saving_is_not_told(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, place: str, fault: Callable[[], BaseException]
) -> None:
    with fresh_store(kind) as store:
        device = plain_device(store, Clock(NOW))
        fail_once(monkeypatch, store, place, fault)
        device.save_impression(PUBLISHER, SAVED)
        device.save_impression(PUBLISHER, SAVED)
        assert len(device.overview().impressions) == 1


# After COMMIT


def test_a_token_that_cannot_be_written_is_not_the_sites_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charge is durable and the report is released; until the token can be written again, no other is."""
    clock = Clock(NOW)
    with fresh_store(Kind.DISK) as store:
        assert isinstance(store, SqliteStore)
        device = plain_device(store, clock)
        device.save_impression(PUBLISHER, SAVED)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(InstanceToken, "follow", full)
            assert device.measure_conversion(QUERIER, STANDARD) == (1, 0)
            assert device.measure_conversion("other.example", STANDARD) == (0, 0)
        assert device.measure_conversion("third.example", STANDARD) == (1, 0)
        paid = {state.site: state.spent for state in device.budget() if state.kind is FilterKind.SITE}
        assert paid == {QUERIER: MICROS // 2, "third.example": MICROS // 2}


def test_too_much_asked_of_sqlite_is_not_called_damage() -> None:
    """Only a file that SQLite itself finds damaged is."""
    with fresh_store(Kind.DISK) as store, raises(ErrorKind.UNAVAILABLE), store.transaction():
        raise sqlite3.OperationalError("too many SQL variables")


@pytest.mark.parametrize("time", [None, "now", math.nan, math.inf, 1.7e9, True, 2**40, -(2**41), 2**63, 10**30])
def test_a_clock_that_gives_no_time_is_said_to_be_wrong(people: tuple[Person, Person], time: Any) -> None:
    """The same with data or without; nothing is charged, closed or kept, and the right time is as good as before."""
    for person in people:
        clock = person.device._clock
        assert isinstance(clock, Clock)
        right, clock.now = clock.now, time
        assert str(person.outcome(STANDARD)).startswith("TrefoilError: the clock of this device")
        with raises(ErrorKind.CLOCK):
            person.device.save_impression(PUBLISHER, SAVED)
        clock.now = right
        assert person.spent() == {}
    assert [person.outcome(STANDARD) for person in people] == [(1, 0), (0, 0)]
