"""What a rank trains with, put together from the job and the settled plan.

Built once for the training itself and, where a benchmark wants the rank's own rate, once more on
copies. What is done with it is not known here.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_shm.control.plan import DEFAULTS
from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.proc import failpoints
from flodl_shm.train import free_run
from flodl_shm.train.checkpoint.names import loan_folder
from flodl_shm.train.checkpoint.restore import borrow, restore
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.picks import PickSource
from flodl_shm.train.lone_meeting import LoneMeeting
from flodl_shm.train.lr import LearningRate
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.seeds import seed_everything
from flodl_shm.train.step import Stepper
from flodl_shm.train.window import WindowRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn
    from torch.optim import Optimizer

    from flodl_shm.control.messages import Attach
    from flodl_shm.control.options import Settled
    from flodl_shm.ids import Rank
    from flodl_shm.train.data.source import Source
    from flodl_shm.train.job import Job
    from flodl_shm.train.session import Meeting, Session
    from flodl_shm.wire.layout import Layout


SEED_STRIDE = 1_000_003  # a prime above any number of ranks: no two streams of a run meet soon


def early_seed(job: Job, session: Session) -> int:
    """The settled seed, before the plan is: the session's word, the script's, the default."""
    for word in (session.seed, job.wishes.seed, DEFAULTS.seed):
        if word is not None:
            return word
    raise WeBroke("no default seed")


def tensor_facts(layout: Layout) -> tuple[str, ...]:
    """A few words per tensor, to name the first difference between two ranks' models."""
    return tuple(
        f"{entry.kind} {entry.name} {'x'.join(map(str, entry.shape)) or 'scalar'} {entry.dtype}"
        for entry in layout.entries
    )


class _Faulty:
    """A source in which a test's faults strike; one of those that cost nothing without them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: NDArray[np.int64]) -> Any:
        batch = self._source.fetch(indices)
        failpoints.hit("mid_batch")
        return batch


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that all runners of a rank share."""

    session: Session
    plan: Settled
    source: Source
    device: torch.device
    clock: Callable[[], int]
    sleep: Callable[[float], None]

    def runner(
        self, job: Job, model: nn.Module, optimizer: Optimizer, meeting: Meeting
    ) -> WindowRunner:
        """For windows of this rank. Raises BadConfig for a scheduler or times that cannot be."""
        session, plan = self.session, self.plan
        return WindowRunner(
            rank=session.rank,
            batch_size=plan.batch_sizes[session.rank],
            source=PickSource(
                _Faulty(self.source) if failpoints.ARMED else self.source,
                plan.seed,
                job.transform,
                augmented=plan.augment > 1,
            ),
            stepper=Stepper(
                model,
                optimizer,
                job.train_step,
                max_grad_norm=plan.max_grad_norm,
                device=self.device,
            ),
            rate=LearningRate(optimizer, job.scheduler, session.world_size),
            pacer=self._pacer(job),
            meeting=meeting,
            device=self.device,
            clock=self.clock,
            sleep=self.sleep,
        )

    def free_picks_per_s(self, job: Job) -> float:
        """This rank's rate alone, on copies. It draws random numbers: seed after it."""
        job, plan = free_run.throwaway(job), self.plan
        model = job.build_model(self.device)
        runner = self.runner(job, model, job.build_optimizer(model), LoneMeeting())
        order = permutation(plan.picks, seed=plan.seed, epoch=0)
        return free_run.free_picks_per_s(runner, order, self.session.free_run_s)

    def take_up(
        self, order: Attach, model: nn.Module, optimizer: Optimizer, rate: LearningRate
    ) -> None:
        """Begin where the order says: afresh, from a checkpoint, or amidst the others.

        Raises BadConfig for a checkpoint that does not fit.
        """
        # What the rank drew before a checkpoint, or its death, it shall not draw again after it.
        drawn = SEED_STRIDE * order.global_step
        seed_everything((self.plan.seed + self.session.rank + drawn) % 2**63)
        if order.checkpoint:
            self._restore(order, model, optimizer, rate)
        if order.loan_of is not None:
            self._borrow(order.loan_of, model, optimizer, rate)

    def _restore(
        self, order: Attach, model: nn.Module, optimizer: Optimizer, rate: LearningRate
    ) -> None:
        """Take model, optimizer, random and scheduler state from the order's checkpoint."""
        rank = self.session.rank
        found = restore(
            Path(order.checkpoint),
            model=model,
            optimizer=optimizer,
            rank=rank,
            state_of=order.state_of,
            device=self.device,
        )
        rate.resume(found.scheduler)
        for note in found.notes:
            print(f"resume: {note}", file=sys.stderr)

    def _borrow(
        self, lender: Rank, model: nn.Module, optimizer: Optimizer, rate: LearningRate
    ) -> None:
        """Take the optimizer and scheduler state that another rank has written for this one."""
        folder = loan_folder(self.session.loans, self.session.row)
        try:
            found = borrow(folder, model=model, optimizer=optimizer, lender=lender)
        except BadConfig as error:
            print(f"rejoin: a fresh optimizer, since {error}", file=sys.stderr)
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rate.resume(found.scheduler)
        for note in found.notes:
            print(f"rejoin: {note}", file=sys.stderr)

    def _pacer(self, job: Job) -> Pacer:
        session, step_ms = self.session, job.step_ms
        if step_ms and len(step_ms) < session.world_size:
            raise BadConfig(
                f"step_ms gives {len(step_ms)} times for {session.world_size} ranks",
                hint="Give one time in milliseconds for each rank.",
            )
        return Pacer(
            slow=session.slow,
            step_ms=step_ms[session.rank] if step_ms else 0.0,
            rank=session.rank,
            seed=self.plan.seed,
        )
