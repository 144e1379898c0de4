"""Privacy filters: check all, then consume all; never overdrawn, whatever is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.limits import DeviceLimits
from device.privacy_filter import (
    EMPTIED,
    FilterKind,
    FilterOwner,
    PrivacyFilter,
    capacities,
    charges_of,
    check_and_consume,
    states,
)
from device.privacy_loss import EpochLoss
from device.storage import EpochOutcome

LIMITS = DeviceLimits(site_budget=10, global_budget=25, impression_site_quota=15)
SITE = FilterOwner(FilterKind.SITE, "shop.example")
EVERYONE = FilterOwner(FilterKind.GLOBAL, "")


def test_the_numbers_that_databases_hold_stay_as_they_are() -> None:
    """Another number would make every filter of a device a new one."""
    numbers = {"SITE": 1, "GLOBAL": 2, "IMPRESSION_SITE": 3, "ADVERTISER": 5}
    assert {kind.name: kind.value for kind in FilterKind} == numbers
    outcomes = {"PAID": 1, "NOTHING_FOUND": 2, "OUT_OF_BUDGET": 3, "CLOSED": 4, "NOT_MEASURED": 5, "FAULT": 6}
    assert {outcome.name: outcome.value for outcome in EpochOutcome} == outcomes


def test_half_an_entry_is_no_filter() -> None:
    """A damaged ledger must not lose an amount without a word."""
    with pytest.raises(ValueError, match="shorter"):
        PrivacyFilter(bytes(8))


def test_each_filter_is_charged_once() -> None:
    charges = charges_of("shop.example", {"news.example", "blog.example"}, EpochLoss(1, 2, 3))
    assert charges == {
        SITE: 1,
        EVERYONE: 2,
        FilterOwner(FilterKind.IMPRESSION_SITE, "news.example"): 3,
        FilterOwner(FilterKind.IMPRESSION_SITE, "blog.example"): 3,
    }


def test_one_filter_that_cannot_pay_spares_the_others() -> None:
    filters = {SITE: PrivacyFilter(), EVERYONE: PrivacyFilter()}
    filters[EVERYONE].consume(3, 20)
    assert not check_and_consume(3, {SITE: 6, EVERYONE: 6}, filters, capacities(LIMITS))
    assert (filters[SITE].spent(3), filters[EVERYONE].spent(3)) == (0, 20)
    assert check_and_consume(3, {SITE: 5, EVERYONE: 5}, filters, capacities(LIMITS))
    assert (filters[SITE].spent(3), filters[EVERYONE].spent(3)) == (5, 25)


def test_the_last_micro_can_be_spent_and_no_more() -> None:
    filters = {SITE: PrivacyFilter()}
    assert check_and_consume(0, {SITE: 10}, filters, capacities(LIMITS))
    assert not check_and_consume(0, {SITE: 1}, filters, capacities(LIMITS))
    assert check_and_consume(0, {SITE: 0}, filters, capacities(LIMITS))
    assert check_and_consume(1, {SITE: 10}, filters, capacities(LIMITS))


def test_a_charge_beyond_64_bits_is_refused_not_wrapped() -> None:
    filters = {SITE: PrivacyFilter()}
    filters[SITE].consume(0, 5)
    assert not check_and_consume(0, {SITE: 2**64 - 5}, filters, capacities(LIMITS))
    assert not check_and_consume(0, {SITE: 2**63}, filters, capacities(LIMITS))


def test_an_emptied_filter_stays_empty_under_any_limits() -> None:
    ledger = PrivacyFilter()
    ledger.empty(2)
    assert ledger.spent(2) == EMPTIED
    generous = DeviceLimits(site_budget=2**52)
    assert not check_and_consume(2, {SITE: 1}, {SITE: ledger}, capacities(generous))
    assert check_and_consume(3, {SITE: 1}, {SITE: ledger}, capacities(generous))
    shown = states({SITE: ledger}, generous)
    assert [(state.epoch, state.remaining) for state in shown] == [(2, 0), (3, 2**52 - 1)]


entries = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 2**40)), max_size=30)


@given(entries, st.integers(-40, 40))
def test_a_ledger_is_a_map_from_epochs_to_sums(charges: list[tuple[int, int]], forgotten: int) -> None:
    ledger, model = PrivacyFilter(), dict[int, int]()
    for epoch, amount in charges:
        ledger.consume(epoch, amount)
        model[epoch] = model.get(epoch, 0) + amount
    assert dict(ledger.entries()) == {epoch: amount for epoch, amount in model.items() if amount}
    copy = PrivacyFilter(ledger.encode())
    copy.forget_before(forgotten)
    assert all(copy.spent(epoch) == (model.get(epoch, 0) if epoch >= forgotten else 0) for epoch in range(-50, 50))


amounts = st.integers(0, 30)


@given(st.lists(st.tuples(st.integers(0, 2), amounts, amounts, amounts), max_size=40))
def test_no_sequence_of_charges_overdraws(requests: list[tuple[int, int, int, int]]) -> None:
    quota = FilterOwner(FilterKind.IMPRESSION_SITE, "news.example")
    filters = {SITE: PrivacyFilter(), EVERYONE: PrivacyFilter(), quota: PrivacyFilter()}
    capacity = capacities(LIMITS)
    for epoch, *owed in requests:
        charges = dict(zip(filters, owed, strict=True))
        before = [filters[owner].spent(epoch) for owner in filters]
        paid = check_and_consume(epoch, charges, filters, capacity)
        after = [filters[owner].spent(epoch) for owner in filters]
        assert after == ([b + a for b, a in zip(before, owed, strict=True)] if paid else before)
        assert all(filters[owner].spent(epoch) <= capacity[owner.kind] for owner in filters)
