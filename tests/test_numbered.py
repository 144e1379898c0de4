"""Numbers on the wire: written in the source beside each member, so that moving a line changes no byte."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpc_helpers.ledger.attempt import Word
from protocol.errors import ProtocolError, Rejection
from protocol.numbered import Numbered
from protocol.vote import Vote
from protocol.wire import Reader

ROOT = Path(__file__).parent.parent
VOCABULARIES = {
    "protocol/errors.py": "Rejection",
    "protocol/vote.py": "Vote",
    "mpc_helpers/ledger/attempt.py": "Word",
}
# Prints, for every member of each vocabulary, the bytes that say it: in a vote, a STATE and the counts of an answer.
PROGRAM = """
import numpy as np
from mpc_helpers.agreement.messages import StateMessage, pack_rejections
from mpc_helpers.ledger.attempt import Word
from protocol.answer import AnswerShare
from protocol.errors import Rejection
from protocol.field import from_integers
from protocol.left_out import code_of, encode_left_out
from protocol.query import NoiseMode
from protocol.vote import SignedVote, Vote
from protocol.wire import Reader

def votes_of(word):
    return (SignedVote(0, bytes(32), Vote.YES, bytes(64)),) if word in (Word.YES, Word.NO) else ()

said = {}
for vote in Vote:
    said["vote " + vote.name] = SignedVote(1, bytes(32), vote, bytes(64)).encode()
    assert SignedVote.decode(said["vote " + vote.name]).vote is vote
for word in Word:
    said["word " + word.name] = StateMessage(bytes(32), word, votes_of(word)).encode()
    assert StateMessage.read(Reader(said["word " + word.name])).word is word
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
    assert len(expected) == len(Vote) + len(Word) + len(Rejection)
    assert said_by(tmp_path) == expected


def test_numbers_are_those_of_the_specification() -> None:
    assert [(vote.name, vote.number) for vote in Vote] == [("YES", 0), ("ABORTED", 1), ("RENOUNCED", 2)]
    assert [(word.name, word.number) for word in Word] == [("YES", 0), ("NO", 1), ("WORKING", 2), ("UNKNOWN", 3)]
    assert [reason.number for reason in Rejection.ascending()] == list(range(len(Rejection)))
    assert (Rejection.MALFORMED.number, Rejection.NOISE_TOO_SMALL.number, Rejection.SEEN.number) == (0, 13, 18)


def test_a_number_that_nobody_has_is_refused() -> None:
    with pytest.raises(ProtocolError, match="9 is the number of no Vote"):
        Reader(b"\x09").numbered(Vote)


def test_a_number_or_a_text_given_twice_is_a_mistake_in_the_source() -> None:
    with pytest.raises(TypeError, match="twice"):
        Numbered("Twice", {"ONE": (1, "one"), "TWO": (1, "two")})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="twice"):
        Numbered("Twice", {"ONE": (1, "one"), "TWO": (2, "one")})  # type: ignore[arg-type]
