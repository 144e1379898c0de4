"""The report: one encoding, sizes that say nothing, and a header every field of which is bound to every payload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import field, numerators
from protocol.errors import ErrorKind, ProtocolError, Rejected, Rejection, TrefoilError
from protocol.header import (
    BODY_HASH_SPAN,
    COMMITMENT_SPANS,
    EPSILON_SPAN,
    FIXED,
    HELPER_SET_SPAN,
    KEY_ID_SPANS,
    NONCE_SPAN,
    SENSITIVITY_SPAN,
    TIME_SPAN,
    Header,
    ReportTerms,
    coarse_time,
    header_size,
)
from protocol.helper_set import HelperSet, HpkeKeyConfig
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey
from protocol.report import (
    SealedReport,
    open_payload,
    open_report,
    payload_info,
    payload_size,
    seal_report,
    seal_reports,
    seed_commitment,
)
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES, reconstruct
from protocol.units import MAX_MICROS, MAX_SENSITIVITY
from protocol.validity import points_of
from tests.support import protocol_samples as samples
from tests.support.raising import raises

NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20).map(str.lower)
HASHES = st.binary(min_size=32, max_size=32)
IDS = st.binary(min_size=8, max_size=8)
TERMS = st.builds(
    ReportTerms,
    site=NAMES,
    caller=NAMES,
    time=st.integers(0, 2**50).map(coarse_time),
    epsilon_micros=st.integers(1, MAX_MICROS),
    sensitivity=st.integers(1, MAX_SENSITIVITY),
    buckets=st.integers(1, MAX_BUCKETS),
    kappa=st.integers(0, MAX_SENSITIVITY),
    unit=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=32),
    debug=st.booleans(),
)
HEADERS = st.builds(
    Header,
    terms=TERMS,
    helper_set=HASHES,
    key_ids=st.tuples(IDS, IDS, IDS),
    nonce=st.binary(min_size=16, max_size=16),
    commitments=st.tuples(HASHES, HASHES, HASHES),
    body_hash=HASHES,
)
REPORT = samples.report("test report", [1, 2, 3, 4, 5, 6, 7, 8])


@given(HEADERS)
def test_decoding_a_header_reverses_encoding(header: Header) -> None:
    assert Header.decode(header.encode()) == header


@given(HEADERS, st.data())
def test_no_second_encoding_of_a_header_decodes(header: Header, data: st.DataObject) -> None:
    """Whatever bytes decode at all are exactly the bytes their meaning encodes to."""
    changed = bytearray(header.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = Header.decode(bytes(changed))
    except Rejected:
        return
    assert decoded.encode() == bytes(changed)


@given(HEADERS, st.data())
def test_a_header_cut_or_extended_is_refused(header: Header, data: st.DataObject) -> None:
    encoded = header.encode()
    with pytest.raises(Rejected):
        Header.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(Rejected):
        Header.decode(encoded + data.draw(st.binary(min_size=1, max_size=300)))


def test_every_single_byte_of_a_report_has_one_meaning() -> None:
    """Every byte changed in eight ways: refused, or another report with exactly those bytes."""
    encoded = REPORT.encode()
    for at in range(len(encoded)):
        for bit in range(8):
            changed = encoded[:at] + bytes([encoded[at] ^ (1 << bit)]) + encoded[at + 1 :]
            try:
                decoded = SealedReport.decode(changed)
            except Rejected:
                continue
            assert decoded.encode() == changed
            assert Header.decode(decoded.header).encode() == decoded.header
            assert decoded != REPORT


CHECKED = samples.terms(cap=100, spread=4, kappa=6)


@pytest.mark.parametrize("sealed", [REPORT, samples.report("bound", [0] * 9, CHECKED)], ids=["unchecked", "checked"])
def test_a_changed_header_byte_leaves_nothing_to_open(sealed: SealedReport) -> None:
    """The whole header is authenticated: no byte of it can change and any payload still open."""
    for party in range(PARTIES):
        key, payload = samples.KEYS[party], sealed.payloads[party]
        open_payload(party, sealed.header, payload, key)
        for at in range(len(sealed.header)):
            changed = bytearray(sealed.header)
            changed[at] ^= 1 << (at % 8)
            with pytest.raises(Rejected):
                open_payload(party, bytes(changed), payload, key)


def test_positions_of_fields_are_those_of_the_layout() -> None:
    """The only place that knows the positions by number."""
    assert FIXED.size == 239
    named = [HELPER_SET_SPAN, NONCE_SPAN, TIME_SPAN, EPSILON_SPAN, SENSITIVITY_SPAN, BODY_HASH_SPAN]
    spans = [(span.start, span.stop) for span in (*named, *KEY_ID_SPANS, *COMMITMENT_SPANS)]
    assert spans[:6] == [(7, 39), (63, 79), (79, 87), (87, 91), (91, 99), (207, 239)]
    assert spans[6:] == [(39, 47), (47, 55), (55, 63), (111, 143), (143, 175), (175, 207)]
    header = Header.decode(REPORT.header)
    assert REPORT.header[NONCE_SPAN] == header.nonce
    assert [REPORT.header[span] for span in COMMITMENT_SPANS] == list(header.commitments)
    assert [REPORT.header[span] for span in KEY_ID_SPANS] == list(header.key_ids)
    assert REPORT.header[BODY_HASH_SPAN] == header.body_hash
    terms = header.terms
    assert len(REPORT.header) == header_size(terms.unit, terms.site, terms.caller, terms.shape)


def test_header_as_annotated_bytes() -> None:
    no_hash, no_id = bytes(32), bytes(8)
    terms = ReportTerms("a.b", "c.d", 7200, 1_500_000, 10, 3, kappa=2, unit="u", debug=True)
    header = Header(terms, no_hash, (no_id, no_id, no_id), bytes(16), (no_hash, no_hash, no_hash), no_hash)
    expected = (
        "0001 0001 0001 01"  # version, suite, schema, flags: debug
        + "00" * (32 + 24 + 16)  # helper set, key ids, nonce
        + "0000000000001c20"  # time: 7200
        + "0016e360"  # ε: 1,500,000 micros
        + "000000000000000a 0000000000000002 00000003"  # Δ, κ, buckets
        + "00" * 128  # commitments, body hash
        + "0001 75 0003 612e62 0003 632e64"  # unit, site, caller
    )
    assert header.encode() == bytes.fromhex(expected)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=8, max_size=8))
@settings(max_examples=30)
def test_what_is_sealed_is_what_opens(values: list[int]) -> None:
    report = samples.report(f"values {values}", values)
    views = [open_report(party, report, samples.private_keys(party)) for party in range(PARTIES)]
    components = {**views[0], **views[1]}
    assert reconstruct([components[index] for index in range(PARTIES)]) == values
    assert all((views[2][index] == components[index]).all() for index in views[2])


def test_real_and_null_reports_have_the_same_size_and_shape() -> None:
    null, real = samples.report("null"), samples.report("real", [2**40, 0, 0, 0, 5, 0, 0, 0])
    assert len(null.header) == len(real.header)
    assert len(null.body) == len(real.body) == 64
    assert [len(payload) for payload in null.payloads] == [len(payload) for payload in real.payloads] == [112] * 3
    null, real = (samples.report("checked", histogram, CHECKED) for histogram in ([0] * 9, [100, *[0] * 7, 6]))
    assert len(null.encode()) == len(real.encode())
    assert Header.decode(null.header).terms == Header.decode(real.header).terms


def test_nothing_public_in_a_header_depends_on_the_histogram() -> None:
    """With the same coins, headers differ in the body's hash alone, and that is a hash of a masked vector."""
    null, real = samples.report("same coins"), samples.report("same coins", [9] * 8)
    assert null.header[: BODY_HASH_SPAN.start] == real.header[: BODY_HASH_SPAN.start]
    assert null.header[FIXED.size :] == real.header[FIXED.size :]
    assert null.header != real.header


