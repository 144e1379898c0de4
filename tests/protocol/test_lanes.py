"""The optional native module: agreement with the library, what happens where it is absent or wrong, and its build."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from protocol import field, lanes, lanes_build
from protocol.lanes import Lanes, find_lanes
from tests.support.lying_lanes import LIES, lie, unsupported


@pytest.fixture
def native() -> Lanes:
    found = find_lanes()
    if found is None:
        pytest.skip("trefoil_lanes is not built, or this processor lacks AVX-512 IFMA")
    return found


@pytest.fixture
def probed_again() -> Iterator[None]:
    find_lanes.cache_clear()
    yield
    find_lanes.cache_clear()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_exchanges_are_those_of_the_library(native: Lanes, count: int) -> None:
    keys = [X25519PrivateKey.generate() for _ in range(count)]
    scalars = np.frombuffer(b"".join(key.private_bytes_raw() for key in keys), dtype=np.uint8).reshape(count, 32)
    publics = [key.public_key().public_bytes_raw() for key in keys]
    assert native.public_points(scalars).tobytes() == b"".join(publics)
    one = X25519PrivateKey.generate()
    point = np.frombuffer(one.public_key().public_bytes_raw(), dtype=np.uint8).reshape(1, 32)
    shared = b"".join(one.exchange(X25519PublicKey.from_public_bytes(public)) for public in publics)
    assert native.exchange(scalars, point).tobytes() == shared


@pytest.mark.parametrize("count", [0, 1, 2, 37, 140])
@pytest.mark.parametrize("rows", [15, 16, 17, 64])
def test_expansions_are_the_same_bytes_with_and_without(
    native: Lanes, count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [os.urandom(32) for _ in range(rows)]
    fast = field.expand_many(seeds, count).tobytes()
    monkeypatch.setattr(field, "find_lanes", lambda: None)
    assert field.expand_many(seeds, count).tobytes() == fast


def test_wrong_keystreams_are_noticed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [os.urandom(32) for _ in range(40)]
    expected = b"".join(field.expand(seed, 9).tobytes() for seed in seeds)
    monkeypatch.setattr(field, "find_lanes", lambda: lie("zeros"))
    assert field.expand_many(seeds, 9).tobytes() == expected


@pytest.mark.usefixtures("probed_again")
def test_without_the_instructions_the_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "trefoil_lanes", unsupported())
    assert find_lanes() is None
    assert lanes.describe_opens() == "one at a time"


@pytest.mark.usefixtures("probed_again")
def test_without_the_module_the_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "trefoil_lanes", None)
    assert find_lanes() is None


@pytest.mark.parametrize("name", LIES)
def test_a_module_that_lies_at_the_start_is_not_used(name: str) -> None:
    assert not lanes._agrees(lie(name))


def test_the_build_says_in_one_line_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    lanes_build.main()
    printed = capsys.readouterr()
    assert printed.out.startswith("trefoil_lanes: not built (") and printed.out.count("\n") == 1
    assert printed.err == ""


def test_archives_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "libcrypto_mb.a"
    other.write_bytes(b"!<arch>\n")
    monkeypatch.setattr(lanes_build, "_installed", lambda *_: other)
    monkeypatch.setattr("shutil.which", lambda _: "cc")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(lanes_build.NotBuilt):
        lanes_build.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["libcrypto_mb.a"]


def test_the_module_builds_where_its_archives_are(tmp_path: Path) -> None:
    try:
        lanes_build._installed("ipp-crypto-static", "libcrypto_mb.a")
    except lanes_build.NotBuilt as error:
        pytest.skip(str(error))
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("there is no C compiler")
    assert lanes_build.build(tmp_path) == tmp_path / "trefoil_lanes.abi3.so"
