"""A helper's configuration: every mistake is named before anything is opened; SIGHUP reloads the sites alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mpc_helpers.identity import tls
from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.identity.keygen import add_hpke_key
from mpc_helpers.identity.membership import destroy_expired_keys, load_membership
from mpc_helpers.local.launcher import Launched, Trio, health, launched_helpers, prepare
from mpc_helpers.service.daemon import PROCESS_FILE, request_reload
from protocol.cli.app import app
from protocol.collector.server import _context
from protocol.errors import ErrorKind, TrefoilError
from protocol.helper_set import HelperEntry, HelperSet, read_entry, write_set
from protocol.keys import IdentityKey, load_identity, save_identity
from protocol.noise import NoiseMode
from protocol.querier.ask import Querier
from protocol.querier.failure import QueryFailed
from protocol.querier.saved_query import QueryOptions, make_query
from protocol.shares import PARTIES
from protocol.units import DAY
from tests.support.raising import raises
from tests.support.three_helpers import SITE, real_now, seal_all, terms, wait_until, write_batch

NOW = 1_800_000_000


@pytest.fixture
def trio(tmp_path: Path) -> Trio:
    return prepare(tmp_path / "trio", now=NOW)


def edit(trio: Trio, change: Callable[[dict[str, Any]], object]) -> Path:
    path = trio.config_path(0)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    return path


def test_what_the_launcher_writes_is_accepted(trio: Trio) -> None:
    for party in range(3):
        config = load_config(trio.config_path(party))
        membership = load_membership(config, NOW)
        assert membership.party == party
        assert membership.peers == tuple(other for other in range(3) if other != party)
        assert len(membership.hpke) == 1
        assert config.report_lifetime == 30 * DAY


@pytest.mark.parametrize(
    ("change", "kind", "datum"),
    [
        (lambda stored: stored.pop("ledger"), ErrorKind.MISSING_FIELD, "ledger"),
        (lambda stored: stored.update(colour="red"), ErrorKind.UNKNOWN_FIELD, "colour"),
        (lambda stored: stored.update(seed=1), ErrorKind.UNKNOWN_FIELD, "seed"),
        (lambda stored: stored.update(failpoints="all"), ErrorKind.UNKNOWN_FIELD, "failpoints"),
        (lambda stored: stored.update(port="8443"), ErrorKind.WRONG_TYPE, "port"),
        (lambda stored: stored.update(port=True), ErrorKind.WRONG_TYPE, "port"),
        (lambda stored: stored.update(port=70000), ErrorKind.OUT_OF_RANGE, "port"),
        (lambda stored: stored.update(port=0), ErrorKind.OUT_OF_RANGE, "port"),
        (lambda stored: stored.update(mpc_ports=[-1]), ErrorKind.OUT_OF_RANGE, "mpc_ports"),
        (lambda stored: stored.update(mpc_ports=[0, 18442]), ErrorKind.OUT_OF_RANGE, "mpc_ports"),
        (lambda stored: stored.update(mpc_ports=[1, "2"]), ErrorKind.WRONG_TYPE, "mpc_ports"),
        (lambda stored: stored.update(report_lifetime_days=0), ErrorKind.OUT_OF_RANGE, "365"),
        (lambda stored: stored.update(processes=-1), ErrorKind.OUT_OF_RANGE, "processes"),
        (lambda stored: stored.update(data="da\0ta"), ErrorKind.WRONG_TYPE, "data"),
        (lambda stored: stored.update(previous_helper_sets=["\0"]), ErrorKind.WRONG_TYPE, "previous_helper_sets"),
        (lambda stored: stored.update(ledger="postgresql://["), ErrorKind.MALFORMED, "ledger"),
        (lambda stored: stored.update(ledger="mysql://host/trefoil"), ErrorKind.INVALID_VALUE, "ledger"),
        (lambda stored: stored.update(ledger="host=/run dbname=trefoil"), ErrorKind.INVALID_VALUE, "ledger"),
        (lambda stored: stored.update(ledger="postgresql:///t?schema=a&schema=b"), ErrorKind.DUPLICATE, "ledger"),
        (lambda stored: stored.update(ledger="postgresql:///t?schema="), ErrorKind.INVALID_VALUE, "ledger"),
        (lambda stored: stored.update(limits={"noise": 0}), ErrorKind.UNKNOWN_FIELD, "noise"),
        (lambda stored: stored.update(limits={"running": 0}), ErrorKind.INVALID_VALUE, "running"),
        (lambda stored: stored.update(limits={"running": True}), ErrorKind.INVALID_VALUE, "running"),
        (
            lambda stored: stored.update(sites={"Shop.Example": {"key": "00" * 32}}),
            ErrorKind.INVALID_VALUE,
            "Shop.Example",
        ),
        (lambda stored: stored.update(sites={"a.example": {"key": "zz"}}), ErrorKind.MALFORMED, "a.example"),
        (lambda stored: stored.update(sites={"a.example": {"key": "00"}}), ErrorKind.INVALID_VALUE, "32"),
        (lambda stored: stored.update(sites={"a.example": {"callers": []}}), ErrorKind.MISSING_FIELD, "key"),
        (lambda stored: stored.update(sites={"a.example": "key"}), ErrorKind.UNKNOWN_FIELD, "a.example"),
        (lambda stored: stored.update(noise_modes=["loud"]), ErrorKind.UNKNOWN_NAME, "loud"),
        (lambda stored: stored.update(noise_modes=[]), ErrorKind.DUPLICATE, "noise_modes"),
        (lambda stored: stored.update(noise_modes=["local", "local"]), ErrorKind.DUPLICATE, "noise_modes"),
        (lambda stored: stored.update(noise_modes="joint"), ErrorKind.WRONG_TYPE, "noise_modes"),
        (lambda stored: stored.update(trefoil_helper=2), ErrorKind.WRONG_FILE, "config.json"),
    ],
)
def test_each_mistake_has_its_kind_and_names_its_field(
    trio: Trio, change: Callable[[dict[str, Any]], object], kind: ErrorKind, datum: str
) -> None:
    with raises(kind, ConfigError) as caught:
        load_config(edit(trio, change))
    assert datum in str(caught.value)


def test_joint_noise_has_to_be_named(trio: Trio) -> None:
    """It makes (ε, δ) of the ε that devices paid, which is for the operator to allow. The launcher allows all."""
    assert load_config(trio.config_path(0)).noise_modes == tuple(NoiseMode)
    without = load_config(edit(trio, lambda stored: stored.pop("noise_modes")))
    assert without.noise_modes == (NoiseMode.LOCAL, NoiseMode.PAIRWISE)
    assert load_config(edit(trio, lambda stored: stored.update(noise_modes=["joint"]))).noise_modes == (
        NoiseMode.JOINT,
    )


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with raises(ErrorKind.FILE_UNREADABLE, ConfigError):
        load_config(tmp_path / "nothing.json")
    for broken in ("{", "[" * 100_000):
        (tmp_path / "broken.json").write_text(broken)
        with raises(ErrorKind.MALFORMED, ConfigError):
            load_config(tmp_path / "broken.json")


def test_a_field_or_a_site_that_is_there_twice_is_named(trio: Trio) -> None:
    """Python's reader keeps the last of the two: a site would be answered by another key than an operator saw first."""
    path = trio.config_path(0)
    text = path.read_text()
    site = json.dumps({"key": "00" * 32, "callers": [SITE]})
    for repeated, name in (
        (text.replace("{", '{"port": 1,', 1), "port"),
        (text.replace('"sites": {', f'"sites": {{"{SITE}": {site},', 1), SITE),
    ):
        assert json.loads(repeated)
        path.write_text(repeated)
        with raises(ErrorKind.DUPLICATE, ConfigError) as caught:
            load_config(path)
        assert name in str(caught.value) and str(path) in str(caught.value)


