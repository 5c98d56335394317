"""Real processes that reduce and die: the harness of the kill tests and of scripts/soak.

A rig holds one arena and knows every contribution beforehand. A trial forks its ranks, lets them
reduce a few rounds, kills as planned, declares only what a pidfd proves dead, and then compares:
contributors with the arrival cells, slots with an independent f64 mean, survivors with each other.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import sys
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from reduce_faults import Faults, Kill

from flodl_shm.control.messages import Seat
from flodl_shm.shm.arena import DEATHS, Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.train.reduce import Reducer
from flodl_shm.wire import layout

ROUNDS = 4
GAMMA = 0.7
TRIAL_S = 20.0  # a trial that takes longer hangs
OUT_S = 5.0  # from the last death to the last survivor's end; usually 0.02

# one record per rank and round: u64 cells, then doubles
FILLED, OK, MASK, CRC, STEPS, ERROR, DIVERGENCE, DIVERGENCE_ERROR, CELLS = range(9)


def square(x):
    """|x|^2 without BLAS, whose threads a forked rank does not have."""
    return float(np.sum(x * x))


@dataclass
class Report:
    """A trial's end: who died, what each round's contributors were, and everything wrong."""

    dead: list[int]
    contributors: dict[int, tuple[int, ...]]
    bad: list[str]


class Rig:
    """One arena for `ranks` ranks, reused by many trials. Rows differ from slots on purpose."""

    def __init__(self, ranks, *, params=50_003, buffers=4_501, slots=None, joiner=None, sample=4):
        self.ranks, self.joiner, self.sample = ranks, joiner, sample
        self.slots = slots or tuple(range(ranks))
        self.rows = tuple(rank + 1 for rank in range(ranks))
        count = max(self.slots) + 1
        with mock.patch.object(layout, "LARGEST_BLOCK", 4096):  # small: many blocks per shard
            plan = layout.plan_arena(
                params=params, buffers=buffers, slots=count, rows=max(count, ranks + 1)
            )
        self.grid = plan.grid
        self.segment = Segment.create(plan.size, purpose="test-arena")
        self.bell_memory = Segment.create(mmap.PAGESIZE, purpose="test-bells")
        flags = self.bell_memory.view.cast("Q")
        self.bells = [Doorbell.create(flags, 8 * row) for row in range(plan.rows)]
        self.arena = Arena(self.segment, plan, self.bells)
        self.arena.flat  # noqa: B018  torch's view exists before the first fork
        rng = np.random.default_rng(ranks)
        self.base = rng.random((ranks, self.grid.floats), dtype=np.float32)
        self.base[:, self.grid.buffer_start :] *= 3
        self.memory = mmap.mmap(-1, max(mmap.PAGESIZE, ranks * (ROUNDS + 1) * CELLS * 8))
        self.q = memoryview(self.memory).cast("Q")
        self.d = memoryview(self.memory).cast("d")
        self.steps_of = lambda rank, number: (rank + number) % 3 + 1

    def close(self):
        """Give everything back."""
        self.arena.close()
        for bell in self.bells:
            bell.close()
        self.bell_memory.close()

    # ---- what is known beforehand --------------------------------------------------------------

    def roster(self, number):
        """Seats of a round. The joiner is absent in round 1, joins in 2, contributes from 3 on."""
        return tuple(
            Seat(rank, self.rows[rank], self.slots[rank], rank == self.joiner and number == 2)
            for rank in range(self.ranks)
            if rank != self.joiner or number > 1
        )

    def steps(self, rank, number):
        return 0 if rank == self.joiner and number <= 2 else self.steps_of(rank, number)

    def mass(self, rank, number):
        steps = self.steps(rank, number)
        return steps**GAMMA if steps else 0.0

    def contribution(self, rank, number):
        """What the rank's slot holds on arrival: NaN where it has nothing to say."""
        anybody = any(self.steps(r, number) for r in range(self.ranks))
        if number > 1 and anybody and not self.steps(rank, number):
            return np.full(self.grid.floats, np.nan, np.float32)
        return self.base[rank] + np.float32(number / 8)

    def expected(self, number, contributors):
        """The consensus in f64, from plain numpy; None when nobody brings mass."""
        if number == 1:
            return self.contribution(contributors[0], 1).astype(np.float64)
        movers = [r for r in contributors if self.steps(r, number)]
        if not movers:
            return None
        split = self.grid.buffer_start
        mean = np.zeros(self.grid.floats)
        total = sum(self.mass(r, number) for r in movers)
        for rank in movers:
            mine = self.contribution(rank, number).astype(np.float64)
            mean[:split] += mine[:split] * (self.mass(rank, number) / total)
            mean[split:] += mine[split:] / len(movers)
        return mean

    def divergence(self, number, contributors, mean):
        """max |x - mean| / |mean| over the blocks that the round looks at, in f64."""
        movers = [r for r in contributors if self.mass(r, number)]
        if number == 1 or len(movers) < 2:
            return 0.0
        param_blocks = self.grid.first_buffer_block
        stride = max(1, min(self.sample, param_blocks // 4))
        looked = [b for b in range(param_blocks) if (b + number) % stride == 0]
        if not looked:  # a model without parameters
            return 0.0
        piece = max(self.grid.block_floats * stride // self.sample, 1024)
        bounds = [self.grid.bounds(block) for block in looked]
        index = np.concatenate([np.arange(low, min(high, low + piece)) for low, high in bounds])
        looked_at = mean[index]
        off = max(square(self.contribution(rank, number)[index] - looked_at) for rank in movers)
        return math.sqrt(off / square(looked_at))

    # ---- one rank ------------------------------------------------------------------------------

    def record(self, rank, number):
        return (rank * (ROUNDS + 1) + number) * CELLS

    def run_rank(self, rank, faults, reducer_type):
        """The child's life: fill, reduce, check, for every round it has a seat in."""
        torch.set_num_threads(1)
        reducer = reducer_type(
            self.arena,
            seat_row=self.rows[rank],
            slot=self.slots[rank],
            sample=self.sample,
            hook=faults,
        )
        slot = self.arena.slot(self.slots[rank]).numpy()
        for number in range(1, ROUNDS + 1):
            if not any(seat.rank == rank for seat in self.roster(number)):
                continue
            faults.round = number
            at, mine = self.record(rank, number), self.contribution(rank, number)
            half = len(mine) // 2
            slot[:half] = mine[:half]
            faults("fill", rank, rank, 0, None)
            slot[half:] = mine[half:]
            self.q[at + FILLED] = 1
            reducer.arrive(
                number,
                self.roster(number),
                steps=self.steps(rank, number),
                mass=self.mass(rank, number),
                picks=10 * number + rank,
            )
            self.check(rank, number, reducer.complete(), slot)

    def check(self, rank, number, outcome, slot):
        """Record what the rank left the round with, judged against the f64 mean."""
        at, who = self.record(rank, number), outcome.contributors
        mean = self.expected(number, who)
        wanted = self.contribution(rank, number) if mean is None else mean
        error = self.error(slot, wanted)
        if outcome.steps != sum(self.steps(r, number) for r in who):
            error = math.inf
        if not math.isclose(outcome.mass, sum(self.mass(r, number) for r in who)):
            error = math.inf
        drift = 0.0 if mean is None else self.divergence(number, who, mean)
        self.d[at + ERROR] = error
        self.d[at + DIVERGENCE] = outcome.divergence
        self.d[at + DIVERGENCE_ERROR] = abs(outcome.divergence - drift) / (drift or 1.0)
        self.q[at + MASK] = sum(1 << r for r in who)
        self.q[at + CRC] = self.crc(slot) if mean is not None else 0
        self.q[at + STEPS] = outcome.steps
        self.q[at + OK] = 1

    def parts(self, floats):
        """The two regions; the gap between them is nobody's."""
        return floats[: self.grid.params], floats[self.grid.buffer_start :]

    def error(self, slot, wanted):
        """Largest difference; NaN stays NaN, which no limit admits, unless it was to be kept."""
        if slot.tobytes() == wanted.tobytes():
            return 0.0
        pairs = zip(self.parts(slot), self.parts(wanted), strict=True)
        return max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)

    def crc(self, slot):
        params, buffers = self.parts(slot)
        return zlib.crc32(buffers, zlib.crc32(params))

    # ---- one trial -----------------------------------------------------------------------------

    def trial(self, faults=None, *, kills=(), reducer_type=Reducer):
        """Run all ranks to their ends, or to the ones planned for them."""
        self.reset()
        faults = faults or {}
        pids = [self.fork(r, faults.get(r) or Faults(), reducer_type) for r in range(self.ranks)]
        bad, dead = [], []
        try:
            self.watch(pids, list(kills), dead, bad)
        finally:
            self.clean_up(pids)
        contributors = {}
        if not bad:
            contributors = self.verify(dead, bad)
        return Report(sorted(dead), contributors, bad)

    def reset(self):
        for cell in range(self.arena.map.redo_at // layout.CELL):
            self.arena.q[cell] = 0
        for bell in self.bells:
            bell.drain()
        self.memory[:] = bytes(len(self.memory))

    def fork(self, rank, faults, reducer_type):
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # 3.12 warns of any thread the test runner has; ranks here start none.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self.run_rank(rank, faults, reducer_type)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def watch(self, pids, kills, dead, bad):
        """Kill as planned, declare what is gone, until everybody is."""
        fds = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        began = last = time.monotonic()
        try:
            while fds:
                kills = self.shoot(kills, pids, fds, began)
                for fd, _ in poll.poll(0 if kills else 100):
                    last = time.monotonic()
                    poll.unregister(fd)
                    os.close(fd)
                    self.bury(fds.pop(fd), pids, dead, bad)
                now = time.monotonic()
                if now - began > TRIAL_S or (dead and now - last > OUT_S):
                    bad.append(f"hang: {self.words()}")
                    return
        finally:
            for fd in fds:
                os.close(fd)

    def shoot(self, kills, pids, fds, began):
        """Fire the first kill of the plan if its time has come; what is left of the plan."""
        if not kills:
            return kills
        kill, now = kills[0], time.monotonic()
        if isinstance(kill, Kill) and (kill.when() or now - began > 1):
            kills = [(now + kill.delay_s, kill.victim), *kills[1:]]
        if not isinstance(kills[0], Kill) and now >= kills[0][0]:
            victim = kills[0][1]
            victim = victim() if callable(victim) else victim
            if victim is not None and victim in fds.values():
                os.kill(pids[victim], signal.SIGKILL)
            kills = kills[1:]
        return kills

    def bury(self, rank, pids, dead, bad):
        _, status = os.waitpid(pids[rank], 0)
        pids[rank] = 0
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code != -signal.SIGKILL:
            bad.append(f"rank {rank} ended with {code}")
        dead.append(rank)
        self.arena.declare_dead(self.rows[rank])

    def clean_up(self, pids):
        for pid in pids:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def words(self):
        """Every rank's cells, for a trial that hangs."""
        arena, words = self.arena, [f"{self.arena.q[DEATHS]} deaths"]
        for rank, row in enumerate(self.rows):
            shard = arena.map.shard(self.slots[rank])
            cells = [arena.q[shard + i] for i in (layout.VALID, layout.DONE, layout.CLOSED)]
            words.append(f"{rank}: {arena.last_arrival(row)} in {arena.state(row)}, {cells}")
        return "; ".join(words)

    def verify(self, dead, bad):
        """Every round's records against the cells and each other; contributors by round."""
        alive = [r for r in range(self.ranks) if r not in dead]
        found = {}
        for number in range(1, ROUNDS + 1):
            seats = [s.rank for s in self.roster(number) if not s.joiner]
            present = [s.rank for s in self.roster(number)]
            came = tuple(r for r in seats if self.arena.last_arrival(self.rows[r])[0] >= number)
            at = {r: self.record(r, number) for r in range(self.ranks)}
            records = [r for r in range(self.ranks) if self.q[at[r] + OK]]
            missing = set(alive) & set(present) - set(records)
            if missing:
                bad.append(f"round {number}: no record of {sorted(missing)}")
            unfinished = [r for r in came if not self.q[at[r] + FILLED]]
            if unfinished:
                bad.append(f"round {number}: {unfinished} counted without having finished")
            for rank in records:
                self.judge(rank, number, came, bad)
            same = {(self.q[at[r] + CRC], self.d[at[r] + DIVERGENCE]) for r in records}
            if len(same) > 1:
                bad.append(f"round {number}: slots or divergences differ between ranks")
            found[number] = came
        self.verify_end(alive, bad)
        return found

    def judge(self, rank, number, came, bad):
        at = self.record(rank, number)
        if self.q[at + MASK] != sum(1 << r for r in came):
            bad.append(f"round {number} rank {rank}: not {came} but {self.q[at + MASK]:b}")
        if not self.d[at + ERROR] <= 1e-6:
            bad.append(f"round {number} rank {rank}: off by {self.d[at + ERROR]:.3g}")
        if not self.d[at + DIVERGENCE_ERROR] <= 1e-3:
            bad.append(f"round {number} rank {rank}: divergence {self.d[at + DIVERGENCE]:.3g}")

    def verify_end(self, alive, bad):
        """Nobody wrote into a slot after its rank had left."""
        for rank in alive:
            wanted = self.q[self.record(rank, ROUNDS) + CRC]
            if wanted and self.crc(self.arena.slot(self.slots[rank]).numpy()) != wanted:
                bad.append(f"slot of rank {rank} was written after the end")
