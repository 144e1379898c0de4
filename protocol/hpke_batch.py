"""HPKE over many messages to one key: the key schedule of RFC 9180 written out, a step for all messages at a time.

A call into the library for each message spends a third of its time on twelve hashes. Here each step of the schedule is
laid out as a matrix with one row for each message, so that the rows of a step are hashed in one sweep. X25519 runs in
eight lanes, and HMAC without Python's objects, where `lanes` has them; elsewhere they are the library's.

Authenticated decryption comes last. A message that does not open here is undecided, not refused: `hpke` passes it to
the library, which alone refuses messages. A wrong secret, from whatever defect, therefore costs time and changes no
verdict, unless a sender can predict it and seal under it. The lanes are wrong for p − 1 and a few other points, and
what they return there depends on all of the private key. Time tells too, so a first disagreement ends their use.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from hashlib import sha3_256, sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.lanes import LANES, POINT_SIZE, Rows, find_lanes, items_of, matrix_of

_MLKEM_SIZE = 1088
_TAG_SIZE = 16
_NONCE_SIZE = 12
_HASH_SIZE = 32
_BLOCK_SIZE = 64
_INNER_PAD, _OUTER_PAD = np.uint8(0x36), np.uint8(0x5C)
# HMAC pads a key with zeros, so 32 of them are no key.
_NO_KEY = np.zeros((1, _HASH_SIZE), dtype=np.uint8)

# The labels of RFC 9180 §4: DHKEM(X25519, HKDF-SHA256) is 0x0020, X-Wing 0x647a, HKDF-SHA256 0x0001, AES-128-GCM 0x0001
# and AES-256-GCM 0x0002.
_KEM = b"HPKE-v1" + b"KEM" + b"\x00\x20"
_CLASSICAL_LABEL = b"HPKE-v1" + b"HPKE" + b"\x00\x20" + b"\x00\x01" + b"\x00\x01"
_HYBRID_LABEL = b"HPKE-v1" + b"HPKE" + b"\x64\x7a" + b"\x00\x01" + b"\x00\x02"
# What the combiner of X-Wing hashes last.
_XWING = b"\\.//^\\"
# The counter of HKDF-Expand. Nothing here is longer than one hash.
_FIRST_BLOCK = b"\x01"


class _Schedule(NamedTuple):
    """What a suite decides of the key schedule."""

    label: bytes
    key_size: int
    # Base mode and the hash of the empty PSK identity, with which every context begins.
    context: bytes


def are_of_one_size(sealed: Sequence[bytes], infos: Sequence[bytes]) -> bool:
    """Return whether messages have one size, and infos too, as in a helper's column: others cannot be laid out."""
    return _are_rows(sealed) and _are_rows(infos)


def open_many(private: bytes, public: bytes, sealed: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes | None]:
    """Return each plaintext of suite 1, or None where the message is undecided and the library must be asked.

    Decap of RFC 9180 §4.1, KeySchedule of §5.1 in base mode, and Open of §5.2 with the first nonce. It
    requires `are_of_one_size`.
    """
    if len(sealed[0]) < POINT_SIZE + _TAG_SIZE:
        return [None] * len(sealed)
    messages = matrix_of(sealed)
    points, ciphertexts = messages[:, :POINT_SIZE], messages[:, POINT_SIZE:]
    extracted = _extracted(_exchange(private, points))
    # The secret is zero for a point of small order. Anyone can seal under that, so RFC 9180 §7.1.4 refuses it. Looked
    # for where it is used next: a defect in between must not hide it.
    usable = (extracted != _EXTRACTED_FROM_ZERO).any(axis=1)
    return _open(_CLASSICAL, _encapsulated(extracted, points, public), usable, infos, ciphertexts)


