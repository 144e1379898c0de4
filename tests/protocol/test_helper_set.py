"""The helper set: signed by all three, digested without what may change, and read without trusting its types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.helper_set import (
    HelperEntry,
    HelperSet,
    HpkeKeyConfig,
    KeyState,
    check_key_ids,
    entry_to_json,
    join,
    write_set,
)
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey, PublicKey, Suite
from tests.support import protocol_samples as samples
from tests.support.raising import raises

SET = samples.HELPER_SET


def with_first(change: Callable[[HelperEntry], HelperEntry]) -> HelperSet:
    first, second, third = SET.helpers
    return replace(SET, helpers=(change(first), second, third))


def test_json_gives_the_same_set_back() -> None:
    again = HelperSet.from_json(json.loads(json.dumps(SET.to_json())))
    assert again == SET
    assert again.digest == SET.digest
    again.verify()


def test_a_file_is_loaded_only_with_all_three_signatures(tmp_path: Path) -> None:
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps(SET.to_json()))
    assert HelperSet.load(path) == SET
    path.write_text(json.dumps(replace(SET, signatures=SET.signatures[:2]).to_json()))
    with raises(ErrorKind.BAD_SIGNATURE, TrefoilError):
        HelperSet.load(path)
    assert HelperSet.load_unverified(path).digest == SET.digest


@pytest.mark.parametrize("missing", range(3))
def test_each_signature_is_needed(missing: int) -> None:
    signatures = list(SET.signatures)
    signatures[missing] = b""
    with raises(ErrorKind.BAD_SIGNATURE, TrefoilError) as caught:
        replace(SET, signatures=tuple(signatures)).verify()
    assert samples.HELPER_NAMES[missing] in str(caught.value)


def test_a_signature_in_the_target_of_a_join_is_kept(tmp_path: Path) -> None:
    first, second, third = SET.signatures
    for name, signatures in {"a": (first,), "b": (b"", second), "target": (b"", b"", third)}.items():
        write_set(tmp_path / name, replace(SET, signatures=signatures))
    assert join([tmp_path / "a", tmp_path / "b"], tmp_path / "target").have_signed() == [True, True, True]
    assert join([tmp_path / "a"], tmp_path / "new").have_signed() == [True, False, False]
    write_set(tmp_path / "other", replace(SET, number=SET.number + 1))
    before = (tmp_path / "other").read_bytes()
    with raises(ErrorKind.INCONSISTENT, TrefoilError):
        join([tmp_path / "a"], tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == before


def test_who_has_signed_is_told_helper_by_helper() -> None:
    first, _, third = SET.signatures
    assert SET.have_signed() == [True, True, True]
    assert replace(SET, signatures=(first, third)).have_signed() == [True, False, False]
    assert replace(SET, signatures=(b"", b"", third)).have_signed() == [False, False, True]
    assert replace(SET, signatures=()).have_signed() == [False, False, False]


def test_signatures_of_the_wrong_helper_are_refused() -> None:
    first, second, third = SET.signatures
    for wrong in ((second, first, third), (first, first, first), ()):
        with raises(ErrorKind.BAD_SIGNATURE, TrefoilError):
            replace(SET, signatures=wrong).verify()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, address="https://elsewhere.example"),
        lambda one: replace(one, tls_pin=bytes(32)),
    ],
)
def test_address_and_pin_are_signed_but_not_digested(change: Callable[[HelperEntry], HelperEntry]) -> None:
    """Renewing a certificate voids no report, and still needs all three operators."""
    moved = with_first(change)
    assert moved.digest == SET.digest
    with raises(ErrorKind.BAD_SIGNATURE, TrefoilError):
        moved.verify()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, name="Elm"),
        lambda one: replace(one, identity_key=samples.QUERIER.public),
        lambda one: replace(one, hpke_keys=one.hpke_keys[:1]),
        lambda one: replace(one, hpke_keys=one.hpke_keys[::-1]),
        lambda one: replace(one, hpke_keys=(replace(one.hpke_keys[0], not_before=0), one.hpke_keys[1])),
        lambda one: replace(one, hpke_keys=(replace(one.hpke_keys[0], not_after=2**40), one.hpke_keys[1])),
        lambda one: replace(one, hpke_keys=(replace(one.hpke_keys[0], key=samples.ANSWER_KEY.public),)),
    ],
)
def test_names_keys_and_validity_are_digested(change: Callable[[HelperEntry], HelperEntry]) -> None:
    changed = with_first(change)
    assert changed.digest != SET.digest
    with raises(ErrorKind.BAD_SIGNATURE, TrefoilError):
        changed.verify()


def test_the_number_is_signed_and_the_order_digested() -> None:
    renumbered = replace(SET, number=8)
    assert renumbered.digest == SET.digest
    with pytest.raises(TrefoilError):
        renumbered.verify()
    first, second, third = SET.helpers
    assert replace(SET, helpers=(second, first, third)).digest != SET.digest


def test_a_strangers_key_cannot_sign() -> None:
    assert SET.sign(samples.IDENTITIES[1]) == SET.signatures[1]
    with raises(ErrorKind.WRONG_KEY, TrefoilError):
        SET.sign(samples.QUERIER)


def test_key_states_through_a_life() -> None:
    config = HpkeKeyConfig(samples.KEYS[0].public, 100, 200)
    states = [config.state(now) for now in (0, 99, 100, 199, 200, 10**9)]
    pending, active, expired = KeyState.PENDING, KeyState.ACTIVE, KeyState.EXPIRED
    assert states == [pending, pending, active, active, expired, expired]


def test_devices_seal_to_the_active_key_that_lasts_longest() -> None:
    entry = samples.helper_entry(0)
    assert entry.active_key(samples.OLD_END - 1, CLASSICAL) == samples.KEYS[0].public
    only_old = replace(entry, hpke_keys=entry.hpke_keys[1:])
    assert only_old.active_key(samples.OLD_END - 1, CLASSICAL) == samples.OLD_KEYS[0].public
    old_set = replace(SET, helpers=(only_old, *SET.helpers[1:]))
    for now in (samples.SET_START - 1, samples.OLD_END):
        assert only_old.active_key(now, CLASSICAL) is None
        with raises(ErrorKind.EXPIRED, TrefoilError) as caught:
            old_set.sealing_keys(now)
        assert "Alder" in str(caught.value)


def with_keys(*more: tuple[PrivateKey, int, int]) -> HelperSet:
    """The set with one more key for each helper that is named here, in order: key, not_before, not_after."""
    helpers = list(SET.helpers)
    for party, (key, start, end) in enumerate(more):
        config = HpkeKeyConfig(key.public, start, end)
        helpers[party] = replace(helpers[party], hpke_keys=(*helpers[party].hpke_keys, config))
    return HelperSet(SET.number, (helpers[0], helpers[1], helpers[2]))


def test_devices_seal_in_the_highest_suite_that_all_three_have() -> None:
    new = [PrivateKey.generate(POST_QUANTUM) for _ in range(3)]
    start, end = samples.NOW, samples.SET_END
    two = with_keys((new[0], start, end), (new[1], start, end))
    assert [key.suite for key in two.sealing_keys(samples.NOW)] == [CLASSICAL] * 3
    three = with_keys((new[0], start, end), (new[1], start, end), (new[2], start + 3600, end))
    assert [key.suite for key in three.sealing_keys(start)] == [CLASSICAL] * 3
    assert three.sealing_keys(start + 3600) == tuple(key.public for key in new)


def test_helpers_without_a_suite_in_common_cannot_be_sealed_to() -> None:
    first, second, third = SET.helpers
    lone = replace(first, hpke_keys=(HpkeKeyConfig(PrivateKey.generate(POST_QUANTUM).public, 0, samples.SET_END),))
    with raises(ErrorKind.EXPIRED, TrefoilError):
        HelperSet(1, (lone, second, third)).sealing_keys(samples.NOW)


def test_a_key_id_stands_for_one_key_in_a_set_and_in_all_known_sets() -> None:
    """Two keys of one id are 2^32 work to make; here an id is written over instead."""
    twice = replace(SET.helpers[0], hpke_keys=(SET.helpers[0].hpke_keys[0],) * 2)
    with raises(ErrorKind.DUPLICATE, ProtocolError):
        replace(SET, helpers=(twice, *SET.helpers[1:]))
    check_key_ids([SET, SET])
    other = replace(SET.helpers[0], hpke_keys=(HpkeKeyConfig(PrivateKey.generate().public, 0, 10),))
    newer = replace(SET, number=8, helpers=(other, *SET.helpers[1:]))
    check_key_ids([SET, newer])
    object.__setattr__(other.hpke_keys[0].key, "key_id", samples.OLD_KEYS[0].public.key_id)
    with raises(ErrorKind.DUPLICATE, ProtocolError):
        check_key_ids([SET, newer])
    object.__setattr__(other.hpke_keys[0].key, "key_id", samples.OLD_KEYS[1].public.key_id)
    with raises(ErrorKind.DUPLICATE, ProtocolError):
        replace(SET, number=8, helpers=(other, *SET.helpers[1:]))


def test_half_a_hybrid_key_is_not_two_helpers_either() -> None:
    one, other = PrivateKey.generate(POST_QUANTUM), PrivateKey.generate(POST_QUANTUM)
    mixed = PrivateKey(POST_QUANTUM, one.raw[:64] + other.raw[64:])
    alone = PrivateKey(CLASSICAL, one.raw[64:])
    for shared in (mixed, alone):
        with raises(ErrorKind.DUPLICATE, ProtocolError):
            with_keys((one, 0, 10), (shared, 0, 10))


@pytest.mark.parametrize(("not_before", "not_after"), [(-1, 5), (5, 5), (6, 5), (0, 2**63)])
def test_a_validity_that_is_no_span_is_refused(not_before: int, not_after: int) -> None:
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        HpkeKeyConfig(samples.KEYS[0].public, not_before, not_after)


def test_a_key_that_nothing_can_be_sealed_to_is_refused() -> None:
    with raises(ErrorKind.WRONG_KEY, ProtocolError):
        HpkeKeyConfig(PublicKey(Suite.X25519_HKDF_SHA256_AES_128_GCM, bytes(32)), 0, 1)


OLD_KEY_OF_FIRST = HpkeKeyConfig(samples.OLD_KEYS[0].public, samples.SET_END, samples.SET_END + 1)
CLASHES: dict[str, Callable[[HelperEntry, HelperEntry], HelperEntry]] = {
    "an identity key": lambda first, third: replace(third, identity_key=first.identity_key),
    "an HPKE key": lambda first, third: replace(third, hpke_keys=(*third.hpke_keys, OLD_KEY_OF_FIRST)),
    "a TLS pin": lambda first, third: replace(third, tls_pin=first.tls_pin),
}


@pytest.mark.parametrize("shared", CLASHES)
def test_helpers_that_share_a_key_are_refused(shared: str, tmp_path: Path) -> None:
    """Made here or read from a file; the error names the two, also when both go by one name."""
    first, second, third = SET.helpers
    posing = replace(CLASHES[shared](first, third), name=first.name)
    with pytest.raises(ProtocolError) as refused:
        replace(SET, helpers=(first, second, posing))
    assert str(refused.value) == f"helper 1 (Alder) and helper 3 (Alder) share {shared}"
    assert "trefoil keygen helper" in refused.value.hint
    path = tmp_path / "helpers.json"
    path.write_text(json.dumps({**SET.to_json(), "helpers": [entry_to_json(one) for one in (second, first, posing)]}))
    with raises(ErrorKind.DUPLICATE, ProtocolError) as caught:
        HelperSet.load_unverified(path)
    assert f"helper 3 (Alder) share {shared}" in str(caught.value)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_set_has_three_helpers(count: int) -> None:
    helpers: Any = (*SET.helpers, SET.helpers[0])[:count]  # Any: what the types already forbid
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        HelperSet(1, helpers)


PLACES: list[tuple[tuple[str | int, ...], object]] = [
    (("number",), 0),
    (("number",), True),
    (("number",), 1.0),
    (("number",), 2**32),
    (("signatures", 0), "00"),
    (("signatures",), None),
    (("signatures",), [signature.hex() for signature in (*SET.signatures, SET.signatures[0])]),
    (("helpers",), []),
    (("helpers", 0), 7),
    (("helpers", 0, "name"), ""),
    (("helpers", 0, "name"), ["a"]),
    (("helpers", 0, "name"), "\u202e"),
    (("helpers", 0, "identity_key"), "00"),
    (("helpers", 0, "tls_pin"), None),
    (("helpers", 0, "address"), 5),
    (("helpers", 0, "address"), "http://alder.example"),
    (("helpers", 0, "address"), "https://\ud800"),
    (("helpers", 0, "address"), "https://"),
    (("helpers", 0, "address"), "https://alder.example:70000"),
    (("helpers", 0, "address"), "https://[::1"),
    (("helpers", 0, "hpke_keys"), []),
    (("helpers", 0, "hpke_keys", 0, "suite"), 2),
    (("helpers", 0, "hpke_keys", 0, "suite"), [1]),
    (("helpers", 0, "hpke_keys", 0, "key_id"), "0011223344556677"),
    (("helpers", 0, "hpke_keys", 0, "public_key"), "00"),
    (("helpers", 0, "hpke_keys", 0, "not_before"), 1.5),
    (("helpers", 0, "hpke_keys", 0, "not_before"), None),
    (("helpers", 0, "hpke_keys", 0, "not_after"), float("nan")),
    (("helpers", 0, "hpke_keys", 0, "not_after"), True),
]


@pytest.mark.parametrize(("place", "value"), PLACES, ids=[f"{place}={value!a:.40}" for place, value in PLACES])
def test_a_wrong_value_anywhere_is_a_protocol_error(place: tuple[str | int, ...], value: object) -> None:
    stored: Any = json.loads(json.dumps(SET.to_json()))
    inner = stored
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    with pytest.raises(ProtocolError):
        HelperSet.from_json(stored)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_any_json_is_a_set_or_a_protocol_error(stored: object) -> None:
    with pytest.raises(ProtocolError):
        HelperSet.from_json(stored)
    with pytest.raises(ProtocolError):
        HelperSet.from_json({"trefoil_helper_set": 1, "number": 1, "helpers": stored, "signatures": []})


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        *[(content, ErrorKind.MALFORMED) for content in (b"", b"{", b"\xff\xfe")],
        (b"[" * 100_000, ErrorKind.TOO_LARGE),
        (b"null", ErrorKind.WRONG_TYPE),
    ],
)
def test_a_file_that_is_no_set_is_refused(tmp_path: Path, content: bytes, kind: ErrorKind) -> None:
    path = tmp_path / "helpers.json"
    path.write_bytes(content)
    with raises(kind, ProtocolError):
        HelperSet.load(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with raises(ErrorKind.FILE_MISSING, TrefoilError):
        HelperSet.load(tmp_path / "absent.json")
    with raises(ErrorKind.WRONG_FILE, TrefoilError):
        HelperSet.load(tmp_path)


def test_an_address_has_a_host_and_a_port() -> None:
    one = samples.HELPER_SET.helpers[0]
    assert replace(one, address="https://north.example:8443/").endpoint == ("north.example", 8443)
    assert replace(one, address="https://north.example").endpoint == ("north.example", 443)


def test_the_fingerprint_covers_addresses_and_pins_too() -> None:
    """Operators compare it by telephone: whatever they sign must show in it."""
    first, second, third = samples.HELPER_SET.helpers
    changed = [
        HelperSet(1, (replace(first, address="https://elsewhere.example"), second, third)),
        HelperSet(1, (replace(first, tls_pin=bytes(32)), second, third)),
        HelperSet(2, samples.HELPER_SET.helpers),
    ]
    assert {each.digest for each in changed} == {samples.HELPER_SET.digest}
    prints = {each.fingerprint for each in (HelperSet(1, samples.HELPER_SET.helpers), *changed)}
    assert len(prints) == 4