def refused(trio: Trio, kind: ErrorKind, now: int = NOW) -> None:
    with raises(kind):
        load_membership(load_config(trio.config_path(0)), now)


def another_identity(trio: Trio) -> None:
    own = trio.helper_folder(0) / "identity.key"
    own.unlink()
    save_identity(own, IdentityKey.generate())


def with_field(**values: str) -> Callable[[Trio], object]:
    return lambda trio: edit(trio, lambda stored: stored.update(values))


def unsigned(trio: Trio) -> None:
    write_set(trio.helper_set_path, HelperSet(1, trio.helper_set.helpers, trio.helper_set.signatures[:2]))


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda trio: (trio.helper_folder(0) / "identity.key").chmod(0o644), ErrorKind.FILE_PERMISSIONS),
        (another_identity, ErrorKind.WRONG_HELPER_SET),
        (with_field(name="north"), ErrorKind.INCONSISTENT),
        (with_field(tls_certificate="../helper-2/tls.crt"), ErrorKind.WRONG_KEY),
        (lambda trio: next((trio.helper_folder(0) / "hpke").iterdir()).unlink(), ErrorKind.FILE_MISSING),
        (unsigned, ErrorKind.BAD_SIGNATURE),
    ],
)
def test_keys_and_sets_that_do_not_fit_are_refused(
    trio: Trio, spoil: Callable[[Trio], object], kind: ErrorKind
) -> None:
    spoil(trio)
    refused(trio, kind)


