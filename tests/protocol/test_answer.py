"""What helpers return about a query: answer shares, the lists of reports left out, votes and status."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import answer as answers
from protocol import left_out
from protocol.answer import Answer, AnswerShare, combine
from protocol.batch import BatchReader, BatchWriter
from protocol.errors import ErrorKind, ProtocolError, Rejection, TrefoilError
from protocol.field import P, encode
from protocol.left_out import code_of, counts_of, decode_left_out, digest_of, encode_left_out, reason_of
from protocol.noise import NoiseMode
from protocol.querier.result import assess
from protocol.querier.view import missing_from_lists, write_left_out
from protocol.query import VERSION_WITHOUT_REST, Query
from protocol.shares import PARTIES, share, to_shamir
from protocol.status import MAX_TEXT, Failure, QueryState, QueryStatus, Shortfall
from protocol.vote import SignedVote, Vote
from protocol.wire import Writer
from tests.support import protocol_samples as samples
from tests.support.raising import raises

QUERY = samples.query(batch_size=20)
NUMBERS = [3, -1, 0, 7, -250, 10**12, 1, 0]
REJECTIONS: tuple[dict[Rejection, int], ...] = ({Rejection.MALFORMED: 2}, {}, {Rejection.SEEN: 1})


CODES = np.zeros((PARTIES, QUERY.batch_size), dtype=np.uint8)
CODES[0, [3, 4]] = code_of(Rejection.MALFORMED)
CODES[2, 19] = code_of(Rejection.SEEN)
PROPOSED = (digest_of(CODES[0]), digest_of(CODES[1]), digest_of(CODES[2]))


def shares_for(query: Query, numbers: list[int]) -> list[AnswerShare]:
    shared = share(numbers, entropy=samples.entropy("answer"))
    return [
        AnswerShare(
            query_digest=query.digest,
            attempt_number=4,
            attempt_id=b"\x07" * 32,
            submitted=query.batch_size,
            counted=query.batch_size - 3,
            rejections=(REJECTIONS[0], REJECTIONS[1], REJECTIONS[2]),
            noise=query.noise,
            epsilon_micros=query.epsilon_micros,
            sensitivity=query.sensitivity,
            proposed=PROPOSED,
            left_out=encode_left_out(CODES[party]),
            vector=to_shamir(party, shared.components(party)),
        )
        for party in range(PARTIES)
    ]


SHARES = shares_for(QUERY, NUMBERS)


def sealed(party: int, query: Query = QUERY, signer: int | None = None) -> bytes:
    return SHARES[party].seal(party, query, samples.IDENTITIES[party if signer is None else signer])


def opened(party: int, data: bytes, query: Query = QUERY) -> AnswerShare:
    return AnswerShare.open(party, data, query, samples.ANSWER_KEY, samples.HELPER_SET)


def test_three_sealed_shares_give_the_answer() -> None:
    answer = combine(QUERY, [opened(party, sealed(party)) for party in range(PARTIES)])
    assert answer.histogram == NUMBERS
    assert answer.side_count is None
    assert (answer.submitted, answer.counted, answer.rejections) == (20, 17, REJECTIONS)
    assert [codes.tolist() for codes in answer.left_out] == CODES.tolist()
    assert (answer.noise, answer.epsilon_micros, answer.sensitivity) == (NoiseMode.LOCAL, 1_000_000, 100)


def test_the_last_number_is_the_side_query() -> None:
    query = samples.query(kappa=5, batch_size=20)
    answer = combine(query, shares_for(query, [*NUMBERS, -15]))
    assert (answer.histogram, answer.side_count) == (NUMBERS, -15)


OTHER: dict[str, Any] = {
    "query_digest": bytes(32),
    "attempt_number": 5,
    "attempt_id": bytes(32),
    "submitted": 21,
    "counted": 16,
    "rejections": ({}, {}, {}),
    "noise": NoiseMode.PAIRWISE,
    "epsilon_micros": 1,
    "sensitivity": 1,
    "proposed": (bytes(32), *PROPOSED[1:]),
}


def test_every_field_but_the_numbers_has_another_value_to_try() -> None:
    assert {*OTHER, "vector", "left_out"} == set(AnswerShare.__slots__)


@pytest.mark.parametrize("party", range(PARTIES))
@pytest.mark.parametrize("name", OTHER)
def test_each_field_changed_in_one_share_is_noticed(party: int, name: str) -> None:
    shares = list(SHARES)
    shares[party] = replace(shares[party], **{name: OTHER[name]})
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        combine(QUERY, shares)


@given(st.integers(0, 2), st.integers(0, 7), st.integers(1, P - 1))
def test_any_changed_number_is_noticed(party: int, bucket: int, change: int) -> None:
    vector = SHARES[party].vector.copy()
    vector[bucket] = (int(vector[bucket]) + change) % P
    shares = list(SHARES)
    shares[party] = replace(shares[party], vector=vector)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        combine(QUERY, shares)


@pytest.mark.parametrize("name", ["noise", "epsilon_micros", "sensitivity", "submitted"])
def test_helpers_that_agree_on_something_not_asked_are_not_believed(name: str) -> None:
    with raises(ErrorKind.REFUSED, ProtocolError):
        combine(QUERY, [replace(one, **{name: OTHER[name]}) for one in SHARES])


def with_list(party: int, codes: list[int]) -> list[AnswerShare]:
    shares = list(SHARES)
    shares[party] = replace(shares[party], left_out=encode_left_out(np.array(codes, dtype=np.uint8)))
    return shares


@pytest.mark.parametrize("party", range(PARTIES))
def test_a_list_of_other_reports_names_the_helper(party: int) -> None:
    """One helper lists none, one more, another reason, or as many at other places than all three agreed on."""
    codes = CODES[party].tolist()
    for wrong in (
        [0] * 20,
        [*codes[1:], codes[0]],
        [*codes[:-1], code_of(Rejection.EXPIRED)],
        [code and code_of(Rejection.EXPIRED) for code in codes],
    ):
        if wrong != codes:
            with raises(ErrorKind.INCONSISTENT, ProtocolError) as caught:
                combine(QUERY, with_list(party, wrong))
            assert f"helper {party + 1} lists" in str(caught.value)


def test_all_three_shares_are_needed() -> None:
    for wrong in (SHARES[:2], [*SHARES, SHARES[0]], []):
        with raises(ErrorKind.TOO_FEW, ProtocolError):
            combine(QUERY, wrong)


@pytest.mark.parametrize("signer", [1, 2])
def test_a_signature_by_another_helper_is_refused(signer: int) -> None:
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError) as caught:
        opened(0, sealed(0, signer=signer))
    assert "Alder" in str(caught.value)


def test_a_share_does_not_pass_for_another_helpers() -> None:
    for claimed in (1, 2):
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
            opened(claimed, sealed(0))
    forged = SHARES[0].seal(1, QUERY, samples.IDENTITIES[0])
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
        opened(1, forged)


def test_a_share_for_another_query_is_refused() -> None:
    other = samples.query(batch_size=20, query_id=bytes(16))
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
        opened(0, sealed(0), other)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        opened(0, sealed(0, other), other)


def test_a_share_of_another_length_is_refused() -> None:
    short = replace(SHARES[0], vector=SHARES[0].vector[:-1])
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        opened(0, short.seal(0, QUERY, samples.IDENTITIES[0]))


def decodable_elements(count: int) -> list[int]:
    """Numbers whose bytes, read as a share of today, are a list of 4 bytes and all elements that can follow it."""
    list_size, elements_size = (4).to_bytes(4, "big"), (8 * (count - 13)).to_bytes(4, "big")
    numbers = [0] * count
    numbers[11] = int.from_bytes(bytes(4) + list_size, "little")
    numbers[12] = int.from_bytes(bytes(4) + elements_size, "little")
    return numbers


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ([5] * 8, ErrorKind.TRUNCATED),
        ([P - 1] * 45, ErrorKind.TOO_LARGE),
        (decodable_elements(45), ErrorKind.INCONSISTENT),
    ],
)
def test_a_share_from_before_the_lists_is_refused(
    numbers: list[int], kind: ErrorKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has neither bitmap digests nor a list, and no version says so: at most, fewer numbers come out of it."""
    query = samples.query(batch_size=20, buckets=len(numbers))
    one = replace(SHARES[0], query_digest=query.digest, vector=np.array(numbers, dtype=np.uint64))
    elements = Writer().blob(encode(one.vector)).done()
    lists = b"".join(one.proposed) + Writer().blob(one.left_out).done()
    assert one.encode().endswith(lists + elements)
    old = one.encode().removesuffix(lists + elements) + elements
    monkeypatch.setattr(AnswerShare, "encode", lambda *_: old)
    with raises(kind, ProtocolError):
        opened(0, one.seal(0, query, samples.IDENTITIES[0]), query)


