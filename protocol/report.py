"""The report: a public header, one masked body and three small sealed payloads (SPEC.md §3).

A report *is* the digest of its header. The header is the HPKE `info` of every payload, so that a changed ε, nonce or
site makes all three fail to open; it holds commitments to the seeds and the hash of the body, so that no two helpers
can ever hold different shares of the same report.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol import field as prime_field
from protocol import self_check, validity
from protocol.errors import ProtocolError, Rejected, Rejection
from protocol.field import ELEMENT_SIZE, SEED_SIZE, Vector
from protocol.header import BODY_HASH_SPAN, NONCE_SIZE, NONCE_SPAN, Header, ReportTerms, committed
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey, Suite
from protocol.shares import BODY_SEED, PARTIES, SEEDS_OF, Entropy, SharedVector, component, share
from protocol.wire import Reader, Writer

_COMMITMENTS = tuple(hashlib.sha256(b"trefoil/1 seed commitment\0" + bytes([index])) for index in range(PARTIES))
_BODY = hashlib.sha256(b"trefoil/1 body\0")
_REPORT = hashlib.sha256(b"trefoil/1 report\0")
_PAYLOAD_INFO = tuple(b"trefoil/1 payload for helper " + bytes([party + 1]) for party in range(PARTIES))


def payload_size(suite: Suite) -> int:
    """Bytes of a sealed payload: two seeds, and what sealing adds."""
    return 2 * SEED_SIZE + suite.overhead


@dataclass(frozen=True, slots=True)
class SealedReport:
    """What leaves the device. Nobody can read it, and real and null reports look the same."""

    header: bytes
    body: bytes = field(repr=False)
    payloads: tuple[bytes, bytes, bytes] = field(repr=False)

    @property
    def digest(self) -> bytes:
        """The report's identity: what ledgers and batches key on."""
        return header_digest(self.header)

    def terms(self) -> ReportTerms:
        """The public promise in the header."""
        return Header.decode(self.header).terms

    def encode(self) -> bytes:
        """One report as one message."""
        writer = Writer().blob(self.header, 2).blob(self.body, 4)
        for payload in self.payloads:
            writer.blob(payload, 2)
        return writer.done()

    @classmethod
    def decode(cls, data: bytes) -> SealedReport:
        """The report in `data`, or `Rejected`: shape, sizes and header are checked; opening is for helpers."""
        reader = Reader(data)
        try:
            header, body = reader.blob(2), reader.blob(4)
            payloads = (reader.blob(2), reader.blob(2), reader.blob(2))
            reader.finish()
        except ProtocolError as error:
            raise Rejected(Rejection.MALFORMED, str(error)) from None
        decoded = Header.decode(header)
        numbers, size = decoded.terms.shape.explicit, payload_size(decoded.suite)
        if len(body) != ELEMENT_SIZE * numbers:
            raise Rejected(Rejection.MALFORMED, f"a body of {len(body)} bytes for {numbers} numbers")
        if any(len(payload) != size for payload in payloads):
            raise Rejected(Rejection.MALFORMED, f"a payload has {size} bytes")
        return cls(header, body, payloads)


def seal_report(
    histogram: Sequence[int], terms: ReportTerms, helper_set: HelperSet, *, entropy: Entropy = os.urandom
) -> SealedReport:
    """Run by a device, last step of a conversion: *Share · Seal*. Zeros for a null report take the same path.

    `histogram` has `terms.length` numbers. `entropy` exists for test vectors; devices use the operating system's.
    Seeds are drawn here and forgotten here: a checked report sealed twice with the same seeds would show its content.
    """
    if len(histogram) != terms.length:
        raise ProtocolError(f"the terms promise {terms.length} numbers, not {len(histogram)}")
    if not terms.shape.checked:
        return _seal(share(histogram, entropy=entropy), terms, helper_set, lambda _: b"", entropy)
    draw = _hedged(entropy, helper_set.digest + f"{terms.site} {terms.caller} {terms.time}".encode())
    return seal_deal(
        validity.deal(histogram, terms.shape, draw), terms, helper_set, opening=_open_checked, entropy=entropy
    )


def seal_deal(
    dealt: validity.Deal,
    terms: ReportTerms,
    helper_set: HelperSet,
    *,
    opening: Callable[[validity.Deal, Sequence[int]], list[int]] = validity.open_at,
    entropy: Entropy = os.urandom,
) -> SealedReport:
    """*Seal* of a checked report: points from the prefix, openings there, payloads. Devices call `seal_report`.

    Whatever was dealt is sealed, as a device would that lies: helpers find out.
    """

    def openings(prefix: bytes) -> bytes:
        return validity.encode_openings(opening(dealt, validity.points_of(prefix, terms.shape.points)))

    return _seal(dealt.shared, terms, helper_set, openings, entropy)


def _open_checked(dealt: validity.Deal, points: Sequence[int]) -> list[int]:
    """Openings, after the device's own check."""
    opened = validity.open_at(dealt, points)
    if not self_check.holds(dealt, points, opened):
        raise ProtocolError("the report's proof does not hold", "This is a defect of the device.")
    return opened


