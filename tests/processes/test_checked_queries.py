"""Checked reports, the display side and an experiment's point, each through devices and three real helpers.

Dishonest devices cost only themselves, and no disk holds what opens a report: two helpers' files, all but their private
keys, are searched for every secret of every honest report. A third helper that knows two of the three components is
given those. By chance a word of 61 bits is met with probability below 10^-6: 10^4 words, 10^7 places, 2^61 values.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments.microbenchmark import Microbenchmark, generate
from benchmarks.experiments.through_mpc import ModeResult, run_through_mpc
from device.device import Device
from device.events import ConversionEventOptions
from device.labelling import LabelOptions
from device.limits import TREFOIL_SERVICE
from device.report import HelperSetSeal
from device.stores.memory_store import MemoryStore
from mpc_helpers.admission.column import Block, BlockCache, block_cache_path
from mpc_helpers.identity.config import load_config
from mpc_helpers.ledger.attempt import Failpoint
from mpc_helpers.local.launcher import prepare
from protocol.errors import Rejection
from protocol.field import ELEMENT_SIZE, Vector, expand_many
from protocol.header import Header, ReportTerms
from protocol.helper_set import HelperSet
from protocol.hpke import POST_QUANTUM
from protocol.keys import load_hpke_key
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.regression.features import FeatureEncoding, Field, FieldKind, Record, append_record
from protocol.querier.regression.view import fit_model
from protocol.querier.saved_query import QueryOptions
from protocol.querier.view import left_out_reports
from protocol.report import SealedReport, open_payload, seal_deal
from protocol.shares import PARTIES, SEEDS_OF, SharedVector
from protocol.units import DAY
from protocol.validity import Deal, Seeds, deal_numbers, reconstruct
from tests.support import checked_reports as checked
from tests.support.checked_reports import draw, numbers_of, planes_of
from tests.support.three_helpers import SITE, MemoryMpc, ThreeHelpers, real_now, terms, three_helpers

BUCKETS = 4
LENIENT = QueryOptions(tolerated_bad_permille=1000, seconds=30)


def checked_terms(cap: int = 2, spread: int = 1) -> ReportTerms:
    made = terms(BUCKETS, sensitivity=4)
    return ReportTerms(
        made.site,
        made.caller,
        made.time,
        made.epsilon_micros,
        made.sensitivity,
        made.buckets,
        cap=cap,
        spread=spread,
    )


def lie(numbers: list[int], proven: list[int], of: ReportTerms, helper_set: HelperSet) -> SealedReport:
    dealt = deal_numbers(numbers_of(numbers, of.shape), planes_of(proven, of.shape), of.shape, draw)
    return seal_deal(dealt, of, helper_set)


async def test_lying_devices_are_left_out_of_the_answer_by_all_three(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        of = checked_terms()
        honest = three.seal([[0, 1, 0, 0]] * 70, of)
        lies = [
            lie(numbers, proven, of, three.helper_set)
            for numbers, proven in (([2**50, 0, 0, 0], [1, 0, 0, 0]), ([0, -1, 0, 0], [0, 0, 0, 0]))
        ]
        batch = three.batch([*honest, *lies])
        result = await three.ask(three.query(batch), batch)
        answer = result.answer
        assert answer.counted == 70
        assert [dict(counts) for counts in answer.rejections] == [{Rejection.INVALID: 2}] * 3
        record = three.mpc.records[answer.attempt_id]
        noise = record.total()
        assert [number - drawn for number, drawn in zip(answer.histogram, noise, strict=True)] == [0, 70, 0, 0]
        folder = load_config(three.trio.config_path(0)).data / "queries"
        assert not list(folder.glob(f"*/{block_cache_path(Path('column')).name}")), (
            "what was shown goes with the column"
        )


async def test_reports_left_out_as_invalid_stay_free_and_good_ones_are_counted_once(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        of = checked_terms()
        honest = three.seal([[1, 0, 0, 0]] * 5, of)
        bad = lie([100, 0, 0, 0], [1, 0, 0, 0], of, three.helper_set)
        first = three.batch([*honest, bad])
        assert (await three.ask(three.query(first, LENIENT), first)).answer.counted == 5
        more = three.seal([[0, 0, 1, 0]] * 3, of)
        second = three.batch([*honest, bad, *more])
        result = await three.ask(three.query(second, LENIENT), second)
        answer = result.answer
        assert answer.counted == 3
        assert [dict(counts) for counts in answer.rejections] == [{Rejection.SEEN: 5, Rejection.INVALID: 1}] * 3
        # And which they are.
        left_out = list(left_out_reports(result, second))
        assert {record for record, _, _ in left_out} == set(range(6))
        assert {digest: reasons for _, digest, reasons in left_out} == {
            **{report.digest: [Rejection.SEEN.value] * 3 for report in honest},
            bad.digest: [Rejection.INVALID.value] * 3,
        }


async def test_reports_that_nobody_can_check_are_taken_only_where_the_operators_say_so(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, options={"unchecked_histograms": False}) as three:
        batch = three.batch(three.seal([[0, 1, 0, 0]] * 3, terms(BUCKETS)))
        with pytest.raises(QueryFailed, match="have no cap"):
            await three.ask(three.query(batch), batch)
        checked = three.batch(three.seal([[0, 1, 0, 0]] * 3, checked_terms()))
        assert (await three.ask(three.query(checked), checked)).answer.counted == 3
        debug = three.batch(three.seal([[0, 1, 0, 0]] * 3, terms(BUCKETS, debug=True)))
        assert (await three.ask(three.query(debug, QueryOptions(debug=True, seconds=30)), debug)).answer.counted == 3


async def test_reports_of_the_second_suite_are_answered(tmp_path: Path) -> None:
    trio = prepare(
        tmp_path / "trio", now=real_now(), sites={SITE: [SITE]}, options={"processes": 0}, suite=POST_QUANTUM
    )
    three = ThreeHelpers(trio, MemoryMpc(), tmp_path)
    try:
        for party in range(3):
            await three.start(party)
        reports = three.seal([[0, 1, 0, 0]] * 3, checked_terms())
        assert {Header.decode(report.header).suite for report in reports} == {POST_QUANTUM}
        batch = three.batch(reports)
        result = await three.ask(three.query(batch), batch)
        assert result.answer.counted == 3 and result.query.suite is POST_QUANTUM
    finally:
        for party in range(3):
            await three.stop(party)


# What helpers' disks hold, in the middle of a query and after it.


STORED_BUCKETS, CAP, HONEST = 40, 100, 6
KEYS = ("identity.key", "tls.key")


def secrets_of(three: ThreeHelpers, report: SealedReport) -> dict[str, list[bytes]]:
    """Everything that must not lie about, by what it is; from the helpers' own keys."""
    shape = report.terms().shape
    seeds: dict[int, bytes] = {}
    for party in range(PARTIES):
        (path,) = (three.trio.helper_folder(party) / "hpke").glob("*.key")
        key = load_hpke_key(path)
        opened = open_payload(party, report.header, report.payloads[party], key)
        seeds.update(zip(SEEDS_OF[party], opened, strict=True))
    in_order: Seeds = (seeds[0], seeds[1], seeds[2])
    expanded = expand_many(in_order, shape.expanded)
    body = np.frombuffer(report.body, dtype="<u8").astype(np.uint64)
    shared = reconstruct(Deal(shape, SharedVector(in_order, body), expanded, [], [], [], []))
    third = (body + (np.uint64(2**61 - 1) - expanded[2, : shape.explicit])) % np.uint64(2**61 - 1)
    return {
        "a seed": [seeds[index] for index in range(PARTIES)],
        "a component": [word for row in (*expanded, third) for word in words(row)],
        "a shared number, a coefficient or a mask": words(shared),
    }