def test_a_share_of_a_version_2_query_has_the_counts_of_its_time() -> None:
    """It was sealed before an upgrade, under a digest of version 2, and is fetched after it: 3 × 20 counts, not 21."""
    query = replace(QUERY, version=VERSION_WITHOUT_REST)
    assert query.digest != QUERY.digest
    old = shares_for(query, NUMBERS)
    for party, one in enumerate(old):
        assert len(SHARES[party].encode()) - len(one.encode(query.version)) == PARTIES * 4
        assert opened(party, one.seal(party, query, samples.IDENTITIES[party]), query) == one
    assert combine(query, old).histogram == NUMBERS


def test_only_the_queriers_key_opens_a_share() -> None:
    with raises(ErrorKind.NOT_OPENED, ProtocolError):
        AnswerShare.open(0, sealed(0), QUERY, samples.KEYS[0], samples.HELPER_SET)


def test_any_changed_byte_of_a_sealed_share_is_refused() -> None:
    data = sealed(0)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ProtocolError):
            opened(0, changed)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            opened(0, data[:length])
    with raises(ErrorKind.TRAILING_BYTES, ProtocolError):
        opened(0, data + b"\x00")


def test_decoding_reverses_encoding() -> None:
    again = AnswerShare.decode(SHARES[1].encode())
    assert again == SHARES[1]
    assert again.vector.tolist() == SHARES[1].vector.tolist()


