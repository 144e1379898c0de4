"""A query as its querier keeps it: what was asked, its signature, and the key that opens the answer.

Whoever is interrupted asks again under the same id and gets the same bytes; without this file the reports would be
spent and the answer lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.batch import BatchReader
from protocol.errors import ProtocolError, TrefoilError
from protocol.files import read_private_file, write_private_file
from protocol.header import Header
from protocol.helper_set import HelperSet
from protocol.hpke import PrivateKey, PublicKey
from protocol.json_message import JsonObject, decode_json
from protocol.keys import IdentityKey
from protocol.permit import make_permits
from protocol.querier.report_span import ReportSpan, spans_of
from protocol.query import QUERY_ID_SIZE, NoiseMode, Query, SignedQuery
from protocol.shares import PARTIES

FORMAT = 2
# Of queries that were saved before; their answers can be fetched all the same.
FORMAT_WITHOUT_SPANS = 1


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """What a querier chooses; the rest of a query follows from the batch. None: what the first report paid for.

    An answer without noise is never given by accident: debug reports need `debug`, and real ones refuse it.
    """

    epsilon_micros: int | None = None
    noise: NoiseMode = NoiseMode.LOCAL
    minimum_reports: int = 1
    tolerated_bad_permille: int = 100
    seconds: int = 600
    debug: bool = False


@dataclass(frozen=True, slots=True)
class SavedQuery:
    """A signed query, the private half of its answer key, when it was made, what its reports could cost, and permits.

    Without permits (a file of an older release) what was uploaded is answered, and nothing more can be uploaded.
    """

    signed: SignedQuery
    answer_key: PrivateKey = field(repr=False)
    made: int
    # For her own record (`own_record`), which may be read when the batch is gone.
    spans: tuple[ReportSpan, ...] = ()
    permits: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def query(self) -> Query:
        """What is asked."""
        return self.signed.query

    def save(self, path: Path) -> None:
        """Before the first byte leaves: an answer whose key is lost is lost."""
        stored = {
            "trefoil_query": FORMAT,
            "query": self.signed.encode().hex(),
            "answer_key": self.answer_key.raw.hex(),
            "made": self.made,
            "reports": [span.to_json() for span in self.spans],
            "permits": [permit.hex() for permit in self.permits],
        }
        write_private_file(path, (json.dumps(stored, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> SavedQuery:
        """The query in `path`, or an error saying what is wrong with the file."""
        try:
            stored = JsonObject(decode_json(read_private_file(path)), "file")
            if stored.value("trefoil_query") not in (FORMAT_WITHOUT_SPANS, FORMAT):
                raise ProtocolError(f"it is not of format {FORMAT}")
            signed = SignedQuery.decode(stored.hexadecimal("query"))
            key = PrivateKey.from_raw(signed.query.suite, stored.hexadecimal("answer_key"))
            made = stored.whole("made")
            known = stored.items("reports") if stored.value("trefoil_query") == FORMAT else []
            spans = tuple(ReportSpan.from_json(span) for span in known)
            permits = stored.hexadecimals("permits") if "permits" in stored.fields() else ()
            if len(permits) not in (0, PARTIES):
                raise ProtocolError(f"it has {len(permits)} permits; there are {PARTIES} helpers")
        except ProtocolError as error:
            raise TrefoilError(f"{path} is not a saved query: {error}", "Move it away to ask a new query.") from None
        if key.public.raw != signed.query.answer_key:
            raise TrefoilError(f"{path} is damaged: its key does not belong to its query")
        return cls(signed, key, made, spans, permits)


def make_query(
    batch: BatchReader,
    options: QueryOptions,
    helper_set: HelperSet,
    site_key: IdentityKey,
    now: int,
    *,
    entropy: Callable[[int], bytes] = os.urandom,
) -> SavedQuery:
    """Run by the querier: a new query on the whole batch, for the site, caller and shape its first report names."""
    if not len(batch):
        raise TrefoilError(f"{batch.path} holds no reports", "Collect some with: trefoil device convert --batch FILE")
    first = Header.decode(batch[0].header)
    _check_debug(batch, first, options)
    answer_key = PrivateKey.generate(first.suite)
    query = _fill(batch, first, options, now, helper_set, entropy(QUERY_ID_SIZE), answer_key.public)
    permits = make_permits(query, site_key)
    return SavedQuery(SignedQuery.sign(query, site_key), answer_key, now, spans_of(batch), permits)


def _check_debug(batch: BatchReader, first: Header, options: QueryOptions) -> None:
    if first.terms.debug and not options.debug:
        raise TrefoilError(
            f"{batch.path} holds debug reports, whose answer has no noise and protects nobody",
            "Ask for that with --debug, or make real reports: a device that is not a debug device.",
        )
    if options.debug and not first.terms.debug:
        raise TrefoilError(
            f"{batch.path} holds real reports: they are never answered without noise", "Leave --debug out."
        )


def _fill(
    batch: BatchReader,
    first: Header,
    options: QueryOptions,
    now: int,
    helper_set: HelperSet,
    query_id: bytes,
    answer_key: PublicKey,
) -> Query:
    terms = first.terms
    return Query(
        query_id=query_id,
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
        answer_key=answer_key.raw,
        noise=options.noise,
        minimum_reports=options.minimum_reports,
        tolerated_bad_permille=options.tolerated_bad_permille,
        deadline=now + options.seconds,
        columns=batch.column_hashes(),
        debug=terms.debug,
        cap=terms.cap,
        spread=terms.spread,
        suite=first.suite,
    )
