"""Admission: headers in bulk against a plain reading of the rules, and every negative vector through three helpers.

A report that a dishonest device made drops only itself.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_helpers.admission.headers import ADMITTED, CODE_OF, REASON_OF, AdmissionRules, examine_headers
from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.local.launcher import _free_ports, prepare
from protocol.errors import Rejected, Rejection
from protocol.header import TIME_SPAN, Header
from protocol.helper_set import HelperEntry, HelperSet, write_set
from protocol.keys import save_hpke_key, save_identity
from protocol.noise import NoiseMode
from protocol.querier.saved_query import QueryOptions
from protocol.query import Query
from protocol.report import SealedReport
from protocol.shares import PARTIES
from tests.protocol.test_vectors import NEGATIVE, Vector, bad_report, reasons
from tests.support import make_vectors
from tests.support import protocol_samples as samples
from tests.support.three_helpers import MemoryMpc, ThreeHelpers, real_now

OLDEST, NEWEST = samples.NOW - 7 * samples.DAY, samples.NOW + samples.HOUR
QUERY = samples.query()
HEADER = Header.decode(samples.report("admission").header)
RULES = [samples.rules(party, QUERY) for party in range(PARTIES)]


def admits(rules: AdmissionRules, query: Query, encoded: bytes) -> bool:
    """The rules of SPEC.md §3 as one reads them: the clear twin of the columns."""
    try:
        header = Header.decode(encoded)
    except Rejected:
        return False
    terms = header.terms
    keys = {config.key.key_id: config for config in samples.HELPER_SET.helpers[rules.party].hpke_keys}
    key = keys.get(header.key_ids[rules.party])
    wanted = (query.site, query.caller, query.buckets, query.kappa, query.unit, query.debug)
    return (
        (terms.site, terms.caller, terms.buckets, terms.kappa, terms.unit, terms.debug) == wanted
        and header.helper_set == samples.HELPER_SET.digest
        and key is not None
        and key.not_before <= terms.time < key.not_after
        and OLDEST < terms.time <= NEWEST
        and Fraction(query.epsilon_micros, query.sensitivity) <= Fraction(terms.epsilon_micros, terms.sensitivity)
    )


def outcomes_of(rules: AdmissionRules, headers: list[bytes]) -> list[Rejection | None]:
    matrix = np.frombuffer(b"".join(headers), dtype=np.uint8).reshape(len(headers), -1)
    return [REASON_OF.get(code) for code in examine_headers(rules, matrix).tolist()]


def header(**changes: Any) -> bytes:  # Any: fields of ReportTerms, each of its own type
    return replace(HEADER, terms=samples.terms(**changes)).encode()


HOURS = st.integers(-31 * 24, 31 * 24).map(lambda hours: samples.NOW + hours * samples.HOUR)
KEY_IDS = st.sampled_from([*samples.KEYS, *samples.OLD_KEYS]).map(lambda key: key.public.key_id)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "time": HOURS,
    "epsilon_micros": st.sampled_from([1, 999_999, 1_000_001, 4_294_000_000]),
    "sensitivity": st.sampled_from([1, 99, 101, 2**40]),
    "site": st.just("shoq.example"),
    "caller": st.just("adz.example"),
    "unit": st.just("euros"),
    "kappa": st.just(1),
    "buckets": st.just(7),
    "debug": st.booleans(),
}
SOUND = st.builds(
    lambda keys, in_the_set, changes: replace(
        HEADER,
        key_ids=keys,
        helper_set=samples.HELPER_SET.digest if in_the_set else bytes(32),
        terms=samples.terms(**changes),
    ).encode(),
    st.tuples(KEY_IDS, KEY_IDS, KEY_IDS),
    st.sampled_from([True, True, True, False]),
    # A change or two at a time: with more, each would hide the others.
    st.lists(st.one_of([st.tuples(st.just(name), values) for name, values in CHANGES.items()]), max_size=2).map(dict),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    changed = bytearray(draw(SOUND))
    for _ in range(draw(st.integers(0, 2))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


@given(st.lists(damaged(), min_size=1, max_size=6), st.integers(0, 2))
def test_bulk_admission_is_the_plain_reading_of_the_rules(headers: list[bytes], party: int) -> None:
    outcomes = outcomes_of(RULES[party], headers)
    assert [outcome is None for outcome in outcomes] == [admits(RULES[party], QUERY, one) for one in headers]


@pytest.mark.parametrize("party", range(PARTIES))
@pytest.mark.parametrize("change", [0x01, 0x80])
def test_every_byte_of_a_header_is_read_as_the_rules_say(party: int, change: int) -> None:
    good = header()
    headers = [good[:at] + bytes([good[at] ^ change]) + good[at + 1 :] for at in range(len(good))]
    outcomes = outcomes_of(RULES[party], headers)
    assert [outcome is None for outcome in outcomes] == [admits(RULES[party], QUERY, one) for one in headers]


@given(st.lists(damaged(), min_size=2, max_size=6), st.integers(0, 2))
def test_a_headers_fate_does_not_depend_on_its_neighbours(headers: list[bytes], party: int) -> None:
    assert outcomes_of(RULES[party], headers) == [outcomes_of(RULES[party], [one])[0] for one in headers]


def test_a_good_header_is_admitted_by_all_three() -> None:
    assert [outcomes_of(rules, [header()]) for rules in RULES] == [[None]] * PARTIES


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (OLDEST, Rejection.EXPIRED),
        (OLDEST + samples.HOUR, None),
        (NEWEST, None),
        (NEWEST + samples.HOUR, Rejection.FROM_THE_FUTURE),
    ],
)
def test_the_edges_of_time(time: int, expected: Rejection | None) -> None:
    assert outcomes_of(RULES[0], [header(time=time)]) == [expected]


def test_times_beyond_any_clock_are_refused() -> None:
    encoded = bytearray(header())
    for value in (2**63, 2**64 - 1, 2**64 - samples.HOUR):
        encoded[TIME_SPAN] = value.to_bytes(8, "big")
        assert outcomes_of(RULES[0], [bytes(encoded)])[0] is not None


def test_a_ledger_from_before_1970_still_has_edges() -> None:
    rules = samples.rules(0, QUERY, oldest=-5, newest=-1)
    assert outcomes_of(rules, [header(time=samples.SET_START + samples.HOUR)]) == [Rejection.FROM_THE_FUTURE]


@pytest.mark.parametrize("party", range(PARTIES))
def test_a_key_counts_from_its_start_until_its_end(party: int) -> None:
    ids = tuple(key.public.key_id for key in samples.OLD_KEYS)
    old = replace(HEADER, key_ids=(ids[0], ids[1], ids[2]))
    rules = samples.rules(party, QUERY, oldest=0, newest=samples.NOW)
    times = [samples.OLD_END - samples.HOUR, samples.OLD_END, samples.SET_START, samples.SET_START - samples.HOUR]
    headers = [replace(old, terms=samples.terms(time=time)).encode() for time in times]
    assert outcomes_of(rules, headers) == [None, Rejection.EXPIRED_KEY, None, Rejection.EXPIRED_KEY]


def test_a_key_that_was_destroyed_is_unknown() -> None:
    rules = AdmissionRules.for_query(samples.membership(0, keys=()), QUERY, oldest=OLDEST, newest=NEWEST)
    assert outcomes_of(rules, [header()])[0] in (Rejection.UNKNOWN_KEY, Rejection.WRONG_HELPER_SET)
    kept = samples.membership(0, keys=samples.OLD_KEYS[:1])
    rules = AdmissionRules.for_query(kept, QUERY, oldest=OLDEST, newest=NEWEST)
    assert outcomes_of(rules, [header()]) == [Rejection.UNKNOWN_KEY]


def test_reports_of_an_earlier_helper_set_still_count() -> None:
    """Helpers keep the sets they know: a device with last month's file is not turned away."""
    first, second, third = samples.HELPER_SET.helpers
    earlier = replace(samples.HELPER_SET, helpers=(first, second, replace(third, name="Cypress")))
    encoded = replace(HEADER, helper_set=earlier.digest).encode()
    assert outcomes_of(RULES[0], [encoded]) == [Rejection.WRONG_HELPER_SET]
    member = samples.membership(0, [samples.HELPER_SET, earlier])
    both = AdmissionRules.for_query(member, QUERY, oldest=OLDEST, newest=NEWEST)
    assert outcomes_of(both, [encoded, header()]) == [None, None]


