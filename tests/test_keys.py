"""Keys: files only their owner can read, signatures for one purpose each, and seals that open in one context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError, TrefoilError
from protocol.files import write_private_file
from protocol.hpke import POST_QUANTUM, PrivateKey, PublicKey, Suite
from protocol.keys import (
    IdentityKey,
    load_hpke_key,
    load_identity,
    save_hpke_key,
    save_identity,
    verify_signature,
)
from tests.support import protocol_samples as samples

SUITE = Suite.X25519_HKDF_SHA256_AES_128_GCM


def test_identity_survives_its_file(tmp_path: Path) -> None:
    key = IdentityKey.generate()
    save_identity(tmp_path / "identity", key)
    assert load_identity(tmp_path / "identity").public == key.public


def test_hpke_key_survives_its_file(tmp_path: Path) -> None:
    key = PrivateKey.generate()
    save_hpke_key(tmp_path / "hpke", key)
    loaded = load_hpke_key(tmp_path / "hpke")
    assert loaded.open(key.public.seal(b"x", b"info"), b"info") == b"x"


def test_a_key_file_is_private_from_the_start(tmp_path: Path) -> None:
    save_identity(tmp_path / "identity", IdentityKey.generate())
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_key_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    save_identity(path, IdentityKey.generate())
    path.chmod(mode)
    with pytest.raises(TrefoilError, match=f"mode {mode:04o}") as error:
        load_identity(path)
    assert error.value.hint == f"If it is the right file, run: chmod 600 {path}"


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = IdentityKey.generate()
    save_identity(path, first)
    with pytest.raises(TrefoilError, match="exists already"):
        save_identity(path, IdentityKey.generate())
    with pytest.raises(TrefoilError, match="exists already"):
        save_hpke_key(path, PrivateKey.generate())
    assert load_identity(path).public == first.public


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b'{"trefoil_key": "hpke"}',
        b'{"trefoil_key": "identity"}',
        b'{"trefoil_key": "identity", "private": "zz"}',
        b'{"trefoil_key": "identity", "private": "ab"}',
    ],
)
def test_a_damaged_identity_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write_private_file(tmp_path / "key", content)
    with pytest.raises(TrefoilError):
        load_identity(tmp_path / "key")


@pytest.mark.parametrize("suite", [3, None, "1", [1]])
def test_an_hpke_key_of_an_unknown_suite_is_refused(tmp_path: Path, suite: object) -> None:
    stored = {"trefoil_key": "hpke", "suite": suite, "private": "00" * 32}
    write_private_file(tmp_path / "key", json.dumps(stored).encode())
    with pytest.raises(ProtocolError, match="unknown cipher suite"):
        load_hpke_key(tmp_path / "key")


def test_a_key_of_one_kind_is_not_read_as_the_other(tmp_path: Path) -> None:
    save_identity(tmp_path / "identity", IdentityKey.generate())
    with pytest.raises(TrefoilError, match="not a Trefoil hpke key file"):
        load_hpke_key(tmp_path / "identity")


@given(st.binary(max_size=50), st.binary(max_size=50), st.sampled_from(["query", "helper set", "vote"]))
def test_a_signature_holds_for_its_message_label_and_key_alone(message: bytes, other: bytes, label: str) -> None:
    signature = samples.QUERIER.sign(label, message)
    assert verify_signature(samples.QUERIER.public, label, message, signature)
    assert verify_signature(samples.QUERIER.public, label, other, signature) == (message == other)
    assert not verify_signature(samples.QUERIER.public, label + "x", message, signature)
    assert not verify_signature(samples.IDENTITIES[0].public, label, message, signature)


@pytest.mark.parametrize(("public", "signature"), [(b"", b""), (bytes(31), bytes(64)), (bytes(32), bytes(63))])
def test_a_signature_of_the_wrong_size_is_no_signature(public: bytes, signature: bytes) -> None:
    assert not verify_signature(public, "query", b"", signature)


def test_private_parts_do_not_show() -> None:
    identity, hpke = samples.QUERIER, samples.KEYS[0]
    assert identity.raw.hex() not in repr(identity)
    assert hpke.raw.hex() not in repr(hpke)
    assert "PrivateKey" not in repr(identity).replace("IdentityKey", "")


@given(st.binary(max_size=100), st.binary(max_size=30), st.binary(max_size=30))
def test_a_seal_opens_under_its_own_context_alone(plaintext: bytes, info: bytes, other: bytes) -> None:
    key = samples.KEYS[0]
    sealed = key.public.seal(plaintext, info)
    assert len(sealed) == len(plaintext) + SUITE.overhead
    assert key.open(sealed, info) == plaintext
    if info != other:
        with pytest.raises(ProtocolError, match="does not open"):
            key.open(sealed, other)
    with pytest.raises(ProtocolError, match="does not open"):
        samples.KEYS[1].open(sealed, info)


def test_a_seal_with_any_changed_bit_does_not_open() -> None:
    """Bit 255 of the ephemeral key included, which X25519 itself ignores: HPKE hashes the key as it was sent."""
    key = samples.KEYS[0]
    sealed = key.public.seal(b"seeds", b"info")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ProtocolError):
            key.open(bytes(changed), b"info")


@pytest.mark.parametrize("size", [0, 1, 31, 32, 47])
def test_what_is_too_short_for_a_seal_does_not_open(size: int) -> None:
    with pytest.raises(ProtocolError):
        samples.KEYS[0].open(bytes(size), b"")


def test_a_public_key_of_low_order_seals_nothing() -> None:
    with pytest.raises(ProtocolError, match="not a usable point"):
        PublicKey(SUITE, bytes(32)).seal(b"", b"")
    with pytest.raises(ProtocolError, match="not a usable point"):
        PublicKey(SUITE, bytes(32)).check_usable()
    samples.KEYS[0].public.check_usable()


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        PublicKey(SUITE, bytes(size))
    with pytest.raises(ProtocolError):
        PrivateKey.from_raw(SUITE, bytes(size))
    with pytest.raises(ProtocolError):
        IdentityKey.from_raw(bytes(size))


def test_a_key_id_belongs_to_its_key() -> None:
    ids = {key.public.key_id for key in (*samples.KEYS, *samples.OLD_KEYS)}
    assert len(ids) == 6
    assert samples.KEYS[0].public.key_id == samples.hpke_key("Alder").public.key_id


POST_QUANTUM_KEY = PrivateKey.from_raw(POST_QUANTUM, samples.entropy("hybrid key")(96))


def test_a_hybrid_key_opens_what_was_sealed_to_it_and_nothing_else() -> None:
    key = PrivateKey.from_raw(POST_QUANTUM, POST_QUANTUM_KEY.raw)
    assert len(key.public.raw) == POST_QUANTUM.public_size == 1216
    sealed = PublicKey(POST_QUANTUM, key.public.raw).seal(b"seeds", b"info")
    assert len(sealed) == 5 + POST_QUANTUM.overhead == 5 + 1136
    assert key.open(sealed, b"info") == b"seeds"
    for other in (PrivateKey.generate(POST_QUANTUM), _with_half_of(key, 0), _with_half_of(key, 64)):
        with pytest.raises(ProtocolError, match="does not open"):
            other.open(sealed, b"info")
    for at in (0, 1000, 1100, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(ProtocolError, match="does not open"):
            key.open(bytes(changed), b"info")
    assert key.raw.hex() not in repr(key)


def _with_half_of(key: PrivateKey, at: int) -> PrivateKey:
    """Whoever broke X25519 alone, or ML-KEM alone."""
    other = PrivateKey.generate(POST_QUANTUM).raw
    return PrivateKey.from_raw(POST_QUANTUM, key.raw[:64] + other[64:] if at else other[:64] + key.raw[64:])


def test_a_hybrid_key_on_disk(tmp_path: Path) -> None:
    save_hpke_key(tmp_path / "key", POST_QUANTUM_KEY)
    assert load_hpke_key(tmp_path / "key").public == POST_QUANTUM_KEY.public


@pytest.mark.parametrize("suite", Suite)
def test_a_key_has_one_encoding(suite: Suite) -> None:
    """X25519 ignores its top bit and reduces the rest: written otherwise, one key would pass for two."""
    raw = PrivateKey.generate(suite).public.raw
    with pytest.raises(ProtocolError, match="only encoding"):
        PublicKey(suite, raw[:-1] + bytes([raw[-1] | 128]))
    with pytest.raises(ProtocolError, match="only encoding"):
        PublicKey(suite, raw[:-32] + (2**255 - 19 + 9).to_bytes(32, "little"))
    PublicKey(suite, raw[:-32] + (2**255 - 20).to_bytes(32, "little"))


def test_what_is_no_mlkem_key_is_refused() -> None:
    raw = POST_QUANTUM_KEY.public.raw
    with pytest.raises(ProtocolError, match="no ML-KEM key"):
        PublicKey(POST_QUANTUM, b"\xff" * 24 + raw[24:])
    with pytest.raises(ProtocolError, match="not a usable point"):
        PublicKey(POST_QUANTUM, raw[:-32] + bytes(32)).check_usable()