def test_two_reports_of_the_same_data_are_unlike() -> None:
    one, two = (seal_report([0] * 8, samples.TERMS, samples.HELPER_SET) for _ in range(2))
    assert one.digest != two.digest
    assert one.body != two.body
    assert Header.decode(one.header).nonce != Header.decode(two.header).nonce


def test_a_side_query_adds_one_number() -> None:
    terms = samples.terms(kappa=5)
    assert terms.length == terms.buckets + 1
    assert len(samples.report("side", [0] * 9, terms).body) == 72
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        samples.report("side", [0] * 8, terms)


def test_sealing_needs_keys_that_are_active() -> None:
    with raises(ErrorKind.EXPIRED, TrefoilError):
        samples.report(
            "late", None, samples.terms(time=samples.SET_END + samples.HOUR - samples.SET_END % samples.HOUR)
        )


def test_commitments_tell_index_nonce_and_seed_apart() -> None:
    made = {
        seed_commitment(index, nonce * 16, seed * 32)
        for index in range(3)
        for nonce in (b"a", b"b")
        for seed in (b"c", b"d")
    }
    assert len(made) == 12


@pytest.mark.parametrize("size", [0, 32, 63, 65, 96])
def test_a_payload_is_exactly_two_seeds(size: int) -> None:
    sealed = samples.KEYS[0].public.seal(bytes(size), payload_info(0, REPORT.header))
    with pytest.raises(Rejected) as error:
        open_payload(0, REPORT.header, sealed, samples.KEYS[0])
    assert error.value.rejection is Rejection.UNOPENABLE


