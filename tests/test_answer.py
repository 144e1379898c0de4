"""The answer: believed only if three signed shares agree on everything and lie on a line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.answer import AnswerShare, combine
from protocol.errors import ProtocolError, Rejection
from protocol.field import P, encode
from protocol.left_out import code_of, digest_of, encode_left_out
from protocol.query import NoiseMode, Query
from protocol.shares import PARTIES, share, to_shamir
from protocol.wire import Writer
from tests.support import protocol_samples as samples

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
    with pytest.raises(ProtocolError, match="disagree"):
        combine(QUERY, shares)


@given(st.integers(0, 2), st.integers(0, 7), st.integers(1, P - 1))
def test_any_changed_number_is_noticed(party: int, bucket: int, change: int) -> None:
    vector = SHARES[party].vector.copy()
    vector[bucket] = (int(vector[bucket]) + change) % P
    shares = list(SHARES)
    shares[party] = replace(shares[party], vector=vector)
    with pytest.raises(ProtocolError, match="do not fit together"):
        combine(QUERY, shares)


@pytest.mark.parametrize("name", ["noise", "epsilon_micros", "sensitivity", "submitted"])
def test_helpers_that_agree_on_something_not_asked_are_not_believed(name: str) -> None:
    with pytest.raises(ProtocolError, match="other noise or another batch"):
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
            with pytest.raises(ProtocolError, match=f"helper {party + 1} lists other reports"):
                combine(QUERY, with_list(party, wrong))


def test_all_three_shares_are_needed() -> None:
    for wrong in (SHARES[:2], [*SHARES, SHARES[0]], []):
        with pytest.raises(ProtocolError, match="all three helpers"):
            combine(QUERY, wrong)


@pytest.mark.parametrize("signer", [1, 2])
def test_a_signature_by_another_helper_is_refused(signer: int) -> None:
    with pytest.raises(ProtocolError, match="helper Alder is not signed by it"):
        opened(0, sealed(0, signer=signer))


def test_a_share_does_not_pass_for_another_helpers() -> None:
    for claimed in (1, 2):
        with pytest.raises(ProtocolError, match="not signed by it"):
            opened(claimed, sealed(0))
    forged = SHARES[0].seal(1, QUERY, samples.IDENTITIES[0])
    with pytest.raises(ProtocolError, match="not signed by it"):
        opened(1, forged)


def test_a_share_for_another_query_is_refused() -> None:
    other = samples.query(batch_size=20, query_id=bytes(16))
    with pytest.raises(ProtocolError, match="not signed by it for this query"):
        opened(0, sealed(0), other)
    with pytest.raises(ProtocolError, match="for another query"):
        opened(0, sealed(0, other), other)


def test_a_share_of_another_length_is_refused() -> None:
    short = replace(SHARES[0], vector=SHARES[0].vector[:-1])
    with pytest.raises(ProtocolError, match="for another query"):
        opened(0, short.seal(0, QUERY, samples.IDENTITIES[0]))


def decodable_elements(count: int) -> list[int]:
    """Numbers whose bytes, read as a share of today, are a list of 4 bytes and all elements that can follow it."""
    list_size, elements_size = (4).to_bytes(4, "big"), (8 * (count - 13)).to_bytes(4, "big")
    numbers = [0] * count
    numbers[11] = int.from_bytes(bytes(4) + list_size, "little")
    numbers[12] = int.from_bytes(bytes(4) + elements_size, "little")
    return numbers


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([5] * 8, "message ends"),
        ([P - 1] * 45, "over the limit"),
        (decodable_elements(45), "for another query"),
    ],
)
def test_a_share_from_before_the_lists_is_refused(
    numbers: list[int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has neither bitmap digests nor a list, and no version says so: at most, fewer numbers come out of it."""
    query = samples.query(batch_size=20, buckets=len(numbers))
    one = replace(SHARES[0], query_digest=query.digest, vector=np.array(numbers, dtype=np.uint64))
    elements = Writer().blob(encode(one.vector)).done()
    lists = b"".join(one.proposed) + Writer().blob(one.left_out).done()
    assert one.encode().endswith(lists + elements)
    old = one.encode().removesuffix(lists + elements) + elements
    monkeypatch.setattr(AnswerShare, "encode", lambda _: old)
    with pytest.raises(ProtocolError, match=reason):
        opened(0, one.seal(0, query, samples.IDENTITIES[0]), query)


def test_only_the_queriers_key_opens_a_share() -> None:
    with pytest.raises(ProtocolError, match="does not open"):
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
    with pytest.raises(ProtocolError, match="left over"):
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
