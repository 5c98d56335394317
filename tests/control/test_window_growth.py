"""Windows grow while their fixed cost is too large, and only with the guard's consent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.convergence import NudgeDown, Stable, SuppressGrowth
from flodl_shm.control.window_growth import REARM, WindowGrowth


def growth(steps=10, *, low=10, high=1000, target=0.05):
    return WindowGrowth(steps, low=low, high=high, target=target)


def propose(window, *, fixed, cost=80.0, settled=True, cap=None):
    return window.propose(cost_ns=cost, fixed_ns=fixed, settled=settled, cap=cap)


def test_a_proposal_waits_for_the_guard():
    window = growth()
    said = propose(window, fixed=60.0)
    assert said == "overhead 7.0% of the window, over 5.0%: 14 anchor steps proposed"
    assert window.steps == 10
    assert window.judge(Stable()) == "window grows from 10 to 14 anchor steps"
    assert window.judge(Stable()) == "window stays at 14 anchor steps"


def test_one_reading_at_most_doubles_the_window():
    window = growth()
    propose(window, fixed=1e9)
    window.judge(Stable())
    assert window.steps == 20


def test_small_overhead_proposes_nothing():
    window = growth()
    assert propose(window, fixed=20.0) == "overhead 2.4% of the window"
    window.judge(Stable())
    assert window.steps == 10


def test_early_on_only_a_clear_excess_counts():
    window = growth()
    assert "proposed" not in propose(window, fixed=60.0, settled=False)
    assert "proposed" in propose(window, fixed=100.0, settled=False)


def test_growth_off_is_armed_again_by_stable_verdicts():
    window = growth()
    propose(window, fixed=60.0)
    assert window.judge(SuppressGrowth()).startswith("growth to 14 dropped, growth off")
    for _ in range(REARM):
        assert propose(window, fixed=60.0).endswith("but growth is off")
        assert window.judge(Stable()) == "window stays at 10 anchor steps"
    propose(window, fixed=60.0)
    window.judge(Stable())
    assert window.steps == 14
    assert window.judge(SuppressGrowth()) == "growth off, window stays at 14 anchor steps"


def test_a_nudge_drops_the_proposal_and_goes_below_the_least():
    window = growth(low=10)
    propose(window, fixed=60.0)
    assert window.judge(NudgeDown(0.5)) == "window nudged from 10 to 5 anchor steps, growth off"
    window.judge(Stable())
    assert window.steps == 5


@given(st.floats(), st.integers(1, 1000))
def test_a_nudge_never_goes_up_nor_collapses(factor, steps):
    window = growth(steps, low=1)
    window.judge(NudgeDown(factor))
    assert max(1, steps // 10) <= window.steps <= steps


def test_bounds_and_caps_hold_growth_back():
    window = growth(20, high=20)
    assert propose(window, fixed=1e9).endswith("but 20 anchor steps are the most")
    window = growth()
    assert propose(window, fixed=1e9, cap=40).endswith("capped at 40 batches")
    window.judge(Stable())
    assert window.steps == 10


def test_an_old_proposal_can_be_forgotten():
    window = growth()
    propose(window, fixed=60.0)
    window.forget_proposal()
    window.judge(Stable())
    assert window.steps == 10


@pytest.mark.parametrize(("low", "high", "steps"), [(5, 3, 3), (30, 50, 30), (1, 4, 4)])
def test_the_start_lies_within_bounds(low, high, steps):
    assert WindowGrowth(10, low=low, high=high, target=0.05).steps == steps