def test_sizes_that_contradict_the_header_are_malformed() -> None:
    first, second, third = REPORT.payloads
    for wrong in (
        replace(REPORT, body=REPORT.body[:-8]),
        replace(REPORT, body=REPORT.body + bytes(8)),
        replace(REPORT, body=b""),
        replace(REPORT, payloads=(first, second, third + b"\x00")),
        replace(REPORT, payloads=(first[:-1], second, third)),
    ):
        with pytest.raises(Rejected) as error:
            SealedReport.decode(wrong.encode())
        assert error.value.rejection is Rejection.MALFORMED
    assert len(first) == payload_size(CLASSICAL) == 112


def test_unknown_versions_are_named_whatever_follows() -> None:
    for header in (b"\x00\x02\x00\x01\x00\x01", b"\xff\xff" + bytes(500)):
        with pytest.raises(Rejected) as error:
            Header.decode(header)
        assert error.value.rejection is Rejection.UNKNOWN_VERSION


WRONG_TERMS: list[dict[str, Any]] = [
    {"site": ""},
    {"site": "Shop.example"},
    {"site": "sho p.example"},
    {"site": "bücher.example"},
    {"site": "a" * 254},
    {"site": "a\n"},
    {"caller": ""},
    {"time": -3600},
    {"time": 1},
    {"time": 2**63},
    {"epsilon_micros": 0},
    {"epsilon_micros": MAX_MICROS + 1},
    {"sensitivity": 0},
    {"sensitivity": MAX_SENSITIVITY + 1},
    {"buckets": 0},
    {"buckets": MAX_BUCKETS + 1},
    {"kappa": -1},
    {"kappa": MAX_SENSITIVITY + 1},
    {"unit": ""},
    {"unit": "x" * 33},
    {"unit": "€"},
    {"unit": "\t"},
]


@pytest.mark.parametrize("wrong", WRONG_TERMS, ids=str)
def test_terms_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        samples.terms(**wrong)


def test_header_fields_of_another_length_are_refused() -> None:
    header = Header.decode(REPORT.header)
    for wrong in ({"nonce": bytes(15)}, {"helper_set": b""}, {"body_hash": bytes(33)}, {"key_ids": (b"", b"", b"")}):
        changes: dict[str, Any] = {**wrong}
        with raises(ErrorKind.INVALID_VALUE, ProtocolError):
            replace(header, **changes)


