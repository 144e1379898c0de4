"""A report's ε in parts, at helpers: amounts from headers, the setting, and answers up to what was paid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mpc_helpers.agreement.messages import pack_mask
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation
from mpc_helpers.commands import app
from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.ledger.rebuild import Export, accept_peer, export, rebuild
from mpc_helpers.ledger.reports import EVERYTHING, Entries
from mpc_helpers.local.launcher import prepare
from mpc_helpers.service.policy import Policy, Refusal
from protocol.amounts import Amount, Amounts
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.left_out import code_of, counts_of
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, SavedQuery
from protocol.query import VERSION_WITHOUT_REST, SignedQuery, make_permits
from protocol.shares import PARTIES
from protocol.units import need
from tests.mpc_helpers.test_report_ledger import lose, opened
from tests.support import protocol_samples as samples
from tests.support.commit_world import AskedQuery
from tests.support.raising import raises
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers

PART = QueryOptions(epsilon_micros=200_000, seconds=30, keeps_rest=True)


def test_amounts_follow_from_the_headers_of_admitted_reports(tmp_path: Path) -> None:
    """Five kinds of (ε, Δ), one of which the query's noise does not cover, and a debug report, in chunks."""
    paid = [(1_000_000, 100), (2_000_000, 100), (1_000_000, 50), (1_500_001, 99), (999, 100)]
    reports = [
        samples.report(f"amounts {index}", [1] * 8, samples.terms(epsilon_micros=epsilon, sensitivity=sensitivity))
        for index in range(200)
        for epsilon, sensitivity in [paid[index % len(paid)]]
    ]
    reports.append(samples.report("amounts debug", [1] * 8, samples.terms(debug=True, epsilon_micros=7_000_000)))
    query = samples.query_for(reports, epsilon_micros=300_001, sensitivity=100)
    terms_of = {one.digest: (one.terms().epsilon_micros, one.terms().sensitivity) for one in reports}
    for column in samples.ingest_columns(samples.write_columns(tmp_path, reports), query):
        assert column.amounts is not None and len(column.amounts) == len(reports)
        digests = [bytes(row) for row in column.digests[0 : len(reports)]]
        compared = 0
        for amount, places in column.amounts.groups(0, len(reports)):
            for place in places[column.admitted[places]]:
                epsilon, sensitivity = terms_of[digests[place]]
                assert (amount.paid, amount.sensitivity) == (epsilon, sensitivity)
                assert amount.need == need(epsilon, sensitivity, 300_001, 100)
                compared += 1
        assert compared == np.count_nonzero(column.admitted) == 160


def test_reports_that_paid_alike_have_one_amount(tmp_path: Path) -> None:
    reports = [samples.report(f"alike {index}", [1] * 8) for index in range(70)]
    query = samples.query_for(reports, epsilon_micros=200_000)
    for column in samples.ingest_columns(samples.write_columns(tmp_path, reports), query):
        assert column.amounts == Amounts(70, (Amount(1_000_000, 100, 200_000),))


def test_a_batch_has_an_amount_for_each_report() -> None:
    batch = AskedQuery.of(1, range(3)).batch()
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        replace(batch, amounts=Amounts(2, (Amount(10, 1, 1),)))


def negotiation(*, names_little: bool) -> Negotiation:
    batch = AskedQuery.of(1, range(6)).batch()
    batch = AdmittedBatch(
        batch.root,
        batch.digests,
        batch.hours,
        batch.debug,
        batch.admitted & (np.arange(6) > 0),
        {Rejection.EXPIRED: 1},
        codes=np.array([code_of(Rejection.EXPIRED), 0, 0, 0, 0, 0], dtype=np.uint8),
        site="",
    )
    return Negotiation(0, AttemptTerms(AskedQuery.of(1, ()).name, False, bytes(32), names_little=names_little), batch)


@pytest.mark.parametrize("names_little", [True, False])
def test_too_little_left_has_a_count_that_old_queries_lack(names_little: bool) -> None:
    """A query of version 2 has the counts of its time: too little left is counted as seen, in list and count."""
    one, places = negotiation(names_little=names_little), np.arange(6)
    rejected = {Rejection.SEEN: places == 1, Rejection.TOO_LITTLE_LEFT: places == 2, Rejection.EXPIRED: places == 3}
    one.set_rejections(rejected)
    expected = {Rejection.SEEN: 1, Rejection.TOO_LITTLE_LEFT: 1, Rejection.EXPIRED: 2}
    if not names_little:
        expected = {Rejection.SEEN: 2, Rejection.EXPIRED: 2}
    assert one.rejections() == expected
    assert one.codes is not None and counts_of(one.codes) == expected
    # A proposal whose counts do not add up to its zeros is refused by its own constructor.
    proposal = one.propose(1, places > 3, bytes(32))
    assert proposal.bitmap == pack_mask(places > 3) and proposal.rejection_counts == expected


