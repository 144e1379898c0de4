"""X25519 in eight lanes, and HMACs and AES keystreams in one call for many, by the optional module `trefoil_lanes`.

`python -m protocol.lanes_build` makes the module from Intel's Cryptography Primitives Library. It is used if it is
installed and agrees with `cryptography` on random inputs. On a processor without AVX-512 IFMA every lane leaves its
output unchanged, so the module fails that test, and only the speed is lost. The library's own test,
`mbx_is_crypto_mb_applicable`, also returns true for AVX-IFMA, for which its X25519 is missing. Its SHA-256 does not
test for the instructions that it needs, so the kernel is asked for them first.

**Its X25519 is wrong for some points**: for 12 of Wycheproof's 518 vectors in each of nine releases from 2021.9 to
2026.2, five of them with p − 1, which has small order and yields no zeros. Products are left below 2^255 + 2^214, and a
difference a − b adds p once: with a < b − p it is negative, and the next product truncates it. A random point has a
probability below 2^-70 of that. So use this module only before authenticated decryption, and let `cryptography` decide
every message that does not open, as `hpke` does. Used for a bare Diffie–Hellman, it would leak bits of the key. Where
the two disagree, the time that the second try takes tells as much: see `distrust_lanes`.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

try:
    import trefoil_lanes
except ImportError:  # not built, or for another machine
    trefoil_lanes = None

LANES = 8
POINT_SIZE = 32
_HASH_SIZE = 32
_KEY_SIZE = 16
_COUNTER_BITS = 32
# GCM encrypts its first block under counter 2; 1 is the tag's.
_FIRST_COUNTER = b"\x00\x00\x00\x02"
_BLOCK_SIZE = 16

_LOG = logging.getLogger(__name__)

# One row of bytes for each key, point or secret.
Rows = npt.NDArray[np.uint8]


class Lanes:
    """The native module behind arrays. It holds no key between two calls."""

    def __init__(self, native: ModuleType) -> None:
        self._ffi: Any = native.ffi
        self._lib: Any = native.lib

    def exchange(self, scalars: Rows, points: Rows) -> Rows:
        """Return X25519 of each scalar and point, zeros for most points of small order; one row stands for all."""
        count = max(len(scalars), len(points))
        return self._in_eights(self._lib.mbx_x25519_mb8, count, scalars, points)

    def public_points(self, scalars: Rows) -> Rows:
        return self._in_eights(self._lib.mbx_x25519_public_key_mb8, len(scalars), scalars)

    def _in_eights(self, function: Any, count: int, *inputs: Rows) -> Rows:
        padded = -(-count // LANES) * LANES
        made = np.zeros((padded, POINT_SIZE), dtype=np.uint8)
        # Held until the calls are over: a pointer keeps nothing alive.
        columns = [np.ascontiguousarray(rows) for rows in (made, *inputs)]
        addresses = [_addresses(rows, padded) for rows in columns]
        pointers = [self._ffi.from_buffer("unsigned char *[]", each) for each in addresses]
        for lane in range(0, padded, LANES):
            # The status that it returns names lanes that are zero, which the caller sees in the rows themselves.
            function(*(each + lane for each in pointers))
        return made[:count]

    def hmac(self, keys: Rows, messages: Rows) -> Rows:
        """Return HMAC-SHA256 of each message under its key of 32 bytes; one key stands for all."""
        made = np.zeros((len(messages), _HASH_SIZE), dtype=np.uint8)
        columns = [np.ascontiguousarray(rows) for rows in (messages, keys, made)]
        addresses = [_addresses(rows, len(messages)) for rows in columns]
        texts, secrets, results = (self._ffi.from_buffer("unsigned char *[]", each) for each in addresses)
        width, size, method = (
            repeat(messages.shape[1]),
            repeat(_HASH_SIZE),
            repeat(self._lib.ippsHashMethod_SHA256_NI()),
        )
        # Consumed without a loop in Python.
        deque(map(self._lib.ippsHMACMessage_rmf, texts, width, secrets, size, results, size, method), maxlen=0)
        return made

    def keystreams(self, seeds: Sequence[bytes], size: int, rows: npt.NDArray[np.uint64]) -> None:
        """Write `size` bytes of the keystream that GCM has under each seed's key and nonce to the start of its row."""
        initialize, encrypt = self._lib.ippsAESInit, self._lib.ippsAESEncryptCTR
        needed = self._ffi.new("int *")
        self._lib.ippsAESGetSize(needed)
        memory = self._ffi.new("char[]", needed[0])
        state, counter = self._ffi.cast("IppsAESSpec *", memory), self._ffi.new("unsigned char[]", _BLOCK_SIZE)
        block, zeros = self._ffi.buffer(counter), self._ffi.new("unsigned char[]", size)
        row, step = self._ffi.cast("unsigned char *", rows.ctypes.data), rows.strides[0]
        for seed in seeds:
            initialize(seed, _KEY_SIZE, state, needed[0])
            block[:] = seed[_KEY_SIZE:28] + _FIRST_COUNTER
            encrypt(zeros, row, size, state, counter, _COUNTER_BITS)
            row += step
        self._ffi.buffer(memory)[:] = bytes(needed[0])


