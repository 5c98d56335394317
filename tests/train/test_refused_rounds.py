"""Rounds in which ranks are refused: what all hold afterwards, and what their checksums say."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from flodl_shm.control.mass import REFUSED
from flodl_shm.control.messages import Seat
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.train.reduce import Reducer
from flodl_shm.wire.layout import plan_arena

RANKS, LIMIT_S = 3, 20.0
SEATS = tuple(Seat(rank, rank, rank) for rank in range(RANKS))


@pytest.fixture
def arena():
    plan = plan_arena(params=9_000, buffers=300, slots=RANKS, rows=RANKS)
    memory = Segment.create(4096, purpose="test-bells")
    bells = [Doorbell.create(memory.view.cast("Q"), 8 * row) for row in range(RANKS)]
    arena = Arena(Segment.create(plan.size, purpose="test"), plan, bells)
    yield arena
    for thing in (arena, *bells, memory):
        thing.close()


def meet(arena, brought, number=2, hooks=None):
    """One round of all ranks; `brought` is (value, steps, mass) of each. What each left with."""
    outcomes = {}

    def one(rank):
        value, steps, mass = brought[rank]
        hook = (hooks or {}).get(rank)
        reducer = Reducer(arena, seat_row=rank, slot=rank, hook=hook)
        arena.slot(rank).fill_(value)
        reducer.arrive(number, SEATS, steps=steps, mass=mass, picks=7)
        outcomes[rank] = reducer.complete()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(outcomes) == RANKS, "the round hangs"
    grid = arena.map.grid
    parts = ((0, grid.params), (grid.buffer_start, grid.buffer_start + grid.buffers))
    slots = [torch.cat([arena.slot(r)[low:high] for low, high in parts]) for r in range(RANKS)]
    return outcomes, slots


NAN = (math.nan, 0, REFUSED)


def test_the_round_commits_without_who_is_refused_and_gives_it_the_consensus(arena):
    outcomes, slots = meet(arena, [(1.0, 1, 1.0), NAN, (3.0, 1, 1.0)])
    assert all(bool((slot == 2.0).all()) for slot in slots)
    assert {(o.steps, o.mass, o.contributors) for o in outcomes.values()} == {(2, 2.0, (0, 1, 2))}
    assert len({o.digest for o in outcomes.values()}) == 1
    assert outcomes[0].digest is not None
    assert {o.divergence for o in outcomes.values()} == {0.5}


def test_one_finite_mover_is_the_consensus(arena):
    _, slots = meet(arena, [NAN, NAN, (3.0, 2, 2.0)])
    assert all(bool((slot == 3.0).all()) for slot in slots)


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_if_all_who_trained_are_refused_the_others_still_have_what_was_agreed(arena, idle):
    brought = [NAN] * RANKS
    brought[idle] = (5.0, 0, 0.0)
    outcomes, slots = meet(arena, brought)
    assert all(bool((slot == 5.0).all()) for slot in slots)
    assert {(o.steps, o.mass) for o in outcomes.values()} == {(0, 0)}
    assert len({o.digest for o in outcomes.values()} - {None}) == 1


def test_if_everybody_is_refused_nothing_is_agreed(arena):
    outcomes, slots = meet(arena, [NAN] * RANKS)
    assert all(bool(slot.isnan().all()) for slot in slots)
    assert {o.digest for o in outcomes.values()} == {None}


def test_if_nobody_moves_everybody_keeps_its_own_and_no_checksum_is_compared(arena):
    outcomes, slots = meet(arena, [(float(rank), 0, 0.0) for rank in range(RANKS)])
    assert [float(slot[0]) for slot in slots] == [0.0, 1.0, 2.0]
    assert {o.digest for o in outcomes.values()} == {None}


def test_a_slot_that_is_written_into_after_the_mean_has_another_checksum(arena):
    def scribble(point, worker, shard, block, task):
        if point == "left":
            arena.slot(1)[:] += 1e-6

    outcomes, _ = meet(arena, [(1.0, 1, 1.0)] * RANKS, hooks={1: scribble})
    digests = [outcomes[rank].digest for rank in range(RANKS)]
    assert digests[0] == digests[2] != digests[1]