def test_the_terms_of_an_attempt_follow_from_the_query() -> None:
    query = samples.query(keeps_rest=True)
    assert AttemptTerms.of(query, bytes(32), 1, None).keeps_rest
    old = AttemptTerms.of(samples.query(version=VERSION_WITHOUT_REST), bytes(32), 1, None)
    assert (old.keeps_rest, old.names_little) == (False, False)
    assert AttemptTerms.of(samples.query(), bytes(32), 1, None).names_little


def test_the_setting_is_off_unless_it_is_on(tmp_path: Path) -> None:
    path = prepare(tmp_path / "trio", now=real_now()).config_path(1)
    assert not load_config(path).spend_in_parts
    stored = json.loads(path.read_text())
    for value in ("yes", 1):
        path.write_text(json.dumps(stored | {"spend_in_parts": value}))
        with raises(ErrorKind.WRONG_TYPE, ConfigError):
            load_config(path)
    for setting in (True, False):
        path.write_text(json.dumps(stored | {"spend_in_parts": setting}))
        assert load_config(path).spend_in_parts is setting


def test_any_helper_prevents_it_and_says_which_it_is(tmp_path: Path) -> None:
    trio = prepare(tmp_path / "trio", now=real_now())
    query = samples.query(keeps_rest=True, deadline=real_now() + 60, minimum_reports=1, cap=100, spread=1)
    for party in range(PARTIES):
        member = samples.membership(party)
        config = replace(load_config(trio.config_path(party)), processes=0)
        off = Policy(member, config, real_now)
        with raises(ErrorKind.REFUSED, Refusal) as refused:
            off.check_acceptable(query, [])
        assert refused.value.http_status == 422 and f"helper {party + 1}" in refused.value.hint
        off.check_acceptable(replace(query, keeps_rest=False), [])
        Policy(member, replace(config, spend_in_parts=True), real_now).check_acceptable(query, [])


async def test_three_helpers_use_reports_up_unless_all_three_are_set_otherwise(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))
        with raises(ErrorKind.REFUSED, QueryFailed) as refused:
            await three.ask(three.query(batch, PART), batch)
        assert refused.value.http_status == 422 and not refused.value.taken
        assert "spend_in_parts" in refused.value.hint and "--use-up" in refused.value.hint
        # Nothing was spent, and an answer at a part of what was paid uses the reports up, as before.
        result = await three.ask(three.query(batch, replace(PART, keeps_rest=None)), batch)
        assert result.answer.counted == 5
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(three.query(batch, replace(PART, keeps_rest=False)), batch)


async def refused(three: ThreeHelpers, batch: BatchReader, micros: int, reason: Rejection) -> QueryFailed:
    """Ask for a part that no helper grants; return the failure."""
    with pytest.raises(QueryFailed) as failed:
        await three.ask(three.query(batch, replace(PART, epsilon_micros=micros)), batch)
    assert failed.value.shortfall is not None
    assert failed.value.shortfall.left_out == ({reason: 5},) * PARTIES
    return failed.value


async def stop_and_lose(three: ThreeHelpers, lost: int) -> None:
    for party in range(PARTIES):
        await three.stop(party)
    lose(three, lost)


def exports(three: ThreeHelpers, lost: int, name: str) -> list[Path]:
    """The files of both peers for a helper that lost its ledger."""
    files = {party: three.folder / f"{name}-{party}" for party in range(PARTIES) if party != lost}
    for party, file in files.items():
        export(*opened(three, party), lost, file)
    return list(files.values())


async def accept_and_start(three: ThreeHelpers, lost: int) -> None:
    for party in {0, 1, 2} - {lost}:
        accept_peer(*opened(three, party), lost)
    for party in range(PARTIES):
        await three.start(party)


