"""The query: every field is in the digest, one encoding, and only its site's key signs it."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.epsilon import MAX_MICROS, MAX_SENSITIVITY
from protocol.errors import ProtocolError
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey
from protocol.query import MAX_BATCH, NoiseMode, Query, SignedQuery
from tests.support import protocol_samples as samples

QUERY = samples.query()
HASHES = st.binary(min_size=32, max_size=32)
NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20).map(str.lower)
QUERIES = st.builds(
    Query,
    query_id=st.binary(min_size=16, max_size=16),
    site=NAMES,
    caller=NAMES,
    epsilon_micros=st.integers(1, MAX_MICROS),
    sensitivity=st.integers(1, 2**26),
    buckets=st.integers(1, 2**16),
    kappa=st.integers(0, 2**26),
    unit=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=32),
    helper_set=HASHES,
    batch_root=HASHES,
    batch_size=st.integers(1000, MAX_BATCH),
    answer_key=st.just(samples.ANSWER_KEY.public.raw),
    noise=st.sampled_from(NoiseMode),
    minimum_reports=st.integers(1, 1000),
    tolerated_bad_permille=st.integers(0, 1000),
    deadline=st.integers(1, 2**63 - 1),
    columns=st.tuples(HASHES, HASHES, HASHES),
    debug=st.booleans(),
    suite=st.just(CLASSICAL),
)


def checked(query: Query, cap: int, spread: int) -> Query:
    within = min(cap, query.sensitivity)
    return replace(query, cap=within, spread=min(spread, query.buckets, within))


CHECKED = st.builds(checked, QUERIES, st.integers(1, 2**26), st.integers(1, 20))
OTHER: dict[str, Any] = {
    "query_id": bytes(16),
    "site": "shoq.example",
    "caller": "adz.example",
    "epsilon_micros": 999_999,
    "sensitivity": 101,
    "buckets": 9,
    "kappa": 1,
    "unit": "euros",
    "helper_set": bytes(32),
    "batch_root": b"\x01" * 32,
    "batch_size": 1001,
    "answer_key": b"\x09" + bytes(31),
    "noise": NoiseMode.PAIRWISE,
    "minimum_reports": 2,
    "tolerated_bad_permille": 999,
    "deadline": 1,
    "columns": (bytes(32), bytes(32), b"\x01" * 32),
    "debug": True,
    "cap": 99,
    "spread": 2,
    "suite": POST_QUANTUM,
}
# A field that only makes sense with another.
WITH: dict[str, dict[str, Any]] = {
    "cap": {"spread": 1},
    "spread": {"cap": 100},
    "suite": {"answer_key": PrivateKey.generate(POST_QUANTUM).public.raw},
}


@given(st.one_of(QUERIES, CHECKED))
def test_decoding_reverses_encoding(query: Query) -> None:
    assert Query.decode(query.encode()) == query


@given(st.one_of(QUERIES, CHECKED), st.data())
def test_no_second_encoding_decodes(query: Query, data: st.DataObject) -> None:
    changed = bytearray(query.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = Query.decode(bytes(changed))
    except ProtocolError:
        return
    assert decoded.encode() == bytes(changed)


def test_a_query_cut_or_extended_is_refused() -> None:
    for encoded, decode in (
        (QUERY.encode(), Query.decode),
        (SignedQuery.sign(QUERY, samples.QUERIER).encode(), SignedQuery.decode),
    ):
        for length in range(len(encoded)):
            with pytest.raises(ProtocolError):
                decode(encoded[:length])
        with pytest.raises(ProtocolError, match="left over"):
            decode(encoded + b"\x00")


def test_every_field_has_another_value_to_try() -> None:
    assert set(OTHER) == {one.name for one in fields(Query)}


@pytest.mark.parametrize("name", OTHER)
def test_every_field_is_in_the_digest_and_under_the_signature(name: str) -> None:
    together = WITH.get(name, {})
    before = replace(QUERY, cap=100, spread=1) if name in ("cap", "spread") else QUERY
    changed = replace(before, **{**together, name: OTHER[name]})
    assert changed.digest != before.digest
    signed = SignedQuery.sign(before, samples.QUERIER)
    signed.verify(samples.QUERIER.public)
    with pytest.raises(ProtocolError, match="not signed by the key registered"):
        replace(signed, query=changed).verify(samples.QUERIER.public)


def test_another_key_does_not_sign_for_the_site() -> None:
    signed = SignedQuery.decode(SignedQuery.sign(QUERY, samples.IDENTITIES[0]).encode())
    with pytest.raises(ProtocolError, match=r"registered for shop\.example"):
        signed.verify(samples.QUERIER.public)


WRONG: list[dict[str, Any]] = [
    {"query_id": bytes(15)},
    {"site": "Shop.example"},
    {"caller": ""},
    {"epsilon_micros": 0},
    {"epsilon_micros": MAX_MICROS + 1},
    {"sensitivity": 0},
    {"sensitivity": MAX_SENSITIVITY + 1},
    {"buckets": 0},
    {"buckets": 2**16 + 1},
    {"kappa": -1},
    {"kappa": MAX_SENSITIVITY + 1},
    {"unit": ""},
    {"unit": "é" * 20},
    {"unit": "\ud800"},
    {"helper_set": bytes(31)},
    {"batch_root": b""},
    {"batch_size": 0},
    {"batch_size": MAX_BATCH + 1},
    {"answer_key": bytes(33)},
    {"answer_key": bytes(32)},
    {"answer_key": b"\x01" + bytes(31)},
    {"answer_key": b"\xed" + b"\xff" * 30 + b"\x7f"},
    {"minimum_reports": 0},
    {"minimum_reports": 1001},
    {"tolerated_bad_permille": -1},
    {"tolerated_bad_permille": 1001},
    {"deadline": 0},
    {"deadline": 2**63},
    {"columns": (bytes(32), bytes(32), bytes(31))},
    {"columns": (bytes(32), bytes(32))},
    {"cap": 101, "spread": 1},
    {"cap": 5, "spread": 6},
    {"cap": 5},
    {"spread": 1},
    {"suite": POST_QUANTUM},
    {"sensitivity": 2**40, "batch_size": 2**19},
    {"kappa": 2**40, "batch_size": 2**19},
    {"sensitivity": 2**40, "cap": 2**40, "spread": 1, "batch_size": 2**19},
]


@pytest.mark.parametrize("wrong", WRONG, ids=ascii)
def test_fields_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        samples.query(**wrong)


@pytest.mark.parametrize(("from_end", "value"), [(1, 2), (1, 255), (16, 0), (16, 4)])
def test_codes_outside_their_vocabulary_are_refused(from_end: int, value: int) -> None:
    """The last byte is debug; the noise mode stands before minimum, tolerance, deadline and debug."""
    encoded = bytearray(QUERY.encode())
    encoded[-from_end] = value
    with pytest.raises(ProtocolError):
        Query.decode(bytes(encoded))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="unknown query version 1"):
        Query.decode(b"\x00\x01" + QUERY.encode()[2:])


def test_a_sum_that_could_wrap_is_never_asked_for() -> None:
    """2^20 reports of 2^40 each once came out negative. A cap below Δ leaves room for more reports."""
    largest = samples.query(sensitivity=2**40, batch_size=2**19 - 1)
    assert largest.batch_size * largest.sensitivity < 2**59
    with pytest.raises(ProtocolError, match="would wrap"):
        replace(largest, batch_size=2**19)
    replace(largest, cap=2**20, spread=1, batch_size=2**32 - 1)


@pytest.mark.parametrize(("schema", "cap", "spread"), [(1, 1, 1), (2, 0, 0), (3, 1, 1), (0, 0, 0), (1, 0, 1)])
def test_a_schema_and_its_cap_go_together(schema: int, cap: int, spread: int) -> None:
    encoded = QUERY.encode()
    at = encoded.index((8).to_bytes(4, "big") + bytes(8)) + 12
    assert encoded[at : at + 12] == b"\x00\x01" + bytes(10)
    forged = schema.to_bytes(2, "big") + cap.to_bytes(8, "big") + spread.to_bytes(2, "big")
    with pytest.raises(ProtocolError):
        Query.decode(encoded[:at] + forged + encoded[at + 12 :])


def test_the_answer_is_sealed_in_the_suite_of_the_reports() -> None:
    key = PrivateKey.generate(POST_QUANTUM)
    query = Query.decode(samples.query(suite=POST_QUANTUM, answer_key=key.public.raw).encode())
    assert key.open(query.answer_public_key.seal(b"share", b"info"), b"info") == b"share"


def test_there_is_no_mode_without_noise() -> None:
    assert {mode.value for mode in NoiseMode} == {"local", "pairwise", "joint"}


@pytest.mark.parametrize(
    ("epsilon_micros", "sensitivity", "gamma"),
    [
        (300_000, 7, Fraction(3, 70)),
        (1_000_000, 7, Fraction(1, 7)),
        (1, 3, Fraction(1, 3_000_000)),
        (1, MAX_SENSITIVITY, Fraction(1, 10**6 * 2**40)),
        (MAX_MICROS, 1, Fraction(4294)),
    ],
)
def test_gamma_is_exact(epsilon_micros: int, sensitivity: int, gamma: Fraction) -> None:
    """What would give no rate at all is refused before: see `WRONG`."""
    assert samples.query(epsilon_micros=epsilon_micros, sensitivity=sensitivity).gamma == gamma


def test_a_side_query_adds_a_number() -> None:
    assert (QUERY.length, samples.query(kappa=1).length) == (8, 9)


def test_a_signature_of_another_size_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError):
        SignedQuery(QUERY, bytes(63)).encode()
