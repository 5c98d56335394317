"""Guards: when growth stops, when windows shall be shorter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.convergence import (
    MsfGuard,
    NoGuard,
    NudgeDown,
    Stable,
    SuppressGrowth,
    TrendGuard,
    make_guard,
)
from flodl_shm.errors import BadConfig


def verdicts(guard, divergences, k=10):
    return [guard.report(d, k_used=3 * k, k_max=k)[0] for d in divergences]


def test_a_steady_rise_above_the_threshold_stops_growth():
    guard = TrendGuard()
    assert verdicts(guard, [0.04, 0.05, 0.06, 0.07]) == [
        Stable(), Stable(), SuppressGrowth(), SuppressGrowth(),
    ]  # fmt: skip
    assert guard.report(0.08, k_used=1, k_max=1)[1] == (
        "divergence rises: 0.06 < 0.07 < 0.08, above 0.05"
    )


def test_a_rise_within_the_threshold_or_with_a_dip_is_stable():
    guard = TrendGuard()
    assert set(verdicts(guard, [0.01, 0.02, 0.03])) == {Stable()}
    assert "within 0.05" in guard.report(0.04, k_used=1, k_max=1)[1]
    assert set(verdicts(TrendGuard(), [0.1, 0.3, 0.2, 0.4, 0.4, 0.5])) == {Stable()}


@given(st.lists(st.floats(0, 10), max_size=30))
def test_the_trend_guard_never_nudges(divergences):
    assert NudgeDown not in map(type, verdicts(TrendGuard(), divergences))


@pytest.mark.parametrize("guard", [TrendGuard(), MsfGuard()])
@pytest.mark.parametrize("divergence", [math.nan, math.inf])
def test_what_is_not_finite_stops_growth_and_is_forgotten(guard, divergence):
    verdict, reason = guard.report(divergence, k_used=9, k_max=3)
    assert verdict == SuppressGrowth()
    assert reason == f"divergence is {divergence} after 9 steps"
    assert guard.report(0.01, k_used=9, k_max=3)[0] == Stable()


def test_the_trend_survives_a_checkpoint():
    before = TrendGuard()
    verdicts(before, [0.9, 0.1, 0.06, 0.07, 0.05, 0.06])
    after = TrendGuard()
    after.restore(before.to_state())
    assert after.to_state() == (0.1, 0.06, 0.07, 0.05, 0.06)
    assert after.report(0.07, k_used=1, k_max=1)[0] == SuppressGrowth()


def test_growth_of_divergence_per_step_stops_growth_after_three():
    rising = [0.01 * math.exp(0.002 * 10 * n) for n in range(8)]
    assert verdicts(MsfGuard(), rising) == [Stable()] * 3 + [SuppressGrowth()] + [Stable()] * 2 + [
        SuppressGrowth(), Stable(),
    ]  # fmt: skip


def test_wild_growth_halves_windows_and_wins():
    rising = [1e-4 * math.exp(0.05 * 10 * n) for n in range(5)]
    assert verdicts(MsfGuard(), rising)[3:] == [NudgeDown(0.5), SuppressGrowth()]


def test_no_rate_without_two_readings_above_the_floor():
    guard = MsfGuard()
    assert guard.report(0.1, k_used=1, k_max=1) == (Stable(), "divergence 0.1, no rate yet")
    assert guard.report(1e-9, k_used=1, k_max=1)[1].endswith("no rate yet")
    assert guard.report(0.1, k_used=1, k_max=1)[1].endswith("no rate yet")
    assert guard.report(0.2, k_used=0, k_max=0)[1].endswith("no rate yet")
    assert guard.report(0.2, k_used=2, k_max=1) == (Stable(), "divergence 0.2 grows by 0 a step")


def test_falling_divergence_is_stable():
    assert set(verdicts(MsfGuard(), [2.0**-n for n in range(20)])) == {Stable()}


def test_no_guard_is_always_content():
    assert NoGuard().report(math.nan, k_used=1, k_max=1) == (Stable(), "divergence nan, no guard")


def test_guards_by_name():
    assert [type(make_guard(name)) for name in ("trend", "msf", "none")] == [
        TrendGuard, MsfGuard, NoGuard,
    ]  # fmt: skip
    with pytest.raises(BadConfig, match="no guard is called 'tend'"):
        make_guard("tend")
