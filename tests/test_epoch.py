"""Epochs: integer seconds, rounding to the past on both sides of the start, and a start on the hour."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from device.epoch import EpochCalendar, draw_start
from protocol.seconds import DAY, HOUR

WEEK = 7 * DAY
moments = st.integers(min_value=-(10**11), max_value=10**11)


@given(moments, moments)
def test_every_moment_is_in_exactly_one_epoch(start: int, moment: int) -> None:
    calendar = EpochCalendar(start, WEEK)
    epoch = calendar.index(moment)
    assert calendar.first_second(epoch) <= moment < calendar.first_second(epoch + 1)


def test_indices_go_below_zero_without_a_gap() -> None:
    calendar = EpochCalendar(1000, WEEK)
    assert [calendar.index(moment) for moment in (1000 - WEEK, 999, 1000, 999 + WEEK, 1000 + WEEK)] == [-1, -1, 0, 0, 1]


@given(moments, st.floats(min_value=0, max_value=1, exclude_max=True))
def test_the_start_is_on_the_hour_and_within_an_epoch_before_now(now: int, coin: float) -> None:
    start = draw_start(now, WEEK, coin)
    assert start % HOUR == 0
    assert now - WEEK - HOUR < start <= now


def test_the_start_rounds_down_also_before_1970() -> None:
    assert draw_start(3, WEEK, 0.5) == -302_400
    assert draw_start(2, WEEK, 0.0) == 0
    assert draw_start(-1, WEEK, 0.0) == -HOUR


def test_a_window_has_the_epochs_of_both_ends() -> None:
    calendar = EpochCalendar(0, WEEK)
    assert list(calendar.window(WEEK - 1, 2 * WEEK)) == [0, 1, 2]
    assert list(calendar.window(0, WEEK - 1)) == [0]


def test_new_year_is_a_day_like_any_other() -> None:
    """Peers that counted ISO weeks or local dates had epochs that ran backwards here."""
    calendar = EpochCalendar(draw_start(1_767_000_000, WEEK, 0.3), WEEK)
    indices = [calendar.index(1_767_000_000 + hour * HOUR) for hour in range(24 * 30)]
    assert indices == sorted(indices)
    assert indices[-1] - indices[0] in (4, 5)
