"""Write tests/data/vectors/*.json. Run from the root after a change of format: python -m tests.support.make_vectors

Everything is derived from labels (`protocol_samples.entropy`) except the HPKE seals, which the library randomises: a
new run makes the same headers and bodies and other payloads. That is why the private keys are in the file, and why a
vector says what its payloads must open to. The keys protect nothing. In joint.json (SPEC §11) the parameter digest is
given, because it covers the version of MPyC; messages of more than 64 bytes are there as their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpc_helpers.admission.column import block_hash, check_root, preimages
from mpc_helpers.admission.residues import ResidueCheck, check_words
from mpc_helpers.mpc.joint import circuit
from mpc_helpers.mpc.joint.layout import Layout, PairStreams, Purpose
from mpc_helpers.mpc.session import MpcSession
from protocol import field
from protocol.errors import Rejection
from protocol.header import EPSILON_SPAN, FIXED, NONCE_SPAN, SENSITIVITY_SPAN, TIME_SPAN, Header
from protocol.joint_scale import JointScale
from protocol.left_out import code_of, digest_of, encode_left_out
from protocol.noise import NoiseMode
from protocol.query import VERSION_WITHOUT_REST, SignedQuery
from protocol.report import SealedReport, open_payload, open_report, seal_deal
from protocol.shares import PARTIES, to_shamir
from protocol.units import affordable, need
from protocol.validity import Seeds, deal_numbers, points_of
from tests.support import protocol_samples as samples
from tests.support.checked_reports import numbers_of, planes_of
from tests.support.joint_trio import SESSION, Run, is_step

SCALES = [
    (Fraction(64), 1),
    (Fraction(16), 4),
    (Fraction(3, 2), 4),
    (Fraction(1, 2), 2),
    (Fraction(1, 100), 100),
    (Fraction(1, 100), 380),
    (Fraction(999_983, 12_345_000_000), 7),
    (Fraction(1, 65536), 65536),
    (Fraction(1, 2**40), 2**40),
]
DRAWN = (Fraction(16), 4, 70)
PAIR_KEYS = {lacking: bytes([lacking]) * 16 for lacking in range(3)}
DIGEST = b"p" * 32


class VectorSession(MpcSession):
    """With a parameter digest that does not depend on what is installed."""

    @property
    def parameter_digest(self) -> bytes:
        return DIGEST


def parameters_vector(rate: Fraction, change: int) -> dict[str, Any]:
    scale = JointScale.of(rate, change)
    return {
        "rate": str(rate),
        "change": change,
        "covered": scale.change,
        "coins": [[coin.bits, coin.numerator] for coin in scale.coins],
        "delta": str(scale.delta()),
        "variance": str(scale.variance),
        "half_width_95": scale.half_width(Fraction(19, 20)),
        "encoding": scale.encode().hex(),
    }


def circuit_vector(rate: Fraction, change: int) -> dict[str, Any]:
    """Wires: inputs, then gates, then XORs."""
    built = circuit.build(JointScale.of(rate, change))
    return {
        "rate": str(rate),
        "change": change,
        "inputs": built.inputs,
        "gates": [[layer.left.tolist(), layer.right.tolist()] for layer in built.layers],
        "xors": [[layer.xor_left.tolist(), layer.xor_right.tolist()] for layer in built.layers],
        "roots": built.roots.tolist(),
        "constants": list(built.constants),
    }


def streams_vector() -> list[dict[str, Any]]:
    session = VectorSession(0, SESSION, b"", 1, 1.0)
    return [
        {
            "purpose": purpose.value,
            "lacking": lacking,
            "bytes": PairStreams(PAIR_KEYS[lacking], session, lacking).open(purpose).take(16).hex(),
            "elements": PairStreams(PAIR_KEYS[lacking], session, lacking).open(purpose).elements(2).tolist(),
        }
        for purpose in Purpose
        for lacking in range(3)
    ]


def session_vector() -> dict[str, Any]:
    rate, change, numbers = DRAWN
    layout = Layout(circuit.build(JointScale.of(rate, change)), numbers)
    run = Run(layout, keys=PAIR_KEYS, session=VectorSession)
    messages = sorted((sender, to, frame[1], frame[2:]) for sender, to, frame in run.frames if is_step(frame))
    return {
        "rate": str(rate),
        "change": change,
        "numbers": numbers,
        "rows": layout.rows,
        "columns": layout.columns,
        "folded": layout.folded,
        "messages": [
            {"from": sender, "to": to, "step": step, "size": len(body), "body": _shown(body)}
            for sender, to, step, body in messages
        ],
        "components": [
            {str(lacking): component.tolist() for lacking, component in run.components(party).items()}
            for party in range(3)
        ],
        "noise": run.clear(),
    }


def _shown(body: bytes) -> str:
    return body.hex() if len(body) <= 64 else "sha256 " + hashlib.sha256(body).hexdigest()


def joint_file() -> dict[str, Any]:
    return {
        "about": "SPEC §11. Attempt id, parameter digest and pair keys are inputs of streams and session.",
        "attempt_id": SESSION.hex(),
        "parameter_digest": DIGEST.hex(),
        "pair_keys": {str(lacking): key.hex() for lacking, key in PAIR_KEYS.items()},
        "parameters": [parameters_vector(*terms) for terms in SCALES],
        "circuit": circuit_vector(*DRAWN[:2]),
        "streams": streams_vector(),
        "session": session_vector(),
    }


FOLDER = Path(__file__).parents[1] / "data" / "vectors"
Fates = tuple[Rejection | None, Rejection | None, Rejection | None]

R = Rejection
HISTOGRAM = [3, 0, 0, 250, 0, 0, 0, 1]


def same(reason: Rejection | None) -> Fates:
    """All three helpers say the same."""
    return reason, reason, reason


@dataclass(frozen=True)
class Negative:
    """A bad report; what opening it alone raises at each helper, and what a helper counts it under in a query."""

    name: str
    report: SealedReport
    opened: Fates
    counted: Fates
    copies: int = 1


def altered(report: SealedReport, at: int, value: bytes) -> SealedReport:
    header = report.header[:at] + value + report.header[at + len(value) :]
    return replace(report, header=header)


def negatives() -> Iterator[Negative]:
    yield Negative("same report twice", samples.report("twice", HISTOGRAM), same(None), same(R.DUPLICATE), copies=2)
    yield from altered_headers()
    yield from moved_payloads()
    yield from unknown_kinds()
    yield from malicious_devices()


def altered_headers() -> Iterator[Negative]:
    """Fields changed on the way: every payload is bound to the header it was sealed under."""
    report, other = samples.report("altered", HISTOGRAM), samples.report("other", HISTOGRAM)
    unopenable = same(R.UNOPENABLE)
    nonce = other.header[NONCE_SPAN]
    site_at = report.header.index(b"shop.example")
    caller_at, unit_at = report.header.index(b"ads.example"), report.header.index(b"cents")
    changes: list[tuple[str, int, bytes, Fates]] = [
        ("nonce copied into another header", NONCE_SPAN.start, nonce, unopenable),
        ("epsilon raised", EPSILON_SPAN.start, (2_000_000).to_bytes(4, "big"), unopenable),
        ("epsilon lowered", EPSILON_SPAN.start, (999_999).to_bytes(4, "big"), same(R.NOISE_TOO_SMALL)),
        ("sensitivity lowered", SENSITIVITY_SPAN.start, (99).to_bytes(8, "big"), unopenable),
        ("sensitivity raised", SENSITIVITY_SPAN.start, (101).to_bytes(8, "big"), same(R.NOISE_TOO_SMALL)),
        ("site altered", site_at, b"shoq.example", same(R.WRONG_SITE)),
        ("caller altered", caller_at, b"adz.example", same(R.WRONG_CALLER)),
        ("unit altered", unit_at, b"euros", same(R.WRONG_SHAPE)),
        ("time moved by an hour", TIME_SPAN.start, (samples.NOW - 2 * samples.HOUR).to_bytes(8, "big"), unopenable),
        ("debug flag flipped", 6, b"\x01", same(R.WRONG_MODE)),
        ("commitment altered", 111, bytes(32), unopenable),
    ]
    for name, at, value, counted in changes:
        yield Negative(name, altered(report, at, value), unopenable, counted)
    wrong_hash = altered(report, 207, bytes(32))
    yield Negative("body hash altered", wrong_hash, unopenable, (R.UNOPENABLE, R.WRONG_BODY, R.WRONG_BODY))
    yield Negative("helper set altered", altered(report, 7, bytes(32)), unopenable, same(R.WRONG_HELPER_SET))
    unknown_key: Fates = (R.UNKNOWN_KEY, R.UNOPENABLE, R.UNOPENABLE)
    yield Negative("key id of helper 1 altered", altered(report, 39, bytes(8)), unknown_key, unknown_key)


def moved_payloads() -> Iterator[Negative]:
    """Parts of sound reports, put together in another way."""
    one, two = samples.report("one", HISTOGRAM), samples.report("two", HISTOGRAM)
    for name, report, taken in (("first", one, two), ("second", two, one)):
        swapped = replace(report, payloads=taken.payloads)
        yield Negative(f"payloads of two reports swapped: the {name}", swapped, same(R.UNOPENABLE), same(R.UNOPENABLE))
    first, second, third = one.payloads
    crossed: Fates = (None, R.UNOPENABLE, None)
    yield Negative(
        "payload of helper 1 given to helper 2", replace(one, payloads=(first, first, third)), crossed, crossed
    )
    flipped = bytes([one.body[0] ^ 1]) + one.body[1:]
    wrong_body: Fates = (None, R.WRONG_BODY, R.WRONG_BODY)
    yield Negative("body altered", replace(one, body=flipped), wrong_body, wrong_body)
    yield Negative("body of another report", replace(two, body=one.body), wrong_body, wrong_body)
    damaged = replace(one, payloads=(first, second, third[:-1] + bytes([third[-1] ^ 128])))
    broken: Fates = (None, None, R.UNOPENABLE)
    yield Negative("payload of helper 3 damaged", damaged, broken, broken)


def unknown_kinds() -> Iterator[Negative]:
    """What this version does not speak is rejected by name, no matter who sealed it."""
    report = samples.report("unknown", HISTOGRAM)
    for name, at, reason in (
        ("unknown version", 0, R.UNKNOWN_VERSION),
        ("unknown suite", 2, R.UNKNOWN_SUITE),
        ("unknown schema", 4, R.UNKNOWN_SCHEMA),
    ):
        yield Negative(name, altered(report, at, b"\x00\x03"), same(reason), same(reason))
    yield Negative("unknown flag", altered(report, 6, b"\x02"), same(R.MALFORMED), same(R.MALFORMED))


def malicious_devices() -> Iterator[Negative]:
    """Sealed by their device with every key in order, and still not to be counted."""
    opens = same(None)
    terms = samples.terms
    honest: list[tuple[str, dict[str, Any], Rejection]] = [
        ("from the future", {"time": samples.NOW + 2 * samples.HOUR}, R.FROM_THE_FUTURE),
        ("expired", {"time": samples.NOW - 7 * samples.DAY}, R.EXPIRED),
        ("paid for more noise", {"epsilon_micros": 999_999}, R.NOISE_TOO_SMALL),
        ("debug report", {"debug": True}, R.WRONG_MODE),
        ("another site", {"site": "shoq.example"}, R.WRONG_SITE),
        ("side query nobody asked for", {"buckets": 7, "kappa": 5}, R.WRONG_SHAPE),
    ]
    for name, changes, reason in honest:
        yield Negative(name, samples.report(name, HISTOGRAM, terms(**changes)), opens, same(reason))
    old = samples.forged_report("old key", HISTOGRAM, keys=samples.OLD_KEYS)
    yield Negative("expired key", old, opens, same(R.EXPIRED_KEY))
    yield from lies()


def lies() -> Iterator[Negative]:
    """Headers that contradict what was sealed or sent."""

    def swap_commitment(header: Header) -> Header:
        return replace(header, commitments=(header.commitments[0], bytes(32), header.commitments[2]))

    def in_body(element: int) -> Callable[[bytes], bytes]:
        return lambda body: element.to_bytes(8, "little") + body[8:]

    wrong: Fates = (R.WRONG_COMMITMENT, R.WRONG_COMMITMENT, None)
    report = samples.forged_report("commitment", HISTOGRAM, header=swap_commitment)
    yield Negative("wrong commitment to seed 2", report, wrong, wrong)
    outside: Fates = (None, R.WRONG_BODY, R.WRONG_BODY)
    for name, element in (("p", field.P), ("2^64 - 1", 2**64 - 1)):
        report = samples.forged_report(f"body {name}", HISTOGRAM, body=in_body(element))
        yield Negative(f"body element {name}", report, outside, outside)


def positives() -> Iterator[tuple[str, list[int], SealedReport]]:
    full = samples.terms(kappa=10, epsilon_micros=4_294_000_000, sensitivity=2**40)
    for name, values, terms in (
        ("null report", [0] * 8, samples.TERMS),
        ("several buckets", HISTOGRAM, samples.TERMS),
        ("one bucket", [2**40], samples.terms(buckets=1, unit="u", site="a.example", caller="b.example")),
        ("side query, largest terms", [*HISTOGRAM, 10], full),
        ("debug", HISTOGRAM, samples.terms(debug=True)),
    ):
        yield name, values, samples.report(f"positive {name}", values, terms)


def positive_vector(name: str, values: list[int], report: SealedReport) -> dict[str, object]:
    views = [open_report(party, report, samples.private_keys(party)) for party in range(PARTIES)]
    components = {**views[0], **views[1]}
    return {
        "name": name,
        "terms": asdict(report.terms()),
        "histogram": values,
        "report": report.encode().hex(),
        "digest": report.digest.hex(),
        "components": [components[index].tolist() for index in range(PARTIES)],
        "shamir_shares": [to_shamir(party, views[party]).tolist() for party in range(PARTIES)],
    }


def negative_vector(negative: Negative) -> dict[str, object]:
    report = negative.report
    return {
        "name": negative.name,
        "header": report.header.hex(),
        "body": report.body.hex(),
        "payloads": [payload.hex() for payload in report.payloads],
        "copies": negative.copies,
        "opened_alone": [reason and reason.name for reason in negative.opened],
        "counted_under": [reason and reason.name for reason in negative.counted],
    }


def reports_file() -> dict[str, object]:
    terms = {name: value for name, value in asdict(samples.TERMS).items() if name != "time"}
    return {
        "about": "Reports, sound and bad. Lists of three are helpers 1, 2, 3; null: this helper finds nothing wrong.",
        "rules": {"query": terms, "oldest": samples.NOW - 7 * samples.DAY, "newest": samples.NOW + samples.HOUR},
        "header_fixed_part": FIXED.size,
        "helper_set": samples.HELPER_SET.to_json(),
        "private_keys": [
            {key_id.hex(): key.raw.hex() for key_id, key in samples.private_keys(party).items()}
            for party in range(PARTIES)
        ],
        "positive": [positive_vector(*positive) for positive in positives()],
        "negative": [negative_vector(negative) for negative in negatives()],
        "every_length": {
            "about": "The report named here, cut to every shorter length or with any byte appended, is MALFORMED.",
            "positive": "several buckets",
            "rejection": R.MALFORMED.name,
        },
    }


CHECKED_SHAPES = {
    "one bucket of eight": ({"cap": 100, "spread": 1}, [0, 0, 77, 0, 0, 0, 0, 0]),
    "null report": ({"cap": 100, "spread": 1}, [0] * 8),
    "four buckets and a side query": ({"cap": 100, "spread": 4, "kappa": 6}, [1, 0, 20, 0, 3, 0, 0, 40, 6]),
    "two groups": ({"cap": 2**20, "spread": 1, "buckets": 40, "sensitivity": 2**21}, [0] * 39 + [999_999]),
}


def validity_file() -> dict[str, object]:
    """Each report is a batch of its own, so that its block and root follow from it alone."""
    vectors = []
    for name, (changes, histogram) in CHECKED_SHAPES.items():
        terms = samples.terms(**changes)
        report = samples.report(f"checked {name}", histogram, terms)
        views = [open_report(party, report, samples.private_keys(party)) for party in range(PARTIES)]
        header = Header.decode(report.header)
        shares = check_shares(report)
        preimage = preimages(np.ones(1, dtype=np.bool_), shares[0])[0]
        vectors.append(
            {
                "name": name,
                "terms": asdict(terms),
                "histogram": histogram,
                "report": report.encode().hex(),
                "prefix_size": len(header.prefix()),
                "points": points_of(header.prefix(), terms.shape.points),
                "components": [({**views[0], **views[1]})[index].tolist() for index in range(PARTIES)],
                "planes": [list(plane) for plane in terms.shape.planes],
                "check_shares": [share[0].tolist() for share in shares],
                "block_hash": block_hash(0, preimage).hex(),
                "check_root": check_root([block_hash(0, preimage)]).hex(),
            }
        )
    return {
        "about": "Checked reports (SPEC 3.1, 3.2): equal check shares at all three helpers, or invalid.",
        "positive": vectors,
        "negative": invalid_vectors(),
    }


_LIE_TERMS: dict[str, Any] = {"cap": 100, "spread": 2, "kappa": 6}
# Numbers, and the histogram that the coins pay: nothing pays for what is outside the cap.
LIES = {
    "a negative number": ([0, -1, 0, 0, 0, 0, 0, 0, 0], [0] * 9),
    "one more than the cap": ([101, 0, 0, 0, 0, 0, 0, 0, 0], [100] + [0] * 8),
    "more than the cap in two buckets": ([60, 41, 0, 0, 0, 0, 0, 0, 0], [60, 40] + [0] * 7),
    "a huge number": ([2**59] + [0] * 8, [0] * 9),
    "half of one": ([(field.P + 1) // 2] + [0] * 8, [0] * 9),
    "two numbers that cancel": ([2**59, -(2**59)] + [0] * 7, [0] * 9),
    "twice the side query's number": ([0] * 8 + [12], [0] * 8 + [6]),
    "half the side query's number": ([0] * 8 + [3], [0] * 9),
    "another bucket than the coins": ([0, 5, 0, 0, 0, 0, 0, 0, 0], [5] + [0] * 8),
}


def _seeds(draw: Callable[[int], bytes], _: bytes) -> Seeds:
    return draw(32), draw(32), draw(32)


def invalid_vectors() -> list[dict[str, object]]:
    """Reports that three helpers open, and whose check shares fit together and are not equal."""
    terms = samples.terms(**_LIE_TERMS)
    made: list[dict[str, object]] = []
    for name, (numbers, paid) in LIES.items():
        draw = samples.entropy(f"lie {name}")
        dealt = deal_numbers(
            numbers_of(numbers, terms.shape),
            planes_of(paid, terms.shape),
            terms.shape,
            partial(_seeds, draw),
        )
        report = seal_deal(dealt, terms, samples.HELPER_SET, entropy=draw)
        made.append(
            {
                "name": name,
                "report": report.encode().hex(),
                "numbers": numbers,
                "check_shares": [share[0].tolist() for share in check_shares(report)],
                "rejection": R.INVALID.name,
            }
        )
    return made


def check_shares(report: SealedReport) -> list[field.Vector]:
    """Of each helper, from what it opens."""
    header = Header.decode(report.header)
    shape = header.terms.shape
    openings = field.decode(header.openings, shape.openings).reshape(1, -1)
    bodies = field.decode(report.body, shape.explicit).reshape(1, -1)
    made = []
    for party in range(PARTIES):
        seeds = open_payload(party, report.header, report.payloads[party], samples.KEYS[party])
        first, second = (field.expand_many([seed], shape.expanded).copy() for seed in seeds)
        check = ResidueCheck(party, shape, [report.header], openings)
        check.add(0, check_words(party, first, second, bodies, shape))
        made.append(check.normal_shares())
    return made


def field_file() -> dict[str, object]:
    seeds = [samples.entropy(f"seed {index}")(32) for index in range(4)] + [bytes(32)]
    return {
        "about": "Seeds and the field elements they expand to.",
        "expand": [{"seed": seed.hex(), "elements": field.expand(seed, 9).tolist()} for seed in seeds],
    }


def queries_file() -> dict[str, object]:
    queries = [
        samples.query(),
        samples.query(kappa=3, noise=NoiseMode.PAIRWISE, debug=True, unit="x"),
        samples.query(epsilon_micros=200_000, keeps_rest=True),
        samples.query(version=VERSION_WITHOUT_REST),
    ]
    return {
        "about": "Queries in their canonical bytes, with digest and the signature of the querier's key.",
        "signer": samples.QUERIER.public.hex(),
        "queries": [
            {
                "signed": SignedQuery.sign(query, samples.QUERIER).encode().hex(),
                "bytes": query.encode().hex(),
                "digest": query.digest.hex(),
                "epsilon_micros": query.epsilon_micros,
                "sensitivity": query.sensitivity,
                "site": query.site,
                "noise": query.noise.value,
                "version": query.version,
                "keeps_rest": query.keeps_rest,
            }
            for query in queries
        ],
    }


# ε_r, Δ_r, ε_q, Δ_q: what a report paid, and a query. Equal Δ, a quarter at half the Δ, micros that are not whole, half
# a micro (which rounding to nearest would drop), the least part just below, at and above, the largest of everything.
TERMS_OF_NEED = [
    (1_000_000, 10, 1_000_000, 10),
    (1_000_000, 10, 200_000, 10),
    (1_000_000, 10, 125_000, 5),
    (500_000, 4, 124_999, 3),
    (1_000_000, 1, 999_999, 2),
    (1_000_000, 10, 15_624, 10),
    (1_000_000, 10, 15_625, 10),
    (1_000_000, 10, 15_626, 10),
    (1_000_001, 10, 1, 10),
    (1, 1, 1, 1),
    (63, 1, 1, 2**40),
    (65, 1, 1, 1),
    (4_294_000_000, 2**40, 4_294_000_000, 2**40),
    (4_294_000_000, 2**40, 1, 1),
    (4_294_000_000, 2**40 - 1, 4_293_999_999, 2**40),
    (4_294_000_000, 1, 4_294_000_000, 2**40),
]


def need_file() -> dict[str, object]:
    vectors = [
        {
            "report_epsilon": paid,
            "report_sensitivity": reach,
            "query_epsilon": epsilon,
            "query_sensitivity": sensitivity,
            "need": (cost := need(paid, reach, epsilon, sensitivity)),
            "covered": cost <= paid,
            # Of what is left after this answer, at the query's Δ.
            "affordable_after": affordable(paid, reach, max(0, paid - cost), sensitivity),
        }
        for paid, reach, epsilon, sensitivity in TERMS_OF_NEED
    ]
    return {"about": "What one answer costs a report (SPEC 3), in micros of the report's own epsilon.", "need": vectors}


def left_out_file() -> dict[str, object]:
    lists: list[tuple[str, int, list[tuple[int, int, R]]]] = [
        ("nothing left out", 5, []),
        ("one", 5, [(2, 1, R.SEEN)]),
        ("neighbours with two reasons", 9, [(0, 2, R.MALFORMED), (2, 3, R.INVALID), (8, 1, R.INVALID)]),
        ("numbers of two bytes", 1000, [(130, 300, R.EXPIRED)]),
        ("all", 70_000, [(0, 70_000, R.DUPLICATE)]),
        ("too little left", 6, [(1, 2, R.SEEN), (3, 2, R.TOO_LITTLE_LEFT)]),
    ]
    positive = []
    for name, count, runs in lists:
        codes = np.zeros(count, dtype=np.uint8)
        for first, length, reason in runs:
            codes[first : first + length] = code_of(reason)
        shown = [{"first": first, "length": length, "reason": reason.name} for first, length, reason in runs]
        encoded, digest = encode_left_out(codes).hex(), digest_of(codes).hex()
        positive.append({"name": name, "count": count, "runs": shown, "bytes": encoded, "digest": digest})
    wrong = {
        "an empty run": "000012",
        "a reason without a name": "000115",
        "one run cut in two": "000112000112",
        "more than there are": "020412",
        "ends inside a run": "0001",
        "a number in a longer form": "80000112",
        "a number above 2^32": "ffffffff1f0112",
        "a number without an end": "ffffffffffff",
    }
    negative = [{"name": name, "count": 5, "bytes": data} for name, data in wrong.items()]
    return {"about": "Lists of reports left out (SPEC 5).", "positive": positive, "negative": negative}


def main() -> None:
    for name, content in (
        ("reports", reports_file()),
        ("field", field_file()),
        ("queries", queries_file()),
        ("validity", validity_file()),
        ("left_out", left_out_file()),
        ("need", need_file()),
    ):
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (FOLDER / "joint.json").write_text(json.dumps(joint_file(), indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