def words(numbers: Vector) -> list[bytes]:
    """Both ways round, without small ones, which are everywhere."""
    large = [int(number) for number in numbers.tolist() if number >= 2**40]
    return [number.to_bytes(ELEMENT_SIZE, order) for number in large for order in ("little", "big")]


def files_of(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """All files of a helper but its private keys, which its operator keeps."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in KEYS and path.parent.name != "hpke":
            yield path.relative_to(folder), path.read_bytes()


def found_in(folder: Path, secrets: dict[str, list[bytes]]) -> set[tuple[str, str]]:
    found = set()
    for path, data in files_of(folder):
        # Every place, aligned or not, as a set: thousands of words are looked for.
        places = {data[at : at + ELEMENT_SIZE] for at in range(len(data) - ELEMENT_SIZE + 1)}
        for what, values in secrets.items():
            if any(value[:ELEMENT_SIZE] in places for value in values):
                found.add((path.name, what))
    return found


def snapshot(three: ThreeHelpers, party: int, to: Path) -> Callable[[Failpoint], None]:
    """Copies a helper's folder the first time it has reserved: the column and what was shown are still there."""

    def reached(step: Failpoint) -> None:
        if step is Failpoint.RESERVE_AFTER_COMMIT and not to.exists():
            shutil.copytree(three.trio.helper_folder(party), to)

    return reached


async def test_two_helpers_files_open_no_report(tmp_path: Path) -> None:
    of: ReportTerms = replace(terms(STORED_BUCKETS, sensitivity=2 * CAP), cap=CAP, spread=1)
    shape = of.shape
    async with three_helpers(tmp_path / "run", start=False) as three:
        copies = [tmp_path / f"copy-{party}" for party in range(PARTIES)]
        for party in range(PARTIES):
            three.steps[party] = snapshot(three, party, copies[party])
            await three.start(party)
        honest = three.seal(
            [[CAP if bucket == own else 0 for bucket in range(STORED_BUCKETS)] for own in range(HONEST)], of
        )
        zero = [0] * STORED_BUCKETS
        lie = checked.numbers_of([-1, *zero[1:]], shape)
        bad = seal_deal(deal_numbers(lie, checked.planes_of(zero, shape), shape, checked.draw), of, three.helper_set)
        batch = three.batch([*honest, bad])
        wishes = QueryOptions(tolerated_bad_permille=1000, seconds=30)
        result = await three.ask(three.query(batch, wishes), batch)
        assert result.answer.counted == HONEST
        secrets: dict[str, list[bytes]] = {}
        for report in honest:
            for what, values in secrets_of(three, report).items():
                secrets.setdefault(what, []).extend(values)
        assert len(secrets["a seed"]) == 3 * HONEST
        for folder in (*copies, *(three.trio.helper_folder(party) for party in range(PARTIES))):
            assert found_in(folder, secrets) == set()
        order = sorted(report.digest for report in (*honest, bad))
        shown_blocks_tell_nothing(copies, [order.index(report.digest) for report in honest], shape.residues)
        the_search_finds_what_is_there(copies[0], secrets)


def shown_blocks_tell_nothing(copies: list[Path], places: list[int], residues: int) -> None:
    """What lies beside the columns is of honest reports the same at all three: nobody learns it from another's disk."""
    blocks = []
    for copy in copies:
        (shown,) = copy.rglob("*.shown")
        column = shown.with_name(shown.name.removesuffix(".shown"))
        assert block_cache_path(column) == shown
        blocks.append(Block.parse(BlockCache(column, residues).read(0), residues))
    rows = [block.rows(np.array(places)) for block in blocks]
    assert (rows[0] == rows[1]).all() and (rows[1] == rows[2]).all()
    assert not (blocks[0].shares == blocks[1].shares).all(), "the liar's row differs, or nothing was shown"


def the_search_finds_what_is_there(folder: Path, secrets: dict[str, list[bytes]]) -> None:
    """The positive control: one seed, one word, one number, each in the middle of other bytes."""
    for what, values in secrets.items():
        planted = folder / "planted"
        planted.write_bytes(os.urandom(1001) + values[-1] + os.urandom(1000))
        assert found_in(folder, secrets) == {("planted", what)}
        planted.unlink()


ADVERTISERS = ("boots.example", "books.example")
ENCODING = FeatureEncoding((Field("advertiser", FieldKind.CATEGORY, levels=ADVERTISERS),))
REPORTS = 60


def labelled(advertiser: str, helper_set: HelperSet, *, converted: bool) -> SealedReport:
    """One person, whom the publisher showed an ad of `advertiser` eight days ago."""
    now = real_now()
    clock = [now - 8 * DAY]
    device = Device(MemoryStore(), HelperSetSeal(helper_set), clock=lambda: clock[0])
    device.calendar()
    if converted:
        clock[0] += 2 * DAY
        device.save_conversion(advertiser, ConversionEventOptions((SITE,)))
    clock[0] = now
    features = ENCODING.encode({"advertiser": advertiser})
    asked = LabelOptions(TREFOIL_SERVICE, features, ENCODING.cap, 1.0, 8 * DAY, (advertiser,), unit=ENCODING.unit)
    return device.measure_impression(SITE, asked)


async def test_a_publisher_fits_a_model_of_conversions_that_it_never_saw(tmp_path: Path) -> None:
    """Reports of two advertisers are one batch; without the noise that was drawn, the answer is Σ y·x exactly."""
    records, features = tmp_path / "records", tmp_path / "features.json"
    ENCODING.save(features)
    async with three_helpers(tmp_path / "helpers") as three:
        reports, sums = [], np.zeros(ENCODING.columns, dtype=np.int64)
        for number in range(REPORTS):
            advertiser = ADVERTISERS[number % 2]
            # Nine of ten who saw boots, and one of ten who saw books.
            converted = (number // 2 % 10 < 9) if number % 2 == 0 else (number // 2 % 10 < 1)
            report = labelled(advertiser, three.helper_set, converted=converted)
            vector = ENCODING.encode({"advertiser": advertiser})
            append_record(records, Record(report.digest, vector))
            sums += np.array(vector) * converted
            reports.append(report)
        batch = three.batch(reports)
        result = await three.ask(three.query(batch), batch)
        noise = three.noise_of(result)
    assert result.answer.counted == REPORTS
    assert [told - drawn for told, drawn in zip(result.answer.histogram, noise, strict=True)] == sums.tolist()
    assert sums.tolist() == [30, 27, 3]
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(result.to_json()))
    fit_model(answer, batch.path, records, features, tmp_path / "model.json")
    fitted = json.loads((tmp_path / "model.json").read_text())
    # Whatever the noise was: a model of this batch, or a reason why there is none.
    assert (fitted["rows"], fitted["unit"]) == (REPORTS, ENCODING.unit)


def test_helpers_answer_what_the_simulation_predicts() -> None:
    """Two queries of ten reports: every report is counted, and the answer is the simulated sum plus the mode's noise.

    The noise is the difference of two NB(3/2, q) variables, whose tail beyond 30·b is below 10^-11.
    """
    world = generate(Microbenchmark(participation=0.5, seed=4, scale=0.005, products=1, repeats=2))
    made: list[int] = []
    (result,) = run_through_mpc(world, 7, [NoiseMode.LOCAL], int(time.time()), made.append)
    assert sum(made) == result.reports == 20
    # Only the value 5 of 5 occurs, so units are whole conversions and b = 1/ε.
    scale = 1e6 / 46_051
    assert result.deviation == pytest.approx((2 * 1.5) ** 0.5 * scale, rel=0.01)
    assert np.all(np.abs(result.errors) < 30 * scale)
    assert np.all(result.predicted <= 10)


def test_the_comparison_counts_in_standard_errors() -> None:
    """Noise of exactly the promised size is no standard errors off; three times as much is many."""
    sums = np.full(50, 1000, dtype=np.int64)
    signs = np.where(np.arange(50) % 2, 1, -1)
    right = ModeResult(NoiseMode.LOCAL, sums, sums, sums + 20 * signs, 20.0, 1, 1.0)
    assert right.measured == pytest.approx(20)
    assert right.standard_errors_off == pytest.approx(0)
    assert right.rmsre == pytest.approx((0.02, 0.02))
    assert ModeResult(NoiseMode.LOCAL, sums, sums, sums + 60 * signs, 20.0, 1, 1.0).standard_errors_off > 20