@given(st.data())
def test_no_second_encoding_decodes(data: st.DataObject) -> None:
    changed = bytearray(SHARES[0].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = AnswerShare.decode(bytes(changed))
    except ProtocolError:
        return
    assert decoded.encode() == bytes(changed)


def test_a_share_cut_extended_or_outside_the_field_is_refused() -> None:
    encoded = SHARES[0].encode()
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError):
            AnswerShare.decode(encoded[:length])
    for wrong in (encoded + b"\x00", encoded[:-8] + b"\xff" * 8):
        with pytest.raises(ProtocolError):
            AnswerShare.decode(wrong)


def test_counts_that_cannot_be_are_refused() -> None:
    for wrong in ({"counted": 21}, {"counted": -1}, {"query_digest": b""}, {"attempt_id": b""}):
        changes: dict[str, Any] = {**wrong}
        with pytest.raises(ProtocolError):
            replace(SHARES[0], **changes)


def test_numbers_do_not_show() -> None:
    assert str(int(SHARES[0].vector[0])) not in repr(SHARES[0])
    assert np.iinfo(np.uint64).max > P


VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "vectors" / "left_out.json").read_text())
CODE_ARRAYS = st.lists(st.integers(0, len(Rejection)), max_size=400).map(lambda codes: np.array(codes, dtype=np.uint8))


@given(CODE_ARRAYS)
def test_decoding_a_list_reverses_encoding(codes: left_out.Codes) -> None:
    assert decode_left_out(encode_left_out(codes), len(codes)).tolist() == codes.tolist()
    assert all(reason_of(code_of(reason)) is reason for reason in Rejection)


@given(st.binary(max_size=24), st.integers(0, 300))
def test_no_list_has_two_encodings(data: bytes, count: int) -> None:
    try:
        codes = decode_left_out(data, count)
    except ProtocolError:
        return
    assert encode_left_out(codes) == data


