"""Several helper sets on one device: which may be added, how one is renewed, and what a site's choice changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from device import agent, errors, services
from device.budget import FilterKind
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.events import ImpressionOptions
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.report import HelperSetSeal, PlainSeal, ServicesSeal
from device.schedule import AtOnce
from device.stores.memory_store import MemoryStore, ServiceList
from device.stores.storage import Store
from device.web.dictionaries import read_options
from device.web.http_headers import parse_measure_conversion
from mpc_helpers.local.launcher import prepare
from protocol.batch import BatchReader
from protocol.cli import app as cli
from protocol.errors import ErrorKind, Rejection, TrefoilError
from protocol.header import Header
from protocol.helper_set import HelperEntry, HelperSet, HpkeKeyConfig
from protocol.hpke import POST_QUANTUM, PrivateKey
from protocol.querier.failure import QueryFailed
from tests.support.both_stores import Ann, Kind, fresh_store
from tests.support.protocol_samples import (
    HELPER_SET,
    IDENTITIES,
    NOW,
    SET_END,
    SET_START,
    entropy,
    hpke_key,
    identity,
    signed,
)
from tests.support.raising import raises
from tests.support.three_helpers import SITE, MemoryMpc, ThreeHelpers, real_now, three_helpers

NORTH, SOUTH = "north", "https://south.example/aggregate"
OTHERS = tuple(identity(f"other {party}") for party in range(3))


def set_of(label: str, number: int = 1, **changes: Any) -> HelperSet:
    """Return a signed set of three other helpers."""
    start, end = changes.pop("start", SET_START), changes.pop("end", SET_END)
    entries = [
        HelperEntry(
            f"{label} {party}",
            OTHERS[party].public,
            (HpkeKeyConfig(hpke_key(f"{label} {party}").public, start, end),),
            f"https://{label}-{party}.example",
            entropy(f"{label} pin {party}")(32),
        )
        for party in range(3)
    ]
    return signed(HelperSet(number, (entries[0], entries[1], entries[2])), OTHERS)


OTHER_SET = set_of("south")


def resigned(helper_set: HelperSet, number: int, helpers: tuple[HelperEntry, ...] | None = None) -> HelperSet:
    """Return a set of the same three helpers under another number, with `helpers` as its entries if given."""
    first, second, third = helpers or helper_set.helpers
    return signed(HelperSet(number, (first, second, third)), OTHERS)


@pytest.fixture(params=Kind, ids=lambda kind: kind.value)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with fresh_store(request.param) as fresh:
        yield fresh


# What a store keeps


def test_sets_are_kept_by_name_and_replaced_whole(store: Store) -> None:
    with store.transaction():
        services.add(store.services, SOUTH, OTHER_SET, NOW)
        services.add(store.services, NORTH, HELPER_SET, NOW)
    with store.transaction():
        assert list(services.trusted_sets(store.services).items()) == [(SOUTH, OTHER_SET), (NORTH, HELPER_SET)]
        services.remove(store.services, SOUTH)
    with store.transaction():
        assert services.trusted_sets(store.services) == {NORTH: HELPER_SET}


def test_a_failed_transaction_changes_nothing(store: Store) -> None:
    with store.transaction():
        services.add(store.services, NORTH, HELPER_SET, NOW)
    with pytest.raises(KeyError), store.transaction():
        services.remove(store.services, NORTH)
        raise KeyError
    with pytest.raises(KeyError), store.transaction():
        services.add(store.services, SOUTH, OTHER_SET, NOW)
        raise KeyError
    with store.transaction():
        assert services.trusted_sets(store.services) == {NORTH: HELPER_SET}


def test_clearing_history_leaves_trust_alone(store: Store) -> None:
    with store.transaction():
        services.add(store.services, NORTH, HELPER_SET, NOW)
    ann = Ann(store)
    ann.device.clear_browsing_history(forget_visits=True)
    ann.device.clear_browsing_history(["shop.example"], forget_visits=False)
    ann.device.clear_impressions_for_site(NORTH + ".example")
    with store.transaction():
        assert services.trusted_sets(store.services) == {NORTH: HELPER_SET}


def test_a_damaged_set_is_not_used_and_does_not_take_the_others_with_it(store: Store) -> None:
    wrong_signature = replace(OTHER_SET, signatures=HELPER_SET.signatures)
    with store.transaction():
        services.add(store.services, NORTH, HELPER_SET, NOW)
        for name, row in (("a", b"{"), ("b", b"\xff"), ("c", json.dumps(wrong_signature.to_json()).encode())):
            store.services.keep(name, row)
        assert services.trusted_sets(store.services) == {NORTH: HELPER_SET}
        for name in "abc":
            with raises(ErrorKind.FILE_DAMAGED, TrefoilError):
                services.renew(store.services, name, OTHER_SET, NOW)
            services.remove(store.services, name)
        assert list(store.services.all()) == [NORTH]


# Who may be added


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\n", 'a"', "a\\", "é", "n" * 256, "\x7f", "a\0"], ids=lambda name: repr(name[:5])
)
def test_names_that_no_header_could_carry_are_refused(name: str) -> None:
    with raises(ErrorKind.MALFORMED, TrefoilError):
        services.add(ServiceList(), name, HELPER_SET, NOW)


@pytest.mark.parametrize("name", ["t", "n" * 255, "https://agg-service.example:8443/a?b=c#d", "--db", "Trefoil", "'"])
def test_other_names_go_into_a_header_and_come_out_again(name: str) -> None:
    held = ServiceList()
    services.add(held, name, HELPER_SET, NOW)
    header = f'aggregation-service="{name}", histogram-size=2, report-url="/r"'
    options = parse_measure_conversion(header, "https://shop.example/").options
    assert options.checked("shop.example", "shop.example", limits_of(*held.all())).service == name


def test_a_set_must_be_signed_usable_and_new() -> None:
    held = ServiceList()
    services.add(held, NORTH, HELPER_SET, NOW)
    unsigned = replace(OTHER_SET, signatures=())
    for name, given, now, kind in (
        (SOUTH, unsigned, NOW, ErrorKind.BAD_SIGNATURE),
        (SOUTH, replace(OTHER_SET, signatures=HELPER_SET.signatures), NOW, ErrorKind.BAD_SIGNATURE),
        (SOUTH, OTHER_SET, SET_END, ErrorKind.EXPIRED),
        (SOUTH, OTHER_SET, SET_START - 1, ErrorKind.EXPIRED),
        (NORTH, OTHER_SET, NOW, ErrorKind.DUPLICATE),
    ):
        with raises(kind, TrefoilError):
            services.add(held, name, given, now)
    assert services.trusted_sets(held) == {NORTH: HELPER_SET}
    for number in range(services.MAX_SERVICES - 1):
        services.add(held, f"s{number}", OTHER_SET, NOW)
    with raises(ErrorKind.TOO_LARGE, TrefoilError):
        services.add(held, SOUTH, OTHER_SET, NOW)


# The chain of trust


def test_a_set_is_renewed_by_the_three_that_it_names(store: Store) -> None:
    later = resigned(OTHER_SET, 2, set_of("later").helpers)
    with store.transaction():
        services.add(store.services, NORTH, HELPER_SET, NOW)
        services.add(store.services, SOUTH, OTHER_SET, NOW)
        assert services.renew(store.services, SOUTH, later, NOW)
        assert not services.renew(store.services, SOUTH, later, NOW)
    with store.transaction():
        assert services.trusted_sets(store.services) == {NORTH: HELPER_SET, SOUTH: later}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_set_given_for_one_call_replaces_none_that_is_held(number: int) -> None:
    """Not even a later one: `renew` decides that."""
    held, given = set_of("north", 2), set_of("south", number)
    assert services.with_given({"north": held}, "north", held) == {"north": held}
    assert services.with_given({"north": held}, "south", given) == {"north": held, "south": given}
    with raises(ErrorKind.WRONG_HELPER_SET, TrefoilError):
        services.with_given({"north": held}, "north", given)


def test_no_other_set_takes_its_place() -> None:
    held = ServiceList()
    services.add(held, SOUTH, resigned(OTHER_SET, 5), NOW)
    first, second, third = OTHER_SET.helpers
    newcomer = replace(third, identity_key=IDENTITIES[0].public)
    replaced = HelperSet(6, (first, second, newcomer))
    everyone = (*OTHERS[:2], IDENTITIES[0])
    swapped = HelperSet(6, (second, first, third))
    moved = replace(first, address="https://elsewhere.example")
    # The first helper's old key moved to the second: one key id would belong to two helpers.
    borrowed = (
        replace(first, hpke_keys=(HpkeKeyConfig(hpke_key("new").public, SET_START, SET_END),)),
        replace(second, hpke_keys=first.hpke_keys),
        third,
    )
    for given, now, kind in (
        (replace(HELPER_SET, number=9), NOW, ErrorKind.WRONG_HELPER_SET),
        (signed(replaced, everyone), NOW, ErrorKind.WRONG_HELPER_SET),
        (signed(swapped, (OTHERS[1], OTHERS[0], OTHERS[2])), NOW, ErrorKind.WRONG_HELPER_SET),
        (resigned(OTHER_SET, 4), NOW, ErrorKind.ROLLED_BACK),
        (resigned(OTHER_SET, 5, (moved, second, third)), NOW, ErrorKind.ROLLED_BACK),
        (replace(resigned(OTHER_SET, 6), signatures=()), NOW, ErrorKind.BAD_SIGNATURE),
        (signed(resigned(OTHER_SET, 6), IDENTITIES), NOW, ErrorKind.BAD_SIGNATURE),
        (resigned(OTHER_SET, 6), SET_END, ErrorKind.EXPIRED),
        (resigned(OTHER_SET, 6, borrowed), NOW, ErrorKind.DUPLICATE),
    ):
        with raises(kind, TrefoilError):
            services.renew(held, SOUTH, given, now)
    assert services.trusted_sets(held)[SOUTH].number == 5
    with raises(ErrorKind.UNKNOWN_NAME, TrefoilError):
        services.renew(held, NORTH, HELPER_SET, NOW)
    with raises(ErrorKind.UNKNOWN_NAME, TrefoilError):
        services.remove(held, NORTH)


def test_a_renewal_may_bring_the_other_suite() -> None:
    held = ServiceList()
    services.add(held, SOUTH, OTHER_SET, NOW)
    entries = tuple(
        replace(
            entry,
            hpke_keys=(*entry.hpke_keys, HpkeKeyConfig(PrivateKey.generate(POST_QUANTUM).public, SET_START, SET_END)),
        )
        for entry in OTHER_SET.helpers
    )
    services.renew(held, SOUTH, resigned(OTHER_SET, 2, entries), NOW)
    assert {key.suite for key in services.trusted_sets(held)[SOUTH].sealing_keys(NOW)} == {POST_QUANTUM}


# What a site chooses


def limits_of(*names: str) -> DeviceLimits:
    return DeviceLimits(aggregation_services=frozenset(names))


def device_of(store: Store, clock: Callable[[], int] = lambda: NOW) -> Device[Any]:
    seals = {NORTH: HelperSetSeal(HELPER_SET), SOUTH: HelperSetSeal(OTHER_SET)}
    return Device(store, ServicesSeal(seals), clock=clock, limits=limits_of(*seals))


def chosen_by_dictionary(name: str) -> ConversionOptions:
    return read_options(ConversionOptions, {"aggregationService": name, "histogramSize": 2})


def chosen_by_header(name: str) -> ConversionOptions:
    header = f'aggregation-service="{name}", histogram-size=2, report-url="/r"'
    return parse_measure_conversion(header, "https://shop.example/").options


def chosen_by_request(name: str) -> AttributionRequest:
    return AttributionRequest([0], 1.0, 2, 1, 2, aggregation_service=name)


def chosen_by_label(name: str) -> LabelOptions:
    return LabelOptions(name, (1,), 1, 1.0, 8 * 86_400, ("shop.example",))


FORMS = [chosen_by_dictionary, chosen_by_header, chosen_by_request, chosen_by_label]


def measure(device: Device[Any], options: ConversionOptions | AttributionRequest | LabelOptions) -> Any:
    if isinstance(options, LabelOptions):
        return device.measure_impression("news.example", options)
    return device.measure_conversion("shop.example", options)


@pytest.mark.parametrize("form", FORMS)
def test_the_report_names_the_set_that_the_site_chose(form: Callable[[str], Any], store: Store) -> None:
    device = device_of(store)
    for name, helper_set in ((NORTH, HELPER_SET), (SOUTH, OTHER_SET)):
        header = Header.decode(measure(device, form(name)).header)
        assert header.helper_set == helper_set.digest
        assert header.key_ids == tuple(key.key_id for key in helper_set.sealing_keys(NOW))


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_service_is_an_error_of_the_options(form: Callable[[str], Any], store: Store) -> None:
    """The error does not depend on data or on whether measurement is on; nothing is charged or logged."""
    messages = []
    for ready in (Device.enable, Device.disable, _with_an_impression):
        device = device_of(store)
        ready(device)
        for name in ("elsewhere", "North", "", "trefoil", "n" * 10_000, "\ud800"):
            with pytest.raises(errors.ReferenceError) as refused:
                measure(device, form(name) if form is not chosen_by_header else form(name if name.isascii() else "x"))
            messages.append(f"{refused.value} {refused.value.hint}".replace("'x'", repr(name)))
        assert device.budget() == []
        assert list(device.reports()) == []
    assert messages[:6] == messages[6:12] == messages[12:]


def _with_an_impression(device: Device[Any]) -> None:
    device.enable()
    device.save_impression("news.example", ImpressionOptions(0))


def test_an_expired_set_is_refused_before_anything_is_charged(store: Store) -> None:
    now = [NOW]
    device = device_of(store, lambda: now[0])
    _with_an_impression(device)
    now[0] = SET_END
    for name in (NORTH, SOUTH):
        with raises(ErrorKind.EXPIRED, errors.ReferenceError):
            measure(device, chosen_by_dictionary(name))
    assert device.budget() == []
    assert list(device.reports()) == []


def test_two_services_have_one_budget(store: Store) -> None:
    """A site's ε = 1 a week is shared by all services."""
    ann = Ann(store, aggregation_services=frozenset({NORTH, SOUTH}))
    seal: ServicesSeal[tuple[int, ...]] = ServicesSeal({NORTH: PlainSeal(), SOUTH: PlainSeal()})
    device = Device(store, seal, clock=lambda: ann.now, limits=ann.limits)
    ann.see(0.1)
    reports = [
        device.measure_conversion("shop.example", ConversionOptions(name, 1, epsilon=0.4))
        for name in (NORTH, SOUTH, NORTH, SOUTH)
    ]
    assert reports == [(1,), (1,), (0,), (0,)]
    assert {state.spent for state in device.budget() if state.kind is FilterKind.SITE} == {800_000}


