"""The order of an epoch, and what a rank takes from it."""

from __future__ import annotations

import numpy as np
import pytest

from flodl_shm.errors import HostUnfit, WeBroke
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.sampler import PickQueue


def test_every_sample_comes_once():
    assert sorted(permutation(100, seed=7, epoch=3)) == list(range(100))


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    first = permutation(50, seed=7, epoch=3).copy()
    np.random.seed(1)
    assert permutation(50, seed=7, epoch=4).tolist() != first.tolist()
    assert permutation(50, seed=8, epoch=2).tolist() != first.tolist()
    assert permutation(50, seed=7, epoch=3).tolist() == first.tolist()


def test_the_order_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        permutation(5, seed=0, epoch=0)[0] = 1


def test_picks_come_in_the_order_of_the_spans():
    order = np.arange(100, 200)
    queue = PickQueue([(10, 13), (0, 2)], order)
    assert queue.take(4).tolist() == [110, 111, 112, 100]
    assert queue.left == 1
    assert queue.take(4).tolist() == [101]
    assert (queue.left, queue.taken) == (0, 5)


def test_what_was_consumed_since_the_grant_is_skipped():
    queue = PickQueue([(4, 6), (8, 10)], np.arange(20), skip=3)
    assert queue.take(5).tolist() == [9]
    assert queue.taken == 1


def test_no_spans_are_no_picks():
    assert PickQueue([], np.arange(3)).left == 0


@pytest.mark.parametrize(("spans", "skip"), [([(0, 30)], 0), ([(0, 3)], 4), ([(0, 3)], -1)])
def test_picks_that_do_not_exist_are_our_bug(spans, skip):
    with pytest.raises(WeBroke, match="in an epoch of 20 picks"):
        PickQueue(spans, np.arange(20), skip=skip)


@pytest.mark.parametrize("picks", [2**50, 2**62])
def test_an_epoch_no_memory_can_order_is_the_machines_fault(picks):
    with pytest.raises(HostUnfit, match=f"no memory for the order of {picks} picks"):
        permutation(picks, seed=0, epoch=0)