def test_noise_is_compared_without_wrapping() -> None:
    """In 64 bits ε_q·Δ_r would be 2^31·2^40 → 0, and a report that paid next to nothing would be admitted."""
    rules = samples.rules(0, samples.query(epsilon_micros=2**31, sensitivity=1))
    assert outcomes_of(rules, [header(epsilon_micros=1, sensitivity=2**40)]) == [Rejection.NOISE_TOO_SMALL]


def test_joint_noise_covers_reports_up_to_the_loss_that_its_delta_is_stated_for() -> None:
    """ε_q = 1, Δ_q = 100: a report may have asked for Δ_r up to 1500 at the same rate, with its side query for less."""
    paid = {"epsilon_micros": 15_000_000, "sensitivity": 1500}
    beyond = {"epsilon_micros": 15_010_000, "sensitivity": 1501}
    both = [header(**paid), header(**beyond)]
    joint = samples.rules(0, samples.query(noise=NoiseMode.JOINT))
    assert outcomes_of(joint, both) == [None, Rejection.NOISE_TOO_SMALL]
    for rules in (RULES[0], samples.rules(0, samples.query(noise=NoiseMode.JOINT, debug=True))):
        debug = rules.query.debug
        assert outcomes_of(rules, [header(debug=debug, **beyond)]) == [None]
    side = samples.rules(0, samples.query(noise=NoiseMode.JOINT, kappa=1))
    assert outcomes_of(side, [header(kappa=1, **paid)]) == [Rejection.NOISE_TOO_SMALL]
    assert outcomes_of(side, [header(kappa=1, epsilon_micros=14_990_000, sensitivity=1499)]) == [None]


