"""The reduce without deaths: weights, regions, rosters, joiners, promises to the caller."""

from __future__ import annotations

import gc
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flodl_shm.control.messages import Seat
from flodl_shm.errors import WeBroke
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.train.kernels import Mix, even_stride, mean_of, views_of
from flodl_shm.train.reduce import Reducer
from flodl_shm.wire.layout import plan_arena

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from reduce_rig import Rig


def run(rig, **kwargs):
    report = rig.trial(**kwargs)
    assert not report.bad
    assert not report.dead
    return report


@pytest.fixture
def rig_of():
    rigs = []

    def make(ranks, **kwargs):
        rigs.append(Rig(ranks, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def arena_of():
    """An arena within this process, for what needs no second one."""
    made = []

    def make(*, params=100, buffers=0, slots=1, rows=None):
        plan = plan_arena(params=params, buffers=buffers, slots=slots, rows=rows or slots)
        memory = Segment.create(4096, purpose="test-bells")
        flags = memory.view.cast("Q")
        bells = [Doorbell.create(flags, 8 * row) for row in range(plan.rows)]
        made.extend([Arena(Segment.create(plan.size, purpose="test"), plan, bells), memory, *bells])
        return made[-2 - len(bells)]

    yield make
    for thing in made:
        thing.close()


ALONE = (Seat(0, 0, 0),)


# ---- many ranks ----------------------------------------------------------------------------------


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_leaves_with_the_same_f64_mean(rig_of, ranks):
    report = run(rig_of(ranks))
    assert report.contributors == {k: tuple(range(ranks)) for k in range(1, 5)}


@pytest.mark.procs
def test_unevenly_spaced_slots_use_the_lerp_chain_and_agree(rig_of):
    run(rig_of(3, slots=(0, 1, 3)))
    run(rig_of(3, slots=(2, 0, 1)))


@pytest.mark.procs
@pytest.mark.parametrize(("params", "buffers"), [(0, 0), (0, 700), (1, 0), (300, 16), (5000, 5000)])
def test_models_of_few_blocks_or_none(rig_of, params, buffers):
    run(rig_of(3, params=params, buffers=buffers))


@pytest.mark.procs
@pytest.mark.parametrize("idle", [(0,), (1,), (0, 2), (1, 2, 3)])
def test_ranks_without_mass_receive_but_do_not_weigh_even_with_nan_in_the_slot(rig_of, idle):
    rig = rig_of(4)
    rig.steps_of = lambda rank, number: 0 if rank in idle else rank + number
    run(rig)


@pytest.mark.procs
def test_without_any_mass_everybody_keeps_what_they_have(rig_of):
    rig = rig_of(3)
    rig.steps_of = lambda rank, number: 0 if number in (2, 3) else rank + 1
    run(rig)


@pytest.mark.procs
def test_divergence_can_be_off_or_on_every_block(rig_of):
    run(rig_of(3, sample=1))
    run(rig_of(2, sample=64))  # more than there are blocks: a piece of one each round
    rig = rig_of(2, sample=0)
    rig.divergence = lambda number, who, mean: 0.0
    run(rig)


@pytest.mark.procs
@pytest.mark.parametrize("joiner", [0, 2])
def test_a_joiner_receives_at_once_and_contributes_from_the_next_round(rig_of, joiner):
    report = run(rig_of(3, joiner=joiner))
    others = tuple(rank for rank in range(3) if rank != joiner)
    assert report.contributors == {1: others, 2: others, 3: (0, 1, 2), 4: (0, 1, 2)}


# ---- kernels -------------------------------------------------------------------------------------


def test_evenly_spaced_slots_are_one_matrix():
    assert even_stride([0, 1, 2]) == 1
    assert even_stride([1, 3, 5, 7]) == 2
    assert even_stride([0, 2]) == even_stride([0, 1, 3]) == even_stride([2, 1, 0]) == 0


@pytest.mark.parametrize("slots", [(0, 1), (0, 1, 2), (0, 2, 4), (0, 1, 3), (4, 2, 3, 0)])
def test_every_kernel_is_the_weighted_mean(arena_of, slots):
    arena = arena_of(params=1000, slots=5)
    weights = tuple(1.0 + i for i in range(len(slots)))
    values = torch.rand(5, 1000, generator=torch.Generator().manual_seed(1))
    for slot in range(5):
        arena.slot(slot).copy_(values[slot])
    out = torch.full((1000,), math.nan)
    mean_of(Mix(slots, weights))(views_of(arena, slots, 0, 1000), out)
    wanted = sum(values[s].double() * w for s, w in zip(slots, weights, strict=True)) / sum(weights)
    assert (out - wanted).abs().max() <= 1e-6


# ---- one rank ------------------------------------------------------------------------------------


def test_a_lone_rank_keeps_its_values_and_touches_no_block(arena_of):
    arena = arena_of(params=5000, buffers=10)
    seen = []
    reducer = Reducer(arena, seat_row=0, slot=0, hook=lambda point, *_: seen.append(point))
    arena.slot(0).fill_(3.0)
    for number in (1, 2):
        reducer.arrive(number, ALONE, steps=4, mass=2.5, picks=32)
        outcome = reducer.complete()
    assert (outcome.round, outcome.contributors, outcome.steps, outcome.mass) == (2, (0,), 4, 2.5)
    assert outcome.divergence == 0.0
    assert (arena.slot(0)[:5000] == 3.0).all()
    assert "compute" not in seen


def test_a_prepared_rank_builds_nothing_while_the_others_wait(arena_of):
    arena = arena_of(slots=2, params=5000, buffers=700)
    both = (*ALONE, Seat(1, 1, 1))
    reducers = [Reducer(arena, seat_row=row, slot=row) for row in range(2)]
    for reducer in reducers:
        reducer.prepare(both)
        reducer._worker._task = None  # a call fails
    with ThreadPoolExecutor(2) as pool:
        for number, mean in ((1, 0.0), (2, 0.5)):
            for row, reducer in enumerate(reducers):
                arena.slot(row).fill_(row)
                reducer.arrive(number, both, steps=1, mass=1.0, picks=number)
            list(pool.map(Reducer.complete, reducers))
            assert (arena.slot(1)[:5000] == mean).all()


def test_a_survivor_goes_on_alone(arena_of):
    arena = arena_of(slots=2)
    reducer = Reducer(arena, seat_row=0, slot=0)
    arena.declare_dead(1)
    assert not reducer.alive(1)
    reducer.arrive(1, (*ALONE, Seat(1, 1, 1)), steps=1, mass=1.0, picks=1)
    assert reducer.complete().contributors == (0,)


def test_a_round_of_a_joiner_alone_has_no_contributor(arena_of):
    arena = arena_of(slots=2)
    arena.slot(1).fill_(5.0)
    arena.declare_dead(0)
    reducer = Reducer(arena, seat_row=1, slot=1)
    reducer.arrive(2, (*ALONE, Seat(1, 1, 1, joiner=True)), steps=0, mass=0.0, picks=0)
    outcome = reducer.complete()
    assert (outcome.contributors, outcome.steps, outcome.mass) == ((), 0, 0.0)
    assert (arena.slot(1) == 5.0).all()


def test_threads_and_garbage_collection_are_off_inside_and_restored(arena_of):
    seen = {}

    def hook(point, *_):
        seen[point] = (torch.get_num_threads(), gc.isenabled())

    reducer = Reducer(arena_of(), seat_row=0, slot=0, hook=hook)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reducer.arrive(1, ALONE, steps=1, mass=1.0, picks=1)
        reducer.complete()
        assert (torch.get_num_threads(), gc.isenabled()) == (2, True)
    finally:
        torch.set_num_threads(before)
    assert seen["reduce"] == (1, False)


def test_the_last_arrival_is_whole_even_while_the_next_is_written(arena_of):
    arena = arena_of()
    assert arena.last_arrival(0) == (0, 0, 0)
    reducer = Reducer(arena, seat_row=0, slot=0)
    for number, steps in ((1, 3), (2, 5), (5, 7)):
        reducer.arrive(number, ALONE, steps=steps, mass=1.0, picks=10 * number)
        reducer.complete()
        assert arena.last_arrival(0) == (number, steps, 10 * number)
    publish = reducer._publish_arrival

    def dies_before_the_last_store(number, half, steps, mass, picks):
        arrived = arena.q[reducer._base]
        publish(number, half, steps, mass, picks)
        arena.q[reducer._base] = arrived

    reducer._publish_arrival = dies_before_the_last_store
    reducer.arrive(6, ALONE, steps=9, mass=1.0, picks=60)
    assert arena.last_arrival(0) == (5, 7, 50)


def test_pace_is_read_as_it_was_written(arena_of):
    arena = arena_of(slots=2)
    mine, peer = (Reducer(arena, seat_row=row, slot=row) for row in (0, 1))
    assert peer.pace_of(0) == (0, 0, 0, 0)
    mine.publish_step(3, 7, 1_000, 250)
    assert peer.pace_of(0) == (3, 7, 1_000, 250)
    arena.q[arena.map.row(0) + 8] += 1  # died inside publish_step: its last words still come
    assert peer.pace_of(0) == (3, 7, 1_000, 250)
    mine.publish_step(4, 0, 2_000, 250)
    assert peer.pace_of(0) == (4, 0, 2_000, 250)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r.complete(), "without arrive"),
        (lambda r: r.arrive(0, ALONE, steps=0, mass=0.0, picks=0), "cannot arrive in 0"),
        (lambda r: r.arrive(1, ALONE, steps=0, mass=math.nan, picks=0), "mass nan"),
        (lambda r: r.arrive(1, ALONE, steps=0, mass=-2.0, picks=0), "mass -2.0"),
        (lambda r: r.arrive(1, (Seat(0, 1, 0),), steps=0, mass=0.0, picks=0), "row 0 needs one"),
        (lambda r: r.arrive(1, ALONE * 2, steps=0, mass=0.0, picks=0), "row 0 needs one"),
        (lambda r: r.arrive(1, (Seat(0, 0, 1),), steps=0, mass=0.0, picks=0), "slot 1"),
        (lambda r: r.arrive(1, (Seat(0, 0, 0, True),), steps=1, mass=1.0, picks=0), "joiner"),
    ],
)
def test_a_misuse_is_our_bug_and_says_so(arena_of, call, says):
    with pytest.raises(WeBroke, match=says):
        call(Reducer(arena_of(slots=2), seat_row=0, slot=0))


def test_arriving_twice_without_completing_is_refused(arena_of):
    reducer = Reducer(arena_of(), seat_row=0, slot=0)
    reducer.arrive(1, ALONE, steps=1, mass=1.0, picks=0)
    with pytest.raises(WeBroke, match="cannot arrive in 2"):
        reducer.arrive(2, ALONE, steps=1, mass=1.0, picks=0)


def test_an_arena_needs_its_bytes_and_a_bell_per_row():
    plan = plan_arena(params=10_000, buffers=0, slots=2, rows=2)
    small = Segment.create(4096, purpose="test")
    try:
        with pytest.raises(WeBroke, match="segment of 4096"):
            Arena(small, plan, [])
    finally:
        small.close()
    large = Segment.create(plan.size, purpose="test")
    try:
        with pytest.raises(WeBroke, match="0 doorbells for 2 rows"):
            Arena(large, plan, [])
    finally:
        large.close()
