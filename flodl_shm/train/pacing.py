"""Makes a rank slower on purpose, inside the timed step, so that the balancer sees it.

Two reasons to wait: `--slow` stretches every step by a factor; the `paced` workload stands in for
a device and waits until the step has lasted as long as the device would have taken. Both are pure
functions of what the step took: nobody banks credit, a late step is not caught up later. Nothing
here sleeps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.train.session import SlowDown

SIGMA = 0.1  # spread of a paced step: about what a GPU under a desktop shows
BLOCK = 256  # jitters drawn at a time: one draw costs more than the step would
MS = 1_000_000


@lru_cache(maxsize=4)
def _jitters(seed: int, rank: int, block: int) -> tuple[float, ...]:
    draw = np.random.Generator(np.random.PCG64([seed, rank, block]))
    # exp(N(0, s)) has the mean exp(s*s/2); without the correction every rank would be slow by it
    return tuple(np.exp(draw.normal(0.0, SIGMA, BLOCK) - SIGMA * SIGMA / 2).tolist())


def jitter(seed: int, rank: int, step_index: int) -> float:
    """The factor by which this step of this rank differs from its stated time; 1.0 on average."""
    return _jitters(seed, rank, step_index // BLOCK)[step_index % BLOCK]


def default_step_ms(world_size: int) -> tuple[float, ...]:
    """20, 40, 80, ... ms: each rank half as fast as the one before."""
    return tuple(20.0 * 2.0**rank for rank in range(world_size))


class Pacer:
    """How long one rank waits at the end of each step."""

    def __init__(
        self, *, slow: Sequence[SlowDown] = (), step_ms: float = 0.0, rank: int = 0, seed: int = 0
    ) -> None:
        self._slow = sorted(slow, key=lambda s: s.from_epoch)
        self._step_ns = step_ms * MS
        self._rank = rank
        self._seed = seed
        self.active = bool(self._slow) or step_ms > 0  # False: no step will ever wait

    def factor(self, epoch: int) -> float:
        """The factor in force in this epoch: of several, the one that began last."""
        factor = 1.0
        for entry in self._slow:
            if entry.from_epoch <= epoch:
                factor = entry.factor
        return factor

    def pad(self, elapsed_ns: int, step_index: int, epoch: int) -> int:
        """Nanoseconds to wait after a step that took `elapsed_ns`; 0 or more."""
        took = elapsed_ns
        if self._step_ns:
            target = self._step_ns * jitter(self._seed, self._rank, step_index)
            took = max(took, int(target))
        return int(took * self.factor(epoch)) - elapsed_ns
