"""A report's ε in parts through three real helpers, with a ledger that is lost and rebuilt by commands in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpc_helpers.commands import app
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import Launched, launched_helpers
from protocol.errors import ErrorKind, Rejection
from protocol.noise import NoiseMode
from protocol.querier.failure import QueryFailed
from protocol.querier.query_folder import ask
from protocol.querier.result import QueryResult
from protocol.querier.spending import audit
from protocol.querier.view import list_and_show
from protocol.shares import PARTIES
from tests.support.raising import raises
from tests.support.three_helpers import SITE, seal_all, terms, write_batch

REPORTS = 5


class Shop:
    """A querier with one batch of reports that paid ε = 1."""

    def __init__(self, helpers: Launched, batch: Path) -> None:
        self.helpers, self.batch = helpers, batch
        checked = replace(terms(4), cap=2, spread=1)
        write_batch(batch, seal_all([[1, 0, 0, 0]] * REPORTS, checked, helpers.helper_set))

    def ask(self, micros: int, noise: NoiseMode = NoiseMode.LOCAL, *, keep_rest: bool = True) -> QueryResult:
        # A float may lie just below the millionths that it is written as, and what is asked for is rounded down.
        key, epsilon = self.helpers.site_key(SITE), (micros + 0.5) / 1_000_000
        settings = {"epsilon": epsilon, "noise": noise, "keep_rest": keep_rest, "seconds": 60}
        return ask(self.batch, self.helpers.helper_set, key, new=True, **settings)  # type: ignore[arg-type]

    def answered(self, micros: int, noise: NoiseMode = NoiseMode.LOCAL) -> None:
        assert self.ask(micros, noise).answer.counted == REPORTS

    def refused(self, micros: int, reason: Rejection, *, keep_rest: bool = True) -> QueryFailed:
        """All three leave all reports out."""
        with pytest.raises(QueryFailed) as failed:
            self.ask(micros, keep_rest=keep_rest)
        assert failed.value.shortfall is not None
        assert failed.value.shortfall.left_out == ({reason: REPORTS},) * PARTIES
        return failed.value


def operate(helpers: Launched, party: int, command: str, *words: object) -> int:
    """Run an operator's command on a ledger, and return how it ended."""
    line = ["ledger", command, "--config", helpers.trio.config_path(party), *words]
    return CliRunner().invoke(app, list(map(str, line))).exit_code


def lose_and_rebuild(helpers: Launched, lost: int, folder: Path) -> None:
    peers = [party for party in range(PARTIES) if party != lost]
    for helper in helpers.helpers:
        helper.stop()
    ledger = load_config(helpers.trio.config_path(lost)).ledger_file
    for file in ledger.parent.glob(ledger.name + "*"):
        file.unlink()
    files = {party: folder / f"from-{party}" for party in peers}
    done = [operate(helpers, party, "export", "--lost-by", lost + 1, "--out", file) for party, file in files.items()]
    entries = [word for file in files.values() for word in ("--entries", file)]
    done.append(operate(helpers, lost, "rebuild", *entries))
    done += [operate(helpers, party, "accept-peer", "--helper", lost + 1) for party in peers]
    assert done == [0] * 5
    for party in range(PARTIES):
        helpers.restart(party)


def test_answers_cost_together_at_most_what_was_paid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.2 + 0.5 + 0.2 + 0.1 of 1, a millionth more, and one helper of three whose setting is off."""
    with launched_helpers(tmp_path / "trio", sites={SITE: [SITE]}, options={"spend_in_parts": True}) as helpers:
        shop = Shop(helpers, tmp_path / "batch")
        shop.answered(200_000)
        shop.answered(500_000, NoiseMode.PAIRWISE)
        lose_and_rebuild(helpers, 1, tmp_path)
        assert "0.3 " in shop.refused(300_001, Rejection.TOO_LITTLE_LEFT).hint, "what can be asked for"
        shop.answered(200_000)
        shop.refused(100_001, Rejection.TOO_LITTLE_LEFT)
        shop.answered(100_000, NoiseMode.PAIRWISE)
        shop.refused(1, Rejection.SEEN)
        (spent,) = audit([shop.batch])
        assert spent.left == (0, 0)
        listed = list_and_show(shop.batch, helpers.trio.helper_set_path)
        assert all(entry["keeps_rest"] for entry in listed) and "0.2 of 1, rest kept" in capsys.readouterr().out
        # With its ledger helper 2 lost its shares of the first two answers.
        assert [entry["epsilon_micros"] for entry in listed if entry["answer_held"]] == [200_000, 100_000]
        # Helper 2 has voted since. A ledger rebuilt from the files of that time would leave 0.3 again.
        other = Shop(helpers, tmp_path / "other")
        other.answered(200_000)
        for party in (0, 2):
            helpers.helpers[party].stop()
            assert operate(helpers, party, "accept-peer", "--helper", 2) == 1
        path = helpers.trio.config_path(2)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"spend_in_parts": False}))
        for party in (0, 2):
            helpers.restart(party)
        with raises(ErrorKind.REFUSED, QueryFailed) as off:
            other.ask(200_000)
        assert off.value.http_status == 422 and "helper 3" in off.value.hint
        # What is left of split reports can still be used up, and no more than that.
        other.refused(800_001, Rejection.TOO_LITTLE_LEFT, keep_rest=False)
        assert other.ask(300_000, keep_rest=False).answer.counted == REPORTS
        other.refused(100_000, Rejection.SEEN, keep_rest=False)