async def test_a_ledger_rebuilt_from_the_older_of_two_exports_is_refused(tmp_path: Path) -> None:
    """The files of an earlier loss are at hand: both peers notice that the new ledger knows too little of theirs."""
    async with three_helpers(tmp_path, options={"spend_in_parts": True}) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))
        assert (await three.ask(three.query(batch, PART), batch)).answer.counted == 5
        await stop_and_lose(three, 1)
        older = exports(three, 1, "older")
        rebuild(*opened(three, 1), older, real_now())
        await accept_and_start(three, 1)
        assert (await three.ask(three.query(batch, PART), batch)).answer.counted == 5
        await stop_and_lose(three, 1)
        newer = exports(three, 1, "newer")
        rebuild(*opened(three, 1), older, real_now())
        await accept_and_start(three, 1)
        for _ in range(2):
            # Also after the peers have started again: the new ledger was told nothing that it did not know.
            failed = await three.fails(batch, replace(PART, seconds=3))
            assert "helper 2 was rebuilt from older entries" in str(failed)
            for party in range(PARTIES):
                await three.stop(party)
                await three.start(party)
        await stop_and_lose(three, 1)
        rebuild(*opened(three, 1), newer, real_now())
        await accept_and_start(three, 1)
        await refused(three, batch, 600_001, Rejection.TOO_LITTLE_LEFT)
        assert (await three.ask(three.query(batch, PART), batch)).answer.counted == 5


async def test_two_ledgers_lost_in_turn_beside_a_helper_that_claims_more_than_was_paid(tmp_path: Path) -> None:
    """Helper 3 exports 2^32 - 1 for every report. Of a report that was never counted nobody contradicts it."""
    async with three_helpers(tmp_path, options={"spend_in_parts": True}) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))
        claimed = sorted(bytes(row) for row in batch.digests())

        async def lose_beside_a_liar(lost: int) -> None:
            await stop_and_lose(three, lost)
            files = exports(three, lost, f"lost-{lost}")
            _, liar = opened(three, 2)
            honest = Export.open(files[1].read_bytes(), opened(three, lost)[1])
            rows = np.frombuffer(b"".join(claimed), dtype=np.uint8).reshape(-1, 32)
            lie = Entries(0, rows, np.full(5, EVERYTHING, dtype=np.uint32), np.zeros(5, dtype=np.uint8))
            files[1].write_bytes(replace(honest, entries=lie).seal(liar))
            rebuild(*opened(three, lost), files, real_now())
            await accept_and_start(three, lost)

        await lose_beside_a_liar(0)
        most = replace(PART, epsilon_micros=900_000)
        assert (await three.ask(three.query(batch, most), batch)).answer.counted == 5
        await lose_beside_a_liar(1)
        await refused(three, batch, 100_001, Rejection.TOO_LITTLE_LEFT)
        assert (await three.ask(three.query(batch, replace(PART, epsilon_micros=100_000)), batch)).answer.counted == 5
        await refused(three, batch, 20_000, Rejection.SEEN)


async def test_an_operator_in_doubt_leaves_nothing_of_what_peers_list(tmp_path: Path) -> None:
    """`trefoil ledger rebuild --all-spent`: what is listed is spent at one helper, and so at all three."""
    async with three_helpers(tmp_path, options={"spend_in_parts": True}) as three:
        batch, fresh = (three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4))) for _ in range(2))
        assert (await three.ask(three.query(batch, PART), batch)).answer.counted == 5
        await stop_and_lose(three, 1)
        files = [word for file in exports(three, 1, "from") for word in ("--entries", str(file))]
        line = ["ledger", "rebuild", "--config", str(three.trio.config_path(1)), *files, "--all-spent"]
        assert CliRunner().invoke(app, line).exit_code == 0
        await accept_and_start(three, 1)
        with pytest.raises(QueryFailed) as failed:
            await three.ask(three.query(batch, replace(PART, epsilon_micros=20_000)), batch)
        assert failed.value.shortfall is not None
        assert failed.value.shortfall.left_out == ({}, {Rejection.SEEN: 5}, {})
        assert (await three.ask(three.query(fresh, PART), fresh)).answer.counted == 5


async def test_a_query_of_version_2_is_answered_and_fetched(tmp_path: Path) -> None:
    """An upgrade does not lose answers: it is found under its own digest, also after it was released."""
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))
        new, key = three.query(batch), three.site_key()
        query = replace(new.query, version=VERSION_WITHOUT_REST)
        old = replace(new, signed=SignedQuery.sign(query, key), permits=make_permits(query, key))
        old.save(tmp_path / "old.json")
        old = SavedQuery.load(tmp_path / "old.json")
        assert old.query.version == VERSION_WITHOUT_REST and old.query.digest != new.query.digest
        first = await three.ask(old, batch)
        again = await Querier(three.helper_set).fetch(old)
        assert first.answer.counted == 5 and again.answer == first.answer
        # Its reports are used up for queries of either version, and the shortfall says so.
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(three.query(batch), batch)