def test_a_clock_outside_every_keys_validity_is_noticed(trio: Trio) -> None:
    refused(trio, ErrorKind.EXPIRED, NOW - 400 * DAY)
    refused(trio, ErrorKind.EXPIRED, NOW + 100 * DAY)


def rotate(trio: Trio, now: int) -> None:
    """A new set with one more HPKE key for helper 1."""
    first = trio.helper_set.helpers[0]
    renew(trio, replace(first, hpke_keys=(*first.hpke_keys, add_hpke_key(trio.helper_folder(0), now, 90))))


def renew(trio: Trio, renewed: HelperEntry) -> None:
    """A new set in which helper 1 has another entry; the old set is kept as previous."""
    old = trio.helper_set
    write_set(trio.folder / "old.json", old)
    new = HelperSet(2, (renewed, old.helpers[1], old.helpers[2]))
    for party in range(3):
        new = new.signed_by(load_identity(trio.helper_folder(party) / "identity.key"))
    write_set(trio.helper_set_path, new)
    edit(trio, lambda stored: stored.update(previous_helper_sets=["../old.json"]))


def test_previous_sets_are_known_and_expired_keys_destroyed(trio: Trio) -> None:
    later = NOW + 80 * DAY
    rotate(trio, later)
    config = load_config(trio.config_path(0))
    folder = trio.helper_folder(0) / "hpke"
    membership = load_membership(config, later)
    assert len(membership.known_sets) == 2
    assert len(membership.hpke) == 2
    # Expired for devices, but reports sealed to it are still young enough to count.
    destroy_expired_keys(config, membership, NOW + 100 * DAY)
    assert len(load_membership(config, NOW + 100 * DAY).hpke) == 2
    # Loading leaves an expired key out and does not touch it; destroying is an act of its own.
    assert len(load_membership(config, NOW + 121 * DAY).hpke) == 1
    assert len(list(folder.iterdir())) == 2
    destroy_expired_keys(config, membership, NOW + 121 * DAY)
    assert len(list(folder.iterdir())) == len(membership.hpke) == 1


def test_a_key_that_the_new_set_prolongs_is_kept_for_as_long_as_that(trio: Trio) -> None:
    """The old set's earlier date must not end a key to which devices with the new set seal."""
    first = trio.helper_set.helpers[0]
    longer = replace(first.hpke_keys[0], not_after=NOW + 200 * DAY)
    renew(trio, replace(first, hpke_keys=(longer,)))
    config = load_config(trio.config_path(0))
    membership = load_membership(config, NOW)
    destroy_expired_keys(config, membership, NOW + 199 * DAY)
    assert len(load_membership(config, NOW + 199 * DAY).hpke) == len(membership.hpke) == 1
    destroy_expired_keys(config, membership, NOW + 231 * DAY)
    assert membership.hpke == {}


