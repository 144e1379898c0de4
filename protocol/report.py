"""The report: a public header, one masked body and three small sealed payloads (SPEC.md §3).

A report *is* the digest of its header. The header is the HPKE `info` of every payload, so that a changed ε, nonce or
site makes all three fail to open; it holds commitments to the seeds and the hash of the body, so that no two helpers
can ever hold different shares of the same report.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol import field as prime_field
from protocol import validity
from protocol.errors import ErrorKind, Inconsistent, ProtocolError, Rejected, Rejection
from protocol.field import ELEMENT_SIZE, SEED_SIZE, Vector
from protocol.header import BODY_HASH_SPAN, COMMITMENT_SPANS, NONCE_SIZE, NONCE_SPAN, Header, ReportTerms
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey, PublicKey, Suite
from protocol.shares import BODY_SEED, PARTIES, SEEDS_OF, Entropy, SharedVector, component, share
from protocol.wire import Reader, Writer

_COMMITMENTS = tuple(b"trefoil/1 seed commitment\0" + bytes([index]) for index in range(PARTIES))
_BODY = hashlib.sha256(b"trefoil/1 body\0")
_REPORT = hashlib.sha256(b"trefoil/1 report\0")
_PAYLOAD_INFO = tuple(b"trefoil/1 payload for helper " + bytes([party + 1]) for party in range(PARTIES))


def payload_size(suite: Suite) -> int:
    """Return the size of a sealed payload: two seeds, and what sealing adds."""
    return 2 * SEED_SIZE + suite.overhead


@dataclass(frozen=True, slots=True)
class SealedReport:
    """What leaves the device. Nobody can read it, and real and null reports look the same.

    >>> batch.add(device.measure_conversion("shop.example", purchase))  # doctest: +SKIP
    """

    header: bytes
    body: bytes = field(repr=False)
    payloads: tuple[bytes, bytes, bytes] = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Return the report's identity, the key of ledgers and batches."""
        return header_digest(self.header)

    def terms(self) -> ReportTerms:
        return Header.decode(self.header).terms

    def encode(self) -> bytes:
        writer = Writer().blob(self.header, 2).blob(self.body, 4)
        for payload in self.payloads:
            writer.blob(payload, 2)
        return writer.done()

    @classmethod
    def decode(cls, data: bytes) -> SealedReport:
        """Parse a report, or raise `Rejected`. Shape, sizes and header are checked; only helpers can open it."""
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
    Seeds are drawn and discarded here: a checked report sealed twice with the same seeds would reveal its content.
    """
    return _share(histogram, terms, helper_set, entropy).seal()


def seal_reports(histograms: Iterable[Sequence[int]], terms: ReportTerms, helper_set: HelperSet) -> list[SealedReport]:
    """Run by a simulation: `seal_report` of a crowd of devices, the payloads for each helper in one batch."""
    shared = [_share(histogram, terms, helper_set, os.urandom) for histogram in histograms]
    keys = helper_set.sealing_keys(terms.time)
    columns = [
        keys[party].seal_many([each.seeds_of(party) for each in shared], [each.info_of(party) for each in shared])
        for party in range(PARTIES)
    ]
    payloads = zip(*columns, strict=True)
    return [SealedReport(each.header, each.body, sealed) for each, sealed in zip(shared, payloads, strict=True)]


@dataclass(frozen=True, slots=True)
class _SharedReport:
    """A report with its header and body, of which the seeds are not sealed yet."""

    header: bytes
    body: bytes = field(repr=False)
    seeds: Sequence[bytes] = field(repr=False)
    keys: Sequence[PublicKey]

    def seeds_of(self, party: int) -> bytes:
        """Return the plaintext of a helper's payload."""
        return b"".join(self.seeds[index] for index in SEEDS_OF[party])

    def info_of(self, party: int) -> bytes:
        return payload_info(party, self.header)

    def seal(self) -> SealedReport:
        first, second, third = (
            self.keys[party].seal(self.seeds_of(party), self.info_of(party)) for party in range(PARTIES)
        )
        return SealedReport(self.header, self.body, (first, second, third))


def _share(histogram: Sequence[int], terms: ReportTerms, helper_set: HelperSet, entropy: Entropy) -> _SharedReport:
    if len(histogram) != terms.length:
        raise Inconsistent(f"the terms promise {terms.length} numbers, not {len(histogram)}")
    if not terms.shape.checked:
        return _commit(share(histogram, entropy=entropy), terms, helper_set, lambda _: b"", entropy)
    draw = _hedged(entropy, helper_set.digest + f"{terms.site} {terms.caller} {terms.time}".encode())
    dealt = validity.deal(histogram, terms.shape, draw)
    return _commit(dealt.shared, terms, helper_set, _openings(dealt, terms, _open_checked), entropy)


def seal_deal(
    dealt: validity.Deal,
    terms: ReportTerms,
    helper_set: HelperSet,
    *,
    opening: Callable[[validity.Deal, Sequence[int]], list[int]] = validity.open_at,
    entropy: Entropy = os.urandom,
) -> SealedReport:
    """Seal a checked report: points from the prefix, openings there, payloads. Devices call `seal_report`.

    Nothing is verified, so that tests can act as a malicious device: helpers verify.
    """
    return _commit(dealt.shared, terms, helper_set, _openings(dealt, terms, opening), entropy).seal()


