"""A report's ε in parts, at helpers: amounts from headers, the setting, and answers up to what was paid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.agreement.messages import pack_mask
from mpc_helpers.agreement.negotiation import AdmittedBatch, AttemptTerms, Negotiation
from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.ledger.engine import LedgerError
from mpc_helpers.ledger.rebuild import accept_peer, export, rebuild
from mpc_helpers.local.launcher import prepare
from mpc_helpers.mpc.failed_proofs import FailedProofs
from mpc_helpers.service.policy import Policy, Refusal
from protocol.amounts import Amount, Amounts
from protocol.batch import BatchReader
from protocol.errors import ErrorKind, ProtocolError, Rejection
from protocol.left_out import code_of, counts_of
from protocol.noise import NoiseMode
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
        proofs = FailedProofs(tmp_path / f"proofs-{party}")
        off = Policy(member, config, proofs, real_now)
        with raises(ErrorKind.REFUSED, Refusal) as refused:
            off.check_acceptable(query, [])
        assert refused.value.http_status == 422 and f"helper {party + 1}" in refused.value.hint
        off.check_acceptable(replace(query, keeps_rest=False), [])
        Policy(member, replace(config, spend_in_parts=True), proofs, real_now).check_acceptable(query, [])


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


async def test_answers_cost_together_at_most_what_was_paid(tmp_path: Path) -> None:
    """0.2 + 0.5 + 0.2 + 0.1 of 1, in two noise modes, with a ledger that is lost and rebuilt in between."""
    async with three_helpers(tmp_path, options={"spend_in_parts": True}) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))

        async def answered(micros: int, noise: NoiseMode) -> bool:
            wishes = replace(PART, epsilon_micros=micros, noise=noise)
            return (await three.ask(three.query(batch, wishes), batch)).answer.counted == 5

        assert await answered(200_000, NoiseMode.LOCAL)
        assert await answered(500_000, NoiseMode.PAIRWISE)
        for party in range(PARTIES):
            await three.stop(party)
        lose(three, 1)
        for party in (0, 2):
            export(*opened(three, party), 1, tmp_path / f"from-{party}")
        rebuild(*opened(three, 1), [tmp_path / "from-0", tmp_path / "from-2"], real_now())
        for party in (0, 2):
            accept_peer(*opened(three, party), 1)
        for party in range(PARTIES):
            await three.start(party)
        little = await refused(three, batch, 300_001, Rejection.TOO_LITTLE_LEFT)
        assert "0.3 " in little.hint, "what can be asked for"
        assert await answered(200_000, NoiseMode.LOCAL)
        await refused(three, batch, 100_001, Rejection.TOO_LITTLE_LEFT)
        assert await answered(100_000, NoiseMode.PAIRWISE)
        await refused(three, batch, 1, Rejection.SEEN)
        await refused(three, batch, 15_625, Rejection.SEEN)
        # Helper 2 has voted since. A ledger rebuilt from the files of that time would leave 0.3 again.
        for party in range(PARTIES):
            await three.stop(party)
        for party in (0, 2):
            with raises(ErrorKind.ROLLED_BACK, LedgerError):
                accept_peer(*opened(three, party), 1)


async def test_one_helper_whose_setting_is_off_refuses_and_the_rest_can_be_used_up(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, options={"spend_in_parts": True}) as three:
        batch = three.batch(three.seal([[1, 0, 0, 0]] * 5, terms(4)))
        assert (await three.ask(three.query(batch, PART), batch)).answer.counted == 5
        await three.stop(1)
        path = three.trio.config_path(1)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"spend_in_parts": False}))
        await three.start(1)
        with raises(ErrorKind.REFUSED, QueryFailed) as off:
            await three.ask(three.query(batch, PART), batch)
        assert off.value.http_status == 422 and "helper 2" in off.value.hint
        # What is left of split reports can still be used up, and no more than that.
        whole = replace(PART, keeps_rest=False)
        with pytest.raises(QueryFailed) as failed:
            await three.ask(three.query(batch, replace(whole, epsilon_micros=800_001)), batch)
        assert failed.value.shortfall is not None
        assert failed.value.shortfall.left_out == ({Rejection.TOO_LITTLE_LEFT: 5},) * PARTIES
        assert (await three.ask(three.query(batch, replace(whole, epsilon_micros=300_000)), batch)).answer.counted == 5
        with raises(ErrorKind.ALREADY_COUNTED, QueryFailed):
            await three.ask(three.query(batch, replace(whole, epsilon_micros=100_000)), batch)


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
