"""One object per policy: what the gate is shown, and what is dealt."""

from __future__ import annotations

import pytest

from flodl_shm.control.chunk_pool import ChunkPool
from flodl_shm.control.gate import Gate
from flodl_shm.control.policy import Cadence, Scene, Sync, policy_of
from flodl_shm.control.window_ledger import Window
from flodl_shm.control.window_plan import Belief
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank, Round

RANKS = (Rank(0), Rank(1))


def scene(pool: ChunkPool, *flying: Window) -> Scene:
    belief = Belief(
        counts={Rank(0): 4, Rank(1): 2},
        costs={Rank(0): 1.0, Rank(1): 2.0},
        sizes=dict.fromkeys(RANKS, 1),
        calibrated=True,
        elastic=True,
    )
    return Scene(pool, belief, list(flying), epochs_left=False)


def window(**ceiling: int) -> Window:
    counts = {Rank(int(name[1:])): count for name, count in ceiling.items()}
    return Window(Round(2), 0, (), Rank(1), 2, dict(counts), counts, exact=False)


def test_a_policy_has_a_name() -> None:
    assert isinstance(policy_of("sync"), Sync)
    assert isinstance(policy_of("cadence"), Cadence)
    with pytest.raises(WeBroke, match="'async'"):
        policy_of("async")


def test_sync_deals_one_batch_for_each_rank_in_order() -> None:
    pool = ChunkPool(3)
    sync = Sync()
    assert sync.gate(scene(pool))[0] is Gate.EXACT
    sync.deal(Gate.EXACT, scene(pool))
    assert [pool.held_spans(rank) for rank in RANKS] == [((0, 1),), ((1, 2),)]
    planned = sync.deal(Gate.EXACT, scene(pool))
    assert planned.planned == {0: 1, 1: 0}


def test_cadence_takes_back_what_was_not_used_when_nothing_is_in_flight() -> None:
    pool = ChunkPool(100)
    pool.take(Rank(0), 90)
    planned = Cadence().deal(Gate.EXACT, scene(pool))
    assert planned.planned == {0: 4, 1: 2}
    assert {rank: pool.held(rank) for rank in RANKS} == planned.ceiling


def test_a_round_on_top_of_another_gets_what_both_may_take_at_most() -> None:
    pool = ChunkPool(100)
    pool.take(Rank(0), 10)
    flying = window(r0=10, r1=6)
    here = scene(pool, flying)
    assert here.needs_ahead() == {0: 10, 1: 12}
    assert Cadence().gate(here)[0] is Gate.EARLY
    planned = Cadence().deal(Gate.EARLY, here)
    assert not planned.exact
    assert {rank: pool.held(rank) for rank in RANKS} == {0: 20, 1: 12}
