"""No bytes from outside raise anything but the protocol's own error.

Valid messages are damaged at random, and random bytes are tried too, on every decoder that meets the outside world.
`make test` allots each a share of about ten seconds; TREFOIL_FUZZ_SECONDS (`make fuzz`) allots all of them that long
together. The seed is printed when something fails; TREFOIL_FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpc_helpers.admission.column import Block, preimages
from mpc_helpers.admission.ingest import ingest
from mpc_helpers.agreement.messages import Show, Shown
from mpc_helpers.ledger.attempt import QueryName
from protocol.answer import AnswerShare
from protocol.batch import BatchReader, BatchWriter, ColumnReader
from protocol.errors import ProtocolError
from protocol.header import Header
from protocol.helper_set import HelperSet
from protocol.left_out import encode_left_out
from protocol.noise import NoiseMode
from protocol.query import Query, SignedQuery
from protocol.report import SealedReport, open_report
from protocol.shares import PARTIES
from protocol.vote import SignedVote, Vote
from protocol.wire import Reader
from tests.support import protocol_samples as samples

SECONDS = float(os.environ.get("TREFOIL_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("TREFOIL_FUZZ_SEED", "0")) or int.from_bytes(os.urandom(4), "big")

REPORTS = [samples.report(f"fuzz {index}", [index] * 8) for index in range(4)]
CHECKED = [
    samples.report(f"fuzz checked {index}", [index] + [0] * 7, samples.terms(cap=9, spread=1)) for index in range(2)
]
SHOW = Show(QueryName(b"q" * 32, b"d" * 32), b"k" * 32, (1, 5))
BLOCK = preimages(np.array([True, False, True]), np.arange(6, dtype=np.uint64).reshape(2, 3))[0]
QUERY = samples.query_for(REPORTS)
SHARE = AnswerShare(
    query_digest=QUERY.digest,
    attempt_number=1,
    attempt_id=bytes(32),
    submitted=4,
    counted=4,
    rejections=({}, {}, {}),
    noise=NoiseMode.LOCAL,
    epsilon_micros=1,
    sensitivity=1,
    proposed=(bytes(32), bytes(32), bytes(32)),
    left_out=encode_left_out(np.array([0, 3, 3, 1], dtype=np.uint8)),
    vector=np.arange(8, dtype=np.uint64),
)

VOTES = [SignedVote.sign(party, bytes(32), Vote.YES, samples.IDENTITIES[party]) for party in range(PARTIES)]


class Mutator:
    """Damages bytes the ways that find bugs: bits, runs, cuts, repeats, lengths at their limits."""

    EXTREMES = (b"\x00", b"\xff", b"\x7f\xff", b"\xff\xff", b"\x00\x00", b"\x80\x00\x00\x00", b"\xff" * 4, b"\xff" * 8)

    def __init__(self, seed: int) -> None:
        self.coins = np.random.default_rng(seed)

    def number(self, below: int) -> int:
        return int(self.coins.integers(0, max(below, 1)))

    def damage(self, data: bytes) -> bytes:
        if self.number(20) == 0:
            return self.coins.bytes(self.number(600))
        for _ in range(1 + self.number(4)):
            data = self._damage_once(data)
        return data

    def damage_records(self, data: bytes) -> bytes:
        """For files of records: half the time all lengths stay, so that the damage reaches what is behind them."""
        if self.number(2):
            return self.damage(data)
        for _ in range(1 + self.number(6)):
            at = 28 + self.number(len(data) - 28)
            extreme = self.EXTREMES[self.number(len(self.EXTREMES))] if self.number(2) else self.coins.bytes(1)
            data = (data[:at] + extreme + data[at + len(extreme) :])[: len(data)]
        return data

    def _damage_once(self, data: bytes) -> bytes:
        at, end = sorted((self.number(len(data) + 1), self.number(len(data) + 1)))
        match self.number(6):
            case 0:
                return data[:at] + bytes([self.number(256)]) + data[at + 1 :]
            case 1:
                return data[:at]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:end] + data[at:end] + data[end:]
            case 4:
                extreme = self.EXTREMES[self.number(len(self.EXTREMES))]
                return data[:at] + extreme + data[at + len(extreme) :]
            case _:
                return data[:at] + self.coins.bytes(self.number(9)) + data[at:]


def decode_with_reader(data: bytes) -> None:
    """A message in an order that the bytes themselves choose."""
    reader = Reader(data)
    for _ in range(8):
        match reader.uint(1) % 5:
            case 0:
                reader.uint(8)
            case 1:
                reader.fixed(3)
            case 2:
                reader.blob(limit=1000)
            case 3:
                reader.text()
            case _:
                reader.blob(2)
    reader.finish()


def open_decoded_report(data: bytes) -> None:
    report = SealedReport.decode(data)
    for party in range(PARTIES):
        open_report(party, report, KEYS[party])


def open_answer_share(data: bytes) -> None:
    AnswerShare.open(0, data, QUERY, samples.ANSWER_KEY, samples.HELPER_SET)


def decode_signed_query(data: bytes) -> None:
    SignedQuery.decode(data).verify(samples.QUERIER.public)


KEYS = [samples.private_keys(party) for party in range(PARTIES)]
DECODERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "report": (open_decoded_report, [report.encode() for report in (*REPORTS, *CHECKED)]),
    "header": (Header.decode, [report.header for report in (*REPORTS, *CHECKED)]),
    "query": (Query.decode, [QUERY.encode(), replace(QUERY, cap=50, spread=2).encode()]),
    "show": (lambda data: Show.read(Reader(data)), [SHOW.encode()]),
    "shown": (lambda data: Shown.read(Reader(data)), [Shown(SHOW, (b"one", b"other")).encode()]),
    "block": (lambda data: Block.parse(data, 3), [BLOCK]),
    "signed query": (decode_signed_query, [SignedQuery.sign(QUERY, samples.QUERIER).encode()]),
    "answer share": (AnswerShare.decode, [SHARE.encode()]),
    "sealed answer share": (open_answer_share, [SHARE.seal(0, QUERY, samples.IDENTITIES[0])]),
    "vote": (SignedVote.decode, [vote.encode() for vote in VOTES]),
    "reader": (decode_with_reader, [bytes(range(256)), bytes(40), b"\x02\x00\x00\x00\x03abc\x03\x00\x01a"]),
}
FILES = ("batch", "column", "helper set", "helper set values", "writer")


def run(decode: Callable[[bytes], Any], valid: list[bytes], damage: Callable[[bytes], bytes], seed: int) -> None:
    """Try damaged messages until the time is up; what a decoder raises must be a `ProtocolError`."""
    pick = np.random.default_rng(seed)
    until = time.monotonic() + SECONDS / (len(DECODERS) + len(FILES))
    tried = 0
    while tried < 20 or time.monotonic() < until:
        data = damage(valid[int(pick.integers(len(valid)))])
        tried += 1
        try:
            decode(data)
        except ProtocolError:
            continue
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} (TREFOIL_FUZZ_SEED={SEED}) from {data.hex()}")


@pytest.mark.parametrize("name", DECODERS)
def test_no_bytes_raise_anything_but_the_protocols_error(name: str) -> None:
    decode, valid = DECODERS[name]
    for data in valid[:1]:
        if name != "reader":
            decode(data)
    run(decode, valid, Mutator(SEED).damage, SEED)


def test_no_batch_file_raises_anything_but_the_protocols_error(tmp_path: Path) -> None:
    path = samples.write_batch(tmp_path / "batch", REPORTS)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        batch = BatchReader(path)
        for report in batch:
            SealedReport.decode(report.encode())
        batch.order()

    run(read, [path.read_bytes()], Mutator(SEED).damage_records, SEED)


def test_no_column_raises_anything_but_the_protocols_error(tmp_path: Path) -> None:
    """From the file's preamble to the sum, at each of the three helpers."""
    columns = samples.write_columns(tmp_path, REPORTS)
    path = tmp_path / "damaged"
    rules = [samples.rules(party, QUERY) for party in range(PARTIES)]
    originals = [column.read_bytes() for column in columns]

    def admit(data: bytes) -> None:
        path.write_bytes(data)
        column = ColumnReader(path)
        for party in range(PARTIES):
            try:
                ingest(column, column.digests(), rules[party], samples.INLINE)
            except ProtocolError:
                continue

    run(admit, originals, Mutator(SEED).damage_records, SEED)


