"""Every mistake in a helper's configuration is named before anything is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpc_helpers.identity.config import ConfigError, load_config
from mpc_helpers.identity.keygen import add_hpke_key
from mpc_helpers.identity.membership import destroy_expired_keys, load_membership
from mpc_helpers.local.launcher import Trio, prepare
from protocol.errors import TrefoilError
from protocol.helper_set import HelperEntry, HelperSet
from protocol.keys import IdentityKey, load_identity, save_identity
from protocol.query import NoiseMode
from protocol.seconds import DAY
from protocol.set_files import write_set

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
    ("change", "complaint"),
    [
        (lambda stored: stored.pop("ledger"), "'ledger' is missing"),
        (lambda stored: stored.update(colour="red"), "unknown field 'colour'"),
        (lambda stored: stored.update(seed=1), "unknown field 'seed'"),
        (lambda stored: stored.update(failpoints="all"), "unknown field 'failpoints'"),
        (lambda stored: stored.update(port="8443"), "'port' must be a whole number"),
        (lambda stored: stored.update(port=True), "'port' must be a whole number"),
        (lambda stored: stored.update(port=70000), "a port is 0 to 65535"),
        (lambda stored: stored.update(mpc_ports=[1, "2"]), "every entry of 'mpc_ports'"),
        (lambda stored: stored.update(report_lifetime_days=0), "1 to 365 days"),
        (lambda stored: stored.update(processes=-1), "processes"),
        (lambda stored: stored.update(limits={"noise": 0}), "unknown limit"),
        (lambda stored: stored.update(limits={"running": 0}), "limit running"),
        (lambda stored: stored.update(limits={"running": True}), "limit running"),
        (lambda stored: stored.update(sites={"Shop.Example": {"key": "00" * 32}}), "lower case"),
        (lambda stored: stored.update(sites={"a.example": {"key": "zz"}}), "not hexadecimal"),
        (lambda stored: stored.update(sites={"a.example": {"key": "00"}}), "32 bytes"),
        (lambda stored: stored.update(sites={"a.example": {"callers": []}}), "'key' is missing"),
        (lambda stored: stored.update(sites={"a.example": "key"}), "expected an object"),
        (lambda stored: stored.update(noise_modes=["loud"]), "unknown noise mode 'loud'"),
        (lambda stored: stored.update(noise_modes=[]), "noise_modes names at least one"),
        (lambda stored: stored.update(noise_modes=["local", "local"]), "none twice"),
        (lambda stored: stored.update(noise_modes="joint"), "'noise_modes' must be a list"),
        (lambda stored: stored.update(trefoil_helper=2), "not a helper's configuration"),
    ],
)
def test_each_mistake_has_its_message(trio: Trio, change: Callable[[dict[str, Any]], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(edit(trio, change))


def test_joint_noise_has_to_be_named(trio: Trio) -> None:
    """It makes (ε, δ) of the ε that devices paid, which is for the operator to allow. The launcher allows all."""
    assert load_config(trio.config_path(0)).noise_modes == tuple(NoiseMode)
    without = load_config(edit(trio, lambda stored: stored.pop("noise_modes")))
    assert without.noise_modes == (NoiseMode.LOCAL, NoiseMode.PAIRWISE)
    assert load_config(edit(trio, lambda stored: stored.update(noise_modes=["joint"]))).noise_modes == (
        NoiseMode.JOINT,
    )


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path / "broken.json")


def refused(trio: Trio, complaint: str, now: int = NOW) -> None:
    with pytest.raises(TrefoilError, match=complaint):
        load_membership(load_config(trio.config_path(0)), now)


def test_keys_that_others_can_read_are_refused(trio: Trio) -> None:
    (trio.helper_folder(0) / "identity.key").chmod(0o644)
    refused(trio, "can be read by others")


def test_a_key_of_another_helper_is_refused(trio: Trio) -> None:
    own = trio.helper_folder(0) / "identity.key"
    own.unlink()
    save_identity(own, IdentityKey.generate())
    refused(trio, "belongs to none of the three helpers")


def test_a_name_that_is_not_the_sets_is_refused(trio: Trio) -> None:
    edit(trio, lambda stored: stored.update(name="north"))
    refused(trio, "calls this helper helper-1")


def test_a_certificate_that_is_not_pinned_is_refused(trio: Trio) -> None:
    edit(trio, lambda stored: stored.update(tls_certificate="../helper-2/tls.crt"))
    refused(trio, "not the certificate that the helper set pins")


def test_a_missing_hpke_key_is_refused(trio: Trio) -> None:
    next((trio.helper_folder(0) / "hpke").iterdir()).unlink()
    refused(trio, "lacks the private key")


def test_a_clock_outside_every_keys_validity_is_noticed(trio: Trio) -> None:
    refused(trio, "no HPKE key of helper-1 is valid now", NOW - 400 * DAY)
    refused(trio, "no HPKE key of helper-1 is valid now", NOW + 100 * DAY)


def test_a_set_that_not_all_have_signed_is_refused(trio: Trio) -> None:
    helper_set = trio.helper_set
    write_set(trio.helper_set_path, HelperSet(1, helper_set.helpers, helper_set.signatures[:2]))
    refused(trio, "not signed by helper-3")


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
    refused(trio, "in another place")
