"""The display side against a model of it that was written from the rule and not from the engine.

Random worlds and sequences of questions, on both stores: every report and every ledger entry must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device.device import Device
from device.labelling import LabelOptions
from device.limits import DeviceLimits
from device.privacy_filter import FilterKind
from device.report import PlainSeal
from device.side_query import SideQuery, SideQueryForm
from device.storage import Store
from tests.support.both_stores import Kind, fresh_store
from tests.support.display_worlds import (
    CAP,
    GRAIN,
    NOW,
    OTHER_PUBLISHER,
    PUBLISHER,
    A,
    Ask,
    B,
    Event,
    converted,
    label,
    limits,
    moment,
    populate,
)
from tests.support.small_worlds import START, WEEK, Clock, fixed_coins

Account = tuple[FilterKind, str, int]


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@dataclass
class Model:
    """A device of the display side in one page. Amounts are in micros of ε."""

    events: list[Event]
    limits: DeviceLimits
    paid: dict[Account, int] = field(default_factory=dict)

    def answer(self, asked: Ask) -> tuple[int, ...]:
        options = asked.options
        assert isinstance(options, LabelOptions)
        shown = NOW - options.shown_ago
        end = shown + options.window_days * 86_400
        kappa = options.side_query.kappa if options.side_query else 0
        unpaid, label = 0, 0
        for epoch in range((shown - START) // WEEK, (end - 1 - START) // WEEK + 1):
            sites = {event.site for event in self.events if self._relevant(event, asked, epoch, shown, end)}
            moved = sum(options.features) if sites else 0
            if self._pay(asked.site, epoch, sites, options.epsilon, moved, kappa):
                label |= bool(sites)
            else:
                unpaid += 1
        report = tuple(label * number for number in options.features)
        if options.side_query is None:
            return report
        flagged = unpaid and (options.side_query.form is SideQueryForm.GENERAL or not label)
        return (*report, kappa if flagged else 0)

    def _relevant(self, event: Event, asked: Ask, epoch: int, shown: int, end: int) -> bool:
        assert isinstance(asked.options, LabelOptions)
        return (
            event.epoch == epoch
            and shown <= moment(event.epoch, event.day) < end
            and event.site in asked.options.advertisers
            and asked.site in event.publishers
            and asked.site not in (event.site, event.caller)
        )

    def _pay(self, site: str, epoch: int, sites: set[str], epsilon: float, moved: int, kappa: int) -> bool:
        def micros(units: int) -> int:
            return ceil(round(epsilon * 10**6) * units / CAP)

        owed: dict[Account, tuple[int, int]] = {
            (FilterKind.SITE, site, epoch): (micros(moved + kappa), self.limits.site_budget),
            (FilterKind.GLOBAL, "", epoch): (micros(moved + kappa), self.limits.global_budget),
        }
        for advertiser in sites:
            owed[FilterKind.ADVERTISER, advertiser, epoch] = (micros(moved), self.limits.advertiser_quota)
        if any(self.paid.get(account, 0) + amount > most for account, (amount, most) in owed.items()):
            return False
        for account, (amount, _) in owed.items():
            if amount:
                self.paid[account] = self.paid.get(account, 0) + amount
        return True


publishers = st.sampled_from([(PUBLISHER,), (OTHER_PUBLISHER,), (PUBLISHER, OTHER_PUBLISHER)])
happened = st.builds(
    lambda epoch, day, site, caller, by: converted(epoch, site, day, caller, by),
    st.integers(0, 1),
    st.integers(0, 6),
    st.sampled_from([A, B]),
    st.sampled_from(["", PUBLISHER, "adtech.example"]),
    publishers,
)
side_queries = st.none() | st.builds(
    SideQuery, st.integers(1, 2), st.sampled_from([SideQueryForm.GENERAL, SideQueryForm.ANY])
)


@st.composite
def questions(draw: st.DrawFn) -> Ask:
    epoch, day = draw(st.integers(0, 1)), draw(st.integers(0, 6))
    features = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any))
    return label(
        features,
        (epoch, day),
        draw(st.integers(1, 14 - 7 * epoch - day)),
        advertisers=draw(st.sampled_from([(A,), (B,), (A, B)])),
        site=draw(st.sampled_from([PUBLISHER, OTHER_PUBLISHER])),
        side_query=draw(side_queries),
    )


def ledger(store: Store) -> Iterator[tuple[Account, int]]:
    with store.transaction():
        for owner, entries in store.filters().items():
            yield from (((owner.kind, owner.site, epoch), amount) for epoch, amount in entries.entries())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(happened, max_size=6, unique=True),
    asked=st.lists(questions(), min_size=1, max_size=8),
    grains=st.fixed_dictionaries({"global_budget": st.integers(3, 12), "advertiser_quota": st.integers(2, 12)}),
)
def test_the_engine_says_and_charges_what_the_rule_does(
    kind: Kind, events: list[Event], asked: list[Ask], grains: dict[str, Any]
) -> None:
    with fresh_store(kind) as store:
        clock = Clock()
        device: Device[tuple[int, ...]] = Device(
            store, PlainSeal(), clock=clock, limits=limits(**grains), coins=fixed_coins()
        )
        populate(device, store, clock, events)
        model = Model(events, limits(**grains))
        for question in asked:
            assert question.on(device) == model.answer(question)
            assert dict(ledger(store)) == model.paid


def test_the_model_counts_in_grains() -> None:
    """So that it cannot agree by both being zero: one conversion, features of 3, three grains."""
    model = Model([converted(0)], limits())
    assert model.answer(label((2, 1))) == (2, 1)
    assert model.paid == {
        (FilterKind.SITE, PUBLISHER, 0): 3 * GRAIN,
        (FilterKind.GLOBAL, "", 0): 3 * GRAIN,
        (FilterKind.ADVERTISER, A, 0): 3 * GRAIN,
    }
