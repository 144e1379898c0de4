"""A query as the querier saves it: the signed query, and the private key that opens its answer.

Saved before the first byte is sent: a querier that is interrupted resumes under the same id. Without this file the
reports would be spent and the answer lost. `ReportSpan` is what public headers say about the cost of the reports to
devices; it is saved too, because the querier's own record (`own_record`) must outlive her batches.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.batch import BatchReader
from protocol.collector.limits import ReportKind
from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import read_private_file, write_private_file
from protocol.header import (
    COMMITMENT_SPANS,
    EPSILON_SPAN,
    FIXED,
    HELPER_SET_SPAN,
    TIME_SPAN,
    TIME_STEP,
    Header,
    decode_header_or_none,
)
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey
from protocol.keys import IdentityKey
from protocol.net.json_message import JsonObject, decode_json
from protocol.noise import NoiseMode
from protocol.query import QUERY_ID_SIZE, Query, SignedQuery, make_permits
from protocol.shares import PARTIES
from protocol.units import DAY, MICROS, charge, validate_terms

_MICRO_DIGITS = 6
_ROWS = 2**15
# The longest lifetime of reports that a helper can be configured with, plus a day of clock skew. Applied to the future
# too, though no helper counts such reports: a span that is too long is safe, and one that is too short is not.
MAX_AGE = 366 * DAY


@dataclass(frozen=True, slots=True)
class ReportSpan:
    """Reports of one site with equal ε, Δ and κ, and the hours of the first and the last of them."""

    site: str
    first: int
    last: int
    epsilon_micros: int
    sensitivity: int
    kappa: int

    def __post_init__(self) -> None:
        validate_terms(self.epsilon_micros, self.sensitivity)

    @property
    def end(self) -> int:
        """Return the latest possible second of the last report: a header has only the hour."""
        return self.last + TIME_STEP - 1

    def most(self, digits: int) -> int:
        """Return the most that one report can charge to one epoch, in micros, as devices compute it.

        A device charges for at most Δ + κ, since Δ covers every report's sensitivity (Theorem 18). It takes the larger
        of the exact ceiling and the standard's arithmetic in doubles; both grow with ε. The header has ε rounded down
        to micros m, so ε < m + 1; it is m itself if ε has at most `digits` decimals and m fits them.
        """
        step = 10 ** max(0, _MICRO_DIGITS - digits)
        exactly = self.epsilon_micros % step == 0 and (self.epsilon_micros + 1) % step
        micros = self.epsilon_micros if exactly else self.epsilon_micros + 1
        moved = self.sensitivity + self.kappa
        scale = self.sensitivity / (micros / MICROS)
        return max(charge(self.epsilon_micros, moved, self.sensitivity), math.ceil(moved / scale * MICROS))

    @classmethod
    def from_json(cls, value: object) -> ReportSpan:
        stored = JsonObject(value, "record of its reports")
        site, *numbers = (each.name for each in fields(cls))
        stored.expect([site, *numbers])
        return cls(stored.text(site), *(stored.whole(name) for name in numbers))


@dataclass(frozen=True, slots=True)
class _HeaderGroup:
    """Some reports of a batch whose headers agree in all that a query fixes, with one of these headers decoded."""

    header: Header
    count: int
    first: int
    last: int


def _header_groups(batch: BatchReader) -> Iterator[_HeaderGroup]:
    """Yield the groups of a batch, block by block. A record whose header does not decode is in none."""
    some = batch.first_header()
    if some is None:
        return
    # The openings, which follow the texts and the cap, differ from report to report.
    rest = slice(FIXED.size, batch.layout.header - len(some.openings))
    alike = (slice(0, HELPER_SET_SPAN.stop), slice(EPSILON_SPAN.start, COMMITMENT_SPANS[0].start), rest)
    for start in range(0, len(batch), _ROWS):
        headers = np.array(batch.records[start : start + _ROWS, : batch.layout.header])
        hours = np.ascontiguousarray(headers[:, TIME_SPAN]).view(">u8").ravel().astype(np.uint64)
        headers = headers[(hours % TIME_STEP == 0) & (hours < 2**63)]
        for places in _equal_rows(np.hstack([headers[:, cut] for cut in alike])):
            decoded = next(filter(None, (decode_header_or_none(headers[place].tobytes()) for place in places)), None)
            if decoded is not None:
                made = np.ascontiguousarray(headers[places, TIME_SPAN]).view(">u8").ravel()
                yield _HeaderGroup(decoded, len(places), int(made.min()), int(made.max()))


def _equal_rows(rows: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.int64]]:
    """Return the places of equal rows. Linear in the rows, however many groups a malicious device makes."""
    if not len(rows):
        return []
    # Nearly always all rows.
    same = (rows == rows[0]).all(axis=1)
    others: dict[bytes, list[int]] = {}
    for place in np.flatnonzero(~same):
        others.setdefault(rows[place].tobytes(), []).append(int(place))
    return [np.flatnonzero(same), *(np.array(places, dtype=np.int64) for places in others.values())]


def spans_of(batch: BatchReader, first: int = 0, last: int = 2**63) -> tuple[ReportSpan, ...]:
    """Return the spans of the reports in a batch that say they were made from `first` to `last`.

    The bounds keep out the hours that no helper counts: one malicious device could stretch a span over millennia.
    """
    spans: dict[tuple[object, ...], ReportSpan] = {}
    for group in _header_groups(batch):
        terms = group.header.terms
        span = ReportSpan(
            terms.site,
            max(group.first, first),
            min(group.last, last),
            terms.epsilon_micros,
            terms.sensitivity,
            terms.kappa,
        )
        if span.first > span.last:
            continue
        key = (span.site, terms.caller, terms.unit, span.epsilon_micros, span.sensitivity, span.kappa)
        other = spans.get(key, span)
        spans[key] = replace(span, first=min(span.first, other.first), last=max(span.last, other.last))
    return tuple(spans.values())


def kind_to_query(batch: BatchReader, name: str = "") -> ReportKind:
    """Return the kind of a batch's reports, or the one called `name`; raise an error if it is not determined.

    Before anything is signed: a query takes ε, Δ, unit and shape from the kind, so that one malicious device's report
    must not choose it. Kinds that differ in the helper set alone are one: the helpers count reports to an earlier set.
    """
    counts: Counter[ReportKind] = Counter()
    for group in _header_groups(batch):
        counts[ReportKind.of(group.header)] += group.count
    if name:
        return _named_kind(batch, counts, name)
    if not counts:
        raise TrefoilError(
            f"{batch.path} holds no reports",
            "Collect some with: trefoil device convert --batch FILE",
            kind=ErrorKind.TOO_FEW,
        )
    if len({replace(kind, helper_set=b"") for kind in counts}) > 1:
        raise TrefoilError(
            f"{batch.path} mixes {len(counts)} kinds of reports, and a query counts one: {_few(counts)}",
            "Choose one with --kind, or split the batch: trefoil batch split --by kind",
            kind=ErrorKind.INCONSISTENT,
        )
    return next(iter(counts))


def _named_kind(batch: BatchReader, counts: Counter[ReportKind], name: str) -> ReportKind:
    for kind in counts:
        if kind.name == name:
            return kind
    message = f"{batch.path} has no reports of kind {name!r}"
    raise TrefoilError(message, f"It has: {_few(counts)}", kind=ErrorKind.UNKNOWN_NAME)


def _few(counts: Counter[ReportKind]) -> str:
    """Return the five most frequent kinds: devices can make reports of any number of them."""
    most = [f"{count:,} of {kind.name} ({kind.describe()})" for kind, count in counts.most_common(5)]
    return "; ".join(most) + ("; …" if len(counts) > len(most) else "")


FORMAT = 2


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """What a querier chooses; the rest of a query follows from the batch.

    `epsilon_micros` defaults to that of the reports. `debug` must be set for debug reports, and for no others, so that
    no answer is without noise by accident. `kind` names the reports to count in a batch of several kinds. `keeps_rest`
    takes of each report what the answer costs; None, which nobody has chosen, uses reports up.
    """

    epsilon_micros: int | None = None
    noise: NoiseMode = NoiseMode.LOCAL
    minimum_reports: int = 1
    tolerated_bad_permille: int = 100
    seconds: int = 600
    debug: bool = False
    kind: str = ""
    keeps_rest: bool | None = None


@dataclass(frozen=True, slots=True)
class SavedQuery:
    """A signed query, the private half of its answer key, its time, the spans of its reports, and upload permits."""

    signed: SignedQuery
    answer_key: PrivateKey = field(repr=False)
    made: int
    spans: tuple[ReportSpan, ...] = ()
    permits: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def query(self) -> Query:
        return self.signed.query

    def save(self, path: Path) -> None:
        """Write a private file. Must happen before the first byte is sent: without the key the answer is lost."""
        stored = {
            "trefoil_query": FORMAT,
            "query": self.signed.encode().hex(),
            "answer_key": self.answer_key.raw.hex(),
            "made": self.made,
            "reports": [asdict(span) for span in self.spans],
            "permits": [permit.hex() for permit in self.permits],
        }
        write_private_file(path, (json.dumps(stored, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> SavedQuery:
        try:
            stored = JsonObject(decode_json(read_private_file(path)), "file")
            if stored.value("trefoil_query") != FORMAT:
                raise ProtocolError(f"it is not of format {FORMAT}")
            signed = SignedQuery.decode(stored.hexadecimal("query"))
            key = PrivateKey(signed.query.suite, stored.hexadecimal("answer_key"))
            made = stored.whole("made")
            spans = tuple(ReportSpan.from_json(span) for span in stored.items("reports"))
            permits = stored.hexadecimals("permits")
            if len(permits) != PARTIES:
                raise ProtocolError(f"it has {len(permits)} permits; there are {PARTIES} helpers")
        except ProtocolError as error:
            message = f"{path} is not a saved query: {error}"
            raise TrefoilError(message, "Move it away to submit a new query.", kind=ErrorKind.FILE_DAMAGED) from None
        if key.public.raw != signed.query.answer_key:
            message = f"{path} is damaged: its key does not belong to its query"
            raise TrefoilError(message, kind=ErrorKind.WRONG_KEY)
        return cls(signed, key, made, spans, permits)


def make_query(
    batch: BatchReader, options: QueryOptions, helper_set: HelperSet, site_key: IdentityKey, now: int
) -> SavedQuery:
    """Return a new signed query on the whole batch, for the kind of its reports or the kind that `options` name.

    Reports of other kinds and records that do not decode stay in the batch: helpers leave each of them out.
    """
    kind = kind_to_query(batch, options.kind)
    terms = kind.terms
    _check_debug(batch, terms.debug, options)
    answer_key = PrivateKey.generate(kind.suite)
    query = Query(
        query_id=os.urandom(QUERY_ID_SIZE),
        site=terms.site,
        caller=terms.caller,
        epsilon_micros=terms.epsilon_micros if options.epsilon_micros is None else options.epsilon_micros,
        sensitivity=terms.sensitivity,
        buckets=terms.buckets,
        kappa=terms.kappa,
        unit=terms.unit,
        helper_set=helper_set.digest,
        batch_root=batch.root(),
        batch_size=len(batch),
        answer_key=answer_key.public.raw,
        noise=options.noise,
        minimum_reports=options.minimum_reports,
        tolerated_bad_permille=options.tolerated_bad_permille,
        deadline=now + options.seconds,
        columns=batch.column_hashes(),
        debug=terms.debug,
        cap=terms.cap,
        spread=terms.spread,
        suite=kind.suite,
        keeps_rest=bool(options.keeps_rest),
    )
    permits = make_permits(query, site_key)
    spans = spans_of(batch, now - MAX_AGE, now + MAX_AGE)
    return SavedQuery(SignedQuery.sign(query, site_key), answer_key, now, spans, permits)


def _check_debug(batch: BatchReader, debug: bool, options: QueryOptions) -> None:
    if debug and not options.debug:
        raise TrefoilError(
            f"{batch.path} holds debug reports, whose answer has no noise and protects no one",
            "Confirm that with --debug, or request reports from devices that are not debug devices.",
            kind=ErrorKind.MISSING_OPTION,
        )
    if options.debug and not debug:
        raise TrefoilError(
            f"{batch.path} holds real reports, which are never answered without noise",
            "Omit --debug.",
            kind=ErrorKind.CONFLICTING_OPTIONS,
        )
