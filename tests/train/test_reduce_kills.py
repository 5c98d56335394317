"""A death inside a reduce costs nothing: real SIGKILLs at every point, and tests that bite.

Injected kills (a rank kills itself at a named point) reach every point for certain; random ones
and schedule fuzz reach the moments nobody named. Each kind must also catch a broken variant.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from flodl_shm.control.messages import Seat
from flodl_shm.shm.arena import REDUCING
from flodl_shm.train.reduce import Reducer

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from reduce_faults import Die, Hold
from reduce_plans import (
    BLOCK_POINTS,
    MEETING,
    InPlace,
    LivingOnly,
    NoDone,
    NoReplay,
    fuzz_faults,
    random_kills,
)
from reduce_rig import Rig

pytestmark = pytest.mark.procs


@pytest.fixture(scope="module")
def rigs():
    """One rig per shape, shared by all trials of this file."""
    made = {}

    def get(ranks, **kwargs):
        key = (ranks, *sorted(kwargs.items()))
        if key not in made:
            made[key] = Rig(ranks, **kwargs)
        return made[key]

    yield get
    for rig in made.values():
        rig.close()


def inject(rig, faults, *, late=()):
    """One trial in round 2; the dead of `late` had not arrived in it. Returns what is wrong."""
    report = rig.trial(faults)
    full = set(range(rig.ranks))
    contributors = [seat.rank for seat in rig.roster(2) if not seat.joiner]
    wanted = {
        1: tuple(seat.rank for seat in rig.roster(1)),
        2: tuple(rank for rank in contributors if rank not in late),
        3: tuple(sorted(full - set(faults))),
        4: tuple(sorted(full - set(faults))),
    }
    if report.dead != sorted(faults):
        report.bad.append(f"dead are {report.dead}: a point was not reached")
    elif not report.bad and report.contributors != wanted:
        report.bad.append(f"contributors {report.contributors}, not {wanted}")
    return [(faults, bad) for bad in report.bad]


def shard_blocks(rig):
    """First, a middle and the last block of the first shard, which every shard has."""
    least = rig.grid.blocks // rig.ranks
    return sorted({0, least // 2, least - 1})


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", BLOCK_POINTS)
def test_two_ranks_one_dies_at_a_block(rigs, victim, point):
    rig = rigs(2)
    wrong = []
    for block in shard_blocks(rig):
        wrong += inject(rig, {victim: Die(point, victim, block)})
    assert not wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_death_anywhere_else_in_the_round(rigs, ranks):
    rig, wrong = rigs(ranks), []
    for victim in (0, ranks - 1):
        for point in ("fill", *MEETING, "closed, rung"):
            late = (victim,) if point in ("fill", "before arrive") else ()
            wrong += inject(rig, {victim: Die(point, victim)}, late=late)
    assert not wrong


@pytest.mark.parametrize(("ranks", "victim"), [(3, 0), (3, 2), (4, 1)])
def test_three_or_more_ranks_one_dies_at_a_block(rigs, ranks, victim):
    rig, wrong = rigs(ranks), []
    for point in BLOCK_POINTS:
        for block in (0, 1):
            wrong += inject(rig, {victim: Die(point, victim, block)})
    assert not wrong


@pytest.mark.parametrize("first", ["reduce", "mid compute", "mid copy", "copied"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_helper_dies_too(rigs, victim, first):
    rig, wrong = rigs(3), []
    helper = 1 if victim == 0 else 0
    own = Die(first, victim, None if first == "reduce" else 1)
    for point in (*BLOCK_POINTS, "finished", "closed"):
        block = 2 if point in BLOCK_POINTS else None
        wrong += inject(rig, {victim: own, helper: Die(point, victim, block)})
    if first in ("mid copy", "copied"):
        wrong += inject(rig, {victim: own, helper: Die("replayed", victim, 1)})
    assert not wrong


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", ["mid compute", "mid copy", "mid second copy", "copied", "done"])
def test_two_helpers_die_in_a_row_and_the_last_rank_finishes(rigs, victim, point):
    rig = rigs(4)
    helper, second = [rank for rank in range(4) if rank != victim][:2]
    own = Die("mid copy", victim, 0)
    wrong = inject(rig, {victim: own, helper: Die(point, victim, 1), second: Die(point, victim, 2)})
    wrong += inject(
        rig,
        {
            victim: own,
            helper: Die("mid second copy", victim, 2),
            second: Die("replayed", victim, 2),
        },
    )
    assert not wrong


@pytest.mark.parametrize("slots", [(0, 1, 3), (2, 0, 1)])
def test_a_helper_uses_the_owners_kernel_on_odd_slots(rigs, slots):
    rig, wrong = rigs(3, slots=slots), []
    for point in ("mid compute", "mid copy"):
        wrong += inject(rig, {1: Die(point, 1, 1)})
        wrong += inject(rig, {1: Die(point, 1, 1), 0: Die(point, 1, 2)})
    assert not wrong


@pytest.mark.parametrize("point", BLOCK_POINTS)
def test_round_1_survives_the_death_of_whoever_spreads_the_state(rigs, point):
    rig = rigs(3)
    for victim in (0, 1):
        report = rig.trial({victim: Die(point, victim, 1, at_round=1)})
        assert (report.bad, report.dead) == ([], [victim])
        assert report.contributors[1] == (0, 1, 2)


@pytest.mark.parametrize("joiner", [0, 2])
def test_a_joiner_dies_and_nobody_notices(rigs, joiner):
    rig, wrong = rigs(3, joiner=joiner), []
    for point in ("fill", "before arrive", "arrived", "rung", "reduce", "leaving", "left"):
        wrong += inject(rig, {joiner: Die(point, joiner)})
    assert not wrong


@pytest.mark.parametrize("point", BLOCK_POINTS)
def test_a_joiner_finishes_the_shards_of_the_dead(rigs, point):
    lowest, last = rigs(3, joiner=0), rigs(3, joiner=2)
    wrong = inject(lowest, {1: Die(point, 1, 1)})
    wrong += inject(last, {0: Die(point, 0, 1), 1: Die(point, 1, 2)})
    wrong += inject(lowest, {1: Die("mid copy", 1, 1), 0: Die(point, 1, 2)})
    assert not wrong


class SlotReused(Rig):
    """Rank 1 dies in round 2; rank 2 takes over its slot, joins in round 3, contributes in 4."""

    def roster(self, number):
        if number <= 2:
            second = Seat(1, self.rows[1], 1)
        else:
            second = Seat(2, self.rows[2], 1, joiner=number == 3)
        return (Seat(0, self.rows[0], 0), second)

    def steps(self, rank, number):
        return 0 if rank == 2 and number <= 3 else self.steps_of(rank, number)

    def run_rank(self, rank, faults, reducer_type):
        if rank == 2:  # the slot is free once the last round that used it has closed
            faults.round = 0
            Hold("start", lambda: self.arena.last_arrival(self.rows[0])[0] >= 3, at_round=0)(
                "start", 2, 2, 0, None
            )
        super().run_rank(rank, faults, reducer_type)


@pytest.mark.parametrize("point", BLOCK_POINTS)
def test_a_slot_and_its_half_worked_shard_pass_to_a_new_incarnation(point):
    rig = SlotReused(3, slots=(0, 1, 1))
    try:
        report = rig.trial({1: Die(point, 1, 1)})
    finally:
        rig.close()
    assert (report.bad, report.dead) == ([], [1])
    assert report.contributors == {1: (0, 1), 2: (0, 1), 3: (0,), 4: (0, 2)}


# ---- kills that nobody aimed ---------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_kills(rigs, ranks):
    rng = random.Random(ranks)
    for trial in range(20):
        report = rigs(ranks).trial(kills=random_kills(rigs(ranks), rng))
        assert not report.bad, f"seed {ranks}, trial {trial}"


@pytest.mark.parametrize(("ranks", "joiner"), [(2, None), (3, None), (4, None), (3, 0), (4, 3)])
def test_fuzzed_schedules(rigs, ranks, joiner):
    rng = random.Random(10 * ranks)
    rig = rigs(ranks, joiner=joiner)
    for trial in range(8):
        report = rig.trial(fuzz_faults(rig, rng), kills=random_kills(rig, rng)[1:])
        assert not report.bad, f"seed {10 * ranks}, trial {trial}"


# ---- do the tests bite? --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "point"),
    [(InPlace, "mid compute"), (NoReplay, "mid copy"), (NoDone, "mid compute")],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_injected_kills_catch_a_broken_variant(rigs, ranks, variant, point):
    faults = {1: Die(point, 1, 2)}
    assert not rigs(ranks).trial(faults).bad
    assert rigs(ranks).trial(faults, reducer_type=variant).bad


@pytest.mark.parametrize(("reducer", "broken"), [(Reducer, False), (LivingOnly, True)])
def test_a_death_seen_at_different_times_catches_contributors_by_life(rigs, reducer, broken):
    rig = rigs(3)
    rows, arena = rig.rows, rig.arena
    faults = {
        # rank 2 dies once rank 0 has passed the meeting with it; rank 1 looks only afterwards
        2: Hold("rung", lambda: arena.state(rows[0]) >= REDUCING, then_die=True),
        1: Hold("rung", lambda: arena.is_gone(rows[2])),
    }
    report = rig.trial(faults, reducer_type=reducer)
    assert report.dead == [2]
    assert bool(report.bad) == broken


def test_random_kills_catch_the_unsafe_reduce(rigs):
    rng, rig = random.Random(5), rigs(2)
    caught = (rig.trial(kills=random_kills(rig, rng), reducer_type=InPlace).bad for _ in range(150))
    assert any(caught)


def test_fuzz_catches_a_skipped_replay(rigs):
    rng, rig = random.Random(6), rigs(3)
    caught = (rig.trial(fuzz_faults(rig, rng), reducer_type=NoReplay).bad for _ in range(100))
    assert any(caught)