def open_many_hybrid(
    mlkem: MLKEM768PrivateKey, private: bytes, public: bytes, sealed: Sequence[bytes], infos: Sequence[bytes]
) -> list[bytes | None]:
    """Do the same in suite 2. `private` and `public` are the X25519 halves; decapsulation is the library's.

    The combiner is that of X-Wing: SHA3-256 over both secrets, the X25519 point, the recipient's, and a label.
    """
    head = _MLKEM_SIZE + POINT_SIZE
    if len(sealed[0]) < head + _TAG_SIZE:
        return [None] * len(sealed)
    messages = matrix_of(sealed)
    points, ciphertexts = messages[:, _MLKEM_SIZE:head], messages[:, head:]
    secrets = _exchange(private, points)
    inner = matrix_of([mlkem.decapsulate(each) for each in items_of(messages[:, :_MLKEM_SIZE])])
    constant = np.broadcast_to(matrix_of([public + _XWING]), (len(sealed), len(public + _XWING)))
    combined = items_of(np.hstack([inner, secrets, points, constant]))
    shared = matrix_of([state.digest() for state in map(sha3_256, combined)])
    return _open(_HYBRID, shared, np.any(secrets, axis=1), infos, ciphertexts)


def _open(
    schedule: _Schedule, shared: Rows, usable: npt.NDArray[np.bool_], infos: Sequence[bytes], ciphertexts: Rows
) -> list[bytes | None]:
    keys, nonces = _derive(schedule, shared, matrix_of(infos))
    parts = zip(usable.tolist(), keys, nonces, items_of(ciphertexts), strict=True)
    return [_decrypt(key, nonce, text) if allowed else None for allowed, key, nonce, text in parts]


def seal_many(public: bytes, plaintexts: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes] | None:
    """Seal each plaintext to one key under its own info, or return None where there are no lanes, or they are wrong.

    For simulated crowds: a device seals three payloads, by the library. Nothing authenticates what a sender computes,
    so one exchange of every batch, at random, is compared with the library's.
    """
    lanes = find_lanes()
    if lanes is None or not _are_rows(infos):
        return None
    scalars = matrix_of([os.urandom(POINT_SIZE) for _ in plaintexts])
    points, secrets = lanes.public_points(scalars), lanes.exchange(scalars, matrix_of([public]))
    chosen = int.from_bytes(os.urandom(4)) % len(plaintexts)
    if not _is_exchange(scalars[chosen].tobytes(), public, points[chosen].tobytes(), secrets[chosen].tobytes()):
        return None
    keys, nonces = _derive(_CLASSICAL, _encapsulated(_extracted(secrets), points, public), matrix_of(infos))
    parts = zip(items_of(points), keys, nonces, plaintexts, strict=True)
    return [point + AESGCM(key).encrypt(nonce, text, None) for point, key, nonce, text in parts]


def _is_exchange(scalar: bytes, public: bytes, point: bytes, secret: bytes) -> bool:
    """Return whether the library computes the same public point and the same secret with `public`."""
    key = X25519PrivateKey.from_private_bytes(scalar)
    try:
        expected = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return (key.public_key().public_bytes_raw(), expected) == (point, secret)


def _exchange(private: bytes, points: Rows) -> Rows:
    """Return X25519 of one key with every point: in lanes where this machine has them, which are wrong for some points.

    It returns zeros for points of small order, except where the lanes are wrong.
    """
    lanes = find_lanes()
    if lanes is not None:
        return lanes.exchange(matrix_of([private]), points)
    key = X25519PrivateKey.from_private_bytes(private)

    def exchange(point: bytes) -> bytes:
        try:
            return key.exchange(X25519PublicKey.from_public_bytes(point))
        except ValueError:
            return bytes(POINT_SIZE)

    return matrix_of([exchange(point) for point in items_of(points)])


def _extracted(secrets: Rows) -> Rows:
    """Return the first half of ExtractAndExpand of RFC 9180 §4.1."""
    return _hmac(None, _KEM + b"eae_prk", secrets)


