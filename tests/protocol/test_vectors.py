"""The JSON vectors, run through opening one report and through a helper's bulk path."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.admission.column import block_hash, check_root, fit, preimages
from mpc_helpers.admission.headers import ADMITTED, REASON_OF
from protocol import field
from protocol.errors import Rejected, Rejection
from protocol.header import Header
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey, Suite
from protocol.query import SignedQuery
from protocol.report import SealedReport, open_report, seal_report
from protocol.shares import PARTIES, open_shamir, reconstruct, to_shamir
from protocol.units import MAX_MICROS
from protocol.validity import histogram_in, points_of
from tests.support import make_vectors
from tests.support import protocol_samples as samples
from tests.support.checked_reports import query_of

Vector = dict[str, Any]  # JSON


@cache
def stored(name: str) -> Vector:
    content: Vector = json.loads((make_vectors.FOLDER / f"{name}.json").read_text())
    return content


def named(vectors: list[Vector]) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in vectors]


POSITIVE: list[Vector] = stored("reports")["positive"]
NEGATIVE: list[Vector] = stored("reports")["negative"]


def private_keys(party: int) -> dict[bytes, PrivateKey]:
    suite = Suite.X25519_HKDF_SHA256_AES_128_GCM
    raw = stored("reports")["private_keys"][party]
    return {bytes.fromhex(name): PrivateKey(suite, bytes.fromhex(key)) for name, key in raw.items()}


def bad_report(vector: Vector) -> SealedReport:
    first, second, third = (bytes.fromhex(payload) for payload in vector["payloads"])
    return SealedReport(bytes.fromhex(vector["header"]), bytes.fromhex(vector["body"]), (first, second, third))


def reasons(names: list[str | None]) -> list[Rejection | None]:
    return [None if name is None else Rejection[name] for name in names]


def fate_alone(party: int, report: SealedReport) -> Rejection | None:
    try:
        open_report(party, report, private_keys(party))
    except Rejected as error:
        return error.rejection
    return None


def test_stored_helper_set_is_the_one_the_tests_build() -> None:
    helper_set = HelperSet.from_json(stored("reports")["helper_set"])
    helper_set.verify()
    assert helper_set == samples.HELPER_SET


@pytest.mark.parametrize("vector", named(POSITIVE))
def test_positive_vector_opens_to_its_components(vector: Vector) -> None:
    report = SealedReport.decode(bytes.fromhex(vector["report"]))
    assert report.encode().hex() == vector["report"]
    assert report.digest.hex() == vector["digest"]
    views = [open_report(party, report, private_keys(party)) for party in range(PARTIES)]
    for view in views:
        assert {index: vector["components"][index] for index in view} == {k: v.tolist() for k, v in view.items()}
    shares = [to_shamir(party, view) for party, view in enumerate(views)]
    assert [share.tolist() for share in shares] == vector["shamir_shares"]
    assert open_shamir(shares) == vector["histogram"]
    assert reconstruct([field.from_integers(part) for part in vector["components"]]) == vector["histogram"]


@pytest.mark.parametrize("vector", named(POSITIVE))
def test_positive_vector_states_its_terms(vector: Vector) -> None:
    report = SealedReport.decode(bytes.fromhex(vector["report"]))
    stated = {name: getattr(report.terms(), name) for name in vector["terms"]}
    assert stated == vector["terms"]


def test_vectors_are_those_the_generator_makes() -> None:
    """All but the seals, which HPKE randomises."""
    fresh = [SealedReport.decode(bytes.fromhex(str(v["report"]))) for v in make_vectors.reports_file()["positive"]]  # type: ignore[attr-defined]  # JSON content is typed as object
    kept = [SealedReport.decode(bytes.fromhex(vector["report"])) for vector in POSITIVE]
    assert [(one.header, one.body) for one in fresh] == [(one.header, one.body) for one in kept]
    assert make_vectors.field_file() == stored("field")
    assert make_vectors.queries_file() == stored("queries")
    assert make_vectors.need_file() == stored("need")
    assert [negative.name for negative in make_vectors.negatives()] == [vector["name"] for vector in NEGATIVE]


@pytest.mark.parametrize("vector", named(NEGATIVE))
def test_negative_vector_opened_alone(vector: Vector) -> None:
    report = bad_report(vector)
    assert [fate_alone(party, report) for party in range(PARTIES)] == reasons(vector["opened_alone"])


@pytest.mark.parametrize("vector", named(NEGATIVE))
def test_negative_vector_costs_only_itself_in_a_query(vector: Vector, tmp_path: Path) -> None:
    """The bad report sits among good ones; each helper counts it under its reason, and the sum is the good ones'."""
    good = [samples.report(f"good {index}", [index, *[1] * 7]) for index in range(5)]
    bad = bad_report(vector)
    reports = [*good, *[bad] * vector["copies"]]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    at = [index for index, digest in enumerate(ingested[0].column.digests()) if digest.tobytes() == bad.digest][-1]
    fates = [None if one.reasons[at] == ADMITTED else REASON_OF[int(one.reasons[at])] for one in ingested]
    assert fates == reasons(vector["counted_under"])
    dropped = [sum(one.rejections().values()) for one in ingested]
    assert dropped == [int(fate is not None) for fate in fates]
    expected = np.array([10, *[5] * 7])
    if vector["copies"] == 2:
        expected = expected + np.array(make_vectors.HISTOGRAM)
    assert samples.opened_sum(ingested) == expected.tolist()


