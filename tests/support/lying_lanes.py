"""Native modules that return wrong results: planted where `trefoil_lanes` would be used."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from protocol.lanes import Lanes, Rows

Change = Callable[[Rows], Rows]


def _random(right: Rows) -> Rows:
    return np.frombuffer(os.urandom(right.size), dtype=np.uint8).reshape(right.shape)


def _one_lane(right: Rows) -> Rows:
    wrong = right.copy()
    wrong[3::8, 0] ^= 1
    return wrong


LIES: dict[str, Change] = {
    "random secrets": _random,
    "zeros": np.zeros_like,
    "each lane's result in the next": lambda right: np.roll(right, 1, axis=0),
    "one lane of eight": _one_lane,
}


class _LyingLanes(Lanes):
    """Computes with the library, and changes the results."""

    def __init__(self, change: Change, change_macs: Change) -> None:
        self._change = change
        self._change_macs = change_macs

    def exchange(self, scalars: Rows, points: Rows) -> Rows:
        count = max(len(scalars), len(points))
        return self._change(
            _rows([_x25519(scalars[at % len(scalars)], points[at % len(points)]) for at in range(count)])
        )

    def public_points(self, scalars: Rows) -> Rows:
        keys = [X25519PrivateKey.from_private_bytes(scalar.tobytes()) for scalar in scalars]
        return self._change(_rows([key.public_key().public_bytes_raw() for key in keys]))

    def hmac(self, keys: Rows, messages: Rows) -> Rows:
        each = enumerate(messages)
        return self._change_macs(
            _rows([hmac.digest(keys[at % len(keys)].tobytes(), message.tobytes(), "sha256") for at, message in each])
        )

    def keystreams(self, seeds: Sequence[bytes], size: int, rows: npt.NDArray[np.uint64]) -> None:
        rows[: len(seeds)] = 7


def lie(name: str) -> Lanes:
    """Return lanes that were probed and found right, and lie from then on."""
    return _LyingLanes(LIES[name], LIES[name])


def lie_in_macs(name: str) -> Lanes:
    """Return lanes whose exchanges are right and whose HMACs are not."""
    return _LyingLanes(np.copy, LIES[name])


def unsupported() -> ModuleType:
    """Return a module as it behaves without AVX-512 IFMA: no lane writes anything, and each says so in its status."""
    from cffi import FFI

    class Library:
        @staticmethod
        def mbx_x25519_mb8(*_: object) -> int:
            return 0xAAAAAAAA

        mbx_x25519_public_key_mb8 = ippsHMACMessage_rmf = mbx_x25519_mb8  # noqa: N815 - the library's name

    module = ModuleType("trefoil_lanes")
    module.__dict__.update(ffi=FFI(), lib=Library)
    return module


def _x25519(scalar: Rows, point: Rows) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(scalar.tobytes()).exchange(
            X25519PublicKey.from_public_bytes(point.tobytes())
        )
    except ValueError:
        return bytes(32)


def _rows(items: list[bytes]) -> Rows:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(len(items), -1)
