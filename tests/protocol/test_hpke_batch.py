"""Open many messages at once and compare every verdict with the library's, for every message that anybody may send."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol import hpke_batch, lanes
from protocol.errors import ErrorKind, ProtocolError
from protocol.hpke import CLASSICAL, POST_QUANTUM, PrivateKey, PublicKey, Suite
from protocol.lanes import find_lanes
from tests.support.lying_lanes import LIES, lie, lie_in_macs
from tests.support.raising import raises

COUNT = 40
P = 2**255 - 19
KEM, SUITE = b"HPKE-v1KEM\x00\x20", b"HPKE-v1HPKE\x00\x20\x00\x01\x00\x01"
# Every point of small order. With them any X25519 is zero, so that anybody can seal under it.
SMALL_ORDER = [0, 1, P - 1, P, P + 1]
SMALL_ORDER += [
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]
# Points near p, near 2^255 and with long runs of ones: an X25519 that leaves its products unreduced is wrong for some
# of them under some keys, as Wycheproof's vectors show and random points never do.
EDGE = [P - k for k in range(1, 20)] + [P + k for k in range(2, 19)] + [2**255 - 1]
EDGE += [2**k - 1 for k in range(84, 95)] + [P - 2**k - 1 for k in (64, 129, 130, 131)] + [2, 3, 4, 8, 9, 2**254]
WYCHEPROOF = Path(__file__).parents[3] / "shared" / "batch-open" / "bench" / "x25519_wycheproof.json"


@pytest.fixture(params=["lanes", "no lanes", *LIES], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run every test with the native module where it is built, without it, and with modules that lie."""
    # Given back after the test, if it was distrusted in it.
    monkeypatch.setattr(lanes, "trefoil_lanes", vars(lanes)["trefoil_lanes"])
    find_lanes.cache_clear()
    if request.param in LIES:
        monkeypatch.setattr(hpke_batch, "find_lanes", lambda: lie(request.param))
    elif request.param == "no lanes":
        monkeypatch.setattr(hpke_batch, "find_lanes", lambda: None)
    elif find_lanes() is None:
        pytest.skip("trefoil_lanes is not built, or this processor lacks AVX-512 IFMA")
    yield str(request.param)
    find_lanes.cache_clear()


def encoded(point: int) -> bytes:
    return point.to_bytes(32, "little")


# X25519 ignores the top bit of a point.
POINTS = [encoded(point | top) for point in SMALL_ORDER + EDGE for top in (0, 2**255)]


def one_by_one(key: PrivateKey, sealed: list[bytes], infos: list[bytes]) -> list[bytes | None]:
    """Return the library's verdict on each message."""

    def attempt(message: bytes, info: bytes) -> bytes | None:
        try:
            return key.open(message, info)
        except ProtocolError:
            return None

    return [attempt(message, info) for message, info in zip(sealed, infos, strict=True)]


def seal_under(shared: bytes, point: bytes, public: bytes, plain: bytes, info: bytes) -> bytes:
    """Seal as if X25519 of the recipient's key and `point` were `shared`: RFC 9180 by hmac, without the batch."""

    def mac(secret: bytes, message: bytes) -> bytes:
        return hmac.digest(secret, message, "sha256")

    extracted = mac(b"", KEM + b"eae_prk" + shared)
    agreed = mac(extracted, b"\x00\x20" + KEM + b"shared_secret" + point + public + b"\x01")
    secret = mac(agreed, SUITE + b"secret")
    context = b"\x00" + mac(b"", SUITE + b"psk_id_hash") + mac(b"", SUITE + b"info_hash" + info) + b"\x01"
    nonce = mac(secret, b"\x00\x0c" + SUITE + b"base_nonce" + context)[:12]
    return point + AESGCM(mac(secret, b"\x00\x10" + SUITE + b"key" + context)[:16]).encrypt(nonce, plain, None)


