"""Elastic windows: who starts another batch, and what a rank believes of its own pace."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.pace import RECENT, Pace, predicted_end, starts_another

MS = 1_000_000


def test_the_end_is_what_is_left_at_the_pace():
    end = predicted_end(1000, done=3, anchor_steps=10, pace_ns=80, now=1010)
    assert end == 1000 + 7 * 80


def test_an_unknown_pace_predicts_nothing():
    assert predicted_end(0, done=0, anchor_steps=10, pace_ns=0, now=0) is None
    assert starts_another(now=10**9, own_ns=20, anchor_end=None)


def test_steps_done_are_done_whatever_the_pace():
    assert predicted_end(500, done=10, anchor_steps=10, pace_ns=0, now=900) == 500
    assert not starts_another(now=900, own_ns=20, anchor_end=500)


def test_while_the_anchor_rank_hangs_the_end_moves_on():
    late = predicted_end(0, done=0, anchor_steps=5, pace_ns=100, now=10_000)
    assert late == 10_000 + 4 * 100
    last = predicted_end(0, done=4, anchor_steps=5, pace_ns=100, now=10_000)
    assert last == 10_000
    assert not starts_another(now=10_000, own_ns=50, anchor_end=last)


def test_half_a_batch_must_fit():
    assert starts_another(now=100, own_ns=40, anchor_end=120)
    assert not starts_another(now=101, own_ns=40, anchor_end=120)
    assert not starts_another(now=100, own_ns=41, anchor_end=120)


@given(
    done=st.integers(0, 20),
    steps=st.integers(1, 20),
    pace=st.integers(1, 10**9),
    now=st.integers(0, 10**12),
)
def test_the_end_is_never_past_while_steps_are_left(done, steps, pace, now):
    end = predicted_end(0, done=done, anchor_steps=steps, pace_ns=pace, now=now)
    assert end == 0 if done >= steps else end >= now


def window(steps_ns, counts_to, own_ns):
    """Batches a rank does beside an anchor rank whose steps take `steps_ns`, and when it ends."""
    ends = [sum(steps_ns[: k + 1]) for k in range(len(steps_ns))]
    now = done = 0
    while True:
        passed = sum(end <= now for end in ends)
        last = ends[passed - 1] if passed else 0
        end = predicted_end(last, done=passed, anchor_steps=len(ends), pace_ns=counts_to, now=now)
        if not starts_another(now=now, own_ns=own_ns, anchor_end=end):
            return done, now
        now += own_ns
        done += 1


def test_ranks_meet_at_the_boundary_nearest_to_the_end():
    rng = random.Random(1)
    for own in (20, 30, 45, 79):
        for _ in range(20):
            steps = [int(80 * rng.uniform(0.9, 1.1)) for _ in range(10)]
            _, end = window(steps, 80, own)
            assert abs(end - sum(steps)) <= own / 2 + 80 * 0.1 + 1


def test_a_pace_ignores_one_outlier_and_what_is_no_time():
    pace = Pace()
    assert pace.mean_ns == 0
    for _ in range(6):
        pace.add(20 * MS)
    pace.add(10_000 * MS)
    pace.add(0)
    pace.add(-5)
    assert pace.mean_ns == 20 * MS


def test_of_two_batches_the_shorter_counts():
    pace = Pace()
    pace.add(5_000 * MS)
    assert pace.mean_ns == 5_000 * MS
    pace.add(20 * MS)
    assert pace.mean_ns == 20 * MS


def test_a_pace_follows_a_throttle_within_its_memory():
    pace = Pace()
    for batch_ns in [20] * 50 + [40] * RECENT:
        pace.add(batch_ns)
    assert pace.mean_ns == 40
