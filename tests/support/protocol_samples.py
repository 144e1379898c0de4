"""Builders the protocol's tests share: three helpers with fixed keys, honest and forged reports, queries, columns.

Everything is deterministic but the HPKE seals, whose ephemeral keys the library draws itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpc_helpers.admission.executors import ReportExecutor
from mpc_helpers.admission.headers import AdmissionRules
from mpc_helpers.admission.ingest import AdmittedColumn, ingest
from mpc_helpers.identity.membership import Membership
from protocol import field
from protocol.batch import BatchReader, BatchWriter, ColumnReader, batch_root, sorted_order
from protocol.header import NONCE_SIZE, Header, ReportTerms
from protocol.helper_set import HelperEntry, HelperSet, HpkeKeyConfig
from protocol.hpke import CLASSICAL, PrivateKey
from protocol.keys import IdentityKey
from protocol.noise import NoiseMode
from protocol.query import Query
from protocol.report import SealedReport, body_digest, payload_info, seal_report, seed_commitment
from protocol.shares import PARTIES, SEEDS_OF, open_shamir, share

HOUR = 3600
DAY = 24 * HOUR
NOW = 1_900_000_800  # a whole hour in March 2030
SET_START, SET_END = NOW - 30 * DAY, NOW + 30 * DAY
OLD_END = NOW - 10 * DAY


def entropy(label: str) -> Callable[[int], bytes]:
    """A stream that is the same for the same label on every machine, in place of the operating system's."""
    stream, position = hashlib.shake_256(f"trefoil test vectors: {label}".encode()), 0

    def draw(size: int) -> bytes:
        nonlocal position
        position += size
        return stream.digest(position)[position - size :]

    return draw


def hpke_key(label: str) -> PrivateKey:
    return PrivateKey(CLASSICAL, entropy(f"hpke {label}")(32))


def identity(label: str) -> IdentityKey:
    return IdentityKey.from_raw(entropy(f"identity {label}")(32))


HELPER_NAMES = ("Alder", "Birch", "Cedar")
IDENTITIES = tuple(identity(name) for name in HELPER_NAMES)
KEYS = tuple(hpke_key(name) for name in HELPER_NAMES)
OLD_KEYS = tuple(hpke_key(f"old {name}") for name in HELPER_NAMES)
QUERIER = identity("querier")
ANSWER_KEY = hpke_key("answers")


def helper_entry(party: int) -> HelperEntry:
    name = HELPER_NAMES[party]
    keys = (
        HpkeKeyConfig(KEYS[party].public, SET_START, SET_END),
        HpkeKeyConfig(OLD_KEYS[party].public, SET_START, OLD_END),
    )
    return HelperEntry(name, IDENTITIES[party].public, keys, f"https://{name.lower()}.example", entropy(name)(32))


def signed(helper_set: HelperSet, keys: Sequence[IdentityKey] = IDENTITIES) -> HelperSet:
    return replace(helper_set, signatures=tuple(key.sign("helper set", helper_set.signed_bytes()) for key in keys))


HELPER_SET = signed(HelperSet(7, (helper_entry(0), helper_entry(1), helper_entry(2))))
TERMS = ReportTerms(
    site="shop.example",
    caller="ads.example",
    time=NOW - HOUR,
    epsilon_micros=1_000_000,
    sensitivity=100,
    buckets=8,
    unit="cents",
)


def private_keys(party: int) -> dict[bytes, PrivateKey]:
    """Every key helper `party` still holds, by id."""
    return {key.public.key_id: key for key in (KEYS[party], OLD_KEYS[party])}


def terms(**changes: Any) -> ReportTerms:  # Any: the fields of ReportTerms, each of its own type
    return replace(TERMS, **changes)


def report(label: str, histogram: Sequence[int] | None = None, promised: ReportTerms = TERMS) -> SealedReport:
    """An honest report."""
    values = [0] * promised.length if histogram is None else histogram
    return seal_report(values, promised, HELPER_SET, entropy=entropy(f"report {label}"))


