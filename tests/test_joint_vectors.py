"""The stored vectors of SPEC §11: parameters, circuit, streams and one whole session, byte for byte.

What is stored is compared with what the code makes now, and with what can be said of it without the code.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from tests import make_joint_vectors, make_vectors

STORED: dict[str, Any] = json.loads((make_vectors.FOLDER / "joint.json").read_text())
P = 2**61 - 1


@pytest.mark.parametrize("part", ["parameters", "circuit", "streams", "session"])
def test_the_code_makes_what_is_stored(part: str) -> None:
    made = json.loads(json.dumps(make_joint_vectors.joint_file()))
    assert made[part] == STORED[part]


def test_every_stored_delta_is_that_of_its_own_coins() -> None:
    for vector in STORED["parameters"]:
        *digits, (bits, numerator) = vector["coins"]
        bound, above, equal = 2 ** len(digits) - vector["covered"], Fraction(0), Fraction(1)
        for place in reversed(range(len(digits))):
            chance = Fraction(digits[place][1], 2 ** digits[place][0])
            above += 0 if bound >> place & 1 else equal * chance
            equal *= chance if bound >> place & 1 else 1 - chance
        assert (1 - Fraction(numerator, 2**bits)) * (above + equal) == Fraction(vector["delta"]) < Fraction(1, 2**52)


def test_the_stored_components_add_up_to_the_stored_noise() -> None:
    session = STORED["session"]
    known: dict[str, list[int]] = {}
    for party, components in enumerate(session["components"]):
        assert str(party) not in components
        for lacking, component in components.items():
            assert known.setdefault(lacking, component) == component
    sums = [sum(column) % P for column in zip(*known.values(), strict=True)]
    assert [value - P if value > P // 2 else value for value in sums] == session["noise"]
    assert len(session["messages"]) == 3 * (6 + len(STORED["circuit"]["gates"]))
