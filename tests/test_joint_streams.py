"""What two parties draw in common: as specified, apart for every purpose, pair, session and parameter."""

from __future__ import annotations

import itertools
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mpc_helpers.mpc.joint.streams import PairStreams, Purpose, Stream
from mpc_helpers.mpc.session import MpcSession
from protocol.field import P

KEY = bytes(range(16))


def session(digest: bytes = b"s" * 32, parameters: bytes = b"p") -> MpcSession:
    return MpcSession(0, digest, parameters, 9, 20.0)


def specified(purpose: str, key: bytes, of: MpcSession, lacking: int, size: int) -> bytes:
    """SPEC §11, written out."""
    label = f"trefoil/1 joint noise: {purpose}".encode()
    data = len(label).to_bytes(2, "big") + label
    for part in (key, of.attempt_id, of.parameter_digest, bytes([lacking])):
        data += len(part).to_bytes(8, "big") + part
    return Cipher(algorithms.AES(sha256(data).digest()), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def test_a_stream_is_the_keystream_of_the_specification() -> None:
    for purpose in Purpose:
        stream = PairStreams(KEY, session(), 2).open(purpose)
        raw = specified(purpose.value, KEY, session(), 2, 64)
        assert stream.take(8) == raw[:8]
        assert stream.words(2, 2).tolist() == [
            [int.from_bytes(raw[at : at + 8], "little") for at in (8, 16)],
            [int.from_bytes(raw[at : at + 8], "little") for at in (24, 32)],
        ]
        assert stream.elements(3).tolist() == [int.from_bytes(raw[at : at + 8], "little") >> 3 for at in (40, 48, 56)]


def test_no_two_streams_are_the_same() -> None:
    seen = set()
    for key, purpose, lacking in itertools.product((KEY, bytes(16)), Purpose, range(3)):
        for of in (session(), session(b"t" * 32), session(parameters=b"q")):
            seen.add(PairStreams(key, of, lacking).open(purpose).take(16))
    assert len(seen) == 2 * len(Purpose) * 3 * 3


class Fixed(Stream):
    """A keystream that is given."""

    def __init__(self, words: list[int]) -> None:
        self.data = b"".join(word.to_bytes(8, "little") for word in words)

    def take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        assert len(taken) == size
        return taken


def test_a_word_that_gives_p_is_left_out() -> None:
    """Never met in practice: once in 2^61 words."""
    p = P << 3
    assert Fixed([8, p | 7, 16, p, p, 24]).elements(3).tolist() == [1, 2, 3]
    assert Fixed([p, 0, 7, 8]).nonzero() == 1
    assert Fixed([8]).elements(0).size == 0


def test_elements_are_below_p() -> None:
    found = Stream(bytes(32)).elements(1000)
    assert found.dtype == np.uint64 and int(found.max()) < P