def test_headers_of_another_length_are_told_why() -> None:
    assert outcomes_of(RULES[0], [header(site="shop2.example")]) == [Rejection.WRONG_SITE]
    assert outcomes_of(RULES[0], [header(caller="a.example")]) == [Rejection.WRONG_CALLER]
    assert outcomes_of(RULES[0], [header(unit="dollars")]) == [Rejection.WRONG_SHAPE]
    assert outcomes_of(RULES[0], [b"\x00" * 10]) == [Rejection.UNKNOWN_VERSION]
    assert outcomes_of(RULES[0], [header()[:200]]) == [Rejection.MALFORMED]


def test_debug_queries_take_debug_reports_and_no_others() -> None:
    rules = samples.rules(0, samples.query(debug=True))
    assert outcomes_of(rules, [header(debug=True), header()]) == [None, Rejection.WRONG_MODE]


def test_every_rejection_has_a_code_of_its_own() -> None:
    assert ADMITTED not in REASON_OF
    assert {REASON_OF[code] for code in CODE_OF.values()} == set(Rejection)


def test_private_keys_do_not_show_in_the_rules() -> None:
    assert samples.KEYS[0].raw.hex() not in repr(RULES[0])
    assert repr(samples.KEYS[0].raw) not in repr(RULES[0])


GOOD = 3


def vectors_clock() -> Callable[[], int]:
    """Time goes on from the hour in which the vectors were made."""
    start = time.monotonic()
    return lambda: samples.NOW + int(time.monotonic() - start)


def make_helper(folder: Path, party: int, port: int) -> HelperEntry:
    """A helper with the vectors' identity and HPKE keys; certificate and address are its own, and not in the digest."""
    folder.mkdir(parents=True)
    save_identity(folder / "identity.key", samples.IDENTITIES[party])
    (folder / "hpke").mkdir()
    for name, key in samples.private_keys(party).items():
        save_hpke_key(folder / "hpke" / f"{name.hex()}.key", key)
    entry = samples.HELPER_SET.helpers[party]
    certificate = tls.make_identity(folder, entry.name, real_now())
    return replace(entry, address=f"https://127.0.0.1:{port}", tls_pin=certificate.pin)


