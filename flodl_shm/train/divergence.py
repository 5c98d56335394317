"""How far the replicas had drifted from their mean: sums that fall out of the reduce.

Every `stride`-th parameter block is looked at, another residue each round. A shard keeps
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


class Sampler:
    """Which blocks are looked at; at least one of the model's in every round. 0: never any."""

    def __init__(self, every: int, param_blocks: int) -> None:
        self.stride = min(every, param_blocks)
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

    def add(self, views: Sequence[torch.Tensor], mean: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add one block: its sources' views, its mean, and a private block to work in."""
        sums, weights = self._sums, self._mix.weights
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
