"""How far the replicas had drifted from their mean: sums that fall out of the reduce.

Every `stride`-th parameter block is looked at, others in each round. A shard keeps
|mean|^2 and |x - mean|^2 per source in the arena, in two halves: the half in force follows from
how many sampled blocks are VALID, so a death between the sums and VALID leaves the old half in
force and no block counts twice. All blocks would cost +57 to +144 % of a round, every 16th
6 to 20 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.ids import Round, Slot
    from flodl_shm.shm.arena import Arena
    from flodl_shm.train.kernels import Mix


LEAST_PIECE = 1024  # floats; fewer say little and cost the same calls
SPREAD = 4  # samples per round at least, so that each shard of a small rig has its share


class Sampler:
    """Which floats are looked at: of every `stride`-th block the first `piece` floats.

    The floats are one in `every` on average. Small models are looked at in more and smaller
    pieces: were only one of two shards sampled, its worker would come late by a sample and the
    other sleep meanwhile, which at 1 MiB cost 100 us of 340.
    """

    def __init__(self, every: int, *, param_blocks: int, block_floats: int) -> None:
        self.stride = max(min(every, param_blocks // SPREAD), 1)
        self.piece = max(block_floats * self.stride // every, LEAST_PIECE)
        self.param_blocks = param_blocks

    def takes(self, block: int, number: Round) -> bool:
        """Whether round `number` looks at this block of the grid."""
        return block < self.param_blocks and not (block + number) % self.stride

    def count(self, first: int, stop: int, number: Round) -> int:
        """How many of the blocks [first, stop) round `number` looks at."""
        stop = min(stop, self.param_blocks)
        if stop <= first:
            return 0
        return (number + stop - 1) // self.stride - (number + first - 1) // self.stride


class Sample:
    """The piece of one block that is looked at: its sources, its mean, private floats to work in.

    All cut to the scratch or the block, whichever is shorter, when the block's views are built.
    """

    __slots__ = ("mean", "scratch", "views")

    def __init__(
        self, views: Sequence[torch.Tensor], mean: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        floats = min(mean.numel(), scratch.numel())
        self.views = [view[:floats] for view in views]
        self.mean = mean[:floats]
        self.scratch = scratch[:floats]


class ShardSums:
    """One shard's sums in one round, as its present worker adds to them.

    Written by the shard's worker before VALID; read by everybody once the shard is closed, and by
    a helper once the former worker is dead.
    """

    def __init__(self, arena: Arena, owner: Slot, mix: Mix, *, sampled: int) -> None:
        """Take up the sums where `sampled` blocks were VALID. Fresh ones begin at zero."""
        self._d = arena.d
        self._at = (arena.map.sums(owner, 0), arena.map.sums(owner, 1))
        self._mix = mix
        self._half = sampled & 1
        self._sums = self.read(arena, owner, mix, sampled=sampled)

    @staticmethod
    def read(arena: Arena, owner: Slot, mix: Mix, *, sampled: int) -> list[float]:
        """[|mean|^2, then |x - mean|^2 per source] after `sampled` blocks."""
        if not sampled:
            return [0.0] * (1 + len(mix.slots))
        at = arena.map.sums(owner, sampled & 1)
        return [float(x) for x in arena.d[at : at + 1 + len(mix.slots)]]

    def add(self, sample: Sample) -> None:
        """Add one block, its mean being computed and its sources not yet overwritten."""
        sums, weights = self._sums, self._mix.weights
        views, mean, scratch = sample.views, sample.mean, sample.scratch
        sums[0] += _square(mean)
        if len(views) == 2:
            # x0 - mean = -share1 * (x1 - x0) and x1 - mean = share0 * (x1 - x0): one pass for both
            torch.sub(views[1], views[0], out=scratch)
            square = _square(scratch) / (weights[0] + weights[1]) ** 2
            sums[1] += square * weights[1] ** 2
            sums[2] += square * weights[0] ** 2
        else:
            for index, view in enumerate(views, 1):
                torch.sub(view, mean, out=scratch)
                sums[index] += _square(scratch)
        self._half ^= 1
        at = self._at[self._half]
        for index, value in enumerate(sums):
            self._d[at + index] = value


def largest(sums: Sequence[float]) -> float:
    """max over sources of |x - mean| / |mean|; NaN if anything is not finite."""
    if not all(map(math.isfinite, sums)):
        return math.nan
    if len(sums) < 2 or sums[0] <= 0.0:
        return 0.0
    return math.sqrt(max(sums[1:]) / sums[0])


def _square(x: torch.Tensor) -> float:
    return float(torch.dot(x, x))