def test_sealed_parts_do_not_show() -> None:
    assert REPORT.payloads[0].hex()[:16] not in repr(REPORT)
    assert "body" not in repr(REPORT)


def test_checked_header_as_annotated_bytes() -> None:
    no_hash, no_id = bytes(32), bytes(8)
    terms = ReportTerms("a.b", "c.d", 7200, 1_500_000, 10, 3, unit="u", cap=2, spread=2)
    header = Header(terms, no_hash, (no_id, no_id, no_id), bytes(16), (no_hash, no_hash, no_hash), no_hash)
    assert (terms.shape.points, len(terms.shape.planes)) == (2, 1)
    expected = (
        "0001 0001 0002 00"  # version, suite, schema: checked, flags
        + "00" * (32 + 24 + 16)  # helper set, key ids, nonce
        + "0000000000001c20 0016e360"  # time, ε
        + "000000000000000a 0000000000000000 00000003"  # Δ, κ, buckets
        + "00" * 128  # commitments, body hash
        + "0001 75 0003 612e62 0003 632e64"  # unit, site, caller
        + "0000000000000002 0002"  # cap, spread
    )
    assert header.prefix() == bytes.fromhex(expected)
    openings = "0700000000000000 0000000000000001"  # little-endian, as all elements
    opened = replace(header, openings=bytes.fromhex(openings))
    assert opened.encode() == bytes.fromhex(expected + openings)
    assert Header.decode(opened.encode()) == opened
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        header.encode()


def test_a_checked_report_opens_to_its_numbers_polynomials_and_masks() -> None:
    histogram = [0, 40, 0, 0, 60, 0, 0, 0, 6]
    report = samples.report("checked", histogram, CHECKED)
    assert SealedReport.decode(report.encode()) == report
    views = [open_report(party, report, samples.private_keys(party)) for party in range(PARTIES)]
    components = {**views[0], **views[1]}
    assert all((views[2][index] == components[index]).all() for index in views[2])
    secret = field.add(field.add(components[0], components[1]), components[2])
    shape = CHECKED.shape
    assert secret.size == shape.expanded
    assert field.lift(numerators.decode(secret[: shape.buckets])) == histogram[:8]
    assert secret[shape.buckets] == 6
    points = points_of(Header.decode(report.header).prefix(), shape.points)
    (weight, degree), mask = shape.planes[0], int(secret[shape.explicit])
    first = [mask, *secret[shape.length : shape.length + degree].tolist()]
    value = sum(c * pow(points[0], power, field.P) for power, c in enumerate(first))
    opening = int.from_bytes(Header.decode(report.header).openings[:8], "little")
    assert weight == 1 and value * opening % field.P == 1


def test_every_field_before_the_openings_moves_the_points() -> None:
    prefix = Header.decode(samples.report("points", [0] * 9, CHECKED).header).prefix()
    before = set(points_of(prefix, 2))
    for at in (2, 6, 7, 39, 63, 79, 87, 91, 99, 107, 111, 143, 175, 207, 239, len(prefix) - 10, len(prefix) - 1):
        changed = bytearray(prefix)
        changed[at] ^= 1
        assert before.isdisjoint(points_of(bytes(changed), 2)), at


@pytest.mark.parametrize(
    ("at_end", "value"),
    [(8, field.P.to_bytes(8, "little")), (8, b"\xff" * 8)],
    ids=["p", "2^64 - 1"],
)
def test_openings_that_are_no_elements_are_malformed(at_end: int, value: bytes) -> None:
    header = samples.report("openings", [0] * 9, CHECKED).header
    with pytest.raises(Rejected) as error:
        Header.decode(header[:-at_end] + value)
    assert error.value.rejection is Rejection.MALFORMED


