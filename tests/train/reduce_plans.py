"""Seeded plans of who dies when, for the random and fuzz kinds of kill test; and broken variants.

A broken variant leaves out one rule of the protocol. The same kills must catch it, else they
prove nothing.
"""

from __future__ import annotations

from reduce_faults import Dawdle, Die, Faults, Kill
from reduce_rig import ROUNDS

from flodl_shm.shm.arena import HELPING
from flodl_shm.train.reduce import Reducer
from flodl_shm.train.shard import ShardWorker
from flodl_shm.wire.layout import DONE, GONE, TAG, VALID

MEETING = ("before arrive", "arrived", "rung", "reduce", "finished", "closed", "leaving", "left")
BLOCK = ("compute", "mid compute", "computed", "valid", "mid copy", "mid second copy", "copied")
BLOCK_POINTS = (*BLOCK, "done")


def random_kills(rig, rng):
    """One to ranks - 1 external kills, most of them aimed at a moment inside a round."""
    first = rng.choice(range(rig.ranks))
    kills, doomed = [aimed(rig, rng, first)], {first}
    while len(doomed) < rig.ranks - 1 and rng.random() < 0.6:
        left = [rank for rank in range(rig.ranks) if rank not in doomed]
        if rng.random() < 0.35:
            victim = rng.choice(left)
            kills.append(Kill(victim, lambda: True, rng.choice((0, rng.uniform(0, 0.003)))))
        else:  # the lowest living rank, once it helps
            victim = left[0]
            row = rig.rows[victim]
            kills.append(
                Kill(victim, lambda row=row: rig.arena.state(row) >= HELPING, rng.uniform(0, 3e-4))
            )
        doomed.add(victim)
    return kills


def aimed(rig, rng, victim):
    """A kill of `victim` near its arrival, or while it works its shard."""
    number, q, arena = rng.randrange(1, ROUNDS), rig.arena.q, rig.arena
    if rng.random() < 0.3:
        row = rig.rows[victim]
        return Kill(victim, lambda: arena.last_arrival(row)[0] >= number, rng.uniform(0, 6e-4))
    shard = arena.map.shard(rig.slots[victim])
    goal = (number << TAG) + rng.randrange(max(1, rig.grid.blocks // rig.ranks))
    cell = shard + rng.choice((VALID, VALID, DONE))
    return Kill(victim, lambda: q[cell] >= goal, rng.choice((0, rng.uniform(0, 60e-6))))


def fuzz_faults(rig, rng):
    """Every rank sleeps at random points; one of them dies at a random one."""
    rngs = {rank: type(rng)(rng.random()) for rank in range(rig.ranks)}
    victim = rng.randrange(rig.ranks)
    inside = rng.random() < 0.7
    point = rng.choice(BLOCK_POINTS if inside else MEETING)
    block = rng.randrange(max(1, rig.grid.blocks // rig.ranks)) if inside else None
    faults = {rank: Dawdle(rngs[rank]) for rank in rngs}
    own = Die(point, victim, block, at_round=rng.randrange(1, ROUNDS))
    if victim == rig.joiner:
        own = Faults()  # owns no shard in the round it joins; external kills reach it
    faults[victim].other = own
    return faults


class InPlaceWorker(ShardWorker):
    """The mean goes straight into the first source's slot."""

    def _redo(self, mix, owner, low, high):
        return self._arena.slot(mix.slots[0])[low:high]


class NoReplayWorker(ShardWorker):
    """A helper computes a half-copied block again, from half-copied slots."""

    def _replay(self, task, owner, valid, done):
        return done


class NoDoneWorker(ShardWorker):
    """One redo block without DONE: the helper always replays the last VALID block."""

    def _restart(self, cells, tag):
        valid, _ = super()._restart(cells, tag)
        return valid, max(valid - 1, 0)


class InPlace(Reducer):
    worker_type = InPlaceWorker


class NoReplay(Reducer):
    worker_type = NoReplayWorker


class NoDone(Reducer):
    worker_type = NoDoneWorker


class LivingOnly(Reducer):
    """Contributors are who lives when a rank looks, not who had arrived."""

    def _has_arrived(self, base):
        return super()._has_arrived(base) and not self._q[base + GONE]
