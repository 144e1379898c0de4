"""Bad devices: every negative vector, among good reports, goes through three whole helpers and drops only itself.

The helpers hold the vectors' own keys, so that anyone else's implementation can be held to the same files; their clock
stands where the vectors were made. What opening or admitting alone gives is in `test_vectors`; here it is the answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger.ledger import ReportLedger
from mpc_helpers.ledger.rebuild import owner_of
from mpc_helpers.local.launcher import _free_ports, prepare
from protocol.errors import Rejection
from protocol.helper_set import HelperEntry, HelperSet
from protocol.keys import save_hpke_key, save_identity
from protocol.querier.saved_query import QueryOptions
from protocol.query import NoiseMode
from protocol.report import SealedReport
from protocol.set_files import write_set
from protocol.shares import PARTIES
from tests import make_vectors
from tests.support import protocol_samples as samples
from tests.support.three_helpers import MemoryMpc, ThreeHelpers, real_now
from tests.test_vectors import NEGATIVE, Vector, bad_report, reasons

GOOD = 3


def vectors_clock() -> Callable[[], int]:
    """Time goes on from the hour in which the vectors were made."""
    start = time.monotonic()
    return lambda: samples.NOW + int(time.monotonic() - start)


def make_helper(folder: Path, party: int, port: int) -> HelperEntry:
    """A helper with the vectors' identity and HPKE keys; certificate and address are its own, and not in the digest."""
    folder.mkdir(parents=True)
    save_identity(folder / "identity.key", samples.IDENTITIES[party])
    (folder / "hpke").mkdir()
    for name, key in samples.private_keys(party).items():
        save_hpke_key(folder / "hpke" / f"{name.hex()}.key", key)
    entry = samples.HELPER_SET.helpers[party]
    certificate = tls.make_identity(folder, entry.name, real_now())
    return replace(entry, address=f"https://127.0.0.1:{port}", tls_pin=certificate.pin)


@asynccontextmanager
async def vector_helpers(folder: Path) -> AsyncIterator[ThreeHelpers]:
    """Three helpers in this process that are the vectors' three helpers."""
    clock, ports = vectors_clock(), _free_ports(PARTIES)
    trio = folder / "trio"
    first, second, third = (make_helper(trio / f"helper-{party + 1}", party, ports[party]) for party in range(PARTIES))
    helper_set = samples.signed(HelperSet(8, (first, second, third)))
    assert helper_set.digest == samples.HELPER_SET.digest
    write_set(trio / "helpers.json", helper_set)
    sites = {samples.TERMS.site: [samples.TERMS.caller]}
    # Reports live eleven days, so that the vectors' old key is still there to be named; the ledgers forget after seven.
    options = {"processes": 0, "unchecked_histograms": True, "report_lifetime_days": 11}
    prepared = prepare(trio, now=clock(), sites=sites, options=options)
    three = ThreeHelpers(prepared, MemoryMpc(), folder, clock=clock)
    forget(three, samples.NOW - 7 * samples.DAY)
    try:
        for party in range(PARTIES):
            await three.start(party)
        yield three
    finally:
        for party in range(PARTIES):
            await three.stop(party)


def forget(three: ThreeHelpers, until: int) -> None:
    """Move the watermark of every ledger, as a helper's housekeeping does."""
    for party in range(PARTIES):
        config = load_config(three.trio.config_path(party))
        ledger = ReportLedger(config.ledger, owner_of(load_membership(config, samples.NOW)))
        ledger.reports.advance_watermark(until)
        ledger.close()


async def fate(three: ThreeHelpers, vector: Vector, mode: NoiseMode) -> tuple[list[int], list[dict[Rejection, int]]]:
    """Ask about good reports with this bad one among them: the answer without its noise, and who rejected what."""
    good = [samples.report(f"{vector['name']} {mode} {index}", [index, *[1] * 7]) for index in range(GOOD)]
    reports: list[SealedReport] = [*good, *[bad_report(vector)] * vector["copies"]]
    batch = three.batch(reports)
    wishes = QueryOptions(noise=mode, tolerated_bad_permille=500, seconds=60)
    result = await three.ask(three.query(batch, wishes, site=samples.TERMS.site), batch)
    exact = np.array(result.answer.histogram) - np.array(three.noise_of(result))
    return exact.tolist(), [dict(counts) for counts in result.answer.rejections]


def expected(vector: Vector) -> tuple[list[int], list[dict[Rejection, int]]]:
    """The good reports' sum, and one rejection at each helper that finds something wrong."""
    total = np.array([sum(range(GOOD)), *[GOOD] * 7])
    if vector["copies"] == 2:  # the first of two copies is sound and counts
        total = total + np.array(make_vectors.HISTOGRAM)
    counts = [{} if reason is None else {reason: 1} for reason in reasons(vector["counted_under"])]
    return total.tolist(), counts


async def test_every_negative_vector_drops_only_itself(tmp_path: Path) -> None:
    assert len(NEGATIVE) >= 30
    async with vector_helpers(tmp_path) as three:
        wrong = {}
        for vector in NEGATIVE:
            found = await fate(three, vector, NoiseMode.LOCAL)
            if found != expected(vector):
                wrong[vector["name"]] = (found, expected(vector))
        assert wrong == {}


@pytest.mark.parametrize("name", ["wrong commitment to seed 2", "body element p"])
async def test_a_lying_device_does_not_spoil_pairwise_noise_either(tmp_path: Path, name: str) -> None:
    (vector,) = (each for each in NEGATIVE if each["name"] == name)
    async with vector_helpers(tmp_path) as three:
        assert await fate(three, vector, NoiseMode.PAIRWISE) == expected(vector)


async def test_all_that_have_their_own_digest_at_once(tmp_path: Path) -> None:
    """A batch with more bad reports than good ones: the good ones are counted, and each bad one has its reason."""
    unique: dict[bytes, Vector] = {}
    for vector in NEGATIVE:
        if vector["copies"] == 1:
            unique.setdefault(bad_report(vector).digest, vector)
    good = [samples.report(f"all at once {index}", [index, *[1] * 7]) for index in range(GOOD)]
    async with vector_helpers(tmp_path) as three:
        batch = three.batch([*good, *(bad_report(vector) for vector in unique.values())])
        wishes = QueryOptions(tolerated_bad_permille=1000, seconds=60)
        result = await three.ask(three.query(batch, wishes, site=samples.TERMS.site), batch)
        exact = np.array(result.answer.histogram) - np.array(three.noise_of(result))
        assert exact.tolist() == [sum(range(GOOD)), *[GOOD] * 7]
        for party, counts in enumerate(result.answer.rejections):
            fates = [reasons(vector["counted_under"])[party] for vector in unique.values()]
            assert dict(counts) == {reason: fates.count(reason) for reason in set(fates) if reason is not None}
