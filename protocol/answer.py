"""The answer: a sealed share from each helper, which only the querier can open and combine (SPEC.md §5).

The querier accepts an answer only if the shares agree on everything but the numbers, and the numbers lie on a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol import field as prime_field
from protocol.errors import ErrorKind, Inconsistent, InvalidValue, ProtocolError, Rejection
from protocol.field import ELEMENT_SIZE, Vector
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.left_out import LONGEST_RUN, MAX_LIST, Codes, counts_of, decode_left_out, digest_of
from protocol.noise import NoiseMode
from protocol.query import VERSION, VERSION_WITHOUT_REST, Query, decode_noise_mode
from protocol.shape import MAX_BUCKETS
from protocol.shares import PARTIES, open_shamir
from protocol.units import validate_terms
from protocol.wire import HASH_SIZE, Reader, Writer

_SIGNATURE_LABEL = "answer share"
_REASONS = Rejection.by_number()
# The shares of a query of version 2 have the counts of its time.
_REASONS_OF = {VERSION: _REASONS, VERSION_WITHOUT_REST: _REASONS[: Rejection.TOO_LITTLE_LEFT.number]}

RejectionCounts = Mapping[Rejection, int]


@dataclass(frozen=True, slots=True)
class AnswerShare:
    """One helper's share of the answer. All fields but `vector` and `left_out` must be equal in the three shares.

    `proposed` are the digests of the three helpers' bitmaps of accepted reports; `left_out` is this helper's own list.
    """

    query_digest: bytes
    attempt_number: int
    attempt_id: bytes
    submitted: int
    counted: int
    rejections: tuple[RejectionCounts, RejectionCounts, RejectionCounts]
    noise: NoiseMode
    epsilon_micros: int
    sensitivity: int
    proposed: tuple[bytes, bytes, bytes]
    left_out: bytes = field(repr=False, compare=False)
    vector: Vector = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(len(digest) != HASH_SIZE for digest in (self.query_digest, self.attempt_id, *self.proposed)):
            raise InvalidValue("a digest has 32 bytes")
        if not (0 <= self.counted <= self.submitted):
            raise Inconsistent(f"{self.counted} reports counted of {self.submitted}")
        validate_terms(self.epsilon_micros, self.sensitivity)

    def encode(self, version: int = VERSION) -> bytes:
        """Return the plaintext of a sealed answer share to a query of this version."""
        writer = Writer().fixed(self.query_digest, HASH_SIZE).uint(self.attempt_number, 8)
        writer.fixed(self.attempt_id, HASH_SIZE).uint(self.submitted, 4).uint(self.counted, 4)
        for counts in self.rejections:
            for reason in _REASONS_OF[version]:
                writer.uint(counts.get(reason, 0), 4)
        writer.uint(self.noise.facts.code, 1).uint(self.epsilon_micros, 4).uint(self.sensitivity, 8)
        for digest in self.proposed:
            writer.fixed(digest, HASH_SIZE)
        return writer.blob(self.left_out).blob(prime_field.encode(self.vector)).done()

    @classmethod
    def decode(cls, data: bytes, version: int = VERSION) -> AnswerShare:
        reader = Reader(data)
        digest, attempt = reader.fixed(HASH_SIZE), reader.uint(8)
        attempt_id, submitted, counted = reader.fixed(HASH_SIZE), reader.uint(4), reader.uint(4)
        first, second, third = (_read_counts(reader, version) for _ in range(PARTIES))
        noise, epsilon, sensitivity = decode_noise_mode(reader.uint(1)), reader.uint(4), reader.uint(8)
        proposed = (reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE))
        left_out = reader.blob(limit=MAX_LIST)
        numbers = reader.blob(limit=ELEMENT_SIZE * (MAX_BUCKETS + 1))
        reader.finish()
        vector = prime_field.decode(numbers, len(numbers) // ELEMENT_SIZE)
        counts = (first, second, third)
        terms = (noise, epsilon, sensitivity)
        return cls(digest, attempt, attempt_id, submitted, counted, counts, *terms, proposed, left_out, vector)

    def seal(self, party: int, query: Query, identity: IdentityKey) -> bytes:
        """Run by helper `party`: seal to the querier, bound to the query, and sign as this helper."""
        sealed = query.answer_public_key.seal(self.encode(query.version), _info(party, query))
        signature = identity.sign(_SIGNATURE_LABEL, _info(party, query) + sealed)
        return Writer().uint(party, 1).fixed(signature, SIGNATURE_SIZE).blob(sealed).done()

    @classmethod
    def open(cls, party: int, data: bytes, query: Query, key: PrivateKey, helper_set: HelperSet) -> AnswerShare:
        """Run by the querier: return the share of helper `party`, if that helper signed it for this query."""
        helper = helper_set.helpers[party]
        reader = Reader(data)
        sender, signature, sealed = reader.uint(1), reader.fixed(SIGNATURE_SIZE), reader.blob()
        reader.finish()
        signed = verify_signature(helper.identity_key, _SIGNATURE_LABEL, _info(party, query) + sealed, signature)
        if sender != party or not signed:
            raise ProtocolError(
                f"the answer share of helper {helper.name} is not signed by it for this query",
                kind=ErrorKind.BAD_SIGNATURE,
            )
        share = cls.decode(key.open(sealed, _info(party, query)), query.version)
        if share.query_digest != query.digest or share.vector.size != query.length:
            raise Inconsistent(f"the answer share of helper {helper.name} is for another query")
        return share


@dataclass(frozen=True, slots=True)
class Answer:
    """What the querier learns: one noisy histogram, how many reports are in it, and why others are not.

    `attempts` is the number of the attempt that was released: those before it were aborted. `left_out` has the
    codes of each helper (`protocol.left_out`) in the batch's order by digest.
    """

    histogram: list[int]
    side_count: int | None
    submitted: int
    counted: int
    rejections: tuple[RejectionCounts, RejectionCounts, RejectionCounts]
    noise: NoiseMode
    epsilon_micros: int
    sensitivity: int
    attempts: int
    attempt_id: bytes
    left_out: tuple[Codes, Codes, Codes] = field(repr=False, compare=False)


def combine(query: Query, shares: Sequence[AnswerShare]) -> Answer:
    """Run by the querier: combine three shares that agree on everything and whose numbers lie on a line."""
    if len(shares) != PARTIES:
        raise ProtocolError("an answer needs the shares of all three helpers", kind=ErrorKind.TOO_FEW)
    first = shares[0]
    if any(share != first for share in shares[1:]):
        raise Inconsistent(
            "the helpers disagree about what they counted or how much noise they added",
            "Do not use this answer. Ask the three operators to compare their logs for this query.",
        )
    expected = (query.noise, query.epsilon_micros, query.sensitivity, query.batch_size)
    if (first.noise, first.epsilon_micros, first.sensitivity, first.submitted) != expected:
        raise ProtocolError(
            "the helpers answered with other noise or another batch than was asked for", kind=ErrorKind.REFUSED
        )
    left_out = _left_out(shares)
    numbers = open_shamir([share.vector for share in shares])
    side_count = numbers.pop() if query.kappa else None
    return Answer(
        histogram=numbers,
        side_count=side_count,
        submitted=first.submitted,
        counted=first.counted,
        rejections=first.rejections,
        noise=first.noise,
        epsilon_micros=first.epsilon_micros,
        sensitivity=first.sensitivity,
        attempts=first.attempt_number,
        attempt_id=first.attempt_id,
        left_out=left_out,
    )


def _left_out(shares: Sequence[AnswerShare]) -> tuple[Codes, Codes, Codes]:
    """Return the three lists, if each matches the counts and digests that all three agreed on."""
    first, second, third = (_checked_list(party, share) for party, share in enumerate(shares))
    return first, second, third


def _checked_list(party: int, share: AnswerShare) -> Codes:
    codes = decode_left_out(share.left_out, share.submitted)
    counts, stated = counts_of(codes), share.rejections[party]
    if counts == stated:
        fits = digest_of(codes) == share.proposed[party]
    else:
        # A list truncated for its length holds fewer reports than the counts, and is nearly as long as a list may be.
        cut = len(share.left_out) > MAX_LIST - LONGEST_RUN
        fits = cut and all(count <= stated.get(reason, 0) for reason, count in counts.items())
    if not fits:
        raise Inconsistent(
            f"helper {party + 1} lists other reports as left out than it did when the three agreed",
            "Do not use this answer. Ask the operator of that helper.",
        )
    return codes


def _info(party: int, query: Query) -> bytes:
    return Writer().text("trefoil/1 answer share").uint(party, 1).fixed(query.digest, HASH_SIZE).done()


def _read_counts(reader: Reader, version: int) -> RejectionCounts:
    counts = {reason: reader.uint(4) for reason in _REASONS_OF[version]}
    return {reason: count for reason, count in counts.items() if count}