def honest(key: PrivateKey, count: int = COUNT) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return plaintexts, infos and sealed messages."""
    plain, infos = [os.urandom(64) for _ in range(count)], [os.urandom(300) for _ in range(count)]
    return plain, infos, [key.public.seal(text, info) for text, info in zip(plain, infos, strict=True)]


@pytest.mark.parametrize("count", [0, 1, 8, 15, 16, 17, COUNT])
@pytest.mark.parametrize("suite", list(Suite))
def test_honest_messages_open(suite: Suite, count: int) -> None:
    key = PrivateKey.generate(suite)
    plain, infos, sealed = honest(key, count)
    assert key.open_many(sealed, infos) == plain


@pytest.mark.parametrize("suite", list(Suite))
def test_the_batch_opens_honest_messages_itself(suite: Suite, way: str) -> None:
    """The library, which decides what is left, would hide a batch that opens nothing."""
    key = PrivateKey.generate(suite)
    plain, infos, sealed = honest(key)
    opened = key._open_batch(sealed, infos)
    if way not in LIES:
        assert opened == plain
    else:
        assert None in opened
        assert all(each in (None, text) for each, text in zip(opened, plain, strict=True))


@pytest.mark.parametrize("suite", list(Suite))
def test_wrong_hmacs_alone_change_no_verdict(suite: Suite, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way not in LIES:
        pytest.skip("there is no lie")
    monkeypatch.setattr(hpke_batch, "find_lanes", lambda: lie_in_macs(way))
    key = PrivateKey.generate(suite)
    plain, infos, sealed = honest(key)
    sealed[7] = flipped(sealed[7], 8 * 40)
    assert key.open_many(sealed, infos) == [None if at == 7 else text for at, text in enumerate(plain)]
    # Under a key that no longer depends on a secret, anybody could seal.
    predicted = [message[: -64 - 16] + AESGCM(bytes(16)).encrypt(bytes(12), bytes(64), None) for message in sealed]
    assert key.open_many(predicted, infos) == [None] * COUNT


def flipped(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


OTHER = PrivateKey.generate(CLASSICAL)
CHANGES: dict[str, Callable[[int, bytes], bytes]] = {
    "one bit flipped": lambda at, message: flipped(message, 37 * at % (8 * len(message))),
    "random bytes": lambda _, message: os.urandom(len(message)),
    "an edge point": lambda at, message: POINTS[at % len(POINTS)] + message[32:],
    "sealed to another key": lambda _, message: OTHER.public.seal(bytes(64), b""),
    "another message's point": lambda _, message: OTHER.public.seal(bytes(64), b"")[:32] + message[32:],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_malformed_message_affects_no_other(change: Callable[[int, bytes], bytes]) -> None:
    key = PrivateKey.generate(CLASSICAL)
    _, infos, sealed = honest(key, 150)
    mixed = [change(at, message) if at % 3 else message for at, message in enumerate(sealed)]
    opened = key.open_many(mixed, infos)
    assert opened == one_by_one(key, mixed, infos)
    assert [text is None for text in opened] == [bool(at % 3) for at in range(150)]


def test_the_top_bit_of_a_point_is_part_of_the_key_schedule() -> None:
    """X25519 ignores the bit, and the schedule hashes it: such a message must not open."""
    key = PrivateKey.generate(CLASSICAL)
    _, infos, sealed = honest(key)
    changed = [flipped(message, 255) for message in sealed]
    assert key.open_many(changed, infos) == one_by_one(key, changed, infos) == [None] * COUNT


def test_another_info_does_not_open() -> None:
    key = PrivateKey.generate(CLASSICAL)
    _, infos, sealed = honest(key)
    others = [flipped(info, at) for at, info in enumerate(infos)]
    assert key.open_many(sealed, others) == one_by_one(key, sealed, others) == [None] * COUNT


def test_messages_sealed_under_the_zero_secret_are_refused() -> None:
    """Anybody can make such a message, and RFC 9180 §7.1.4 refuses it."""
    key, info = PrivateKey.generate(CLASSICAL), os.urandom(300)
    sealed = [seal_under(bytes(32), point, key.public.raw, bytes(64), info) for point in POINTS]
    infos = [info] * len(sealed)
    assert key.open_many(sealed, infos) == one_by_one(key, sealed, infos) == [None] * len(sealed)


@pytest.mark.parametrize("number", range(12))
def test_messages_under_edge_points_get_the_librarys_verdict(number: int) -> None:
    """Sealed under the true secret, which here the test computes from the private key."""
    key = PrivateKey(CLASSICAL, sha256(f"key {number}".encode()).digest())
    exchange = X25519PrivateKey.from_private_bytes(key.raw).exchange
    points = [encoded(point | top) for point in EDGE if point not in SMALL_ORDER for top in (0, 2**255)]
    sealed = [
        seal_under(exchange(X25519PublicKey.from_public_bytes(point)), point, key.public.raw, bytes(64), b"info")
        for point in points
    ]
    infos = [b"info"] * len(sealed)
    assert key.open_many(sealed, infos) == one_by_one(key, sealed, infos) == [bytes(64)] * len(sealed)


def test_lanes_are_not_used_after_their_first_wrong_secret(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Else the time of each further message would tell bits of the key. A message that nobody can open is no reason."""
    if way != "lanes":
        pytest.skip("something else stands in for the lanes")
    key = PrivateKey.generate(CLASSICAL)
    plain, infos, sealed = honest(key)
    bad = [encoded(P - 1) + sealed[0][32:], flipped(sealed[1], 400), os.urandom(len(sealed[2]))]
    assert key.open_many(bad + sealed[3:], infos) == [None] * 3 + plain[3:]
    assert key.open_many([*sealed[1:], sealed[0] + b"x"], infos) == [None] * COUNT
    assert find_lanes() is not None and caplog.messages == []
    point = encoded(P - 6)  # the lanes are wrong for it under every key
    exchange = X25519PrivateKey.from_private_bytes(key.raw).exchange
    secret = exchange(X25519PublicKey.from_public_bytes(point))
    crafted = seal_under(secret, point, key.public.raw, bytes(64), infos[3])
    for _ in range(2):
        assert key.open_many([*sealed[:3], crafted, *sealed[4:]], infos) == [*plain[:3], bytes(64), *plain[4:]]
    assert (find_lanes(), len(caplog.messages)) == (None, 1)


