"""The one encoding: what was written is what is read, and nothing else reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.wire import Reader, Writer, tagged_hash

FIELDS = st.lists(
    st.one_of(
        st.tuples(st.just("uint"), st.integers(0, 2**32 - 1)),
        st.tuples(st.just("fixed"), st.binary(min_size=5, max_size=5)),
        st.tuples(st.just("blob"), st.binary(max_size=20)),
        st.tuples(st.just("text"), st.text(max_size=10)),
    ),
    max_size=6,
)
Fields = list[tuple[str, int | bytes | str]]


def write(fields: Fields) -> bytes:
    writer = Writer()
    for kind, value in fields:
        match value:
            case int():
                writer.uint(value, 4)
            case bytes() if kind == "fixed":
                writer.fixed(value, 5)
            case bytes():
                writer.blob(value)
            case str():
                writer.text(value)
    return writer.done()


def read(data: bytes, kinds: list[str]) -> Fields:
    reader = Reader(data)
    readers: dict[str, Callable[[], int | bytes | str]] = {
        "uint": lambda: reader.uint(4),
        "fixed": lambda: reader.fixed(5),
        "blob": reader.blob,
        "text": reader.text,
    }
    fields = [(kind, readers[kind]()) for kind in kinds]
    reader.finish()
    return fields


@given(FIELDS)
def test_reading_reverses_writing(fields: Fields) -> None:
    assert read(write(fields), [kind for kind, _ in fields]) == fields


@given(FIELDS, st.data())
def test_changed_bytes_read_as_something_that_writes_them(fields: Fields, data: st.DataObject) -> None:
    """No second encoding: whatever reads at all is written back as exactly those bytes."""
    encoded = bytearray(write(fields))
    for _ in range(data.draw(st.integers(1, 3))):
        if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(encoded), [kind for kind, _ in fields])
    except ProtocolError:
        return
    assert write(found) == bytes(encoded)


@given(FIELDS)
def test_truncation_and_extension_are_refused(fields: Fields) -> None:
    encoded, kinds = write(fields), [kind for kind, _ in fields]
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError):
            read(encoded[:length], kinds)
    with pytest.raises(ProtocolError, match="1 bytes left over"):
        read(encoded + b"\x00", kinds)


@pytest.mark.parametrize(("value", "size"), [(256, 1), (-1, 1), (2**64, 8), (1, 0)])
def test_a_number_that_does_not_fit_is_refused(value: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        Writer().uint(value, size)


def test_fixed_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="expected 4 bytes, got 3"):
        Writer().fixed(b"abc", 4)


def test_a_blob_too_long_for_its_prefix_is_refused() -> None:
    assert Writer().blob(bytes(255), 1).done()[0] == 255
    with pytest.raises(ProtocolError):
        Writer().blob(bytes(256), 1)
    with pytest.raises(ProtocolError):
        Writer().text("x" * 65536)


def test_a_length_over_the_limit_is_refused_before_the_bytes_are_looked_for() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        Reader(b"\xff\xff\xff\xff").blob(limit=10)
    with pytest.raises(ProtocolError, match="message ends after 4 bytes"):
        Reader(b"\xff\xff\xff\xff").blob()


@pytest.mark.parametrize("raw", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_refused(raw: bytes) -> None:
    """Overlong forms and halves of surrogate pairs included: they would be second encodings."""
    with pytest.raises(ProtocolError, match="not UTF-8"):
        Reader(Writer().blob(raw, 2).done()).text()


def test_half_a_character_cannot_be_written() -> None:
    with pytest.raises(ProtocolError, match="UTF-8 cannot express"):
        Writer().text("\ud800")


def test_a_choice_is_one_of_the_list() -> None:
    assert [Reader(bytes([code])).choice("abc") for code in range(3)] == ["a", "b", "c"]
    for code in (3, 255):
        with pytest.raises(ProtocolError, match=f"{code} is none of 3 choices"):
            Reader(bytes([code])).choice("abc")


def test_layout_as_annotated_bytes() -> None:
    encoded = Writer().uint(258, 2).fixed(b"\xaa\xbb", 2).blob(b"xyz").text("é").done()
    expected = (
        "0102"  # 258, big-endian, two bytes
        "aabb"  # two fixed bytes
        "00000003 78797a"  # length of four bytes, then xyz
        "0002 c3a9"  # length of two bytes, then é in UTF-8
    )
    assert encoded == bytes.fromhex(expected)


@given(st.text(max_size=5), st.lists(st.binary(max_size=6), max_size=3), st.lists(st.binary(max_size=6), max_size=3))
def test_tagged_hash_tells_parts_apart(label: str, left: list[bytes], right: list[bytes]) -> None:
    assert (tagged_hash(label, *left) == tagged_hash(label, *right)) == (left == right)
    assert tagged_hash(label, *left) != tagged_hash(label + "x", *left)


def test_tagged_hash_is_plain_sha256_over_label_and_lengths() -> None:
    expected = hashlib.sha256(b"\x00\x0btrefoil/1 a" + (2).to_bytes(8, "big") + b"bc").digest()
    assert tagged_hash("a", b"bc") == expected
