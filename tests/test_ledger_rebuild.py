"""A lost ledger, rebuilt from both peers: nothing that was counted is counted again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpc_helpers.identity.config import HelperConfig, load_config
from mpc_helpers.identity.membership import Membership, load_membership
from mpc_helpers.ledger.rebuild import Export, accept_peer, create, export, rebuild
from mpc_helpers.ledger.reports import Entries
from protocol.errors import ProtocolError, TrefoilError
from protocol.querier.query_failed import QueryFailed
from protocol.querier.saved_query import QueryOptions
from tests.support.three_helpers import ThreeHelpers, real_now, terms, three_helpers


def opened(three: ThreeHelpers, party: int) -> tuple[HelperConfig, Membership]:
    config = load_config(three.trio.config_path(party))
    return config, load_membership(config, real_now())


def lose(three: ThreeHelpers, party: int) -> None:
    path = opened(three, party)[0].ledger
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


async def test_after_a_loss_the_union_of_both_peers_counts_as_spent(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        await three.ask(three.query(batch), batch)
        for party in range(3):
            await three.stop(party)
        lose(three, 1)
        files = [tmp_path / "from-1", tmp_path / "from-3"]
        for party, file in zip((0, 2), files, strict=True):
            export(*opened(three, party), 1, file)
        with pytest.raises(TrefoilError, match="both peers"):
            rebuild(*opened(three, 1), [files[0], files[0]], real_now())
        rebuild(*opened(three, 1), files, real_now())
        with pytest.raises(TrefoilError, match="not replaced"):
            rebuild(*opened(three, 1), files, real_now())
        for party in (0, 2):
            accept_peer(*opened(three, party), 1)
        for party in range(3):
            await three.start(party)
        fresh = three.seal([[0, 1]] * 36, terms(2))
        mixed = three.batch([*fresh, *batch])
        result = await three.ask(three.query(mixed), mixed)
        assert result.answer.counted == 36
        assert [sum(counts.values()) for counts in result.answer.rejections] == [4, 4, 4]
        with pytest.raises(QueryFailed, match="all 4 reports were counted before"):
            await three.ask(three.query(batch), batch)


async def test_a_rebuilt_ledger_that_nobody_accepted_is_refused_by_its_peers(tmp_path: Path) -> None:
    async with three_helpers(tmp_path) as three:
        batch = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        await three.ask(three.query(batch), batch)
        for party in range(3):
            await three.stop(party)
        lose(three, 1)
        for party in (0, 2):
            export(*opened(three, party), 1, tmp_path / f"from-{party}")
        rebuild(*opened(three, 1), [tmp_path / "from-0", tmp_path / "from-2"], real_now())
        for party in range(3):
            await three.start(party)
        fresh = three.batch(three.seal([[1, 0]] * 4, terms(2)))
        with pytest.raises(QueryFailed, match="helper 2 has another ledger") as refused:
            await three.ask(three.query(fresh, QueryOptions(seconds=2)), fresh)
        assert refused.value.helpers == (1,)


async def test_entries_are_believed_only_with_the_right_signature_for_the_right_helper(tmp_path: Path) -> None:
    async with three_helpers(tmp_path, start=False) as three:
        path = tmp_path / "entries"
        export(*opened(three, 0), 1, path)
        _, second = opened(three, 1)
        _, third = opened(three, 2)
        assert Export.open(path.read_bytes(), second).party == 0
        with pytest.raises(ProtocolError, match="not a peer's entries for this helper"):
            Export.open(path.read_bytes(), third)
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        with pytest.raises(ProtocolError, match="not signed by helper-1"):
            Export.open(bytes(changed), second)
        with pytest.raises(TrefoilError, match="not one of the two others"):
            export(*opened(three, 0), 0, path)


async def test_a_peer_cannot_have_all_reports_refused_by_a_large_watermark(tmp_path: Path) -> None:
    """Signed and in order, but for a watermark that no honest helper has: refused by name, and no ledger is made."""
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 1)
        config, membership = opened(three, 1)
        files = [tmp_path / "from-1", tmp_path / "from-3"]
        for party, file in zip((0, 2), files, strict=True):
            export(*opened(three, party), 1, file)
        _, bad = opened(three, 2)
        for claimed in (real_now(), 2**62):
            nothing = Entries(claimed, np.empty((0, 32), dtype=np.uint8))
            files[1].write_bytes(Export(2, 1, nothing).seal(bad))
            with pytest.raises(TrefoilError, match="helper-3 claims to have forgotten reports"):
                rebuild(config, membership, files, real_now())
            assert not config.ledger.exists()


async def test_a_ledger_is_not_created_where_one_has_been(tmp_path: Path) -> None:
    """An empty ledger in place of the lost one would count reports again."""
    async with three_helpers(tmp_path, start=False) as three:
        lose(three, 1)
        config, membership = opened(three, 1)
        with pytest.raises(TrefoilError, match="has had a ledger") as refused:
            create(config, membership)
        assert "trefoil ledger rebuild" in refused.value.hint
        assert not config.ledger.exists()