def test_every_rejection_of_a_report_by_itself_has_a_vector() -> None:
    """SEEN and TOO_LITTLE_LEFT need a ledger, INVALID two other helpers; MALFORMED has tests of every length below."""
    covered = {Rejection[name] for vector in NEGATIVE for name in vector["counted_under"] if name}
    assert covered == set(Rejection) - {Rejection.SEEN, Rejection.TOO_LITTLE_LEFT, Rejection.INVALID}


def test_truncated_at_every_byte() -> None:
    rule = stored("reports")["every_length"]
    (data,) = (bytes.fromhex(vector["report"]) for vector in POSITIVE if vector["name"] == rule["positive"])
    for length in range(len(data)):
        with pytest.raises(Rejected) as error:
            SealedReport.decode(data[:length])
        assert error.value.rejection is Rejection[rule["rejection"]]


def test_extended_by_every_byte() -> None:
    rule = stored("reports")["every_length"]
    (data,) = (bytes.fromhex(vector["report"]) for vector in POSITIVE if vector["name"] == rule["positive"])
    for last in range(256):
        with pytest.raises(Rejected) as error:
            SealedReport.decode(data + bytes([last]))
        assert error.value.rejection is Rejection[rule["rejection"]]
    for place in range(len(data)):
        with pytest.raises(Rejected):
            SealedReport.decode(data[:place] + b"\x00" + data[place:])


def test_header_truncated_and_extended_at_every_byte() -> None:
    report = SealedReport.decode(bytes.fromhex(POSITIVE[1]["report"]))
    for length in range(len(report.header)):
        with pytest.raises(Rejected):
            Header.decode(report.header[:length])
    with pytest.raises(Rejected, match="left over"):
        Header.decode(report.header + b"\x00")


def test_a_copied_nonce_burns_nobody_elses_report(tmp_path: Path) -> None:
    """A report is its header's digest: one that reuses a public nonce is another report, and both count."""
    victim = samples.report("victim", [1] * 8)
    nonce = Header.decode(victim.header).nonce
    draws = iter([*[samples.entropy(f"seed {index}")(32) for index in range(3)], nonce])
    copy = seal_report([2] * 8, samples.TERMS, samples.HELPER_SET, entropy=lambda _: next(draws))
    assert Header.decode(copy.header).nonce == nonce
    reports = [victim, copy]
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, reports), samples.query_for(reports))
    assert [one.rejections() for one in ingested] == [{}, {}, {}]
    assert samples.opened_sum(ingested) == [3] * 8


@pytest.mark.parametrize("vector", stored("field")["expand"])
def test_seeds_expand_as_stored(vector: Vector) -> None:
    assert field.expand(bytes.fromhex(vector["seed"]), len(vector["elements"])).tolist() == vector["elements"]


@pytest.mark.parametrize("vector", stored("queries")["queries"])
def test_query_vector_decodes_and_verifies(vector: Vector) -> None:
    signed = SignedQuery.decode(bytes.fromhex(vector["signed"]))
    signed.verify(bytes.fromhex(stored("queries")["signer"]))
    assert signed.query.encode().hex() == vector["bytes"]
    assert signed.query.digest.hex() == vector["digest"]
    assert (signed.query.site, signed.query.noise.value) == (vector["site"], vector["noise"])
    assert (signed.query.epsilon_micros, signed.query.sensitivity) == (vector["epsilon_micros"], vector["sensitivity"])
    assert (signed.query.version, signed.query.keeps_rest) == (vector["version"], vector["keeps_rest"])


