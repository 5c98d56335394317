"""ElChe's windows: how long, with room for callbacks, and what outlives a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.convergence import NudgeDown, SuppressGrowth
from flodl_shm.control.el_che import ElCheState, Phase, Reading
from flodl_shm.errors import BadConfig

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from el_che_rig import MS, RIG, balancer, reading, run

# ---- the length of windows ---------------------------------------------------------------------


def test_windows_grow_until_the_reduce_is_a_small_part():
    el_che = balancer()
    el_che.cap(100_000)
    reason = run(el_che, RIG, 2, sync_ns=200 * MS)
    assert "overhead 20.0% of the window, over 10.0%: 20 anchor steps proposed" in reason
    run(el_che, RIG, 10, sync_ns=200 * MS)
    assert el_che.anchor_steps == 48  # 200 ms of 48 * 80 + 200 ms is just under a twentieth
    assert el_che.counts([0, 1, 2]) == {0: 192, 1: 96, 2: 48}


def test_one_slow_reduce_does_not_grow_the_window():
    el_che = balancer()
    run(el_che, RIG, 6, sync_ns=2 * MS)
    run(el_che, RIG, 1, sync_ns=10_000 * MS)
    run(el_che, RIG, 3, sync_ns=2 * MS)
    assert el_che.anchor_steps == 10


def test_what_the_first_batch_takes_longer_is_a_window_s_fixed_cost():
    el_che = balancer(2)
    for _ in range(2):
        readings = {r: reading(10, 80 * MS, first=280 * MS) for r in (0, 1)}
        said = el_che.report(readings, sync_ns=0, living=[0, 1])
    assert "overhead 20.0%" in said


def test_sync_windows_never_grow():
    el_che = balancer(anchor=1, grows=False)
    run(el_che, RIG, 10, sync_ns=500 * MS)
    assert el_che.anchor_steps == 1


def test_a_suppressed_or_nudged_window():
    el_che = balancer()
    run(el_che, RIG, 6, sync_ns=200 * MS, verdict=SuppressGrowth())
    assert el_che.anchor_steps == 10
    el_che.judge(NudgeDown(0.5))
    assert el_che.counts([0, 1, 2]) == {0: 20, 1: 10, 2: 5}


def test_a_window_is_no_longer_than_an_epoch():
    el_che = balancer()
    el_che.cap(35)
    reason = run(el_che, RIG, 2, sync_ns=500 * MS)
    assert "capped at 35 batches" in reason
    assert el_che.counts([0, 1, 2]) == {0: 20, 1: 10, 2: 5}
    el_che.cap(None)
    assert el_che.counts([0, 1, 2]) == {0: 40, 1: 20, 2: 10}


@given(
    costs=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    cap=st.integers(1, 200),
)
def test_the_cap_holds_whenever_there_is_a_batch_for_each(costs, cap):
    el_che = balancer(len(costs))
    run(el_che, [cost * MS for cost in costs])
    el_che.cap(cap)
    counts = el_che.counts(range(len(costs)))
    assert min(counts.values()) >= 1
    assert sum(counts.values()) <= max(cap, len(costs))


@pytest.mark.parametrize(("diff", "counts"), [(0, (10, 10, 10)), (15, (25, 20, 10))])
def test_nobody_gets_further_ahead_than_allowed(diff, counts):
    el_che = balancer(max_batch_diff=diff)
    run(el_che, RIG, 3)
    assert tuple(el_che.counts([0, 1, 2]).values()) == counts


# ---- callbacks ---------------------------------------------------------------------------------


def test_an_announced_callback_makes_room_for_one_window():
    el_che = balancer()
    run(el_che, RIG)
    el_che.expect_callback(1, 210 * MS)
    assert el_che.counts([0, 1, 2]) == {0: 40, 1: 14, 2: 10}
    el_che.expect_callback(0, 10_000 * MS)
    assert el_che.counts([0, 1, 2])[0] == 1
    run(el_che, RIG)
    assert el_che.counts([0, 1, 2]) == {0: 40, 1: 20, 2: 10}


def test_a_callback_in_every_window_is_expected_a_rare_one_is_not():
    el_che = balancer(1)
    expected = []
    for callback in (0, 0, 50 * MS, 0, 50 * MS, 50 * MS, 50 * MS):
        steady = Reading(10, 200 * MS, 20 * MS, 180 * MS, 10, callback_ns=callback)
        el_che.report({0: steady}, sync_ns=0, living=[0])
        expected.append(el_che.counts([0])[0])
    assert expected == [10, 10, 10, 10, 10, 7, 7]


# ---- checkpoints -------------------------------------------------------------------------------


def test_what_was_learned_survives_a_checkpoint():
    before = balancer()
    run(before, RIG, 6, sync_ns=200 * MS)
    stored = msgspec.json.decode(msgspec.json.encode(before.to_state()), type=ElCheState)
    after = balancer()
    after.restore(stored)
    assert after.counts([0, 1, 2]) == before.counts([0, 1, 2])
    assert (after.phase, after.anchor_rank) == (Phase.STABLE, 2)
    assert after.anchor_steps == before.anchor_steps


def test_a_checkpoint_of_nothing_or_of_another_world():
    fresh = balancer()
    fresh.restore(balancer().to_state())
    assert not fresh.calibrated
    with pytest.raises(BadConfig, match="balances 3 ranks, this run has 2"):
        balancer(2).restore(fresh.to_state())