def forged_report(
    label: str,
    histogram: Sequence[int],
    promised: ReportTerms = TERMS,
    *,
    keys: Sequence[PrivateKey] = KEYS,
    body: Callable[[bytes], bytes] = lambda body: body,
    header: Callable[[Header], Header] = lambda header: header,
) -> SealedReport:
    """A malicious device's report: sealed properly, around a header and body it has tampered with beforehand."""
    draw = entropy(f"report {label}")
    shared = share(histogram, entropy=draw)
    nonce = draw(NONCE_SIZE)
    sent = body(field.encode(shared.body))
    c1, c2, c3 = (seed_commitment(index, nonce, seed) for index, seed in enumerate(shared.seeds))
    ids = (keys[0].public.key_id, keys[1].public.key_id, keys[2].public.key_id)
    honest = Header(promised, HELPER_SET.digest, ids, nonce, (c1, c2, c3), body_digest(sent))
    encoded = header(honest).encode()
    first, second, third = (
        keys[party].public.seal(
            b"".join(shared.seeds[index] for index in SEEDS_OF[party]), payload_info(party, encoded)
        )
        for party in range(PARTIES)
    )
    return SealedReport(encoded, sent, (first, second, third))


def query(**changes: Any) -> Query:  # Any: the fields of Query, each of its own type
    plain = Query(
        query_id=entropy("query id")(16),
        site=TERMS.site,
        caller=TERMS.caller,
        epsilon_micros=TERMS.epsilon_micros,
        sensitivity=TERMS.sensitivity,
        buckets=TERMS.buckets,
        kappa=TERMS.kappa,
        unit=TERMS.unit,
        helper_set=HELPER_SET.digest,
        batch_root=bytes(32),
        batch_size=1000,
        answer_key=ANSWER_KEY.public.raw,
        noise=NoiseMode.LOCAL,
        minimum_reports=1,
        tolerated_bad_permille=1000,
        deadline=NOW + DAY,
        columns=(bytes(32), bytes(32), bytes(32)),
    )
    return replace(plain, **changes)


def query_for(reports: Sequence[SealedReport], **changes: Any) -> Query:
    """The query over exactly these reports."""
    digests = np.frombuffer(b"".join(one.digest for one in reports), dtype=np.uint8).reshape(-1, 32)
    root = batch_root(digests[sorted_order(digests)])
    return query(batch_root=root, batch_size=len(reports), **changes)


def rules(party: int, of_query: Query, *, oldest: int = NOW - 7 * DAY, newest: int = NOW + HOUR) -> AdmissionRules:
    return AdmissionRules.for_query(membership(party), of_query, oldest=oldest, newest=newest)


def membership(
    party: int, helper_sets: Sequence[HelperSet] = (HELPER_SET,), keys: Sequence[PrivateKey] | None = None
) -> Membership:
    """Who helper `party` is, with all of its keys or with `keys`."""
    held = (KEYS[party], OLD_KEYS[party]) if keys is None else keys
    opening = {key.public: key for key in held}
    return Membership(party, helper_sets[0], tuple(helper_sets), IDENTITIES[party], opening)


def write_batch(path: Path, reports: Sequence[SealedReport]) -> Path:
    with BatchWriter(path) as writer:
        for one in reports:
            writer.add(one)
    return path


def write_columns(folder: Path, reports: Sequence[SealedReport]) -> list[Path]:
    """A batch of these reports, cut into the three helpers' columns."""
    batch = BatchReader(write_batch(folder / "batch", reports))
    paths = [folder / f"column-{party + 1}" for party in range(PARTIES)]
    for party, path in enumerate(paths):
        with path.open("wb") as file:
            file.writelines(batch.column(party, batch.order()))
    return paths


class InlineExecutor(Executor):
    """Runs each job at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


INLINE = ReportExecutor(InlineExecutor())


def ingest_columns(paths: Sequence[Path], of_query: Query) -> list[AdmittedColumn]:
    """All three helpers admit their columns."""
    columns = [ColumnReader(path) for path in paths]
    return [ingest(column, column.digests(), rules(party, of_query), INLINE) for party, column in enumerate(columns)]


def accepted_by_all(ingested: Sequence[AdmittedColumn]) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = np.logical_and.reduce([one.admitted for one in ingested])
    return mask


def opened_sum(ingested: Sequence[AdmittedColumn]) -> list[int]:
    """The sum over the reports all three admitted, before noise; refused unless the helpers' shares fit together."""
    accepted = accepted_by_all(ingested)
    return open_shamir([one.shamir_share(accepted) for one in ingested])