@asynccontextmanager
async def vector_helpers(folder: Path) -> AsyncIterator[ThreeHelpers]:
    """Three helpers in this process that are the vectors' three helpers."""
    clock, ports = vectors_clock(), _free_ports(PARTIES)
    trio = folder / "trio"
    first, second, third = (make_helper(trio / f"helper-{party + 1}", party, ports[party]) for party in range(PARTIES))
    helper_set = samples.signed(HelperSet(8, (first, second, third)))
    assert helper_set.digest == samples.HELPER_SET.digest
    write_set(trio / "helpers.json", helper_set)
    sites = {samples.TERMS.site: [samples.TERMS.caller]}
    # Reports live eleven days, so that the vectors' old key is still there to be named; the ledgers forget after seven.
    options = {"processes": 0, "unchecked_histograms": True, "report_lifetime_days": 11}
    prepared = prepare(trio, now=clock(), sites=sites, options=options)
    three = ThreeHelpers(prepared, MemoryMpc(), folder, clock=clock)
    forget(three, samples.NOW - 7 * samples.DAY)
    try:
        for party in range(PARTIES):
            await three.start(party)
        yield three
    finally:
        for party in range(PARTIES):
            await three.stop(party)


def forget(three: ThreeHelpers, until: int) -> None:
    """Move the watermark of every ledger, as a helper's housekeeping does."""
    for party in range(PARTIES):
        config = load_config(three.trio.config_path(party))
        ledger = ReportLedger(config.ledger, owner_of(load_membership(config, samples.NOW)))
        ledger.reports.advance_watermark(until)
        ledger.close()


def with_good_ones(vector: Vector) -> list[SealedReport]:
    """Good reports with this bad one among them."""
    good = [samples.report(f"{vector['name']} {index}", [index, *[1] * 7]) for index in range(GOOD)]
    return [*good, *[bad_report(vector)] * vector["copies"]]


def expected(vector: Vector) -> tuple[list[int], list[dict[Rejection, int]]]:
    """The good reports' sum, and one rejection at each helper that finds something wrong."""
    total = np.array([sum(range(GOOD)), *[GOOD] * 7])
    if vector["copies"] == 2:  # the first of two copies is sound and counts
        total = total + np.array(make_vectors.HISTOGRAM)
    counts = [{} if reason is None else {reason: 1} for reason in reasons(vector["counted_under"])]
    return total.tolist(), counts


@pytest.mark.parametrize("vector", NEGATIVE, ids=lambda vector: vector["name"])
def test_every_negative_vector_drops_only_itself(tmp_path: Path, vector: Vector) -> None:
    """At each of the three helpers, with their keys and clock; below through the whole stack."""
    reports = with_good_ones(vector)
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    assert (samples.opened_sum(ingested), [one.rejections() for one in ingested]) == expected(vector)


def test_there_are_many_negative_vectors() -> None:
    assert len(NEGATIVE) >= 30


@pytest.mark.parametrize("name", ["wrong commitment to seed 2", "body element p"])
async def test_a_lying_device_does_not_spoil_pairwise_noise_either(tmp_path: Path, name: str) -> None:
    (vector,) = (each for each in NEGATIVE if each["name"] == name)
    async with vector_helpers(tmp_path) as three:
        batch = three.batch(with_good_ones(vector))
        wishes = QueryOptions(noise=NoiseMode.PAIRWISE, tolerated_bad_permille=500, seconds=60)
        result = await three.ask(three.query(batch, wishes, site=samples.TERMS.site), batch)
        exact = np.array(result.answer.histogram) - np.array(three.noise_of(result))
        assert (exact.tolist(), [dict(counts) for counts in result.answer.rejections]) == expected(vector)


async def test_all_that_have_their_own_digest_at_once(tmp_path: Path) -> None:
    """A batch with more bad reports than good ones: the good ones are counted, and each bad one has its reason."""
    unique: dict[bytes, Vector] = {}
    for vector in NEGATIVE:
        if vector["copies"] == 1:
            unique.setdefault(bad_report(vector).digest, vector)
    good = [samples.report(f"all at once {index}", [index, *[1] * 7]) for index in range(GOOD)]
    async with vector_helpers(tmp_path) as three:
        batch = three.batch([*good, *(bad_report(vector) for vector in unique.values())])
        wishes = QueryOptions(tolerated_bad_permille=1000, seconds=60)
        result = await three.ask(three.query(batch, wishes, site=samples.TERMS.site), batch)
        exact = np.array(result.answer.histogram) - np.array(three.noise_of(result))
        assert exact.tolist() == [sum(range(GOOD)), *[GOOD] * 7]
        for party, counts in enumerate(result.answer.rejections):
            fates = [reasons(vector["counted_under"])[party] for vector in unique.values()]
            assert dict(counts) == {reason: fates.count(reason) for reason in set(fates) if reason is not None}
