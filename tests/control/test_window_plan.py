"""How many batches a window holds: elastic in the middle of an epoch, exact at its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.window_plan import Belief, plan_ahead, plan_sync, plan_window
from flodl_shm.ids import Rank

COUNTS = {Rank(0): 40, Rank(1): 20, Rank(2): 10}
COSTS = {Rank(0): 20.0, Rank(1): 40.0, Rank(2): 80.0}

ONE = {Rank(0): 1, Rank(1): 1, Rank(2): 1}

counts = st.dictionaries(st.integers(0, 7).map(Rank), st.integers(1, 200), min_size=1)


def belief(**changes: object) -> Belief:
    facts = {"counts": COUNTS, "costs": COSTS, "sizes": ONE, "calibrated": True, "elastic": True}
    return Belief(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_window_in_mid_epoch_leaves_room_on_both_sides() -> None:
    plan = plan_window(1000, belief())
    assert not plan.exact
    assert plan.planned == COUNTS
    assert plan.ceiling == {0: 82, 1: 42, 2: 22}


def test_counted_windows_leave_none() -> None:
    plan = plan_window(1000, belief(elastic=False))
    assert plan.exact
    assert plan.planned == plan.ceiling == COUNTS


def test_the_last_window_deals_all_that_is_left_by_cost() -> None:
    plan = plan_window(91, belief())
    assert plan.exact
    assert plan.planned == plan.ceiling
    assert sum(plan.planned.values()) == 91
    ends = [plan.planned[rank] * COSTS[rank] for rank in COSTS]
    assert max(ends) - min(ends) <= 80


def test_a_short_epoch_begins_with_a_small_window() -> None:
    two = {Rank(0): 50, Rank(1): 50}
    sizes = {Rank(0): 4, Rank(1): 4}
    plan = plan_window(
        224, belief(counts=two, costs=dict.fromkeys(two), sizes=sizes, calibrated=False)
    )
    assert plan.planned == {0: 14, 1: 14}
    assert not plan.exact


def test_fewer_batches_than_ranks_leave_some_without() -> None:
    plan = plan_window(2, belief())
    assert sum(plan.planned.values()) == 2
    assert 0 in plan.planned.values()
    assert plan.exact


def test_a_short_batch_is_the_last_of_the_epoch() -> None:
    sizes = dict.fromkeys(COUNTS, 32)
    plan = plan_window(33, belief(sizes=sizes))
    assert sum(plan.planned.values()) == 2


@pytest.mark.parametrize(("bound", "most"), [(0, 1), (3, 3)])
def test_nobody_gets_ahead_by_more_than_the_bound(bound: int, most: int) -> None:
    for left in range(1, 90):
        plan = plan_window(left, belief(elastic=False, most_ahead=bound))
        assert max(plan.planned.values()) - min(plan.planned.values()) <= most
        assert sum(plan.planned.values()) == left


def test_unequal_batches_end_together() -> None:
    sizes = {Rank(0): 64, Rank(1): 16, Rank(2): 16}
    plan = plan_window(900, belief(sizes=sizes))
    assert plan.exact
    dealt = sum(plan.planned[rank] * sizes[rank] for rank in sizes)
    assert 900 <= dealt < 900 + 64
    ends = [plan.planned[rank] * COSTS[rank] for rank in COSTS]
    assert max(ends) - min(ends) <= 80


@given(
    left=st.integers(1, 5000),
    counts=counts,
    calibrated=st.booleans(),
    size=st.sampled_from((1, 3, 32)),
)
def test_no_plan_promises_more_than_is_left(
    left: int, counts: dict[Rank, int], calibrated: bool, size: int
) -> None:
    costs = {rank: 1e6 / count if calibrated else None for rank, count in counts.items()}
    sizes = dict.fromkeys(counts, size)
    plan = plan_window(left, belief(counts=counts, costs=costs, sizes=sizes, calibrated=calibrated))
    assert set(plan.planned) == set(counts)
    assert all(plan.planned[rank] <= plan.ceiling[rank] for rank in counts)
    if plan.exact:
        assert left <= sum(plan.planned.values()) * size < left + size
    else:
        assert sum(plan.ceiling.values()) * size <= left
        assert all(plan.planned.values())


def test_dealing_ahead_needs_no_knowledge_of_the_end() -> None:
    plan = plan_ahead(COUNTS)
    assert plan.planned == COUNTS
    assert plan.ceiling == {0: 82, 1: 42, 2: 22}


def test_sync_gives_one_batch_each_as_long_as_there_are_any_picks() -> None:
    sizes = {Rank(0): 8, Rank(2): 8, Rank(5): 8}
    assert plan_sync(9, sizes).planned == {0: 1, 2: 1, 5: 0}
