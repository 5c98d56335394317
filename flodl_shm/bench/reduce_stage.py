"""What the ranks of one bench-reduce case share, and how their calls are timed.

All variants run in the same processes, one intra-op thread each, in a new random order every rep,
with a blocking barrier before each timed call: a spinning one takes the core from gloo's I/O
thread and makes gloo look 6 to 8 times worse at 1 MiB. A rep's time is the slowest rank's.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flodl_shm.bench.forked import run_ranks
from flodl_shm.control.messages import Seat
from flodl_shm.ids import Rank, Row, Slot
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.wire.layout import plan_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[int], object]  # of a rep

WARM_UP = 3  # reps that do not count
CASE_S = 300.0  # a case that takes longer hangs


class Stage:
    """The arena, a blocking barrier, the table of times."""

    def __init__(self, *, ranks: int, floats: int, variants: int, reps: int) -> None:
        self.ranks = ranks
        self.variants = variants
        self.reps = reps
        plan = plan_arena(params=floats, buffers=0, slots=ranks, rows=ranks)
        self.segment = Segment.create(plan.size, purpose="bench-arena")
        self.segment.ask_for_huge_pages()
        self.cells_memory = Segment.create(4096 * (1 + ranks), purpose="bench-cells")
        cells = self.cells_memory.view.cast("Q")
        bells = [Doorbell.create(cells, 8 * rank) for rank in range(ranks)]
        self.arena = Arena(self.segment, plan, bells)
        self.barrier_bells = [Doorbell.create(cells, 8 * (ranks + rank)) for rank in range(ranks)]
        self.passed = cells[16 * ranks :]  # cell 8 * rank: how often the rank has arrived
        size = (WARM_UP + reps) * variants * ranks * 8
        self.times = memoryview(mmap.mmap(-1, size)).cast("d")

    @property
    def roster(self) -> tuple[Seat, ...]:
        """All ranks, each in the row and slot of its number."""
        return tuple(Seat(Rank(r), Row(r), Slot(r)) for r in range(self.ranks))

    def barrier(self, rank: int, count: int) -> None:
        """Wait without spinning until every rank has come here `count` times."""
        self.passed[8 * rank] = count
        peers = [other for other in range(self.ranks) if other != rank]
        for other in peers:
            self.barrier_bells[other].ring()
        self.barrier_bells[rank].wait(
            lambda: all(self.passed[8 * other] >= count for other in peers),
            timeout_ns=int(CASE_S * 1e9),
            spin_ns=0,
        )

    def run(self, make_calls: Callable[[int], Sequence[Call]], *, seed: int) -> None:
        """Time the calls in a process for each rank. Raises HostUnfit when one fails or hangs.

        `make_calls(rank)` runs in the rank, which has joined a gloo group; what it returns beyond
        the variants is called once at the end, untimed.
        """
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{Path(folder) / 'gloo'}"
            run_ranks(
                self.ranks,
                lambda rank: self._in_rank(rank, store, make_calls, random.Random(seed)),
                limit_s=CASE_S,
            )

    def _in_rank(
        self,
        rank: int,
        store: str,
        make_calls: Callable[[int], Sequence[Call]],
        order: random.Random,  # the same on all ranks
    ) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=self.ranks)
        self.segment.prefault()  # as a rank does when it attaches
        calls = make_calls(rank)
        count = 0
        for rep in range(WARM_UP + self.reps):
            for variant in order.sample(range(self.variants), self.variants):
                count += 1
                self.barrier(rank, count)
                began = time.perf_counter()
                calls[variant](rep)
                self.times[self._at(rep, variant, rank)] = time.perf_counter() - began
        for check in calls[self.variants :]:
            check(WARM_UP + self.reps)

    def _at(self, rep: int, variant: int, rank: int) -> int:
        return (rep * self.variants + variant) * self.ranks + rank

    def slowest(self, variant: int) -> list[float]:
        """Seconds of every counted rep."""
        return [self._slowest(WARM_UP + rep, variant) for rep in range(self.reps)]

    def first(self, variant: int) -> float:
        """Seconds of the very first call."""
        return self._slowest(0, variant)

    def _slowest(self, rep: int, variant: int) -> float:
        return max(self.times[self._at(rep, variant, rank)] for rank in range(self.ranks))

    def identical(self) -> bool:
        """Whether all slots hold the same bits."""
        first = self.arena.slot(Slot(0))
        return all(torch.equal(first, self.arena.slot(Slot(r))) for r in range(1, self.ranks))

    def close(self) -> None:
        """Give all memory back."""
        self.arena.close()
        for bell in (*self.arena.bells, *self.barrier_bells):
            bell.close()
        self.passed.release()
        self.cells_memory.close()
