"""A query: what the querier asks of three helpers, in canonical bytes under her signature (SPEC.md §5).

- A *permit* authorises one upload: all three helpers hold the signed query, so each could upload a column to another
  in the querier's place. A permit is for one helper and reaches only that one. Any other upload is refused unread.
- A *withdrawal* revokes a query: anyone who holds a signed query can replay it. Without a withdrawal, a malicious
  helper could let a query fail, wait until its querier has asked another, and then revive the first, so that the
  second finds its reports spent. A helper that has a withdrawal never votes for the query. All three must vote, so
  one honest helper is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from protocol.errors import ErrorKind, Inconsistent, InvalidValue, OutOfRange, ProtocolError
from protocol.header import MAX_SITE_LENGTH, MAX_UNIT_LENGTH, Schema, check_cap, check_site, check_unit, schema_of
from protocol.hpke import CLASSICAL, PublicKey, Suite
from protocol.keys import SIGNATURE_SIZE, IdentityKey, verify_signature
from protocol.noise import NoiseMode, NoiseScale
from protocol.shape import Shape, shape_of
from protocol.shares import PARTIES
from protocol.units import MICROS, validate_terms
from protocol.wire import HASH_SIZE, Reader, Writer, tagged_hash

VERSION = 3
# Still accepted, as a query that uses reports up: what was voted for before an upgrade is released after it, and must
# be found and fetched under the digest that it was signed with.
VERSION_WITHOUT_REST = 2
QUERY_ID_SIZE = 16
MAX_BATCH = 2**32 - 1
# Half of p/2: a bucket's sum stays below it, and the other half is headroom for the noise.
MAX_SUM = 2**59
_SIGNATURE_LABEL = "query"


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked, of which batch, with how much noise, and to which key the answer is sealed.

    `query_id` is the querier's choice, scoped by site and caller: resubmitting it is idempotent.
    `suite` is the one that all reports are sealed in, and the answer too. `columns` are the hashes of what each helper
    is given.
    `debug` asks for an answer without noise, over reports that devices marked as debug and no others.
    `keeps_rest` takes from each report what this answer costs (`units.need`); otherwise the report is used up.
    """

    query_id: bytes
    site: str
    caller: str
    epsilon_micros: int
    sensitivity: int
    buckets: int
    kappa: int
    unit: str
    helper_set: bytes
    batch_root: bytes
    batch_size: int
    answer_key: bytes
    noise: NoiseMode
    minimum_reports: int
    tolerated_bad_permille: int
    deadline: int
    columns: tuple[bytes, bytes, bytes]
    debug: bool = False
    cap: int = 0
    spread: int = 0
    suite: Suite = CLASSICAL
    keeps_rest: bool = False
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_version(self.version)
        if self.keeps_rest and self.version == VERSION_WITHOUT_REST:
            message = f"a query of version {self.version} uses its reports up"
            raise Inconsistent(message)
        check_site(self.site)
        check_site(self.caller)
        check_unit(self.unit)
        validate_terms(self.epsilon_micros, self.sensitivity)
        digests = (self.helper_set, self.batch_root, *self.columns)
        if len(self.query_id) != QUERY_ID_SIZE or any(len(digest) != HASH_SIZE for digest in digests):
            raise InvalidValue("a query id has 16 bytes, and a digest has 32")
        if len(self.columns) != PARTIES:
            raise InvalidValue("a query has one column for each helper")
        self.answer_public_key.check_usable()
        check_cap(self.shape, self.sensitivity)
        if not (0 < self.batch_size <= MAX_BATCH):
            raise ProtocolError(
                "a batch holds at least one report",
                "Collect reports first; the batch is empty.",
                kind=ErrorKind.TOO_FEW,
            )
        self._check_sums()
        if not (0 < self.minimum_reports <= self.batch_size):
            raise ProtocolError(
                f"the minimum of {self.minimum_reports} reports cannot be met by a batch of {self.batch_size}",
                "Wait for more reports, or ask for a smaller minimum.",
                kind=ErrorKind.TOO_FEW,
            )
        if not (0 <= self.tolerated_bad_permille <= 1000):
            raise OutOfRange("the tolerated share of rejected reports is 0 to 1000 per mille")
        if not (0 < self.deadline < 2**63):
            raise OutOfRange("the deadline is a time in seconds since 1970")

    def _check_sums(self) -> None:
        """Reject sums that could pass p/2 and come out negative. Without a cap, Δ bounds an honest report."""
        largest = max(self.cap or self.sensitivity, self.kappa)
        if self.batch_size * largest >= MAX_SUM:
            raise ProtocolError(
                f"{self.batch_size} reports of up to {largest} each could sum to 2^59 or more, which would wrap",
                "Ask in a coarser unit, or about fewer reports.",
                kind=ErrorKind.TOO_LARGE,
            )

    @property
    def gamma(self) -> Fraction:
        """Return γ = ε/Δ = 1/b exactly: the rate of the discrete Laplace noise, as the samplers take it."""
        return Fraction(self.epsilon_micros, MICROS * self.sensitivity)

    @property
    def noise_scale(self) -> NoiseScale:
        """Return the noise of the answer. A debug query has none."""
        return NoiseScale(self.noise, self.gamma, self.sensitivity + self.kappa)

    @property
    def length(self) -> int:
        return self.shape.length

    @property
    def shape(self) -> Shape:
        """Return which numbers every report shares, and which of them helpers check."""
        return shape_of(self.buckets, self.kappa, self.cap, self.spread)

    @property
    def digest(self) -> bytes:
        """Return the hash by which every message names this query."""
        return tagged_hash("query", self.encode())

    @property
    def short_name(self) -> str:
        """Return enough of the digest to identify the query in a log, too little to fetch its answer."""
        return self.digest.hex()[:16]

    @property
    def answer_public_key(self) -> PublicKey:
        return PublicKey(self.suite, self.answer_key)

    def encode(self) -> bytes:
        writer = (
            Writer()
            .uint(self.version, 2)
            .fixed(self.query_id, QUERY_ID_SIZE)
            .text(self.site)
            .text(self.caller)
            .uint(self.epsilon_micros, 4)
            .uint(self.sensitivity, 8)
            .uint(self.buckets, 4)
            .uint(self.kappa, 8)
            .uint(schema_of(self.shape).value, 2)
            .uint(self.cap, 8)
            .uint(self.spread, 2)
            .text(self.unit)
            .fixed(self.helper_set, HASH_SIZE)
            .fixed(self.batch_root, HASH_SIZE)
            .uint(self.batch_size, 4)
            .fixed(b"".join(self.columns), PARTIES * HASH_SIZE)
            .uint(self.suite.value, 2)
            .fixed(self.answer_key, self.suite.public_size)
            .uint(self.noise.facts.code, 1)
            .uint(self.minimum_reports, 4)
            .uint(self.tolerated_bad_permille, 2)
            .uint(self.deadline, 8)
            .uint(int(self.debug), 1)
        )
        if self.version >= VERSION:
            writer.uint(int(self.keeps_rest), 1)
        return writer.done()

    @classmethod
    def decode(cls, data: bytes) -> Query:
        reader = Reader(data)
        version = reader.uint(2)
        # Now, not with the other fields: another version has other fields.
        _check_version(version)
        query = cls(
            version=version,
            query_id=reader.fixed(QUERY_ID_SIZE),
            site=reader.text(limit=MAX_SITE_LENGTH),
            caller=reader.text(limit=MAX_SITE_LENGTH),
            epsilon_micros=reader.uint(4),
            sensitivity=reader.uint(8),
            buckets=reader.uint(4),
            kappa=reader.uint(8),
            cap=_read_cap(reader),
            spread=reader.uint(2),
            unit=reader.text(limit=MAX_UNIT_LENGTH),
            helper_set=reader.fixed(HASH_SIZE),
            batch_root=reader.fixed(HASH_SIZE),
            batch_size=reader.uint(4),
            columns=(reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE), reader.fixed(HASH_SIZE)),
            suite=(suite := _read_suite(reader)),
            answer_key=reader.fixed(suite.public_size),
            noise=decode_noise_mode(reader.uint(1)),
            minimum_reports=reader.uint(4),
            tolerated_bad_permille=reader.uint(2),
            deadline=reader.uint(8),
            debug=_boolean(reader.uint(1)),
            keeps_rest=version >= VERSION and _boolean(reader.uint(1)),
        )
        reader.finish()
        return query


