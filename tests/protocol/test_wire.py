"""The canonical encoding: what was written is what is read, nothing else parses, and enums keep their numbers."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_helpers.ledger.attempt import VoteStatus
from protocol.errors import ErrorKind, ProtocolError, Rejection, WireEnum
from protocol.vote import Vote
from protocol.wire import Reader, Writer, tagged_hash
from tests.support.raising import raises

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
        result = read(bytes(encoded), [kind for kind, _ in fields])
    except ProtocolError:
        return
    assert write(result) == bytes(encoded)


@given(FIELDS)
def test_truncation_and_extension_are_refused(fields: Fields) -> None:
    encoded, kinds = write(fields), [kind for kind, _ in fields]
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError):
            read(encoded[:length], kinds)
    with raises(ErrorKind.TRAILING_BYTES, ProtocolError):
        read(encoded + b"\x00", kinds)


@pytest.mark.parametrize(("value", "size"), [(256, 1), (-1, 1), (2**64, 8), (1, 0)])
def test_a_number_that_does_not_fit_is_refused(value: int, size: int) -> None:
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        Writer().uint(value, size)


def test_fixed_bytes_of_another_length_are_refused() -> None:
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        Writer().fixed(b"abc", 4)


def test_a_blob_too_long_for_its_prefix_is_refused() -> None:
    assert Writer().blob(bytes(255), 1).done()[0] == 255
    with pytest.raises(ProtocolError):
        Writer().blob(bytes(256), 1)
    with pytest.raises(ProtocolError):
        Writer().text("x" * 65536)


def test_a_length_over_the_limit_is_refused_before_the_bytes_are_looked_for() -> None:
    with raises(ErrorKind.TOO_LARGE, ProtocolError):
        Reader(b"\xff\xff\xff\xff").blob(limit=10)
    with raises(ErrorKind.TRUNCATED, ProtocolError):
        Reader(b"\xff\xff\xff\xff").blob()


@pytest.mark.parametrize("raw", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_refused(raw: bytes) -> None:
    """Overlong forms and halves of surrogate pairs included: they would be second encodings."""
    with raises(ErrorKind.MALFORMED, ProtocolError):
        Reader(Writer().blob(raw, 2).done()).text()


def test_half_a_character_cannot_be_written() -> None:
    with raises(ErrorKind.INVALID_VALUE, ProtocolError):
        Writer().text("\ud800")


def test_a_choice_is_one_of_the_list() -> None:
    assert [Reader(bytes([code])).choice("abc") for code in range(3)] == ["a", "b", "c"]
    for code in (3, 255):
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
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


ROOT = Path(__file__).parents[2]
VOCABULARIES = {
    "protocol/errors.py": "Rejection",
    "protocol/vote.py": "Vote",
    "mpc_helpers/ledger/attempt.py": "VoteStatus",
}
# Prints, for every member of each vocabulary, the bytes that say it: in a vote, a STATE and the counts of an answer.
PROGRAM = """
import numpy as np
from mpc_helpers.agreement.messages import StateMessage, pack_rejections
from mpc_helpers.ledger.attempt import VoteStatus
from protocol.answer import AnswerShare
from protocol.errors import Rejection
from protocol.field import from_integers
from protocol.left_out import code_of, encode_left_out
from protocol.noise import NoiseMode
from protocol.vote import SignedVote, Vote
from protocol.wire import Reader

def votes_of(word):
    return (SignedVote(0, bytes(32), Vote.YES, bytes(64)),) if word in (VoteStatus.YES, VoteStatus.NO) else ()

said = {}
for vote in Vote:
    said["vote " + vote.name] = SignedVote(1, bytes(32), vote, bytes(64)).encode()
    assert SignedVote.decode(said["vote " + vote.name]).vote is vote
for word in VoteStatus:
    said["word " + word.name] = StateMessage(bytes(32), word, votes_of(word)).encode()
    assert StateMessage.read(Reader(said["word " + word.name])).status is word
for reason in Rejection:
    counts = {reason: 7}
    codes = np.array([code_of(reason)] * 7 + [0] * 2, dtype=np.uint8)
    left_out = (bytes(32),) * 3, encode_left_out(codes)
    terms = NoiseMode.LOCAL, 1, 1
    share = AnswerShare(bytes(32), 1, bytes(32), 9, 2, (counts, {}, {}), *terms, *left_out, from_integers([1]))
    said[reason.name] = share.encode() + bytes(pack_rejections(counts))
    assert AnswerShare.decode(share.encode()).rejections[0] == counts
print(*(f"{name} {said[name].hex()}" for name in sorted(said)), sep="\\n")
"""


def said_by(folder: Path) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def with_members_reversed(source: str, name: str) -> str:
    """The module with the members of one class in the opposite order."""
    start = source.index(f"class {name}(")
    members = re.findall(r"^    [A-Z_]+ = \d+, .*\n", source[start:], flags=re.MULTILINE)
    block = "".join(members)
    assert len(members) > 2
    assert block in source, f"the members of {name} do not stand together"
    return source.replace(block, "".join(reversed(members)))


def test_reordering_a_vocabulary_changes_no_byte(tmp_path: Path) -> None:
    for package in ("protocol", "mpc_helpers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, name in VOCABULARIES.items():
        copy = tmp_path / path
        copy.write_text(with_members_reversed(copy.read_text(), name))
    expected = said_by(ROOT)
    assert len(expected) == len(Vote) + len(VoteStatus) + len(Rejection)
    assert said_by(tmp_path) == expected


def test_numbers_are_those_of_the_specification() -> None:
    assert [(vote.name, vote.number) for vote in Vote] == [("YES", 0), ("ABORTED", 1), ("RENOUNCED", 2)]
    assert [(word.name, word.number) for word in VoteStatus] == [("YES", 0), ("NO", 1), ("WORKING", 2), ("UNKNOWN", 3)]
    assert [reason.number for reason in Rejection.by_number()] == list(range(len(Rejection)))
    assert (Rejection.MALFORMED.number, Rejection.NOISE_TOO_SMALL.number, Rejection.SEEN.number) == (0, 13, 18)


def test_a_number_that_nobody_has_is_refused() -> None:
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        Reader(b"\x09").member(Vote)


def test_a_number_or_a_text_given_twice_is_a_mistake_in_the_source() -> None:
    with pytest.raises(TypeError, match="twice"):
        WireEnum("Twice", {"ONE": (1, "one"), "TWO": (1, "two")})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="twice"):
        WireEnum("Twice", {"ONE": (1, "one"), "TWO": (2, "one")})  # type: ignore[arg-type]
