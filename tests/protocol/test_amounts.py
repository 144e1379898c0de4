"""The amounts of a batch: grouped by what reports paid, without memory where all are alike; and `affordable`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.amounts import Amount, Amounts, AmountsBuilder
from protocol.errors import ErrorKind, ProtocolError
from protocol.units import need
from tests.support.raising import raises

PAIRS = st.tuples(st.integers(1_000, 4_000), st.integers(1, 9))
QUERY = (100, 10)


def amount(pair: tuple[int, int]) -> Amount:
    return Amount.of(*pair, *QUERY)


def built(pairs: list[tuple[int, int]], chunk: int) -> Amounts | None:
    """As an ingest does it: chunk by chunk, grouped in each."""
    builder = AmountsBuilder(len(pairs))
    for start in range(0, len(pairs), chunk):
        span = pairs[start : start + chunk]
        groups = [(pair, np.array([at for at, each in enumerate(span) if each == pair])) for pair in set(span)]
        builder.add(start, [(amount(pair), places) for pair, places in groups])
    return builder.done()


def by_place(amounts: Amounts, start: int, stop: int) -> list[Amount]:
    listed: dict[int, Amount] = {}
    for each, places in amounts.groups(start, stop):
        listed |= dict.fromkeys(places.tolist(), each)
    return [listed[place] for place in sorted(listed)]


@given(st.lists(PAIRS, min_size=1, max_size=40), st.integers(1, 7), st.data())
def test_every_report_has_its_own_amount(pairs: list[tuple[int, int]], chunk: int, data: st.DataObject) -> None:
    amounts = built(pairs, chunk)
    assert amounts is not None and len(amounts) == len(pairs)
    assert by_place(amounts, 0, len(pairs)) == [amount(pair) for pair in pairs]
    start = data.draw(st.integers(0, len(pairs)))
    stop = data.draw(st.integers(start, len(pairs) + 3))
    assert by_place(amounts, start, stop) == [amount(pair) for pair in pairs[start:stop]]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))))
    kept = [amount(pair) for pair, keep in zip(pairs, mask, strict=True) if keep]
    assert by_place(amounts.chosen(mask), 0, len(pairs)) == kept


def test_reports_that_are_alike_cost_no_memory() -> None:
    amounts = built([(1_000, 4)] * 5_000, 512)
    assert amounts is not None and amounts.group is None and len(amounts.distinct) == 1


def test_a_batch_without_admitted_reports_has_no_amounts() -> None:
    assert AmountsBuilder(7).done() is None


def test_a_query_takes_something_and_not_more_than_was_paid() -> None:
    for wrong in (0, -1, 1_001):
        with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
            Amount(1_000, 4, wrong)
    with raises(ErrorKind.OUT_OF_RANGE, ProtocolError):
        Amount.of(1_000, 4, 1_001, 4)
    with raises(ErrorKind.INCONSISTENT, ProtocolError):
        Amounts(3, (amount((1_000, 4)),), np.zeros(2, dtype=np.uint32))


@given(
    st.lists(st.tuples(PAIRS, st.integers(0, 10_000)), min_size=1, max_size=25), st.integers(0, 26), st.integers(1, 9)
)
def test_affordable_is_the_largest_epsilon_with_enough_reports(
    reports: list[tuple[tuple[int, int], int]], needed: int, sensitivity: int
) -> None:
    """By trying: what a ledger was told above what was paid counts as what was paid."""
    amounts = built([pair for pair, _ in reports], 6)
    assert amounts is not None
    left = np.array([rest for _, rest in reports], dtype=np.int64)
    most = amounts.affordable(left, needed, sensitivity)

    def enough(epsilon: int) -> bool:
        costs = [need(*pair, epsilon, sensitivity) for pair, _ in reports]
        rests = [min(rest, pair[0]) for pair, rest in reports]
        return sum(cost <= rest for cost, rest in zip(costs, rests, strict=True)) >= needed

    if most is None:
        assert needed == 0 or not enough(1)
    else:
        assert enough(most) and not enough(most + 1)


@pytest.mark.parametrize(
    ("rests", "needed", "most"), [([0, 300, 700], 1, 700), ([0, 300, 700], 2, 300), ([0, 15], 1, None)]
)
def test_affordable_by_example(rests: list[int], needed: int, most: int | None) -> None:
    """The needed-th largest; below ⌈1000/64⌉ = 16 nothing can be asked for."""
    amounts = Amounts(len(rests), (Amount(1_000, 10, 100),))
    assert amounts.affordable(np.array(rests), needed, 10) == most
