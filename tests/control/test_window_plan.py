"""How many batches a window holds: elastic in the middle of an epoch, exact at its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.window_plan import plan_ahead, plan_sync, plan_window
from flodl_shm.ids import Rank

COUNTS = {Rank(0): 40, Rank(1): 20, Rank(2): 10}
COSTS = {Rank(0): 20.0, Rank(1): 40.0, Rank(2): 80.0}

counts = st.dictionaries(st.integers(0, 7).map(Rank), st.integers(1, 200), min_size=1)


def test_a_window_in_mid_epoch_leaves_room_on_both_sides() -> None:
    plan = plan_window(1000, COUNTS, COSTS, calibrated=True)
    assert not plan.exact
    assert plan.planned == COUNTS
    assert plan.ceiling == {0: 82, 1: 42, 2: 22}


def test_the_last_window_deals_all_that_is_left_by_cost() -> None:
    plan = plan_window(91, COUNTS, COSTS, calibrated=True)
    assert plan.exact
    assert plan.planned == plan.ceiling
    assert sum(plan.planned.values()) == 91
    ends = [plan.planned[rank] * COSTS[rank] for rank in COSTS]
    assert max(ends) - min(ends) <= 80


def test_a_short_epoch_begins_with_a_small_window() -> None:
    plan = plan_window(
        56, {Rank(0): 50, Rank(1): 50}, {Rank(0): None, Rank(1): None}, calibrated=False
    )
    assert plan.planned == {0: 14, 1: 14}
    assert not plan.exact


def test_fewer_batches_than_ranks_leave_some_without() -> None:
    plan = plan_window(2, COUNTS, COSTS, calibrated=True)
    assert plan.planned == {0: 2, 1: 0, 2: 0} or sum(plan.planned.values()) == 2
    assert plan.exact


@given(left=st.integers(1, 5000), counts=counts, calibrated=st.booleans())
def test_no_plan_promises_more_than_is_left(
    left: int, counts: dict[Rank, int], calibrated: bool
) -> None:
    costs = {rank: 1e6 / count if calibrated else None for rank, count in counts.items()}
    plan = plan_window(left, counts, costs, calibrated=calibrated)
    assert set(plan.planned) == set(counts)
    assert sum(plan.ceiling.values()) <= left
    assert all(plan.planned[rank] <= plan.ceiling[rank] for rank in counts)
    if plan.exact:
        assert sum(plan.planned.values()) == left
    else:
        assert all(plan.planned.values())


def test_dealing_ahead_needs_no_knowledge_of_the_end() -> None:
    plan = plan_ahead(COUNTS)
    assert plan.planned == COUNTS
    assert plan.ceiling == {0: 82, 1: 42, 2: 22}


def test_sync_gives_one_batch_each_as_long_as_there_are_any() -> None:
    assert plan_sync(2, (Rank(0), Rank(2), Rank(5))).planned == {0: 1, 2: 1, 5: 0}
