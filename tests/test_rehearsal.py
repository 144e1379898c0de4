"""The rehearsal before the first fork: what fails in it is not passed over, and no two forks draw the same after it."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import ssl
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from mpc_helpers.mpc import rehearsal
from mpc_helpers.mpc.noise import system_coins
from mpc_helpers.mpc.runtime import _Runtime
from protocol.shares import PARTIES

KEY_SIZE = 16


async def pair_keys(party: int) -> list[bytes]:
    """As a worker draws them when its session begins."""
    return list(_Runtime(party, lambda _: None).pair_keys.values())


def drawn() -> list[bytes]:
    """Something from every source of randomness that a worker has, or that a library in it could use."""
    return [
        os.urandom(KEY_SIZE),
        secrets.token_bytes(KEY_SIZE),
        ssl.RAND_bytes(KEY_SIZE),
        X25519PrivateKey.generate().private_bytes_raw()[:KEY_SIZE],
        sha256(system_coins().flips(8 * KEY_SIZE)).digest()[:KEY_SIZE],
        random.randbytes(KEY_SIZE),
        *(key for party in range(PARTIES) for key in asyncio.run(pair_keys(party))),
    ]


def drawn_by_a_fork() -> list[bytes]:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, b"".join(drawn()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(process, 0)
    return [told[at : at + KEY_SIZE] for at in range(0, len(told), KEY_SIZE)]


def forks_draw_alike() -> bool:
    """Whether any two of two forks and the process that they were forked from have anything in common."""
    # First here: a generator that has no state yet could not be copied.
    everything = [*drawn(), *drawn_by_a_fork(), *drawn_by_a_fork()]
    assert len(everything) == 3 * len(drawn())
    return len(set(everything)) < len(everything)


def test_two_forks_draw_different_keys() -> None:
    rehearsal.rehearse()
    assert not forks_draw_alike()


def test_forks_that_shared_a_generator_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = random.Random(1)
    monkeypatch.setattr(secrets, "token_bytes", shared.randbytes)
    assert forks_draw_alike()


def test_a_session_that_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpc_helpers.mpc.joint.noise.JointNoise._commit", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rehearsal.rehearse()
