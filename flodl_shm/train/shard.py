"""One shard of one reduce, from wherever its cells say it stands to its end.

A shard is a run of whole blocks. Per block: the weighted mean into the shard's redo block, VALID,
a copy to every member's slot, DONE. The owner and, once it is known dead, its helper run the same
routine, so a helper's death is the same case again:

- died before VALID: the block's slots are untouched, it is computed again;
- died between VALID and DONE: the redo block is whole and is copied again (replayed);
- died after DONE: the block stands.

A region with a single source needs no redo block: the source is never written, so copying from it
again is always right. Cells hold (round << TAG) + blocks and are never reset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank
from flodl_shm.shm.fence import fence
from flodl_shm.train.divergence import Sample, Sampler, ShardSums
from flodl_shm.train.kernels import Mean, Mix, mean_of, views_of
from flodl_shm.wire.layout import CLOSED, DONE, TAG, VALID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.control.messages import Seat
    from flodl_shm.ids import Round, Slot
    from flodl_shm.shm.arena import Arena

TASKS_KEPT = 4  # a shard's tasks by who is in the round; rosters change rarely


@dataclass(frozen=True, slots=True)
class Assembly:
    """What every rank derives alike from a round's arrivals."""

    number: Round
    contributors: tuple[Seat, ...]  # arrived, dead or not; by rank
    members: tuple[Seat, ...]  # contributors and joiners that arrived
    params: Mix
    buffers: Mix
    steps: int
    mass: float


@dataclass(frozen=True, slots=True)
class Task:
    """One block of a shard, all views built."""

    block: int  # of the grid
    in_params: bool
    sources: Any  # as the kernel wants them
    sample: Sample | None  # what the divergence looks at, if the block's turn comes
    redo: torch.Tensor | None  # None: one source, copied as it is
    result: np.ndarray  # what the targets receive
    targets: tuple[np.ndarray, ...]


Hook = Callable[[str, "Rank", "Rank", int, Task | None], None]  # point, worker, shard, block, task