def test_two_names_for_one_set_are_two_names_and_nothing_else(store: Store) -> None:
    seals = {name: HelperSetSeal(HELPER_SET) for name in (NORTH, SOUTH)}
    device = Device(store, ServicesSeal(seals), clock=lambda: NOW, limits=limits_of(*seals))
    first, second = (measure(device, chosen_by_dictionary(name)) for name in seals)
    assert Header.decode(first.header).helper_set == Header.decode(second.header).helper_set
    assert first.digest != second.digest


def test_a_name_without_helpers_is_the_same_error(store: Store) -> None:
    device: Device[Any] = Device(store, ServicesSeal({}), clock=lambda: NOW, limits=limits_of(NORTH))
    with pytest.raises(errors.ReferenceError):
        measure(device, chosen_by_dictionary(NORTH))
    assert list(device.reports()) == []


async def test_two_trios_answer_each_its_own_reports(tmp_path: Path) -> None:
    """One device, two services, six helpers: a report counts with the three that it was sealed to, and nowhere else."""
    other = prepare(tmp_path / "trio", now=real_now(), sites={SITE: [SITE]}, options={"processes": 0})
    south = ThreeHelpers(other, MemoryMpc(), tmp_path)
    async with three_helpers(tmp_path / "north") as north, AsyncExitStack() as running:
        for party in range(3):
            await south.start(party)
            running.push_async_callback(south.stop, party)
        sets = {NORTH: north.helper_set, SOUTH: south.helper_set}
        device = Device(
            MemoryStore(),
            ServicesSeal({name: HelperSetSeal(helper_set) for name, helper_set in sets.items()}),
            clock=real_now,
            limits=limits_of(*sets),
        )
        reports = {name: [measure(device, chosen_by_dictionary(name)) for _ in range(2)] for name in sets}
        for name, three in ((NORTH, north), (SOUTH, south)):
            own = three.batch(reports[name])
            result = await three.ask(three.query(own), own)
            assert result.answer.counted == 2
        strange = south.batch(reports[NORTH])
        with pytest.raises(QueryFailed, match=Rejection.WRONG_HELPER_SET.value):
            await south.ask(south.query(strange), strange)