def test_no_file_raises_anything_but_the_protocols_error_when_reopened(tmp_path: Path) -> None:
    """For a writer; what it lets stand, a reader reads."""
    path = samples.write_batch(tmp_path / "batch", REPORTS[:2])

    def reopen(data: bytes) -> None:
        path.write_bytes(data)
        with BatchWriter(path):
            pass
        if path.stat().st_size:
            list(BatchReader(path).digests())

    run(reopen, [path.read_bytes()], Mutator(SEED).damage, SEED)


def test_no_helper_set_file_raises_anything_but_the_protocols_error(tmp_path: Path) -> None:
    path = tmp_path / "helpers.json"

    def load(data: bytes) -> None:
        path.write_bytes(data)
        HelperSet.load_unverified(path).signed_bytes()

    run(load, [json.dumps(samples.HELPER_SET.to_json()).encode()], Mutator(SEED).damage, SEED)


STRANGE: tuple[object, ...] = (
    None, True, False, 0, -1, 1.5, 2**32, 2**64, 10**400, float("nan"), float("inf"), "", "x", "00", "\ud800",
    "https://", [], {}, [[]], {"name": 1}, "é" * 70000,
)  # fmt: skip


def test_no_json_value_raises_anything_but_the_protocols_error() -> None:
    """Any value, put anywhere in a good file."""
    mutator = Mutator(SEED)

    def replaced(stored: Any) -> Any:
        """`stored` with something strange at a random depth. Any: JSON."""
        if not isinstance(stored, list | dict) or not stored or mutator.number(6) == 0:
            return STRANGE[mutator.number(len(STRANGE))]
        keys = list(stored) if isinstance(stored, dict) else list(range(len(stored)))
        key = keys[mutator.number(len(keys))]
        changed = dict(stored) if isinstance(stored, dict) else list(stored)
        if mutator.number(8) == 0:
            del changed[key]
        else:
            changed[key] = replaced(stored[key])
        return changed

    def load(_: bytes) -> None:
        helper_set = HelperSet.from_json(replaced(samples.HELPER_SET.to_json()))
        helper_set.signed_bytes()
        json.dumps(helper_set.to_json())

    run(load, [b""], lambda data: data, SEED)


def test_the_fuzzer_catches_a_decoder_that_fails_otherwise() -> None:
    """The net itself: a planted IndexError is detected."""

    def careless(data: bytes) -> int:
        return data[20]

    with pytest.raises(pytest.fail.Exception, match="IndexError"):
        run(careless, [bytes(30)], Mutator(1).damage, 1)