class ShardWorker:
    """Works shards for one rank. `hook` is called at every protocol point, for fault injection."""

    def __init__(self, arena: Arena, *, sampler: Sampler | None, hook: Hook | None) -> None:
        self._arena = arena
        self._q = arena.q
        self.rank = Rank(-1)  # whose worker this is: a roster tells
        self._sampler = sampler
        self._hook = hook
        piece = sampler.piece if sampler is not None else 0
        self._scratch = torch.zeros(piece, dtype=torch.float32, device="cpu")
        self._kept: dict[object, list[Task | None]] = {}

    def work(self, assembly: Assembly, owner: Seat, targets: Sequence[Slot]) -> None:
        """Bring the owner's shard to its end and close it.

        `targets` are the slots to write. One caller at a time: the owner, or the helper after
        the former worker is known dead.
        """
        hook, worker, shard = self._hook, self.rank, owner.rank
        self._work_blocks(assembly, owner, targets)
        if hook is not None:
            hook("finished", worker, shard, 0, None)
        # Copies before CLOSED: reversed, a peer could leave and train on a block not yet written.
        fence()
        self._q[self._arena.map.shard(owner.slot) + CLOSED] = assembly.number
        if hook is not None:
            hook("closed", worker, shard, 0, None)

    def prepare(self, assembly: Assembly, owner: Seat, targets: Sequence[Slot]) -> None:
        """Build the owner's tasks for rounds like this one, if the owner is this rank."""
        first, stop = self.blocks_of(assembly, owner)
        begin, end = self._active(assembly, first, stop, targets)
        self._own_tasks(assembly, owner, targets, (first, begin, end))

    def _work_blocks(self, assembly: Assembly, owner: Seat, targets: Sequence[Slot]) -> None:
        first, stop = self.blocks_of(assembly, owner)
        begin, end = self._active(assembly, first, stop, targets)
        if begin >= end:
            return
        cells = self._arena.map.shard(owner.slot)
        valid, done = self._restart(cells, assembly.number << TAG)
        if done == valid == 0 and owner.rank == self.rank:
            tasks = self._own_tasks(assembly, owner, targets, (first, begin, end))
        else:  # block by block: building a whole shard's views would only delay the others
            tasks = None
        if valid > done:
            task = self._task(assembly, owner, first + done, targets)
            done = self._replay(task, owner, (assembly.number << TAG) + valid, done)
        self._run(assembly, owner, targets, (first, max(done, begin - first), end), tasks)

    def _run(
        self,
        assembly: Assembly,
        owner: Seat,
        targets: Sequence[Slot],
        span: tuple[int, int, int],
        tasks: list[Task | None] | None,
    ) -> None:
        """The hot loop. `span`: the shard's first block, blocks that stand, last block + 1."""
        first, done, end = span
        q, hook, sampler, copy = self._q, self._hook, self._sampler, np.copyto
        worker, shard, number = self.rank, owner.rank, assembly.number
        cells = self._arena.map.shard(owner.slot)
        tag, valid_at, done_at = number << TAG, cells + VALID, cells + DONE
        param_mean, buffer_mean = self._kernels(assembly)
        sums = self._sums(assembly, owner, done)
        for index in range(done, end - first):
            task = tasks[index] if tasks else None
            if task is None:
                task = self._task(assembly, owner, first + index, targets)
            if hook is not None:
                hook("compute", worker, shard, index, task)
            redo = task.redo
            if redo is not None:
                (param_mean if task.in_params else buffer_mean)(task.sources, redo)
                sample = task.sample  # of a parameter block where divergence is measured, else None
                if sums and sampler and sample and sampler.takes(task.block, number):
                    sums.add(sample)
            if hook is not None:
                hook("computed", worker, shard, index, task)
            q[valid_at] = tag + index + 1
            if hook is not None:
                hook("valid", worker, shard, index, task)
            result = task.result
            for target in task.targets:
                copy(target, result)
            if hook is not None:
                hook("copied", worker, shard, index, task)
            q[done_at] = tag + index + 1
            if hook is not None:
                hook("done", worker, shard, index, task)

    def divergence_sums(self, assembly: Assembly) -> list[float]:
        """[|mean|^2, |x - mean|^2 per source] over all closed shards; empty when not sampled."""
        sampler, mix = self._sampler, assembly.params
        if sampler is None or not mix.is_mean:
            return []
        totals = [0.0] * (1 + len(mix.slots))
        for owner in assembly.contributors:
            sampled = sampler.count(*self.blocks_of(assembly, owner), assembly.number)
            sums = ShardSums.read(self._arena, owner.slot, mix, sampled=sampled)
            totals = [a + b for a, b in zip(totals, sums, strict=True)]
        return totals

    def blocks_of(self, assembly: Assembly, owner: Seat) -> tuple[int, int]:
        """Blocks [first, stop) of the contributor's shard."""
        contributors = assembly.contributors
        return self._arena.map.grid.shard(contributors.index(owner), len(contributors))

    def _active(
        self, assembly: Assembly, first: int, stop: int, targets: Sequence[Slot]
    ) -> tuple[int, int]:
        """The part of [first, stop) that somebody would notice: no source, nothing to do."""
        split = self._arena.map.grid.first_buffer_block
        if not _has_work(assembly.params, targets):
            first = max(first, split)
        if not _has_work(assembly.buffers, targets):
            stop = min(stop, split)
        return first, stop

    def _restart(self, cells: int, tag: int) -> tuple[int, int]:
        """(blocks VALID, blocks DONE) in this round; an older round's cells read as nothing."""
        return max(self._q[cells + VALID] - tag, 0), max(self._q[cells + DONE] - tag, 0)

    def _replay(self, task: Task, owner: Seat, valid: int, done: int) -> int:
        """Copy a whole redo block again, since its copies may not be whole; blocks that stand."""
        if task.redo is None:
            return done
        for target in task.targets:
            np.copyto(target, task.result)
        self._q[self._arena.map.shard(owner.slot) + DONE] = valid
        if self._hook is not None:
            self._hook("replayed", self.rank, owner.rank, done, task)
        return done + 1

    def _kernels(self, assembly: Assembly) -> tuple[Mean, Mean]:
        params = mean_of(assembly.params) if assembly.params.is_mean else _no_mean
        if assembly.buffers == assembly.params:
            return params, params
        return params, mean_of(assembly.buffers) if assembly.buffers.is_mean else _no_mean

    def _sums(self, assembly: Assembly, owner: Seat, done: int) -> ShardSums | None:
        if self._sampler is None or not assembly.params.is_mean:
            return None
        first, _ = self.blocks_of(assembly, owner)
        sampled = self._sampler.count(first, first + done, assembly.number)
        return ShardSums(self._arena, owner.slot, assembly.params, sampled=sampled)

    def _own_tasks(
        self,
        assembly: Assembly,
        owner: Seat,
        targets: Sequence[Slot],
        span: tuple[int, int, int],
    ) -> list[Task | None]:
        """My own shard's tasks by index, kept while the same slots meet in the same parts."""
        contributors = tuple(seat.slot for seat in assembly.contributors)
        key = (contributors, tuple(targets), assembly.params.slots, assembly.buffers.slots)
        tasks = self._kept.get(key)
        if tasks is None:
            if len(self._kept) >= TASKS_KEPT:
                self._kept.pop(next(iter(self._kept)))
            first, begin, end = span
            tasks = [None] * (begin - first)
            tasks += [self._task(assembly, owner, b, targets) for b in range(begin, end)]
            self._kept[key] = tasks
        return tasks

    def _task(self, assembly: Assembly, owner: Seat, block: int, targets: Sequence[Slot]) -> Task:
        grid, arena = self._arena.map.grid, self._arena
        low, high = grid.bounds(block)
        in_params = block < grid.first_buffer_block
        mix = assembly.params if in_params else assembly.buffers
        views = [arena.slot(slot)[low:high] for slot in mix.slots]
        redo = sample = None
        if mix.is_mean:
            redo = self._redo(mix, owner, low, high)
            if in_params and self._sampler is not None:
                sample = Sample(views, redo, self._scratch)
        source = None if mix.is_mean else mix.slots[0]
        return Task(
            block=block,
            in_params=in_params,
            sources=views_of(arena, mix.slots, low, high),
            sample=sample,
            redo=redo,
            result=(views[0] if redo is None else redo).numpy(),
            targets=tuple(arena.slot(s)[low:high].numpy() for s in targets if s != source),
        )

    def _redo(self, mix: Mix, owner: Seat, low: int, high: int) -> torch.Tensor:
        """Where the mean of a block is written first."""
        del mix
        return self._arena.redo(owner.slot)[: high - low]


def _has_work(mix: Mix, targets: Sequence[Slot]) -> bool:
    """Whether a region has a mean to compute, or a single source and somebody to receive it."""
    return mix.is_mean or any(mix.slots and slot != mix.slots[0] for slot in targets)


def _no_mean(sources: Any, out: torch.Tensor) -> object:
    raise WeBroke("a mean was asked for in a region of one source, which has no redo block")