@dataclass(frozen=True, slots=True)
class SignedQuery:
    """A query under the signature of the site's key, which authenticates the querier."""

    query: Query
    signature: bytes

    @classmethod
    def sign(cls, query: Query, key: IdentityKey) -> SignedQuery:
        return cls(query, key.sign(_SIGNATURE_LABEL, query.encode()))

    def verify(self, site_key: bytes) -> None:
        """Run by a helper: reject a signature by any key but the one it has configured for the query's site."""
        if not verify_signature(site_key, _SIGNATURE_LABEL, self.query.encode(), self.signature):
            raise ProtocolError(
                f"the query is not signed by the key registered for {self.query.site}",
                "Sign with that site's key, or ask the helpers to register yours.",
                kind=ErrorKind.BAD_SIGNATURE,
            )

    def encode(self) -> bytes:
        return Writer().blob(self.query.encode()).fixed(self.signature, SIGNATURE_SIZE).done()

    @classmethod
    def decode(cls, data: bytes) -> SignedQuery:
        """Parse a signed query; `verify` checks the signature."""
        reader = Reader(data)
        query = Query.decode(reader.blob(limit=4096))
        signature = reader.fixed(SIGNATURE_SIZE)
        reader.finish()
        return cls(query, signature)


def _check_version(version: int) -> None:
    if version not in (VERSION_WITHOUT_REST, VERSION):
        raise ProtocolError(
            f"unknown query version {version}; this is version {VERSION}", kind=ErrorKind.UNKNOWN_VERSION
        )


