"""Waits that make a rank slow are exact, seeded, and never make up for lost time."""

from __future__ import annotations

import pytest

from flodl_shm.train.pacing import Pacer, default_step_ms, jitter
from flodl_shm.train.session import SlowDown

MS = 1_000_000


def test_slow_waits_factor_minus_one_times_the_step():
    pacer = Pacer(slow=[SlowDown(2.5)])
    assert pacer.active
    assert pacer.pad(10 * MS, 0, 0) == 15 * MS


def test_slow_begins_at_its_epoch_and_the_latest_word_counts():
    pacer = Pacer(slow=[SlowDown(3.0, 4), SlowDown(2.0, 1)])
    assert [pacer.factor(epoch) for epoch in range(6)] == [1, 2, 2, 2, 3, 3]
    assert pacer.pad(MS, 0, 0) == 0


def test_nobody_waits_without_a_reason():
    pacer = Pacer()
    assert not pacer.active
    assert pacer.pad(MS, 0, 0) == 0


def test_a_paced_step_lasts_its_time_whatever_the_work_took():
    pacer = Pacer(step_ms=20, rank=1, seed=5)
    target = 20 * MS * jitter(5, 1, 7)
    assert pacer.pad(0, 7, 0) == int(target)
    assert pacer.pad(3 * MS, 7, 0) == int(target) - 3 * MS


def test_a_late_step_earns_no_credit():
    pacer = Pacer(step_ms=20)
    assert pacer.pad(100 * MS, 0, 0) == 0
    assert pacer.pad(0, 1, 0) == int(20 * MS * jitter(0, 0, 1))


def test_slow_stretches_a_paced_step_as_a_whole():
    pacer = Pacer(step_ms=20, slow=[SlowDown(2.0)])
    target = int(20 * MS * jitter(0, 0, 3))
    assert pacer.pad(5 * MS, 3, 0) == 2 * target - 5 * MS


def test_jitter_is_one_on_average_and_spreads_by_a_tenth():
    drawn = [jitter(0, 0, index) for index in range(20_000)]
    mean = sum(drawn) / len(drawn)
    spread = (sum((x - mean) ** 2 for x in drawn) / len(drawn)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.003)
    assert spread == pytest.approx(0.1, abs=0.005)


def test_jitter_depends_on_seed_rank_and_step_alone():
    assert jitter(1, 2, 300) == jitter(1, 2, 300)
    assert len({jitter(1, 2, 300), jitter(1, 2, 301), jitter(1, 3, 300), jitter(2, 2, 300)}) == 4


def test_default_times_double():
    assert default_step_ms(3) == (20, 40, 80)