def test_a_key_of_no_set_yet_is_left_alone(trio: Trio) -> None:
    add_hpke_key(trio.helper_folder(0), NOW, 90)
    config = load_config(trio.config_path(0))
    membership = load_membership(config, NOW)
    assert len(membership.hpke) == 1
    destroy_expired_keys(config, membership, NOW + 1000 * DAY)
    assert membership.hpke == {}
    assert len(list((trio.helper_folder(0) / "hpke").iterdir())) == 1


def test_a_helper_that_changed_places_is_refused(trio: Trio) -> None:
    rotate(trio, NOW)
    old = HelperSet.load(trio.folder / "old.json")
    swapped = HelperSet(1, (old.helpers[1], old.helpers[0], old.helpers[2]))
    for party in range(3):
        swapped = swapped.signed_by(load_identity(trio.helper_folder(party) / "identity.key"))
    write_set(trio.folder / "old.json", swapped)
    refused(trio, ErrorKind.WRONG_HELPER_SET)


KEY = IdentityKey.generate().public


def trefoil(*words: object) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(done.exception, TrefoilError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_site_is_added_listed_replaced_and_removed(trio: Trio) -> None:
    config = trio.config_path(0)
    others = {name: value for name, value in json.loads(config.read_text()).items() if name != "sites"}
    trefoil("site", "add", "new.example", "--key", KEY.hex(), "--caller", "agency.example", "--config", config)
    site = load_config(config).sites["new.example"]
    assert (site.key, sorted(site.callers)) == (KEY, ["agency.example"])
    with raises(ErrorKind.DUPLICATE):
        trefoil("site", "add", "new.example", "--key", "00" * 32, "--config", config)
    assert load_config(config).sites["new.example"] == site
    other = IdentityKey.generate().public
    trefoil("site", "add", "new.example", "--key", other.hex(), "--replace", "--config", config)
    assert load_config(config).sites["new.example"].callers == {"new.example"}
    listed = trefoil("site", "list", "--config", config).splitlines()
    assert [line.split()[0] for line in listed] == ["new.example", SITE]
    assert other.hex() in listed[0]
    trefoil("site", "remove", "new.example", "--config", config)
    assert list(load_config(config).sites) == [SITE]
    with raises(ErrorKind.NOT_REGISTERED):
        trefoil("site", "remove", "new.example", "--config", config)
    assert {name: value for name, value in json.loads(config.read_text()).items() if name != "sites"} == others
    assert config.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("site", "key", "kind"),
    [
        ("new.example", "zz", ErrorKind.MALFORMED),
        ("new.example", "00" * 31, ErrorKind.INVALID_VALUE),
        ("not a site", "00" * 32, ErrorKind.INVALID_VALUE),
    ],
)
def test_an_invalid_site_leaves_the_file_as_it_was(trio: Trio, site: str, key: str, kind: ErrorKind) -> None:
    before = trio.config_path(1).read_bytes()
    with raises(kind):
        trefoil("site", "add", site, "--key", key, "--config", trio.config_path(1))
    assert trio.config_path(1).read_bytes() == before