def test_a_query_of_version_2_keeps_the_digest_it_was_signed_with() -> None:
    """As the release before version 3 computed it: under it such a query is in ledgers, folders and answers."""
    old = "94cb6a0ff5de1a83b06a75fb324a4e4f565aa8cef19d5a0785ab1bedda7ad32c"
    assert [v["version"] for v in stored("queries")["queries"] if v["digest"] == old] == [2]


@pytest.mark.parametrize("vector", stored("need")["need"])
def test_need_vector(vector: Vector) -> None:
    """By the rule as it is written, in fractions: `make_vectors` wrote what the code computes."""
    paid, reach = vector["report_epsilon"], vector["report_sensitivity"]
    share = Fraction(vector["query_epsilon"] * reach, vector["query_sensitivity"])
    cost = max(math.ceil(share), math.ceil(Fraction(paid, 64)))
    assert (vector["need"], vector["covered"]) == (cost, cost <= paid)
    left, most = max(0, paid - cost), vector["affordable_after"]
    if left < Fraction(paid, 64):
        assert most == 0
    else:
        costs = [math.ceil(Fraction(epsilon * reach, vector["query_sensitivity"])) for epsilon in (most, most + 1)]
        assert costs[0] <= left and (costs[1] > left or most == MAX_MICROS)


@pytest.mark.parametrize("vector", named(stored("validity")["positive"]))
def test_validity_vector(vector: Vector) -> None:
    """Points, numbers, check shares, block and root of a checked report."""
    report = SealedReport.decode(bytes.fromhex(vector["report"]))
    header = Header.decode(report.header)
    shape = header.terms.shape
    assert {name: getattr(header.terms, name) for name in vector["terms"]} == vector["terms"]
    assert [list(plane) for plane in shape.planes] == vector["planes"]
    assert points_of(report.header[: vector["prefix_size"]], shape.points) == vector["points"]
    views = [open_report(party, report, private_keys(party)) for party in range(PARTIES)]
    for view in views:
        assert {index: vector["components"][index] for index in view} == {k: v.tolist() for k, v in view.items()}
    first, second, third = (field.from_integers(part) for part in vector["components"])
    secret = field.add(field.add(first, second), third)
    assert field.lift(histogram_in(secret, shape)) == vector["histogram"]
    shares = make_vectors.check_shares(report)
    assert [share[0].tolist() for share in shares] == vector["check_shares"]
    assert vector["check_shares"][0] == vector["check_shares"][1] == vector["check_shares"][2]
    preimage = preimages(np.ones(1, dtype=np.bool_), shares[1])[0]
    assert block_hash(0, preimage).hex() == vector["block_hash"]
    assert check_root([block_hash(0, preimage)]).hex() == vector["check_root"]


def test_the_validity_vectors_are_those_that_are_made() -> None:
    """The same points and check shares, from the same labels; payloads are sealed with new randomness."""
    again: Any = make_vectors.validity_file()
    for kind in ("positive", "negative"):
        known = stored("validity")[kind]
        assert [one["check_shares"] for one in again[kind]] == [one["check_shares"] for one in known]
    assert [one["points"] for one in again["positive"]] == [one["points"] for one in stored("validity")["positive"]]


@pytest.mark.parametrize("vector", named(stored("validity")["negative"]))
def test_a_lie_opens_at_all_three_and_is_invalid(vector: Vector, tmp_path: Path) -> None:
    """Alone nobody has anything against it: the shares of the three fit together, and are not equal."""
    report = SealedReport.decode(bytes.fromhex(vector["report"]))
    shape = Header.decode(report.header).terms.shape
    views = [open_report(party, report, private_keys(party)) for party in range(PARTIES)]
    secret = field.add(field.add(views[0][0], views[0][1]), views[1][2])
    assert histogram_in(secret, shape).tolist() == [number % field.P for number in vector["numbers"]]
    shares = make_vectors.check_shares(report)
    assert [share[0].tolist() for share in shares] == vector["check_shares"]
    assert fit(*shares).all()
    assert len({share.tobytes() for share in shares}) == PARTIES
    assert vector["rejection"] == Rejection.INVALID.name
    # As helpers ingest it: opened and summed by all three, and their roots differ.
    ingested = samples.ingest_columns(samples.write_columns(tmp_path, [report]), query_of([report], shape))
    assert [one.rejections() for one in ingested] == [{}] * PARTIES
    assert len({one.check_root for one in ingested}) == PARTIES