def test_headers_without_a_cap_or_with_one_above_the_sensitivity_are_malformed() -> None:
    header = samples.report("cap", [0] * 9, CHECKED).header
    at = len(Header.decode(header).prefix()) - 10
    for cap, spread in ((0, 0), (101, 4), (100, 0), (100, 9), (2**41, 4)):
        forged = header[:at] + cap.to_bytes(8, "big") + spread.to_bytes(2, "big") + header[at + 10 :]
        with pytest.raises(Rejected) as error:
            Header.decode(forged)
        assert error.value.rejection is Rejection.MALFORMED


def test_what_the_coins_cannot_pay_is_not_sealed() -> None:
    for histogram in ([101, *[0] * 8], [-1, *[0] * 8], [1, 1, 1, 1, 1, 0, 0, 0, 0], [*[0] * 8, 3]):
        with pytest.raises(ProtocolError):
            samples.report("unpaid", histogram, CHECKED)


def test_a_proof_that_does_not_hold_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong on the way: a device looks before it seals."""
    monkeypatch.setattr("protocol.validity.polynomial", lambda labels: [1] + [7] * len(labels))
    monkeypatch.setattr("protocol.validity.factor_powers", lambda label, most: [[1] + [7] * most] * (most + 1))
    for spread in (1, CHECKED.spread):
        with raises(ErrorKind.BAD_PROOF, ProtocolError):
            samples.report("broken", [1, *[0] * 8], replace(CHECKED, spread=spread))


def test_seeds_are_new_for_every_seal_even_from_a_copied_random_state() -> None:
    """The same random bytes under another content, time or set yield other seeds."""
    later = replace(CHECKED, time=CHECKED.time + samples.HOUR)
    sealed = [
        seal_report(histogram, terms, samples.HELPER_SET, entropy=samples.entropy("copied"))
        for histogram, terms in (([0] * 9, CHECKED), ([1, *[0] * 8], CHECKED), ([0] * 9, later))
    ]
    committed = [commitment for one in sealed for commitment in Header.decode(one.header).commitments]
    assert len(set(committed)) == 9


@pytest.mark.parametrize("terms", [samples.TERMS, samples.terms(cap=7, spread=1)], ids=["unchecked", "checked"])
def test_a_crowd_is_sealed_as_single_devices_seal(terms: ReportTerms) -> None:
    histograms = [[number % 7, *[0] * 7] for number in range(20)]
    reports = seal_reports(histograms, terms, samples.HELPER_SET)
    assert len({report.digest for report in reports}) == len({report.payloads[0][:32] for report in reports}) == 20
    for histogram, report in zip(histograms, reports, strict=True):
        assert SealedReport.decode(report.encode()) == report
        assert (
            opened(report)[: terms.length] == opened(seal_report(histogram, terms, samples.HELPER_SET))[: terms.length]
        )


def opened(report: SealedReport) -> list[int]:
    """Return the numbers that three helpers together find in a report."""
    components: dict[int, field.Vector] = {}
    for party in range(PARTIES):
        components |= open_report(party, report, samples.private_keys(party))
    return reconstruct([components[index] for index in range(PARTIES)])


def test_a_report_of_the_second_suite() -> None:
    keys = [PrivateKey.generate(POST_QUANTUM) for _ in range(PARTIES)]
    first, second, third = (
        replace(helper, hpke_keys=(*helper.hpke_keys, HpkeKeyConfig(key.public, samples.SET_START, samples.SET_END)))
        for helper, key in zip(samples.HELPER_SET.helpers, keys, strict=True)
    )
    helper_set = HelperSet(8, (first, second, third))
    report = seal_report([0] * 9, CHECKED, helper_set)
    assert SealedReport.decode(report.encode()) == report
    assert Header.decode(report.header).suite is POST_QUANTUM
    assert [len(payload) for payload in report.payloads] == [payload_size(POST_QUANTUM)] * 3 == [1200] * 3
    for party, key in enumerate(keys):
        open_report(party, report, {key.public.key_id: key})
    shorter = replace(report, payloads=samples.report("short", [0] * 9, CHECKED).payloads)
    with pytest.raises(Rejected):
        SealedReport.decode(shorter.encode())
