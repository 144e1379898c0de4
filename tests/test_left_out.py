"""The list of reports left out: one encoding, vectors, a bound on its length, and a table that names each report."""

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
from protocol.errors import ProtocolError, Rejection, TrefoilError
from protocol.left_out import code_of, counts_of, decode_left_out, digest_of, encode_left_out, reason_of
from protocol.querier.left_out_list import missing_from_lists, write_left_out
from protocol.querier.worth import worth
from protocol.shares import PARTIES, share, to_shamir
from tests.support import protocol_samples as samples

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "left_out.json").read_text())
CODES = st.lists(st.integers(0, len(Rejection)), max_size=400).map(lambda codes: np.array(codes, dtype=np.uint8))


@given(CODES)
def test_decoding_reverses_encoding(codes: left_out.Codes) -> None:
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
    found = combine(QUERY, shares(codes, data))
    assert found.left_out[0].tolist() == [*codes[:21].tolist(), *[0] * 79]
    assert missing_from_lists(worth(QUERY, found, {}, 0)) == 79
    shorter = encode_left_out(codes[:5])
    with pytest.raises(ProtocolError, match="helper 1 lists other reports"):
        combine(QUERY, shares(codes, shorter))


def test_a_million_reports_fit_what_a_querier_takes() -> None:
    """One report in ten left out, at random places: a list of 262,000 bytes. All of them: six bytes."""
    chosen = np.random.default_rng(1).random(1_000_000) < 0.1
    codes = np.where(chosen, code_of(Rejection.EXPIRED), 0).astype(np.uint8)
    data = encode_left_out(codes)
    assert len(data) < 300_000 and decode_left_out(data, len(codes)).tolist() == codes.tolist()
    assert len(encode_left_out(np.full(1_000_000, code_of(Rejection.SEEN), dtype=np.uint8))) < 8


QUERY = samples.query(batch_size=100)


def shares(codes: left_out.Codes, data: bytes) -> list[AnswerShare]:
    """Helper 1 leaves out what `codes` say and lists `data`; the others leave out nothing."""
    nothing = np.zeros(len(codes), dtype=np.uint8)
    shared = share([0] * QUERY.length, entropy=samples.entropy("left out"))
    common = AnswerShare(
        query_digest=QUERY.digest,
        attempt_number=1,
        attempt_id=bytes(32),
        submitted=len(codes),
        counted=int(np.count_nonzero(codes == 0)),
        rejections=(counts_of(codes), {}, {}),
        noise=QUERY.noise,
        epsilon_micros=QUERY.epsilon_micros,
        sensitivity=QUERY.sensitivity,
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
    result = worth(query, answer, {}, 0)
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