@cache
def find_lanes() -> Lanes | None:
    """Return the lanes of this machine, if the module is there and computes what `cryptography` does."""
    # A module that an earlier version of `lanes_build` made has no HMAC.
    if trefoil_lanes is None or not hasattr(trefoil_lanes.lib, "ippsHMACMessage_rmf"):
        return None
    lanes = Lanes(trefoil_lanes)
    return lanes if _agrees(lanes) else None


def distrust_lanes() -> None:
    """Use `cryptography` alone in this process from now on: a message opened with it that had not opened in lanes.

    No honest message does that. Whether a chosen point is one of those for which the lanes are wrong depends on bits
    of the private key, and the second try takes time that a querier can measure over many reports. A bug attack (Biham,
    Carmeli and Shamir, CRYPTO 2008) reads the key bit by bit so. It ends here with its first success.
    """
    global trefoil_lanes
    trefoil_lanes = None
    find_lanes.cache_clear()
    _LOG.error("ALARM: trefoil_lanes was wrong about a message, and is not used any more until the next start")


def describe_opens() -> str:
    return "one at a time" if find_lanes() is None else "eight at a time"


def _agrees(lanes: Lanes) -> bool:
    """Return whether exchanges, public keys, HMACs and keystreams of random inputs are those of the libraries."""
    keys = [X25519PrivateKey.generate() for _ in range(LANES + 1)]
    points = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in keys]
    scalars = matrix_of([key.private_bytes_raw() for key in keys])
    exchanged = [
        key.exchange(X25519PublicKey.from_public_bytes(point)) for key, point in zip(keys, points, strict=True)
    ]
    if lanes.exchange(scalars, matrix_of(points)).tobytes() != b"".join(exchanged):
        return False
    if lanes.public_points(scalars).tobytes() != b"".join(key.public_key().public_bytes_raw() for key in keys):
        return False
    if not _has_sha_instructions():
        return False
    messages = matrix_of([os.urandom(_HASH_SIZE) for _ in keys])
    macs = [hmac.digest(*pair, "sha256") for pair in zip(items_of(scalars), items_of(messages), strict=True)]
    if lanes.hmac(scalars, messages).tobytes() != b"".join(macs):
        return False
    seeds, words = [os.urandom(32) for _ in range(3)], 37
    rows = np.zeros((len(seeds), words + 2), dtype=np.uint64)
    lanes.keystreams(seeds, 8 * words, rows)
    streams = [AESGCM(seed[:_KEY_SIZE]).encrypt(seed[_KEY_SIZE:28], bytes(8 * words), None) for seed in seeds]
    return rows[:, :words].tobytes() == b"".join(stream[: 8 * words] for stream in streams)


def _has_sha_instructions() -> bool:
    """Return whether the kernel lists them. Every processor with AVX-512 IFMA has them; a hypervisor may hide them."""
    try:
        return " sha_ni " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def matrix_of(items: Sequence[bytes]) -> Rows:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(len(items), -1)


def items_of(rows: Rows) -> list[bytes]:
    """Return each row as bytes. Numpy converts rows in one call when it takes each of them for a single element."""
    whole = np.ascontiguousarray(rows)
    items: list[bytes] = whole.view(f"V{whole.shape[1]}").reshape(-1).tolist()
    return items


def _addresses(rows: Rows, count: int) -> npt.NDArray[np.uintp]:
    """Return the address of a row for each of `count` lanes, from the first again where there are fewer rows."""
    places = np.arange(count, dtype=np.uintp) % np.uintp(len(rows))
    return places * np.uintp(rows.shape[1]) + np.uintp(rows.ctypes.data)
