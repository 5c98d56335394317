"""The last window of an epoch: the least makespan, and who gets what on a tie."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.last_window import split_remainder

small_costs = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def makespan(batches_of, costs):
    return max(count * costs[rank] for rank, count in batches_of.items())


def best(batches, costs):
    ranks = range(len(costs))
    splits = product(range(batches + 1), repeat=len(costs))
    return min(max(k[r] * costs[r] for r in ranks) for k in splits if sum(k) == batches)


@given(st.integers(0, 9), small_costs)
def test_no_split_ends_earlier(batches, costs):
    batches_of = split_remainder(batches, dict(enumerate(costs)))
    assert sum(batches_of.values()) == batches
    assert makespan(batches_of, costs) == best(batches, costs)


@given(st.integers(0, 10**9), st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8))
def test_large_remainders_are_split_whole_and_close_to_the_fluid_end(batches, costs):
    batches_of = split_remainder(batches, dict(enumerate(costs)))
    assert sum(batches_of.values()) == batches
    assert min(batches_of.values()) >= 0
    fluid = batches / sum(1 / cost for cost in costs)
    assert makespan(batches_of, costs) <= (fluid + max(costs)) * (1 + 1e-9)


def test_ties_go_to_the_lower_rank():
    assert split_remainder(1, {2: 5.0, 0: 5.0, 1: 5.0}) == {0: 1, 1: 0, 2: 0}
    assert list(split_remainder(3, {1: 1.0, 0: 1.0})) == [0, 1]


def test_unknown_costs_share_equally():
    assert split_remainder(7, {0: None, 1: None, 2: None}) == {0: 3, 1: 2, 2: 2}
    odd = {0: 0.0, 1: float("nan"), 2: float("inf")}
    assert split_remainder(6, odd) == {0: 2, 1: 2, 2: 2}


def test_one_unknown_rank_counts_as_the_slowest():
    assert split_remainder(10, {0: 20.0, 1: 80.0, 2: None}) == {0: 6, 1: 2, 2: 2}


def test_the_dead_get_nothing():
    assert split_remainder(4, {0: 1.0, 1: 1.0, 2: 1.0}, living=[0, 2]) == {0: 2, 1: 0, 2: 2}
    assert split_remainder(4, {0: 1.0}, living=[]) == {0: 0}
    assert split_remainder(4, {}, living=[1, 3]) == {1: 2, 3: 2}


def test_nothing_left_is_nothing_for_anybody():
    assert split_remainder(0, {0: 1.0, 1: 2.0}) == {0: 0, 1: 0}


def test_a_lone_batch_gets_company_if_that_is_free():
    assert split_remainder(10, {0: 20.0, 1: 80.0, 2: 80.0}) == {0: 6, 1: 2, 2: 2}
    assert split_remainder(2, {0: 2.0, 1: 1.0}) == {0: 0, 1: 2}


def test_a_lone_batch_stays_where_company_would_take_longer():
    assert split_remainder(2, {0: 1.0, 1: 1.0}) == {0: 1, 1: 1}
    assert split_remainder(4, {0: 2.0, 1: 7.0}) == {0: 3, 1: 1}
