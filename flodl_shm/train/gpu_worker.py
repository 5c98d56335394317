"""One rank's training, from building the model to handing the state back. Used everywhere.

    build     model with the run's seed; report Ready with its layout
    attach    bind the replica to the arena, build the optimizer; report Attached
    serve     Grant: one window, then the round that ends it; Evaluate; Finish: copy the state out

It cannot tell whether its orders come from a launcher, another host or this very process: it has
a Link, a Meeting and a Session. Who does how much, and when the ranks agree, is not decided here.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import torch

from flodl_shm.control.mass import mass
from flodl_shm.control.messages import (
    Arrived,
    Attach,
    Attached,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Grant,
    Left,
    Ready,
    StopRequest,
)
from flodl_shm.control.plan import DEFAULTS
from flodl_shm.errors import BadConfig, WeBroke
from flodl_shm.ids import Nanos
from flodl_shm.train import free_run
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.picks import PickSource
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.data.source import as_source
from flodl_shm.train.lone_meeting import LoneMeeting
from flodl_shm.train.lr import LearningRate
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.replica import Replica
from flodl_shm.train.seeds import seed_everything
from flodl_shm.train.state import TrainedState
from flodl_shm.train.step import Stepper
from flodl_shm.train.untouched import untouched
from flodl_shm.train.window import WindowRunner, WindowTally

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from flodl_shm.control.messages import Order
    from flodl_shm.control.options import Settled
    from flodl_shm.train.job import Job
    from flodl_shm.train.session import Meeting, Session
    from flodl_shm.wire.layout import Layout

MIB = 1024 * 1024


class GpuWorker:
    """Trains one rank of a job under one session. Runs once."""

    def __init__(
        self,
        job: Job,
        session: Session,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job = job
        self._session = session
        self._clock = clock
        self._sleep = sleep
        self._device = torch.device(session.device)
        self._consumed = 0  # picks since this incarnation attached
        self._global_step = 0  # optimizer steps of all ranks at the last reduce
        self._idle_since = 0  # when the rank last had nothing to do but wait for an order
        self._evaluation: float | None = None
        self.is_awaited = False  # others have been told that this rank takes part
        self.metrics: deque[EpochMetrics] = deque()  # for another thread to take from
        self._plan: Settled
        self._meeting: Meeting
        self._runner: WindowRunner

    def run(self) -> TrainedState:
        """Train until told to finish; the state is copied out, the model free to use again.

        Whatever the user's own functions raise comes through unchanged. Raises BadConfig for a
        model, dataset or optimizer that cannot be trained.
        """
        self._build()
        order = self._session.link.receive(wait_for="the other ranks to build their models")
        if isinstance(order, Finish):
            return self._finish(order)
        if not isinstance(order, Attach):
            raise WeBroke(f"{type(order).__name__} came before Attach")
        self._attach(order)
        return self._serve()

    def ask_to_stop(self, why: str) -> None:
        """Ask for the end of the run. May be called from another thread."""
        session = self._session
        session.link.send(StopRequest(rank=session.rank, row=session.row, why=why))

    # ---- build and attach ------------------------------------------------------------------------

    def _build(self) -> None:
        job, session = self._job, self._session
        seed_everything(self._early_seed())
        self._model: nn.Module = job.build_model(self._device)
        self._source = as_source(job.dataset)
        self._replica = Replica(self._model)
        layout = self._replica.layout
        session.link.send(
            Ready(
                rank=session.rank,
                row=session.row,
                digest=layout.digest,
                params=layout.param_floats,
                buffers=layout.buffer_floats,
                samples=len(self._source),
                device=session.device,
                wishes=job.wishes,
                names=_words(layout),
            )
        )
        self.is_awaited = True

    def _early_seed(self) -> int:
        """The settled seed, before the plan is: the session's word, the script's, the default."""
        for word in (self._session.seed, self._job.wishes.seed, DEFAULTS.seed):
            if word is not None:
                return word
        raise WeBroke("no default seed")

    def _attach(self, order: Attach) -> None:
        session, plan = self._session, order.plan
        self._plan, self._global_step = plan, order.global_step
        self._meeting, slot = session.attach(order)
        if slot is not None:
            self._replica.bind(slot)
        self._runner = self._make_runner(self._job, self._model, self._meeting)
        rate = self._free_picks_per_s() if session.free_run_s > 0 else 0.0
        seed_everything(plan.seed + session.rank)
        session.link.send(Attached(rank=session.rank, row=session.row, free_picks_per_s=rate))

    def _free_picks_per_s(self) -> float:
        """This rank's rate alone, on copies. Random numbers it draws are seeded away after it."""
        job, plan = free_run.throwaway(self._job), self._plan
        runner = self._make_runner(job, job.build_model(self._device), LoneMeeting())
        order = permutation(plan.picks, seed=plan.seed, epoch=0)
        return free_run.free_picks_per_s(runner, order, self._session.free_run_s)

    def _make_runner(self, job: Job, model: nn.Module, meeting: Meeting) -> WindowRunner:
        session, plan = self._session, self._plan
        optimizer = job.build_optimizer(model)
        return WindowRunner(
            rank=session.rank,
            batch_size=plan.batch_sizes[session.rank],
            source=PickSource(self._source, plan.seed, job.transform, augmented=plan.augment > 1),
            stepper=Stepper(
                model,
                optimizer,
                job.train_step,
                max_grad_norm=plan.max_grad_norm,
                device=self._device,
            ),
            rate=LearningRate(optimizer, job.scheduler, session.world_size),
            pacer=self._make_pacer(plan.seed),
            meeting=meeting,
            device=self._device,
            clock=self._clock,
            sleep=self._sleep,
        )

    def _make_pacer(self, seed: int) -> Pacer:
        session, step_ms = self._session, self._job.step_ms
        if step_ms and len(step_ms) < session.world_size:
            raise BadConfig(
                f"step_ms gives {len(step_ms)} times for {session.world_size} ranks",
                hint="Give one time in milliseconds for each rank.",
            )
        return Pacer(
            slow=session.slow,
            step_ms=step_ms[session.rank] if step_ms else 0.0,
            rank=session.rank,
            seed=seed,
        )

    # ---- serve -----------------------------------------------------------------------------------

    def _serve(self) -> TrainedState:
        self._idle_since = self._clock()
        while True:
            order = self._next_order()
            match order:
                case Grant():
                    self._window(order)
                case Evaluate():
                    self._evaluate(order)
                case Finish():
                    return self._finish(order)
                case _:
                    raise WeBroke(f"{type(order).__name__} came in the middle of training")
            self._idle_since = self._clock()

    def _next_order(self) -> Order:
        """What is to be done next; news of epochs are put aside and are no rest from waiting."""
        while True:
            order = self._session.link.receive(wait_for="the next window")
            if not isinstance(order, EpochMetrics):
                return order
            self.metrics.append(order)

    def _window(self, grant: Grant) -> None:
        """Train one window and go through the round that ends it."""
        wait_ns = self._clock() - self._idle_since
        plan, runner = self._plan, self._runner
        order = permutation(plan.picks, seed=plan.seed, epoch=grant.epoch)
        runner.source.epoch = grant.epoch
        queue = PickQueue(grant.spans, order, skip=self._consumed - grant.after)
        tally = runner.run(grant, queue, position=self._global_step)
        self._arrive(grant, tally, wait_ns)
        self._leave(grant)

    def _arrive(self, grant: Grant, tally: WindowTally, wait_ns: int) -> None:
        session, stepper = self._session, self._runner.stepper
        before = self._clock()
        stepper.catch_up()
        busy_ns = tally.busy_ns + self._clock() - before
        self._consumed += tally.picks
        self._replica.arrive()
        self._meeting.arrive(
            grant.round,
            grant.roster,
            steps=tally.batches,
            mass=mass(tally.batches, self._plan.gamma),
            picks=self._consumed,
        )
        loss_sum, loss_count = stepper.take_losses()
        session.link.send(
            Arrived(
                rank=session.rank,
                row=session.row,
                round=grant.round,
                steps=tally.batches,
                batches=tally.batches,
                picks=self._consumed,
                first_ns=tally.first_ns,
                rest_ns=tally.rest_ns,
                busy_ns=busy_ns,
                data_ns=tally.data_ns,
                wait_ns=wait_ns,
                loss_sum=loss_sum,
                loss_count=loss_count,
                began_at=Nanos(tally.began_at),
                lr=self._runner.rate.value,
            )
        )

    def _leave(self, grant: Grant) -> None:
        session = self._session
        outcome = self._meeting.complete()
        self._replica.leave()
        self._global_step += outcome.steps
        session.link.send(
            Left(
                rank=session.rank,
                row=session.row,
                round=grant.round,
                contributors=outcome.contributors,
                barrier_ns=outcome.barrier_ns,
                reduce_ns=outcome.reduce_ns,
                divergence=outcome.divergence,
                left_at=Nanos(self._clock()),
            )
        )

    def _evaluate(self, order: Evaluate) -> None:
        session = self._session
        begin = self._clock()
        value, error = self._score()
        self._evaluation = value
        session.link.send(
            Evaluated(
                rank=session.rank,
                row=session.row,
                epoch=order.epoch,
                value=value,
                elapsed_ns=self._clock() - begin,
                error=error,
            )
        )

    def _score(self) -> tuple[float | None, str]:
        """The user's evaluation, or what it raised in words; it leaves no trace in the model."""
        job = self._job
        if job.eval_fn is None:
            return None, ""
        data = job.dataset if job.eval_dataset is None else job.eval_dataset
        try:
            with untouched(self._model, self._device):
                return float(job.eval_fn(self._model, data)), ""
        except Exception as error:  # an evaluation must not cost the training: it is reported
            place = traceback.extract_tb(error.__traceback__)[-1]
            return None, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"

    def _finish(self, order: Finish) -> TrainedState:
        session = self._session
        self._replica.release()
        state = replace(
            TrainedState.of(self._model),
            status=order.status,
            global_step=self._global_step,
            evaluation=self._evaluation,
        )
        rss_mib, pss_mib = _footprint()
        session.link.send(
            Finished(
                rank=session.rank,
                row=session.row,
                params_sha256=self._replica.sha256(),
                rss_mib=rss_mib,
                pss_mib=pss_mib,
            )
        )
        return state


def _words(layout: Layout) -> tuple[str, ...]:
    """A few words per tensor, to name the first difference between two ranks' models."""
    return tuple(
        f"{entry.kind} {entry.name} {'x'.join(map(str, entry.shape)) or 'scalar'} {entry.dtype}"
        for entry in layout.entries
    )


def _footprint() -> tuple[float, float]:
    """(rss, pss) of this process in MiB; pss counts shared pages by their share."""
    memory = psutil.Process().memory_full_info()
    return memory.rss / MIB, memory.pss / MIB