# On the command line


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, TrefoilError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two sets with active keys, the successor of one, and an expired set."""
    monkeypatch.setattr("device.agent.Delayed.within", lambda _: AtOnce())
    now = int(time.time())
    south = set_of("south", start=0, end=now + 10**6)
    later = resigned(south, 2, set_of("later", start=0, end=now + 10**6).helpers)
    for name, made in (("south", south), ("later", later), ("expired", set_of("old", start=0, end=now - 1))):
        (tmp_path / f"{name}.json").write_text(json.dumps(made.to_json()))
    north = [
        replace(entry, hpke_keys=(HpkeKeyConfig(entry.hpke_keys[0].key, 0, now + 10**6),))
        for entry in HELPER_SET.helpers
    ]
    made = signed(HelperSet(7, (north[0], north[1], north[2])))
    (tmp_path / "north.json").write_text(json.dumps(made.to_json()))
    return tmp_path


def test_a_person_adds_chooses_renews_and_removes(files: Path) -> None:
    db, batch = files / "ann.db", files / "batch"
    convert = ("device", "convert", "shop.example", "--db", db, "--buckets", "2", "--epsilon", "0.1")
    for name in ("north", "south"):
        run("device", "service", "add", name, "--db", db, "--helpers", files / f"{name}.json")
    run(*convert, "--service", "south", "--batch", batch)
    assert Header.decode(BatchReader(batch)[0].header).helper_set == HelperSet.load(files / "south.json").digest
    with raises(ErrorKind.WRONG_HELPER_SET, TrefoilError):
        run(*convert, "--service", "north", "--batch", batch)
    run("device", "service", "renew", "south", "--db", db, "--helpers", files / "later.json")
    with raises(ErrorKind.WRONG_HELPER_SET, TrefoilError):
        run(*convert, "--service", "south", "--batch", batch)
    run(*convert, "--service", "south", "--report", files / "report")
    listed = files / "services.json"
    assert "yes, in suite 1" in run("device", "service", "list", "--db", db, "--json", listed)
    assert [(one["name"], one["number"]) for one in json.loads(listed.read_text())["services"]] == [
        ("north", 7),
        ("south", 2),
    ]
    run("device", "service", "remove", "south", "--db", db)
    with pytest.raises(errors.ReferenceError, match="south"):
        run(*convert, "--service", "south", "--report", files / "report")
    with agent.opened(db) as device:
        assert len(device.reports()) == 2


def test_a_file_does_not_stand_in_for_a_set_that_is_held(files: Path) -> None:
    """`--helpers` serves a name that the device does not hold, for one call."""
    db, report = files / "ann.db", files / "report"
    convert = ("device", "convert", "shop.example", "--db", db, "--buckets", "2", "--report", report)
    with pytest.raises(errors.ReferenceError) as refused:
        run(*convert)
    assert "device service add" in refused.value.hint
    run(*convert, "--helpers", files / "south.json")
    run("device", "service", "add", "trefoil", "--db", db, "--helpers", files / "north.json")
    run(*convert, "--helpers", files / "north.json")
    with raises(ErrorKind.WRONG_HELPER_SET, TrefoilError):
        run(*convert, "--helpers", files / "south.json")
    run(*convert, "--helpers", files / "south.json", "--service", "south")
    with raises(ErrorKind.EXPIRED, TrefoilError):
        run("device", "service", "add", "old", "--db", db, "--helpers", files / "expired.json")
    listed = run("device", "service", "list", "--db", db)
    assert "north" not in listed and "trefoil" in listed
