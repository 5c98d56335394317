"""The balancer: shares follow steady speed, and nothing else."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.convergence import NudgeDown, Stable
from flodl_shm.control.el_che import ElCheConfig, Phase, Reading
from flodl_shm.errors import BadConfig

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from el_che_rig import MS, RIG, balancer, reading, run

# ---- before anything is known ------------------------------------------------------------------


def test_all_do_anchor_steps_at_first():
    el_che = balancer()
    assert el_che.counts([0, 1, 2]) == {0: 10, 1: 10, 2: 10}
    assert (el_che.anchor_rank, el_che.phase, el_che.calibrated) == (0, Phase.PROBE, False)
    assert el_che.cost_ns(0) is None
    assert el_che.counts([]) == {}


def test_a_hint_is_believed_until_something_is_measured():
    el_che = balancer(speed_hint=(1, 2.5))
    assert el_che.anchor_rank == 1
    assert el_che.counts([0, 1, 2]) == {0: 25, 1: 10, 2: 25}
    run(el_che, (20 * MS, 40 * MS, 20 * MS))
    assert el_che.counts([0, 1, 2]) == {0: 20, 1: 10, 2: 20}


def test_a_hint_of_a_rank_that_died_is_forgotten():
    el_che = balancer(speed_hint=(1, 2.5))
    el_che.drop(1)
    assert el_che.anchor_rank == 0
    assert el_che.counts([0, 2]) == {0: 10, 2: 10}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"world_size": 0}, "world of 0"),
        ({"anchor": 0}, "anchor is 0"),
        ({"max_anchor": 0}, "max_anchor is 0"),
        ({"min_anchor": 0}, "min_anchor is 0"),
        ({"overhead_target": float("nan")}, "overhead target is nan"),
        ({"max_batch_diff": -1}, "max batch diff is -1"),
        ({"speed_hint": (3, 2.0)}, "names rank 3 of a world of 3"),
        ({"speed_hint": (0, 0.4)}, "would make the other ranks slower"),
        ({"speed_hint": (0, float("inf"))}, "would make the other ranks slower"),
    ],
)
def test_settings_that_cannot_hold(settings, said):
    with pytest.raises(BadConfig, match=said):
        ElCheConfig(**{"world_size": 3, "anchor": 10, **settings})


# ---- shares follow steady speed ----------------------------------------------------------------


def test_one_window_is_enough_on_a_quiet_rig():
    el_che = balancer()
    reason = run(el_che, RIG)
    assert el_che.counts([0, 1, 2]) == {0: 40, 1: 20, 2: 10}
    assert reason == (
        "window 1 (warmup): delivered costs 20 40 80 ms a batch, counts 40 20 10, "
        "anchor rank 2 with 10 steps; rank 2 is the anchor rank now"
    )


def shares_error(el_che, costs):
    counts = el_che.counts(range(len(costs)))
    fair = {rank: 1 / cost / sum(1 / c for c in costs) for rank, cost in enumerate(costs)}
    total = sum(counts.values())
    return max(abs(counts[rank] / total / fair[rank] - 1) for rank in counts)


@pytest.mark.parametrize("anchor", [1, 2, 10])
@pytest.mark.parametrize("hint", [None, (2, 1.0)])
@pytest.mark.parametrize("outlier_window", range(5))
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_warm_up_and_an_outlier_do_not_steer(anchor, hint, outlier_window, victim):
    el_che = balancer(anchor=anchor, speed_hint=hint)
    for window in range(5):
        counts = el_che.counts([0, 1, 2])
        assert counts[victim] >= max(1, el_che.anchor_steps // 2)
        readings = {rank: reading(counts[rank], RIG[rank]) for rank in counts}
        if window == 0:
            readings[victim] = warmed_up(counts[victim], RIG[victim])
        if window == outlier_window:
            readings[victim] = disturbed(readings[victim], counts[victim])
        el_che.report(readings, sync_ns=2 * MS, living=[0, 1, 2])
        el_che.judge(Stable())
    assert shares_error(el_che, RIG) < 0.15
    assert el_che.anchor_rank == 2


def warmed_up(batches, cost):
    return Reading(batches, batches * cost + 5000 * MS, 5000 * MS, (batches - 1) * cost, batches)


def disturbed(good, batches):
    """One batch of the window took 10 s more; not the first one if there are more."""
    extra = 10_000 * MS
    first, rest = (
        (good.first_ns, good.rest_ns + extra) if batches > 1 else (good.first_ns + extra, 0)
    )
    return Reading(batches, good.busy_ns + extra, first, rest, batches)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_throttled_rank_is_followed_within_four_windows(victim):
    el_che = balancer()
    run(el_che, RIG, 12)
    costs = [cost * (2 if rank == victim else 1) for rank, cost in enumerate(RIG)]
    run(el_che, costs, 4)
    assert shares_error(el_che, costs) < 0.03


@given(
    costs=st.lists(st.integers(5, 300), min_size=2, max_size=6),
    jitter=st.floats(0, 0.15),
    seed=st.integers(0, 1000),
)
def test_any_rig_is_balanced_within_five_windows(costs, jitter, seed):
    rng, el_che = random.Random(seed), balancer(len(costs), grows=False)
    for _ in range(5):
        noisy = [cost * MS * rng.uniform(1 - jitter, 1 + jitter) for cost in costs]
        run(el_che, [int(cost) for cost in noisy])
    counts = el_che.counts(range(len(costs)))
    times = [counts[rank] * cost for rank, cost in enumerate(costs)]
    longest_batch = max(costs)
    assert max(times) - min(times) <= 2 * longest_batch + 2.5 * (jitter + 0.05) * max(times)
    assert min(counts.values()) >= 1


def test_small_changes_are_left_alone():
    el_che = balancer(2)
    run(el_che, (20 * MS, 80 * MS), 6)
    run(el_che, (21 * MS, 80 * MS), 6)
    assert el_che.counts([0, 1]) == {0: 40, 1: 10}


def test_a_degenerate_reading_does_not_explode_the_window():
    el_che = balancer(2)
    run(el_che, (1000, 80 * MS))
    assert el_che.counts([0, 1]) == {0: 640, 1: 10}


# ---- what is fed -------------------------------------------------------------------------------


def test_data_waits_count_as_slowness():
    el_che = balancer(2)
    slow_link = Reading(10, 10 * 20 * MS, 80 * MS, 9 * 80 * MS, 10)
    el_che.report({0: slow_link, 1: reading(10, 80 * MS)}, sync_ns=0, living=[0, 1])
    assert el_che.counts([0, 1]) == {0: 10, 1: 10}


def test_scales_are_never_mixed():
    el_che = balancer(2)
    one_batch = Reading(1, 40 * MS, 500 * MS, 0, 1)
    slow_link = Reading(10, 10 * 20 * MS, 80 * MS, 9 * 80 * MS, 10)
    reason = el_che.report({0: slow_link, 1: one_batch}, sync_ns=0, living=[0, 1])
    assert "compute costs 20 40 ms a batch" in reason
    assert el_che.counts([0, 1]) == {0: 20, 1: 10}


def test_an_idle_rank_does_not_change_the_scale():
    el_che = balancer(2)
    idle = Reading(0, 0, 0, 0, 0)
    reason = el_che.report({0: reading(10, 20 * MS), 1: idle}, sync_ns=0, living=[0, 1])
    assert "delivered costs 20 ? ms a batch" in reason


def test_nothing_is_learned_from_an_idle_window():
    el_che = balancer(2)
    assert "no rank moved" in el_che.report({}, sync_ns=0, living=[0, 1])
    dead_one = {1: reading(10, 20 * MS)}
    assert "no rank moved" in el_che.report(dead_one, sync_ns=0, living=[0])
    useless = {0: Reading(3, 0, 0, 0, 3)}
    said = el_che.report(useless, sync_ns=0, living=[0, 1])
    assert said == "anchor rank 0 has no usable time yet: counts stay"
    assert not el_che.calibrated


def test_without_living_ranks_there_is_no_anchor_rank():
    el_che = balancer(1)
    el_che.drop(0)
    assert el_che.anchor_rank is None
    assert el_che.judge(NudgeDown(0.5)).startswith("window nudged")


def test_a_rank_long_silent_is_measured_afresh():
    el_che = balancer()
    run(el_che, RIG, 3)
    for _ in range(5):
        readings = {rank: reading(10, RIG[rank]) for rank in (1, 2)}
        el_che.report(readings, sync_ns=0, living=[0, 1, 2])
    assert el_che.cost_ns(0) is None
    assert el_che.counts([0, 1, 2])[0] == 10


# ---- the anchor rank ---------------------------------------------------------------------------


def test_the_anchor_rank_stays_until_stable():
    el_che = balancer()
    run(el_che, RIG)
    costs = (200 * MS, 40 * MS, 80 * MS)
    run(el_che, costs, 3)
    assert (el_che.phase, el_che.anchor_rank) == (Phase.WARMUP, 2)
    reason = run(el_che, costs)
    assert (el_che.phase, el_che.anchor_rank) == (Phase.STABLE, 0)
    assert reason.count("rank 0 is the anchor rank now") == 1
    run(el_che, costs, 15)
    assert el_che.phase is Phase.MATURE


def test_among_equally_slow_ranks_the_anchor_rank_stays():
    el_che = balancer(2)
    run(el_che, (80 * MS, 78 * MS), 6)
    assert el_che.anchor_rank == 0
    run(el_che, (80 * MS, 87 * MS), 6)
    assert el_che.anchor_rank == 0
    run(el_che, (80 * MS, 92 * MS), 6)
    assert el_che.anchor_rank == 1  # slower by more than a tenth


def test_a_silent_pinned_rank_is_let_go():
    el_che = balancer(speed_hint=(2, 2.0))
    for window in range(5):
        assert not el_che.calibrated, window
        readings = {0: reading(20, 20 * MS), 1: reading(20, 40 * MS)}
        el_che.report(readings, sync_ns=0, living=[0, 1, 2])
    assert el_che.calibrated
    assert el_che.anchor_rank == 1


def test_when_the_anchor_rank_dies_the_next_slowest_follows():
    el_che = balancer()
    run(el_che, RIG, 2)
    el_che.drop(2)
    assert el_che.anchor_rank == 1
    assert el_che.counts([0, 1]) == {0: 20, 1: 10}
    el_che.drop(0)
    assert el_che.counts([1]) == {1: 10}


def test_a_rank_that_comes_back_starts_unknown():
    el_che = balancer()
    run(el_che, RIG, 6)
    el_che.drop(0)
    assert el_che.counts([0, 1, 2]) == {0: 10, 1: 20, 2: 10}
    run(el_che, RIG)
    assert el_che.counts([0, 1, 2])[0] == 40