def test_a_certificate_for_a_collector_or_for_a_helper_s_next_set(trio: Trio, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    said = trefoil("keygen", "tls", "--name", "shop.example", "--dir", folder, "--days", 10)
    _context(folder / "tls.crt", folder / "tls.key")  # as the collector takes it
    der = tls.load_certificate(folder / "tls.crt")
    assert tls.pin_of(der).hex() in said
    assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600
    with raises(ErrorKind.FILE_EXISTS):
        trefoil("keygen", "tls", "--name", "shop.example", "--dir", folder)
    assert tls.load_certificate(folder / "tls.crt") == der  # nothing is overwritten
    made = tmp_path / "north"
    trefoil("keygen", "helper", "--name", "north", "--address", "https://127.0.0.1:1", "--dir", made)
    old = read_entry(made / "entry.json")
    trefoil("keygen", "tls", "--name", "north", "--dir", made / "next", "--entry", made / "entry.json")
    new = read_entry(made / "entry.json")
    assert new.tls_pin == tls.pin_of(tls.load_certificate(made / "next" / "tls.crt")) != old.tls_pin
    assert (new.identity_key, new.hpke_keys, new.address) == (old.identity_key, old.hpke_keys, old.address)


NEW_SITE = "new.example"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    options = {"processes": 0, "unchecked_histograms": True}
    folder = tmp_path_factory.mktemp("reloading")
    with launched_helpers(folder / "trio", now=real_now(), sites={SITE: [SITE]}, options=options) as trio:
        yield trio


def trefoil_reloading(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    return done.exit_code, done.output + (str(done.exception) if isinstance(done.exception, TrefoilError) else "")


def ask(running: Launched, folder: Path, site: str, key: IdentityKey) -> int:
    helper_set = running.trio.helper_set
    batch = write_batch(
        folder / os.urandom(4).hex(), seal_all([[1, 0]] * 4, terms(2, site=site, caller=site), helper_set)
    )
    asked = make_query(batch, QueryOptions(seconds=60), helper_set, key, real_now())
    return asyncio.run(Querier(helper_set).ask(asked, batch)).answer.counted


def reloads(running: Launched, party: int = 0) -> Any:
    page = health(running.trio.helper_set.helpers[party])
    assert page is not None
    return page["reloads"]


def test_a_site_is_added_without_a_restart(running: Launched, tmp_path: Path) -> None:
    key = IdentityKey.generate()
    pids = [helper.process.pid for helper in running.helpers if helper.process]
    with pytest.raises(QueryFailed) as failed:
        ask(running, tmp_path, NEW_SITE, key)
    assert failed.value.http_status == 403
    for party in range(PARTIES):
        config = running.trio.config_path(party)
        code, said = trefoil_reloading("site", "add", NEW_SITE, "--key", key.public.hex(), "--config", config)
        assert (code, said.startswith(f"registered {NEW_SITE}")) == (0, True)
        code, said = trefoil_reloading("helper", "reload", "--config", config)
        assert (code, f"helper-{party + 1}" in said) == (0, True)
    assert ask(running, tmp_path, NEW_SITE, key) == 4
    for party in range(PARTIES):
        assert trefoil_reloading("site", "remove", NEW_SITE, "--config", running.trio.config_path(party))[0] == 0
        assert trefoil_reloading("helper", "reload", "--config", running.trio.config_path(party))[0] == 0
    with pytest.raises(QueryFailed) as failed:
        ask(running, tmp_path, NEW_SITE, key)
    assert failed.value.http_status == 403
    assert [helper.process.pid for helper in running.helpers if helper.process] == pids


def configuration_reasons(running: Launched) -> list[str]:
    page = health(running.trio.helper_set.helpers[0]) or {}
    reasons: Any = page["reasons"]
    return [reason["text"] for reason in reasons if reason["concern"] == "configuration"]


def test_a_file_that_cannot_be_used_changes_nothing(running: Launched, tmp_path: Path) -> None:
    config = running.trio.config_path(0)
    good = config.read_text()
    before = reloads(running)
    try:
        config.write_text(good.replace('"sites"', '"sights"'))
        assert trefoil_reloading("helper", "reload", "--config", config)[0] == 1  # the command checks the file first
        assert reloads(running) == before
        process = running.helpers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGHUP)
        wait_until(lambda: reloads(running) == before + 1)
        # The page is public: what is wrong with the file is in the log only.
        assert ["sights" in text for text in configuration_reasons(running)] == [False]
        assert "sights" in running.trio.log_path(0).read_text()
        assert ask(running, tmp_path, SITE, running.site_key(SITE)) == 4
    finally:
        config.write_text(good)
    assert trefoil_reloading("helper", "reload", "--config", config)[0] == 0
    assert configuration_reasons(running) == []


def test_anything_but_sites_waits_for_a_restart(running: Launched, tmp_path: Path) -> None:
    """The new site is used at once; the changed fields are named, and have no effect."""
    config = running.trio.config_path(0)
    good = config.read_text()
    stored = json.loads(good)
    taken = json.loads(running.trio.config_path(1).read_text())["port"]
    key = IdentityKey.generate().public.hex()
    stored["sites"][NEW_SITE] = {"key": key, "callers": [NEW_SITE]}
    try:
        config.write_text(json.dumps({**stored, "port": taken, "answer_days": 1}))
        code, said = trefoil_reloading("helper", "reload", "--config", config)
        assert (code, "port, answer_days" in said) == (1, True)
        assert ["port, answer_days" in text for text in configuration_reasons(running)] == [True]
        assert f"{len(stored['sites'])} are registered" in running.trio.log_path(0).read_text()
        assert ask(running, tmp_path, SITE, running.site_key(SITE)) == 4
    finally:
        config.write_text(good)
    assert trefoil_reloading("helper", "reload", "--config", config)[0] == 0


def test_a_new_set_is_applied_by_restarts_while_a_query_runs(running: Launched, tmp_path: Path) -> None:
    """Submitted under the old set and answered under the new one, by helpers that resume it."""
    old = running.trio.helper_set
    batch = write_batch(tmp_path / "batch", seal_all([[1, 0]] * 400, terms(2), old))
    asked = make_query(batch, QueryOptions(seconds=60), old, running.site_key(SITE), real_now())
    renewed = HelperSet(old.number + 1, old.helpers)
    for party in range(PARTIES):
        renewed = renewed.signed_by(load_identity(running.trio.helper_folder(party) / "identity.key"))

    async def ask_and_renew() -> int:
        taken = asyncio.Event()
        asking = asyncio.create_task(Querier(old).ask(asked, batch, lambda _: taken.set()))
        await taken.wait()
        write_set(running.trio.helper_set_path, renewed)
        await asyncio.gather(*(asyncio.to_thread(running.restart, party) for party in range(PARTIES)))
        async with asyncio.timeout(60):
            return (await asking).answer.counted

    assert asyncio.run(ask_and_renew()) == 400
    assert ask(running, tmp_path, SITE, running.site_key(SITE)) == 4


def test_only_a_running_helper_is_told(tmp_path: Path, running: Launched) -> None:
    config = load_config(running.trio.config_path(0))
    stored = (config.data / PROCESS_FILE).read_text()
    pid = stored.split()[0]
    try:
        missing, gone = ErrorKind.FILE_MISSING, ErrorKind.UNAVAILABLE
        for wrong, kind in (("", missing), (f"{pid} 1", gone), ("999999999 5", gone)):
            (config.data / PROCESS_FILE).write_text(wrong)
            with raises(kind):
                request_reload(config)
    finally:
        (config.data / PROCESS_FILE).write_text(stored)


def test_status_shows_all_three_and_says_so_by_its_exit_code(running: Launched, tmp_path: Path) -> None:
    helper_set = running.trio.helper_set_path
    wait_until(lambda: trefoil_reloading("helper", "status", "--set", helper_set)[0] == 0)
    code, said = trefoil_reloading("helper", "status", "--set", helper_set)
    assert all(helper.name in said for helper in running.trio.helper_set.helpers)
    code, said = trefoil_reloading(
        "helper", "status", "--config", running.trio.config_path(0), "--json", "-", "--helper", 2
    )
    (only,) = json.loads(said)
    assert (code, only["name"], only["ready"], only["health"]["status"]) == (0, "helper-2", True, "ok")
    assert trefoil_reloading("helper", "status")[0] == 2
    assert trefoil_reloading("helper", "status", "--set", helper_set, "--helper", 4)[0] == 1
    running.helpers[2].stop()
    code, said = trefoil_reloading("helper", "status", "--set", helper_set)
    assert code == 75
    running.restart(2)
