"""What helpers' disks hold of checked reports, in the middle of a query and after it: nothing that opens one.

Two helpers' files, all but their private keys, are searched for every secret of every honest report: seeds, what they
expand to, shared numbers, masks, polynomials. A third helper that knows two of the three components is given those. By
chance a word of 61 bits is found with probability below 10^-6: 10^4 words, 10^7 places, 2^61 values.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpc_helpers.admission.blocks import Block, ShownBlocks, shown_beside
from mpc_helpers.ledger.attempt import Step
from protocol.field import ELEMENT_SIZE, Vector, expand_many
from protocol.header import ReportTerms
from protocol.keys import load_hpke_key
from protocol.querier.saved_query import QueryOptions
from protocol.report import SealedReport, open_seeds, seal_deal
from protocol.self_check import reconstruct
from protocol.shares import PARTIES, SEEDS_OF, SharedVector
from protocol.validity import Deal, Seeds, deal_numbers
from tests.support import checked_reports as checked
from tests.support.three_helpers import ThreeHelpers, terms, three_helpers

BUCKETS, CAP, HONEST = 40, 100, 6
KEYS = ("identity.key", "tls.key")


def secrets_of(three: ThreeHelpers, report: SealedReport) -> dict[str, list[bytes]]:
    """Everything that must not lie about, by what it is; from the helpers' own keys."""
    shape = report.terms().shape
    seeds: dict[int, bytes] = {}
    for party in range(PARTIES):
        (path,) = (three.trio.helper_folder(party) / "hpke").glob("*.key")
        key = load_hpke_key(path)
        opened = open_seeds(party, report.header, report.payloads[party], key)
        seeds.update(zip(SEEDS_OF[party], (opened[:32], opened[32:]), strict=True))
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


def snapshot(three: ThreeHelpers, party: int, to: Path) -> Callable[[Step], None]:
    """Copies a helper's folder the first time it has reserved: the column and what was shown are still there."""

    def reached(step: Step) -> None:
        if step is Step.RESERVE_AFTER_COMMIT and not to.exists():
            shutil.copytree(three.trio.helper_folder(party), to)

    return reached


async def test_two_helpers_files_open_no_report(tmp_path: Path) -> None:
    of: ReportTerms = replace(terms(BUCKETS, sensitivity=2 * CAP), cap=CAP, spread=1)
    shape = of.shape
    async with three_helpers(tmp_path / "run", start=False) as three:
        copies = [tmp_path / f"copy-{party}" for party in range(PARTIES)]
        for party in range(PARTIES):
            three.steps[party] = snapshot(three, party, copies[party])
            await three.start(party)
        honest = three.seal([[CAP if bucket == own else 0 for bucket in range(BUCKETS)] for own in range(HONEST)], of)
        zero = [0] * BUCKETS
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
        assert shown_beside(column) == shown
        blocks.append(Block.parse(ShownBlocks(column, residues).read(0), residues))
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