def _seal(
    shared: SharedVector,
    terms: ReportTerms,
    helper_set: HelperSet,
    openings: Callable[[bytes], bytes],
    entropy: Entropy,
) -> SealedReport:
    keys = helper_set.sealing_keys(terms.time)
    nonce = entropy(NONCE_SIZE)
    body = prime_field.encode(shared.body)
    commit = [seed_commitment(index, nonce, seed) for index, seed in enumerate(shared.seeds)]
    prefix = Header(
        terms=terms,
        helper_set=helper_set.digest,
        key_ids=(keys[0].key_id, keys[1].key_id, keys[2].key_id),
        nonce=nonce,
        commitments=(commit[0], commit[1], commit[2]),
        body_hash=body_digest(body),
        suite=keys[0].suite,
    ).prefix()
    header = prefix + openings(prefix)
    sealed = [
        keys[party].seal(b"".join(shared.seeds[index] for index in SEEDS_OF[party]), payload_info(party, header))
        for party in range(PARTIES)
    ]
    return SealedReport(header, body, (sealed[0], sealed[1], sealed[2]))


def _hedged(entropy: Entropy, context: bytes) -> validity.Draw:
    """Seeds from new randomness and from what they are for: a random state that was copied does not repeat them."""

    def draw(numbers: bytes) -> validity.Seeds:
        purpose = hashlib.sha256(context + numbers).digest()
        drawn = hashlib.shake_256(entropy(SEED_SIZE) + purpose).digest(PARTIES * SEED_SIZE)
        return drawn[:SEED_SIZE], drawn[SEED_SIZE : 2 * SEED_SIZE], drawn[2 * SEED_SIZE :]

    return draw


def open_payload(party: int, header: bytes, payload: bytes, key: PrivateKey) -> tuple[bytes, bytes]:
    """Run by helper `party`: its two seeds, checked against the commitments in `header`, which was decoded before."""
    return check_seeds(party, header, open_seeds(party, header, payload, key))


def open_seeds(party: int, header: bytes, payload: bytes, key: PrivateKey) -> bytes:
    """What was sealed to helper `party` under exactly this header, not yet compared with its commitments."""
    try:
        return key.open(payload, _PAYLOAD_INFO[party] + header)
    except ProtocolError:
        raise Rejected(Rejection.UNOPENABLE) from None


def check_seeds(party: int, header: bytes, seeds: bytes) -> tuple[bytes, bytes]:
    """The two seeds of helper `party`, if they are those that `header` commits to."""
    if len(seeds) != 2 * SEED_SIZE:
        raise Rejected(Rejection.UNOPENABLE, "a payload is exactly two seeds")
    first, second = seeds[:SEED_SIZE], seeds[SEED_SIZE:]
    nonce = header[NONCE_SPAN]
    first_index, second_index = SEEDS_OF[party]
    if seed_commitment(first_index, nonce, first) != committed(header, first_index):
        raise Rejected(Rejection.WRONG_COMMITMENT, f"seed {first_index + 1}")
    if seed_commitment(second_index, nonce, second) != committed(header, second_index):
        raise Rejected(Rejection.WRONG_COMMITMENT, f"seed {second_index + 1}")
    return first, second


def open_body(header: bytes, body: bytes, length: int) -> Vector:
    """Run by the two helpers that use the body: checked against its hash in `header`, every element below p."""
    if body_digest(body) != header[BODY_HASH_SPAN]:
        raise Rejected(Rejection.WRONG_BODY)
    try:
        return prime_field.decode(body, length)
    except ProtocolError as error:
        raise Rejected(Rejection.WRONG_BODY, str(error)) from None


def open_report(party: int, report: SealedReport, keys: Mapping[bytes, PrivateKey]) -> dict[int, Vector]:
    """Run by helper `party`: all of opening one report, to its two components. Helpers do this in bulk (admission)."""
    header = Header.decode(report.header)
    key = keys.get(header.key_ids[party])
    if key is None:
        raise Rejected(Rejection.UNKNOWN_KEY, header.key_ids[party].hex())
    seeds = open_payload(party, report.header, report.payloads[party], key)
    shape = header.terms.shape
    body = open_body(report.header, report.body, shape.explicit) if BODY_SEED in SEEDS_OF[party] else None
    return {
        index: component(index, seed, shape.expanded, body) for index, seed in zip(SEEDS_OF[party], seeds, strict=True)
    }


def header_digest(header: bytes) -> bytes:
    """The identity of the report with this header."""
    return _hash(_REPORT, header)


def body_digest(body: bytes | memoryview) -> bytes:
    """What the header says of the body."""
    return _hash(_BODY, body)


def seed_commitment(index: int, nonce: bytes, seed: bytes) -> bytes:
    """What the header says of seed `index`. Every part has a fixed size, so no lengths are needed."""
    return _hash(_COMMITMENTS[index], nonce + seed)


def payload_info(party: int, header: bytes) -> bytes:
    """What helper `party`'s payload is bound to: the whole header, and whose payload it is."""
    return _PAYLOAD_INFO[party] + header


def _hash(labelled: hashlib._Hash, data: bytes | memoryview) -> bytes:
    state = labelled.copy()
    state.update(data)
    return state.digest()