def _encapsulated(extracted: Rows, points: Rows, public: bytes) -> Rows:
    """Return the shared secrets of DHKEM, by the second half."""
    return _hmac(extracted, b"\x00\x20" + _KEM + b"shared_secret", points, public + _FIRST_BLOCK)


def _derive(schedule: _Schedule, shared: Rows, infos: Rows) -> tuple[list[bytes], list[bytes]]:
    """Return the key and the first nonce of every message: KeySchedule of RFC 9180 §5.1."""
    label, key_size, context = schedule
    secret = _hmac(shared, label + b"secret")
    hashed = _hmac(None, label + b"info_hash", infos)
    keys = _hmac(secret, key_size.to_bytes(2) + label + b"key" + context, hashed, _FIRST_BLOCK)
    nonces = _hmac(secret, b"\x00\x0c" + label + b"base_nonce" + context, hashed, _FIRST_BLOCK)
    return items_of(keys[:, :key_size]), items_of(nonces[:, :_NONCE_SIZE])


def _hmac(keys: Rows | None, before: bytes, rows: Rows | None = None, after: bytes = b"") -> Rows:
    """Return HMAC-SHA256 of each row between two constants, under its key of 32 bytes; under none for `Extract("")`.

    Without lanes it is RFC 2104 as two sweeps of hashes: less than half the time of `hmac.digest` for each row.
    """
    count = max(1 if each is None else len(each) for each in (keys, rows))
    width = 0 if rows is None else rows.shape[1]
    start = _BLOCK_SIZE + len(before)
    inner = np.empty((count, start + width + len(after)), dtype=np.uint8)
    inner[:, _BLOCK_SIZE:start] = np.frombuffer(before, dtype=np.uint8)
    if rows is not None:
        inner[:, start : start + width] = rows
    inner[:, start + width :] = np.frombuffer(after, dtype=np.uint8)
    made = _hmac_in_lanes(_NO_KEY if keys is None else keys, inner[:, _BLOCK_SIZE:])
    if made is not None:
        return made
    outer = np.empty((count, _BLOCK_SIZE + _HASH_SIZE), dtype=np.uint8)
    inner[:, :_BLOCK_SIZE], outer[:, :_BLOCK_SIZE] = _INNER_PAD, _OUTER_PAD
    if keys is not None:
        inner[:, :_HASH_SIZE] ^= keys
        outer[:, :_HASH_SIZE] ^= keys
    outer[:, _BLOCK_SIZE:] = _hash(inner)
    return _hash(outer)


def _hmac_in_lanes(keys: Rows, messages: Rows) -> Rows | None:
    """Return the native module's HMACs, or None if there is none, or a random one is not the library's.

    Compared in every call: a sender could seal under a key that a defect makes constant.
    """
    lanes = find_lanes() if len(messages) >= LANES else None
    if lanes is None:
        return None
    made, chosen = lanes.hmac(keys, messages), int.from_bytes(os.urandom(4)) % len(messages)
    expected = hmac.digest(keys[chosen % len(keys)].tobytes(), messages[chosen].tobytes(), "sha256")
    return made if made[chosen].tobytes() == expected else None


def _hash(rows: Rows) -> Rows:
    return matrix_of([state.digest() for state in map(sha256, items_of(rows))])


def _are_rows(items: Sequence[bytes]) -> bool:
    return len({len(item) for item in items}) == 1


def _decrypt(key: bytes, nonce: bytes, ciphertext: bytes) -> bytes | None:
    try:
        return AESGCM(key).decrypt(nonce, ciphertext, None)
    except InvalidTag:
        return None


def _schedule(label: bytes, key_size: int) -> _Schedule:
    return _Schedule(label, key_size, b"\x00" + _hmac(None, label + b"psk_id_hash").tobytes())


_EXTRACTED_FROM_ZERO = _extracted(np.zeros((1, POINT_SIZE), dtype=np.uint8))
_CLASSICAL, _HYBRID = _schedule(_CLASSICAL_LABEL, 16), _schedule(_HYBRID_LABEL, 32)
