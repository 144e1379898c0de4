"""Commands of operators that change files: sites of a configuration, certificates and the entry they are pinned in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import load_config
from mpc_helpers.local.launcher import Trio, prepare
from protocol.collector.server import _context
from protocol.errors import TrefoilError
from protocol.keys import IdentityKey
from protocol.set_files import read_entry
from tests.support.three_helpers import SITE
from trefoil import app

NOW = 1_800_000_000
KEY = IdentityKey.generate().public


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return prepare(tmp_path_factory.mktemp("sites") / "trio", now=NOW)


def trefoil(*words: object) -> str:
    """What a command says, or what it complains about."""
    done = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(done.exception, TrefoilError):
        return f"error: {done.exception} ({done.exception.hint})"
    assert done.exit_code == 0, done.output
    return done.output


def test_a_site_is_added_listed_replaced_and_removed(trio: Trio) -> None:
    config = trio.config_path(0)
    others = {name: value for name, value in json.loads(config.read_text()).items() if name != "sites"}
    trefoil("site", "add", "new.example", "--key", KEY.hex(), "--caller", "agency.example", "--config", config)
    site = load_config(config).sites["new.example"]
    assert (site.key, sorted(site.callers)) == (KEY, ["agency.example"])
    assert "error: new.example is registered already (Say --replace" in trefoil(
        "site", "add", "new.example", "--key", "00" * 32, "--config", config
    )
    assert load_config(config).sites["new.example"] == site
    other = IdentityKey.generate().public
    trefoil("site", "add", "new.example", "--key", other.hex(), "--replace", "--config", config)
    assert load_config(config).sites["new.example"].callers == {"new.example"}
    listed = trefoil("site", "list", "--config", config).splitlines()
    assert [line.split()[0] for line in listed] == ["new.example", SITE]
    assert other.hex() in listed[0]
    trefoil("site", "remove", "new.example", "--config", config)
    assert list(load_config(config).sites) == [SITE]
    assert "error: new.example is not registered" in trefoil("site", "remove", "new.example", "--config", config)
    assert {name: value for name, value in json.loads(config.read_text()).items() if name != "sites"} == others
    assert config.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("site", "key", "said"),
    [
        ("new.example", "zz", "not hexadecimal"),
        ("new.example", "00" * 31, "32 bytes"),
        ("not a site", "00" * 32, "site"),
    ],
)
def test_what_is_no_site_leaves_the_file_as_it_was(trio: Trio, site: str, key: str, said: str) -> None:
    before = trio.config_path(1).read_bytes()
    complaint = trefoil("site", "add", site, "--key", key, "--config", trio.config_path(1))
    assert complaint.startswith("error: ")
    assert said in complaint
    assert trio.config_path(1).read_bytes() == before


def test_a_certificate_for_a_collector_or_for_a_helper_s_next_set(trio: Trio, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    said = trefoil("keygen", "tls", "--name", "shop.example", "--dir", folder, "--days", 10)
    _context(folder / "tls.crt", folder / "tls.key")  # as the collector takes it
    der = tls.load_certificate(folder / "tls.crt")
    assert tls.pin_of(der).hex() in said
    assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600
    assert "error: " in trefoil("keygen", "tls", "--name", "shop.example", "--dir", folder)
    assert tls.load_certificate(folder / "tls.crt") == der  # nothing is overwritten
    made = tmp_path / "north"
    trefoil("keygen", "helper", "--name", "north", "--address", "https://127.0.0.1:1", "--dir", made)
    old = read_entry(made / "entry.json")
    trefoil("keygen", "tls", "--name", "north", "--dir", made / "next", "--entry", made / "entry.json")
    new = read_entry(made / "entry.json")
    assert new.tls_pin == tls.pin_of(tls.load_certificate(made / "next" / "tls.crt")) != old.tls_pin
    assert (new.identity_key, new.hpke_keys, new.address) == (old.identity_key, old.hpke_keys, old.address)
