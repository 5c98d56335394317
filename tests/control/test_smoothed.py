"""A steady value: outliers change nothing, lasting changes are followed at the third reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.smoothed import KEPT, Smoothed


def after(*readings):
    smoothed = Smoothed()
    for reading in readings:
        smoothed.add(reading)
    return smoothed.value


def test_nothing_is_known_without_a_reading():
    assert Smoothed().value is None
    assert Smoothed().readings == 0
    assert Smoothed(7.0).value == 7.0


def test_quiet_readings_are_averaged():
    assert after(10, 11, 9, 10, 11) == pytest.approx(10.2)


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=2), st.permutations(range(5)))
def test_two_of_five_change_nothing(wrong, order):
    readings = [100.0, 101.0, 99.0, *wrong]
    value = after(*(readings[place] for place in order))
    assert 75 <= value <= 130


def test_a_change_that_lasts_is_followed():
    seen = [after(*[1.0] * 5, *[2.0] * new) for new in range(1, 4)]
    assert seen == [1.0, 1.0, 2.0]


def test_of_two_the_shorter_counts():
    assert after(5000.0, 20.0) == 20.0
    assert after(20.0, 5000.0) == 20.0


def test_only_the_last_few_are_kept():
    assert after(*range(1, 100), *[7.0] * KEPT) == 7.0


def test_a_makeshift_goes_with_the_next_reading():
    smoothed = Smoothed()
    smoothed.add(5000.0, provisional=True)
    assert smoothed.value == 5000.0
    smoothed.add(20.0, provisional=True)
    assert (smoothed.value, smoothed.readings) == (20.0, 1)
    smoothed.add(22.0, provisional=True)
    assert smoothed.readings == 2