def decode_noise_mode(code: int) -> NoiseMode:
    for mode in NoiseMode:
        if mode.facts.code == code:
            return mode
    raise ProtocolError(f"unknown noise mode {code}", kind=ErrorKind.UNKNOWN_NAME)


def _read_cap(reader: Reader) -> int:
    """Parse schema and cap, which must agree, so that a query has one encoding."""
    schema, cap = reader.uint(2), reader.uint(8)
    if schema not in {each.value for each in Schema}:
        raise ProtocolError(f"unknown schema {schema}", kind=ErrorKind.UNKNOWN_NAME)
    if (schema == Schema.CHECKED_HISTOGRAM.value) != (cap > 0):
        raise Inconsistent(f"schema {schema} does not go with a cap of {cap}")
    return cap


def _read_suite(reader: Reader) -> Suite:
    code = reader.uint(2)
    if code not in {each.value for each in Suite}:
        raise ProtocolError(f"unknown cipher suite {code}", kind=ErrorKind.UNKNOWN_NAME)
    return Suite(code)


def _boolean(code: int) -> bool:
    if code not in (0, 1):
        raise OutOfRange(f"{code} is neither 0 nor 1")
    return code == 1


PERMIT_HEADER = "Trefoil-Permit"
_PERMIT_LABEL = "column upload"


def make_permits(query: Query, key: IdentityKey) -> tuple[bytes, ...]:
    """Run by the querier: return one permit for each helper, in order."""
    return tuple(key.sign(_PERMIT_LABEL, _signed_bytes(query, party)) for party in range(PARTIES))


def check_permit(query: Query, party: int, permit: bytes, site_key: bytes) -> None:
    """Run by helper `party`: reject a permit not signed for it by the key it has configured for the query's site."""
    if not verify_signature(site_key, _PERMIT_LABEL, _signed_bytes(query, party), permit):
        raise ProtocolError(
            f"the upload comes without the permit of {query.site} for this helper",
            "Upload with the saved query that was signed, or ask a new one with --new.",
            kind=ErrorKind.BAD_SIGNATURE,
        )


def _signed_bytes(query: Query, party: int) -> bytes:
    return query.digest + Writer().uint(party, 1).done()


MAX_SIGNED_QUERY = 8192
MAX_WITHDRAWAL = MAX_SIGNED_QUERY + 4 + SIGNATURE_SIZE
_WITHDRAWAL_LABEL = "query withdrawal"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A revocation. It contains the signed query, so that even a helper that never saw that query rejects it later."""

    signed: SignedQuery
    signature: bytes

    @classmethod
    def sign(cls, signed: SignedQuery, key: IdentityKey) -> Withdrawal:
        return cls(signed, key.sign(_WITHDRAWAL_LABEL, signed.query.digest))

    def verify(self, site_key: bytes) -> None:
        """Run by a helper: reject a signature by any key but the one it has configured for the query's site."""
        if not verify_signature(site_key, _WITHDRAWAL_LABEL, self.signed.query.digest, self.signature):
            raise ProtocolError(
                f"the withdrawal is not signed by the key registered for {self.signed.query.site}",
                "Sign with the key that signed the query.",
                kind=ErrorKind.BAD_SIGNATURE,
            )

    def encode(self) -> bytes:
        return Writer().blob(self.signed.encode()).fixed(self.signature, SIGNATURE_SIZE).done()

    @classmethod
    def decode(cls, data: bytes) -> Withdrawal:
        """Parse a withdrawal; `verify` checks the signature."""
        reader = Reader(data)
        signed = SignedQuery.decode(reader.blob(limit=MAX_SIGNED_QUERY))
        signature = reader.fixed(SIGNATURE_SIZE)
        reader.finish()
        return cls(signed, signature)