def test_wycheproof_vectors_get_the_librarys_verdict() -> None:
    """Every vector fills a batch of its own, because each has a private key of its own."""
    if not WYCHEPROOF.exists():
        pytest.skip(f"Wycheproof's X25519 vectors are not at {WYCHEPROOF}")
    tests = [test for group in json.loads(WYCHEPROOF.read_text())["testGroups"] for test in group["tests"]]
    assert len(tests) == 518
    for test in tests:
        key = PrivateKey(CLASSICAL, bytes.fromhex(test["private"]))
        shared = bytes.fromhex(test["shared"])
        message = seal_under(shared, bytes.fromhex(test["public"]), key.public.raw, b"text", b"info")
        verdict = None if shared == bytes(32) else b"text"
        assert one_by_one(key, [message], [b"info"]) == [verdict], test["tcId"]
        assert key.open_many([message] * 16, [b"info"] * 16) == [verdict] * 16, test["tcId"]


@pytest.mark.parametrize("size", [0, 31, 32, 47, 48])
def test_a_message_that_is_too_short_is_refused(size: int) -> None:
    key = PrivateKey.generate(CLASSICAL)
    assert key.open_many([os.urandom(size)] * COUNT, [b""] * COUNT) == [None] * COUNT


def test_messages_and_infos_of_several_sizes_open() -> None:
    key = PrivateKey.generate(CLASSICAL)
    plain, infos = [os.urandom(at) for at in range(COUNT)], [os.urandom(3 * at) for at in range(COUNT)]
    sealed = [key.public.seal(text, info) for text, info in zip(plain, infos, strict=True)]
    assert key.open_many(sealed, infos) == plain
    sealed[5], sealed[6] = sealed[5][:-1], b""
    assert key.open_many(sealed, infos) == one_by_one(key, sealed, infos)


def test_the_hybrid_suite_gets_the_librarys_verdict() -> None:
    key = PrivateKey.generate(POST_QUANTUM)
    _, infos, sealed = honest(key, 150)
    for at in range(1, 150, 3):
        sealed[at] = flipped(sealed[at], 61 * at % (8 * len(sealed[at])))
        point = POINTS[at % len(POINTS)]
        sealed[at + 1] = sealed[at + 1][:1088] + point + sealed[at + 1][1120:]
    opened = key.open_many(sealed, infos)
    assert opened == one_by_one(key, sealed, infos)
    assert [text is None for text in opened] == [bool(at % 3) for at in range(150)]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, COUNT])
@pytest.mark.parametrize("suite", list(Suite))
def test_what_a_crowd_seals_opens_by_the_library(suite: Suite, count: int, way: str) -> None:
    if way == "one lane of eight":
        pytest.skip("one exchange of a batch is compared with the library's, and this lie is in one of eight")
    key = PrivateKey.generate(suite)
    plain, infos = [os.urandom(64) for _ in range(count)], [os.urandom(300) for _ in range(count)]
    sealed = key.public.seal_many(plain, infos)
    assert one_by_one(key, sealed, infos) == plain
    assert len({message[:32] for message in sealed}) == count


def test_a_crowd_seals_infos_and_texts_of_several_sizes() -> None:
    key = PrivateKey.generate(CLASSICAL)
    plain, infos = [os.urandom(at) for at in range(COUNT)], [os.urandom(at // 7) for at in range(COUNT)]
    assert one_by_one(key, key.public.seal_many(plain, infos), infos) == plain


@pytest.mark.parametrize("point", [point for point in SMALL_ORDER if point < P])
def test_nothing_is_sealed_to_a_point_of_small_order(point: int) -> None:
    with raises(ErrorKind.WRONG_KEY):
        PublicKey(CLASSICAL, encoded(point)).seal_many([bytes(64)] * COUNT, [b"info"] * COUNT)
