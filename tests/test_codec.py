"""The codec that stands where MPyC has pickle: round trips, one encoding, and nothing but errors from noise."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_helpers.mpc import codec
from protocol.errors import ProtocolError
from protocol.field import P

elements = st.integers(0, P - 1)


def objects(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@given(st.lists(elements, max_size=40))
def test_vectors_come_back_as_python_integers(values: list[int]) -> None:
    back = codec.loads(codec.dumps(objects(values)))
    assert back.dtype == object and back.tolist() == values
    assert all(type(value) is int for value in back)


@given(st.binary(max_size=codec.MAX_BYTES))
def test_bytes_come_back(value: bytes) -> None:
    assert codec.loads(codec.dumps(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        5,
        "text",
        None,
        [1, 2],
        {"a": 1},
        1.5,
        bytes(codec.MAX_BYTES + 1),
        bytearray(b"mutable"),
        objects([P]),
        objects([-1]),
        objects([1.0]),  # type: ignore[list-item] # a float must be refused, not rounded
        objects([True]),
        objects([np.int64(3)]),  # type: ignore[list-item] # numpy's integers wrap
        np.array([1, 2], dtype=np.int64),
        np.array([[1, 2]], dtype=object),
    ],
)
def test_nothing_else_is_sent(value: object) -> None:
    with pytest.raises(ProtocolError):
        codec.dumps(value)


class Bomb:
    """Unpickling this would create a directory: what a bad helper does to stock MPyC."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(tmp_path_factory: pytest.TempPathFactory, protocol: int) -> None:
    target = tmp_path_factory.getbasetemp() / f"bomb-{protocol}"
    payload = pickle.dumps(Bomb(str(target)), protocol)
    with pytest.raises(ProtocolError):
        codec.loads(payload)
    assert not target.exists()


def test_the_bomb_is_live(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Otherwise the test above would show nothing."""
    target = tmp_path_factory.getbasetemp() / "bomb-live"
    pickle.loads(pickle.dumps(Bomb(str(target))))  # noqa: S301 - our own bytes, to show what they do
    assert target.is_dir()


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_to_their_only_encoding_or_refused(data: bytes) -> None:
    try:
        value = codec.loads(data)
    except ProtocolError:
        return
    assert codec.dumps(value) == data


@given(st.lists(elements, min_size=1, max_size=10), st.data())
def test_a_damaged_vector_is_another_vector_or_an_error(values: list[int], data: st.DataObject) -> None:
    encoded = bytearray(codec.dumps(objects(values)))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        value = codec.loads(bytes(encoded))
    except ProtocolError:
        return
    assert codec.dumps(value) == bytes(encoded)


def test_p_itself_is_not_an_element() -> None:
    """MPyC takes what it unpickles without a check; an unreduced element would be one value with two encodings."""
    encoded = bytearray(codec.dumps(objects([P - 1])))
    encoded[-8:] = P.to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="not below p"):
        codec.loads(bytes(encoded))


def test_only_vectors_of_the_session_are_let_in() -> None:
    codec.check(codec.dumps(objects([1, 2, 3])), 3)
    codec.check(codec.dumps(b"nonce"), 3)
    with pytest.raises(ProtocolError, match="vector of 3 elements"):
        codec.check(codec.dumps(objects([1, 2, 3])), 4)
