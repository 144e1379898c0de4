"""Where a test puts a ledger: in a file or in PostgreSQL, on which the same tests run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from mpc_helpers.identity.config import HelperConfig, LedgerLocation, PostgresLocation, load_config, read_config
from mpc_helpers.identity.membership import load_membership
from mpc_helpers.ledger import ledger as ledger_module
from mpc_helpers.ledger.rebuild import create
from mpc_helpers.local.launcher import Trio
from tests.support import private_postgres

ENGINES = ("sqlite", "postgres")


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

    with mock.patch.object(ledger_module, "engine_at", engine_of):
        yield


def in_postgres(statement: str) -> str:
    """The statement with bytes as PostgreSQL writes them."""
    for sqlite, other in (("randomblob(32)", "sha256('new')"), ("zeroblob(32)", f"x'{'00' * 32}'")):
        statement = statement.replace(sqlite, other)
    return re.sub(r"x'([0-9a-f]*)'", r"decode('\1', 'hex')", statement)
