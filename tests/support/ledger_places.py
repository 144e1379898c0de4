"""Where a test puts a ledger: in a file or in PostgreSQL, on which the same tests run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from mpc_helpers.identity.config import HelperConfig, LedgerLocation, PostgresLocation, load_config, read_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger import ledger as ledger_module
from mpc_helpers.ledger.engine import LEDGER_ID_SIZE, LedgerEngine, LedgerOwner
from mpc_helpers.ledger.ledger import engine_at
from mpc_helpers.ledger.rebuild import create
from mpc_helpers.ledger.schema import ELSEWHERE
from mpc_helpers.local.launcher import Trio
from tests.support import private_postgres
from tests.support.commit_world import KEYS
from tests.support.hunt_world import MemoryLedgers


def new_location(engine: str, folder: Path) -> LedgerLocation:
    """A place where no ledger is yet."""
    folder.mkdir(exist_ok=True)
    return folder / "ledger.db" if engine == "sqlite" else private_postgres.server().location()


def on_each_engine(metafunc: pytest.Metafunc) -> None:
    """Run a test that has a `location` or an `engine_name` on both engines, unless it looks at the `path` of a file."""
    skipped = private_postgres.why_not()
    postgres = pytest.param("postgres", marks=pytest.mark.skipif(bool(skipped), reason=skipped))
    engines = ["sqlite"] if "path" in metafunc.fixturenames else ["sqlite", postgres]
    for fixture in {"location", "engine_name"} & set(metafunc.fixturenames):
        metafunc.parametrize(fixture, engines, indirect=fixture == "location")


def configure(trio: Trio, party: int, place: PostgresLocation) -> HelperConfig:
    """Have a helper look for its ledger at this place. Return its configuration."""
    path = trio.config_path(party)
    path.write_text(json.dumps({**read_config(path), "ledger": f"{place.url}&schema={place.schema}"}))
    return load_config(path)


def put_in_postgres(trio: Trio, party: int, place: PostgresLocation) -> HelperConfig:
    """Have a helper that never ran keep its ledger at this place, and create it there. Return its configuration."""
    config = configure(trio, party, place)
    (config.data / "ledger-made").unlink(missing_ok=True)
    create(config, load_membership(config, int(time.time())))
    return config


@contextmanager
def ledgers_in_postgres() -> Iterator[None]:
    """Put every ledger that is created or opened at a path into PostgreSQL instead, under that path."""
    from mpc_helpers.ledger.postgres_engine import PostgresEngine

    @cache
    def engine_of(path: Path) -> PostgresEngine:
        return PostgresEngine(private_postgres.server().location())

    with mock.patch.object(ledger_module, "engine_at", engine_of), _unhurried():
        yield


def _unhurried() -> AbstractContextManager[object]:
    """Let sessions live while this process is paused from outside, which is nothing that a schedule has planned."""
    from mpc_helpers.ledger import postgres_engine

    return mock.patch.dict(postgres_engine._SETTINGS, {"idle_in_transaction_session_timeout": "0"})


def in_postgres(statement: str) -> str:
    """The statement with bytes as PostgreSQL writes them."""
    statement = statement.replace("randomblob(32)", "sha256('new')")
    statement = statement.replace("randomblob(34)", "'ab' || sha256('new')")
    statement = re.sub(r"zeroblob\((\d+)\)", lambda size: f"x'{'00' * int(size[1])}'", statement)
    return re.sub(r"x'([0-9a-f]*)'", r"decode('\1', 'hex')", statement)


class _ReusedSchemas:
    """One schema for each helper, emptied before each schedule of a hunt: creating it takes longer than a schedule."""

    def __init__(self) -> None:
        self._of_party: dict[int, PostgresLocation] = {}
        self._of_path: dict[Path, PostgresLocation] = {}

    def engine_at(self, path: Path) -> LedgerEngine:
        return engine_at(self._of_path[path])

    def create(self, path: Path, owner: LedgerOwner) -> None:
        if owner.party not in self._of_party:
            self._of_party[owner.party] = place = private_postgres.server().location()
            engine_at(place).create(owner, bytes([owner.party]) * LEDGER_ID_SIZE)
        self._of_path[path] = self._of_party[owner.party]
        self._empty(self._of_party[owner.party])

    def _empty(self, place: PostgresLocation) -> None:
        import psycopg

        from mpc_helpers.ledger.postgres_schema import drop_functions

        # As a replica, which runs no triggers: a ledger is never emptied otherwise.
        options = f"-c search_path={place.schema} -c session_replication_role=replica"
        with psycopg.connect(place.conninfo(), options=options) as raw:
            days = raw.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (place.schema,)).fetchall()
            for (table,) in days:
                if table.startswith("reports_"):
                    raw.execute(f"DROP TABLE {table}; {drop_functions(table)}".encode())
            raw.execute("TRUNCATE days, votes, moves, peer_heads, queries, undated")
            raw.execute("DELETE FROM attempts WHERE attempt <> %s", (ELSEWHERE,))
            raw.execute("UPDATE ledger SET watermark = 0")


@contextmanager
def hunted_in_postgres() -> Iterator[None]:
    """Put the ledgers of a hunt into PostgreSQL instead of memory."""
    schemas = _ReusedSchemas()

    def create(_: MemoryLedgers, path: Path, party: int) -> None:
        schemas.create(path, LedgerOwner(party, KEYS[party]))

    created = mock.patch.object(MemoryLedgers, "create", create)
    with created, mock.patch.object(ledger_module, "engine_at", schemas.engine_at), _unhurried():
        yield
