"""How fast a rank is with nobody to wait for: what a benchmark divides by.

The same runner as in the training, with the real source, step and pace, but on copies, so that the
run that follows is the run that would have been. All ranks do this at once, in the processes that
train afterwards: rates taken one after the other, or elsewhere, would know nothing of how ranks
disturb each other. Reports and reduces are not known here.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from flodl_shm.control.messages import Grant
from flodl_shm.ids import Rank, Round
from flodl_shm.train.data.sampler import PickQueue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flodl_shm.train.job import Job
    from flodl_shm.train.window import WindowRunner

WARM_UP = 2  # batches before the clock starts: a process's first one carries allocations
LEAST = 20  # batches that count, however slow they are
ONE = Grant(  # one batch, exact: nobody else's progress is looked at
    rank=Rank(0),
    round=Round(0),
    epoch=0,
    roster=(),
    anchor_rank=Rank(0),
    anchor_steps=1,
    planned=1,
    ceiling=1,
)


def throwaway(job: Job) -> Job:
    """A job whose model and optimizer nobody else holds; factories make new ones anyway."""
    if not isinstance(job.model, nn.Module):
        return job
    # In one go: a finished optimizer must hold the parameters of the copy.
    model, optimizer = copy.deepcopy((job.model, job.optimizer))
    return replace(job, model=model, optimizer=optimizer)


def free_picks_per_s(runner: WindowRunner, order: NDArray[np.int64], seconds: float) -> float:
    """Picks per second of wall, data waits included, over `seconds` and LEAST batches or more.

    `order` is an epoch's permutation, gone through as often as the time lasts.
    """
    for _ in range(WARM_UP):
        _train_one(runner, order)
    runner.stepper.catch_up()
    began = runner.clock()
    picks = batches = 0
    while batches < LEAST or runner.clock() - began < seconds * 1e9:
        picks += _train_one(runner, order)
        batches += 1
    runner.stepper.catch_up()
    return picks / ((runner.clock() - began) / 1e9)


def _train_one(runner: WindowRunner, order: NDArray[np.int64]) -> int:
    """The next full batch of the order, from its front again after the last; its picks."""
    size = runner.batch_size
    start = runner.steps % max(1, len(order) // size) * size
    queue = PickQueue(((start, min(start + size, len(order))),), order)
    return runner.run(ONE, queue, position=0).picks