def _openings(
    dealt: validity.Deal, terms: ReportTerms, opening: Callable[[validity.Deal, Sequence[int]], list[int]]
) -> Callable[[bytes], bytes]:
    """Return the function from a header's prefix, which decides the points, to the encoded openings there."""

    def openings(prefix: bytes) -> bytes:
        opened = opening(dealt, validity.points_of(prefix, terms.shape.points))
        return struct.pack(f"<{len(opened)}Q", *opened)

    return openings


def _open_checked(dealt: validity.Deal, points: Sequence[int]) -> list[int]:
    """Return the openings, after the device's own verification."""
    opened = validity.open_at(dealt, points)
    if not validity.holds(dealt, points, opened):
        raise ProtocolError(
            "the report's proof does not hold", "This is a defect of the device.", kind=ErrorKind.BAD_PROOF
        )
    return opened


def _commit(
    shared: SharedVector,
    terms: ReportTerms,
    helper_set: HelperSet,
    openings: Callable[[bytes], bytes],
    entropy: Entropy,
) -> _SharedReport:
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
    return _SharedReport(prefix + openings(prefix), body, shared.seeds, keys)


def _hedged(entropy: Entropy, context: bytes) -> validity.Draw:
    """Hedge fresh randomness with the context, so that a cloned random state does not repeat seeds."""

    def draw(numbers: bytes) -> validity.Seeds:
        purpose = hashlib.sha256(context + numbers).digest()
        drawn = hashlib.shake_256(entropy(SEED_SIZE) + purpose).digest(PARTIES * SEED_SIZE)
        return drawn[:SEED_SIZE], drawn[SEED_SIZE : 2 * SEED_SIZE], drawn[2 * SEED_SIZE :]

    return draw


def open_payload(party: int, header: bytes, payload: bytes, key: PrivateKey) -> tuple[bytes, bytes]:
    """Run by helper `party`: return its two seeds, verified against the commitments in a `header` that was decoded."""
    try:
        seeds = key.open(payload, payload_info(party, header))
    except ProtocolError:
        raise Rejected(Rejection.UNOPENABLE) from None
    if len(seeds) != 2 * SEED_SIZE:
        raise Rejected(Rejection.UNOPENABLE, "a payload is exactly two seeds")
    if not all(are_committed(party, [header], [seeds])):
        raise Rejected(Rejection.WRONG_COMMITMENT)
    return seeds[:SEED_SIZE], seeds[SEED_SIZE:]


def open_many_seeds(
    party: int, headers: Sequence[bytes], payloads: Sequence[bytes], key: PrivateKey
) -> list[bytes | None]:
    """Return what was sealed to helper `party` under each header, not yet verified; None where it does not open."""
    return key.open_many(payloads, [payload_info(party, header) for header in headers])


def are_committed(party: int, headers: Sequence[bytes], seeds: Sequence[bytes]) -> list[bool]:
    """Return for each report whether helper `party`'s two seeds are those that its header commits to."""
    (first, own), (second, other) = ((_COMMITMENTS[index], COMMITMENT_SPANS[index]) for index in SEEDS_OF[party])
    hashed, nonce = hashlib.sha256, NONCE_SPAN
    return [
        hashed(first + header[nonce] + pair[:SEED_SIZE]).digest() == header[own]
        and hashed(second + header[nonce] + pair[SEED_SIZE:]).digest() == header[other]
        for header, pair in zip(headers, seeds, strict=True)
    ]


def open_body(header: bytes, body: bytes, length: int) -> Vector:
    """Run by the two helpers that use the body: return it, verified against its hash, every element below p."""
    if body_digest(body) != header[BODY_HASH_SPAN]:
        raise Rejected(Rejection.WRONG_BODY)
    try:
        return prime_field.decode(body, length)
    except ProtocolError as error:
        raise Rejected(Rejection.WRONG_BODY, str(error)) from None


def open_report(party: int, report: SealedReport, keys: Mapping[bytes, PrivateKey]) -> dict[int, Vector]:
    """Run by helper `party`: open one report to its two components. `mpc_helpers.admission` does this in bulk."""
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
    return _hash(_REPORT, header)


def body_digest(body: bytes | memoryview) -> bytes:
    return _hash(_BODY, body)


def seed_commitment(index: int, nonce: bytes, seed: bytes) -> bytes:
    """Return the commitment to seed `index`. Every part has a fixed size, so no lengths are needed."""
    return hashlib.sha256(_COMMITMENTS[index] + nonce + seed).digest()


def payload_info(party: int, header: bytes) -> bytes:
    """Return the HPKE `info` of helper `party`'s payload: the recipient, and the whole header."""
    return _PAYLOAD_INFO[party] + header


def _hash(labelled: hashlib._Hash, data: bytes | memoryview) -> bytes:
    state = labelled.copy()
    state.update(data)
    return state.digest()