@pytest.mark.parametrize("vector", VECTORS["positive"], ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    codes = np.zeros(vector["count"], dtype=np.uint8)
    for run in vector["runs"]:
        codes[run["first"] : run["first"] + run["length"]] = code_of(Rejection[run["reason"]])
    assert encode_left_out(codes).hex() == vector["bytes"]
    assert decode_left_out(bytes.fromhex(vector["bytes"]), vector["count"]).tolist() == codes.tolist()
    assert digest_of(codes).hex() == vector["digest"]


@pytest.mark.parametrize("vector", VECTORS["negative"], ids=lambda vector: vector["name"])
def test_negative_vectors(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_left_out(bytes.fromhex(vector["bytes"]), vector["count"])


def test_a_list_ends_early_where_it_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst case: no two neighbours have one reason. What fits is taken as a part of the whole, not as a lie."""
    monkeypatch.setattr(left_out, "MAX_LIST", 64)
    monkeypatch.setattr(answers, "MAX_LIST", 64)
    codes = np.array([1 + place % 2 for place in range(100)], dtype=np.uint8)
    data = encode_left_out(codes)
    assert 64 - left_out.LONGEST_RUN < len(data) <= 64
    answer = combine(SMALL_QUERY, shares(codes, data))
    assert answer.left_out[0].tolist() == [*codes[:21].tolist(), *[0] * 79]
    assert missing_from_lists(assess(SMALL_QUERY, answer, {}, 0)) == 79
    shorter = encode_left_out(codes[:5])
    with raises(ErrorKind.INCONSISTENT, ProtocolError) as caught:
        combine(SMALL_QUERY, shares(codes, shorter))
    assert "helper 1" in str(caught.value)


def test_a_million_reports_fit_what_a_querier_takes() -> None:
    """One report in ten left out, at random places: a list of 262,000 bytes. All of them: six bytes."""
    chosen = np.random.default_rng(1).random(1_000_000) < 0.1
    codes = np.where(chosen, code_of(Rejection.EXPIRED), 0).astype(np.uint8)
    data = encode_left_out(codes)
    assert len(data) < 300_000 and decode_left_out(data, len(codes)).tolist() == codes.tolist()
    assert len(encode_left_out(np.full(1_000_000, code_of(Rejection.SEEN), dtype=np.uint8))) < 8


SMALL_QUERY = samples.query(batch_size=100)


def shares(codes: left_out.Codes, data: bytes) -> list[AnswerShare]:
    """Helper 1 leaves out what `codes` say and lists `data`; the others leave out nothing."""
    nothing = np.zeros(len(codes), dtype=np.uint8)
    shared = share([0] * SMALL_QUERY.length, entropy=samples.entropy("left out"))
    common = AnswerShare(
        query_digest=SMALL_QUERY.digest,
        attempt_number=1,
        attempt_id=bytes(32),
        submitted=len(codes),
        counted=int(np.count_nonzero(codes == 0)),
        rejections=(counts_of(codes), {}, {}),
        noise=SMALL_QUERY.noise,
        epsilon_micros=SMALL_QUERY.epsilon_micros,
        sensitivity=SMALL_QUERY.sensitivity,
        proposed=(digest_of(codes), digest_of(nothing), digest_of(nothing)),
        left_out=b"",
        vector=to_shamir(0, shared.components(0)),
    )
    return [
        replace(common, left_out=b"" if party else data, vector=to_shamir(party, shared.components(party)))
        for party in range(PARTIES)
    ]


def test_the_table_names_every_report_left_out(tmp_path: Path) -> None:
    reports = [samples.report(f"r{number}") for number in range(6)]
    with BatchWriter(tmp_path / "batch") as writer:
        for report in reports:
            writer.add(report)
    batch = BatchReader(tmp_path / "batch")
    place = batch.order().tolist().index(4)
    lists = np.zeros((PARTIES, 6), dtype=np.uint8)
    lists[:, place] = code_of(Rejection.SEEN)
    lists[1, batch.order().tolist().index(2)] = code_of(Rejection.UNOPENABLE)
    counts = ({Rejection.SEEN: 1}, {Rejection.SEEN: 1, Rejection.UNOPENABLE: 1}, {Rejection.SEEN: 1})
    query = samples.query_for(reports)
    noise = (query.noise, query.epsilon_micros, query.sensitivity)
    answer = Answer([0] * 8, None, 6, 4, counts, *noise, 1, bytes(32), (lists[0], lists[1], lists[2]))
    result = assess(query, answer, {}, 0)
    assert write_left_out(tmp_path / "left.csv", result, batch, ["Alder", "Birch", "Cedar"]) == 2
    head, *rows = csv.reader((tmp_path / "left.csv").read_text().splitlines())
    assert head == ["record", "digest", "Alder", "Birch", "Cedar"]
    assert rows == [
        ["2", reports[2].digest.hex(), "would count", Rejection.UNOPENABLE.value, "would count"],
        ["4", reports[4].digest.hex(), *[Rejection.SEEN.value] * 3],
    ]
    with BatchWriter(tmp_path / "batch") as writer:
        writer.add(samples.report("later"))
    with pytest.raises(TrefoilError, match="has changed since it was queried"):
        write_left_out(tmp_path / "left.csv", result, BatchReader(tmp_path / "batch"), ["a", "b", "c"])


ATTEMPT = b"a" * 32
KEYS = [helper.identity_key for helper in samples.HELPER_SET.helpers]


def vote(helper: int, cast: Vote = Vote.YES) -> SignedVote:
    return SignedVote.sign(helper, ATTEMPT, cast, samples.IDENTITIES[helper])


def test_a_vote_is_of_one_helper_one_attempt_and_one_word() -> None:
    cast = vote(0)
    cast.verify(KEYS[0])
    for changed in (replace(cast, party=1), replace(cast, attempt_id=b"b" * 32), replace(cast, vote=Vote.ABORTED)):
        with raises(ErrorKind.BAD_SIGNATURE, ProtocolError):
            changed.verify(KEYS[0])
    with raises(ErrorKind.BAD_SIGNATURE, ProtocolError) as caught:
        cast.verify(KEYS[1])
    assert "helper 1" in str(caught.value)


@pytest.mark.parametrize("cast", Vote)
@pytest.mark.parametrize("helper", range(PARTIES))
def test_a_vote_comes_back_as_it_was(helper: int, cast: Vote) -> None:
    encoded = vote(helper, cast).encode()
    code = {Vote.YES: 0, Vote.ABORTED: 1, Vote.RENOUNCED: 2}[cast]
    assert encoded[:-64] == bytes([helper]) + ATTEMPT + bytes([code])
    assert SignedVote.decode(encoded) == vote(helper, cast)


def test_bytes_that_are_no_vote_are_refused() -> None:
    encoded = vote(0).encode()
    unknown = (bytes([PARTIES]) + encoded[1:], encoded[:33] + bytes([len(Vote)]) + encoded[34:])
    for data in (b"", encoded[:-1], encoded + b"\0", *unknown):
        with pytest.raises(ProtocolError):
            SignedVote.decode(data)


WITHOUT_ANSWER = {QueryState.FAILED, QueryState.DISPUTED, QueryState.WITHDRAWN, QueryState.EXPIRED}
ENDED = {QueryState.RELEASED, *WITHOUT_ANSWER}
counts = st.integers(0, 2**32 - 1)
rejected = st.dictionaries(st.sampled_from(Rejection), st.integers(1, 2**32 - 1))
shortfalls = st.builds(Shortfall, counts, counts, counts, st.tuples(rejected, rejected, rejected))
texts = st.text(max_size=50)
failures = st.builds(
    Failure, st.sampled_from(QueryState), st.none() | st.integers(0, 2), texts, texts, st.none() | shortfalls
)
seconds = st.dictionaries(st.sampled_from(QueryState), st.integers(0, 10**9).map(lambda tenths: tenths / 10))


@st.composite
def statuses(draw: st.DrawFn) -> QueryStatus:
    state = draw(st.sampled_from(QueryState))
    failure = draw(failures) if state.without_answer else None
    return QueryStatus(state, draw(counts), draw(counts), failure, draw(seconds))


@given(statuses())
def test_what_is_written_is_read(status: QueryStatus) -> None:
    assert QueryStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_states_that_have_ended() -> None:
    assert {state for state in QueryState if state.ended} == ENDED
    assert {state for state in QueryState if state.without_answer} == WITHOUT_ANSWER


def test_a_long_reason_is_cut_where_it_is_written() -> None:
    long = QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, None, "x" * 9999, "y" * 9999))
    read = QueryStatus.from_json(long.to_json()).failure
    assert read is not None
    assert (read.reason, read.hint) == ("x" * MAX_TEXT, "y" * MAX_TEXT)


def test_a_status_says_seconds_in_whole_tenths() -> None:
    """Everyone who holds the query may read it: how long a stage took in microseconds is nobody's business."""
    status = QueryStatus(QueryState.VOTING, 0, 0, None, {QueryState.COMPUTING: 0.149999, QueryState.AGREEING: 2.26})
    assert status.to_json()["seconds"] == {"computing": 0.1, "agreeing": 2.3}


FAILED = QueryStatus(QueryState.FAILED, failure=Failure(QueryState.AGREEING, 1, "why", "what to do")).to_json()


SHORTFALL = Shortfall(4, 0, 3, ({Rejection.SEEN: 4}, {}, {})).to_json()


def but(change: dict[str, object], of: dict[str, Any] = FAILED) -> dict[str, object]:
    return {**of, **change}


def failing(change: dict[str, object]) -> dict[str, object]:
    return but({"failure": {**FAILED["failure"], **change}})  # type: ignore[dict-item]


FAULTS: list[tuple[object, str]] = [
    (None, "status is not an object"),
    ([], "status is not an object"),
    ("released", "status is not an object"),
    ({}, "status lacks the field done"),
    ({name: value for name, value in FAILED.items() if name != "seconds"}, "status lacks the field seconds"),
    (but({"more": 1}), "status has a field that is none of"),
    (but({"state": 1}), "state is no state of a query"),
    (but({"state": "answered"}), "state is no state of a query"),
    (but({"state": ["failed"]}), "state is no state of a query"),
    (but({"done": "3"}), "done is not a whole number"),
    (but({"done": True}), "done is not a whole number"),
    (but({"done": 1.5}), "done is not a whole number"),
    (but({"total": -1}), "total is not a whole number"),
    (but({"total": 2**32}), "total is not a whole number"),
    (but({"failure": None}), "failed comes without a reason"),
    (but({"state": "voting"}), "voting comes with a failure"),
    (but({"failure": []}), "failure is not an object"),
    (but({"failure": {}}), "failure lacks the field hint"),
    (failing({"stage": "nowhere"}), "stage is no state of a query"),
    (failing({"party": 3}), "helper 0, 1 or 2"),
    (failing({"party": "1"}), "party is not a whole number"),
    (failing({"reason": 7}), "reason is not a text"),
    (failing({"hint": "x" * (MAX_TEXT + 1)}), "hint is not a text"),
    (failing({"shortfall": []}), "shortfall is not an object"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}]}}), "each of the three helpers"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}, {"99": 1}]}}), "has no number"),
    (failing({"shortfall": {**SHORTFALL, "left_out": [{}, {}, {"18": -1}]}}), "18 is not a whole number"),
    (failing({"shortfall": {**SHORTFALL, "needed": None}}), "needed is not a whole number"),
    (but({"seconds": []}), "seconds is not an object"),
    (but({"seconds": {"x": 1}}), "seconds is no state"),
    (but({"seconds": {"voting": "1"}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": -1}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": float("nan")}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": float("inf")}}), "seconds in voting are not a span"),
    (but({"seconds": {"voting": False}}), "seconds in voting are not a span"),
]


@pytest.mark.parametrize(("stored", "fault"), FAULTS)
def test_anything_else_is_refused_and_the_fault_is_named(stored: object, fault: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        QueryStatus.from_json(stored)
    assert fault in str(refused.value)
