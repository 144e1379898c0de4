"""A column arriving in pieces, and the digests that are kept beside it."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpc_helpers.admission.column import (
    ColumnDraft,
    StoredDigests,
    digests_beside,
    digests_of,
    remove_column,
    repeated,
)
from mpc_helpers.agreement.messages import Propose, pack_mask, pack_rejections
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation, Selected
from mpc_helpers.ledger.attempt import QueryName
from mpc_helpers.ledger.file import LedgerOwner
from mpc_helpers.ledger.ledger import ReportLedger
from protocol.batch import ColumnReader, batch_root
from protocol.errors import ProtocolError, Rejection, TrefoilError
from tests.support import protocol_samples as samples

REPORTS = [samples.report(f"column {index}", [index] * 8) for index in range(11)]


@pytest.fixture(scope="module")
def column(tmp_path_factory: pytest.TempPathFactory) -> ColumnReader:
    return ColumnReader(samples.write_columns(tmp_path_factory.mktemp("cut"), REPORTS)[1])


def upload(column: ColumnReader, to: Path, pieces: list[bytes], root: bytes | None = None) -> bool:
    with ColumnDraft(to, column.layout, len(column)) as draft:
        for piece in pieces:
            draft.add(piece)
        signed = batch_root(column.digests()) if root is None else root
        right = draft.finish(signed, hashlib.sha256(b"trefoil/1 column\0" + column.path.read_bytes()).digest())
        if right:
            draft.keep()
        return right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cuts=st.lists(st.integers(0, 2**14), max_size=12))
def test_pieces_of_any_size_make_the_same_column(column: ColumnReader, tmp_path: Path, cuts: list[int]) -> None:
    data = column.path.read_bytes()
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    stored = tmp_path / "column"
    assert upload(column, stored, [data[a:b] for a, b in itertools.pairwise(places)])
    assert stored.read_bytes() == data
    assert digests_beside(stored).read_bytes() == column.digests().tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["column", "column.digests"]
    remove_column(stored)
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_arrives_byte_by_byte(column: ColumnReader, tmp_path: Path) -> None:
    data = column.path.read_bytes()
    assert upload(column, tmp_path / "column", [data[at : at + 1] for at in range(len(data))])


def test_nothing_is_left_of_a_column_of_another_batch(column: ColumnReader, tmp_path: Path) -> None:
    data = column.path.read_bytes()
    assert not upload(column, tmp_path / "column", [data], bytes(32))
    flipped = bytearray(data)
    flipped[28 + 150] ^= 1  # inside the first header
    assert not upload(column, tmp_path / "column", [bytes(flipped)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-1], "ended after"),
        (lambda data: data[:20], "ended after 20 of"),
        (lambda data: b"", "ended after 0 of"),
        (lambda data: data + b"x", "more than"),
        (lambda data: b"x" + data[1:], "does not begin"),
        (lambda data: data[:19] + bytes([data[19] + 1]) + data[20:], "another shape"),
    ],
)
def test_what_is_no_column_of_the_query_is_refused_with_a_reason(
    column: ColumnReader, tmp_path: Path, damage: object, told: str
) -> None:
    assert callable(damage)
    with pytest.raises(ProtocolError, match=told):
        upload(column, tmp_path / "column", [damage(column.path.read_bytes())])
    assert list(tmp_path.iterdir()) == []


def kept(column: ColumnReader, folder: Path) -> ColumnReader:
    assert upload(column, folder / "column", [column.path.read_bytes()])
    return ColumnReader(folder / "column")


@pytest.mark.parametrize("trouble", ["lost", "cut short", "changed"])
def test_digests_that_do_not_have_the_signed_root_are_made_again(
    column: ColumnReader, tmp_path: Path, trouble: str
) -> None:
    """A digest that is off by a bit would let its report be spent twice."""
    stored = kept(column, tmp_path)
    path = digests_beside(stored.path)
    good = path.read_bytes()
    if trouble == "lost":
        path.unlink()
    else:
        path.write_bytes(good[:-32] if trouble == "cut short" else bytes([good[0] ^ 1]) + good[1:])
    found = digests_of(stored, batch_root(column.digests()))
    assert found[:].tobytes() == good == path.read_bytes()


def test_a_disk_that_is_full_when_digests_are_made_again_is_an_error_to_act_on(
    column: ColumnReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = kept(column, tmp_path)
    digests_beside(stored.path).unlink()

    def full(_: ColumnReader) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ColumnReader, "digest_spans", full)
    with pytest.raises(TrefoilError, match="No space left"):
        digests_of(stored, bytes(32))
    assert [path.name for path in tmp_path.iterdir()] == ["column"]


def test_a_column_that_changed_on_disk_is_not_admitted(column: ColumnReader, tmp_path: Path) -> None:
    stored = kept(column, tmp_path)
    with pytest.raises(ProtocolError, match="not of the batch"):
        digests_of(stored, bytes(32))
    assert not list(tmp_path.glob("*.part"))


def test_slices_of_stored_digests_are_those_of_the_array(column: ColumnReader, tmp_path: Path) -> None:
    kept(column, tmp_path)
    stored, array = StoredDigests(tmp_path / "column.digests"), column.digests()
    assert len(stored) == len(array)
    for span in (slice(None), slice(0, 0), slice(3, 7), slice(10, 99), slice(5, 2), slice(-3, None)):
        assert np.array_equal(stored[span], array[span])
        chosen = np.arange(len(array)) % 3 == 1
        assert np.array_equal(Selected(stored, chosen)[span], array[chosen][span])
        assert np.array_equal(Selected(stored, np.zeros(len(array), dtype=np.bool_))[span], array[:0])


@pytest.mark.parametrize("chosen", ["all", "most"])
def test_nowhere_from_lookup_to_reservation_are_all_digests_in_memory(tmp_path: Path, chosen: str) -> None:
    """Traced: what Python and numpy allocate. One copy of the digests would show, and so would a list of them."""
    count = 100_000
    path = tmp_path / "column.digests"
    rows = np.zeros((count, 4), dtype=">u8")
    rows[:, 0] = np.arange(count)
    path.write_bytes(rows.tobytes())
    stored = StoredDigests(path)
    accepted = np.ones(count, dtype=np.bool_)
    accepted[7::50] = chosen == "all"
    owner = LedgerOwner(0, bytes(32))
    ReportLedger.create(tmp_path / "ledger", owner)
    ledger = ReportLedger(tmp_path / "ledger", owner)
    hours, debug = np.ones(count, dtype=np.uint32), np.zeros(count, dtype=np.bool_)
    batch = AdmittedBatch(bytes(32), stored, hours, debug, accepted, {})
    negotiation = Negotiation(0, AttemptTerms(QueryName(b"k" * 32, bytes(32)), False, bytes(32)), batch)
    rejections = pack_rejections({Rejection.EXPIRED: int(np.count_nonzero(~accepted))})
    proposal = Propose(negotiation.query, bytes(32), bytes(32), 1, bytes(32), count, pack_mask(accepted), rejections)
    negotiation.own, negotiation.proposals = proposal, dict.fromkeys(range(3), proposal)
    tracemalloc.start()
    try:
        assert not ledger.reports.lookup(stored, b"z" * 32).any()
        reservation = negotiation.reservation()
        ledger.moves.reserve(reservation)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.count_nonzero(ledger.reports.lookup(stored, b"z" * 32)) == np.count_nonzero(accepted)
    ledger.close()
    assert peak < 32 * count, f"{peak / count:.0f} bytes per report"


def rows(*values: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([[0] * 24 + list(value.to_bytes(8, "big")) for value in values], dtype=np.uint8)


def test_repeats_are_all_but_the_first() -> None:
    assert repeated(rows(1, 2, 2, 2, 3, 3)).tolist() == [False, False, True, True, False, True]
    assert repeated(rows(5)).tolist() == [False]
    assert repeated(rows()[:0].reshape(0, 32)).tolist() == []


@pytest.mark.parametrize(("values", "at"), [((2, 1), 2), ((1, 2, 3, 2), 4), ((256, 255), 2), ((2**63, 1), 2)])
def test_a_column_out_of_order_is_refused_at_its_place(values: tuple[int, ...], at: int) -> None:
    with pytest.raises(ProtocolError, match=f"report {at} of the column is out of order"):
        repeated(rows(*values))
