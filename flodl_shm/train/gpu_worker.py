"""One rank's training, from building the model to handing the state back. Used everywhere.

    begin     model with the run's seed, Ready; replica bound to the arena, optimizer, Attached
    windows   one after the other: opened by a grant, trained, closed by arrival and round
    between   errands, with the replica holding just the consensus; at the end the state

Who asks for the windows is either `run` or the user's own loop (train/cooperative.py): the order
of what is done is the same. It cannot tell whether its orders come from a launcher, another host
or this very process: it has a Link, a Meeting and a Session. Who does how much, and when the ranks
agree, is not decided here.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flodl_shm.control.messages import (
    Arrived,
    Attach,
    Attached,
    CallEpochFn,
    EpochMetrics,
    Finish,
    Finished,
    Grant,
    Left,
    Quit,
    Ready,
    Request,
    StopRequest,
)
from flodl_shm.errors import FlodlError, WeBroke
from flodl_shm.ids import Nanos
from flodl_shm.train import scalars
from flodl_shm.train.assembly import Assembly, early_seed, tensor_facts
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.data.source import as_source
from flodl_shm.train.errands import Errands
from flodl_shm.train.finite import weigh
from flodl_shm.train.footprint import footprint
from flodl_shm.train.replica import Replica
from flodl_shm.train.seeds import seed_everything
from flodl_shm.train.state import TrainedState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from flodl_shm.control.messages import Order
    from flodl_shm.control.options import Settled
    from flodl_shm.ids import Rank
    from flodl_shm.train.job import Job
    from flodl_shm.train.session import Meeting, Session
    from flodl_shm.train.window import WindowRunner, WindowTally


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
        self._errands = Errands(job, session, clock=clock)
        self._consumed = 0  # picks since this incarnation attached
        self._global_step = 0  # optimizer steps of all ranks at the last reduce
        self._aside: deque[Order] = deque()  # read before their turn
        self._grant: Grant | None = None  # of a window that is still to be opened
        self._wait_ns = 0  # for orders, since the last reduce
        self._errands_ns = 0  # in errands, since the last arrival
        self._epoch = 0
        self._version = self._version_before = 0
        self._latest: EpochMetrics | None = None
        self._is_noting = False  # record_scalar notes for this training
        self.is_awaited = False  # others have been told that this rank takes part
        self.metrics: deque[EpochMetrics] = deque()  # for another thread to take from
        self.state: TrainedState | None = None  # there once the training has ended
        self._model: nn.Module
        self._plan: Settled
        self._meeting: Meeting
        self.runner: WindowRunner

    def run(self) -> TrainedState:
        """Train until told to finish; the state is copied out, the model free to use again.

        Whatever the user's own functions raise comes through unchanged. Raises BadConfig for a
        model, dataset or optimizer that cannot be trained.
        """
        try:
            self.begin()
            while self.next_window() is not None:
                self.runner.train()
                self.close_window()
        except BaseException:
            self._hush()
            raise
        assert self.state is not None
        return self.state

    def ask_to_stop(self, why: str) -> None:
        """Ask for the end of the run. May be called from another thread."""
        session = self._session
        session.link.send(StopRequest(rank=session.rank, row=session.row, why=why))

    def request(self, what: str) -> None:
        """Ask for an "evaluation" or a "checkpoint" at the next window's edge."""
        session = self._session
        session.link.send(Request(rank=session.rank, row=session.row, what=what))

    def quit(self, why: str) -> None:
        """Leave the training for good, unfinished: peers go on without this rank.

        The model moves out of the arena. Does nothing for one that has ended or not begun.
        """
        if self.state is not None or not self.is_awaited:
            return
        session = self._session
        self._replica.release()
        self._hush()
        with contextlib.suppress(FlodlError):  # a launcher that does not read knows by our end
            session.link.send(Quit(rank=session.rank, row=session.row, why=why))

    def _hush(self) -> None:
        """What the script notes from here on is of no training."""
        if self._is_noting:
            self._is_noting = False
            scalars.stop()

    # ---- what is asked of it ---------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """Of this process."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Ranks the run began with."""
        return self._session.world_size

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def model(self) -> nn.Module:
        """This rank's replica."""
        return self._model

    @property
    def current_lr(self) -> float:
        """Of the first parameter group."""
        return self.runner.rate.value

    @property
    def local_step(self) -> int:
        """Optimizer steps of this incarnation."""
        return self.runner.steps

    @property
    def current_epoch(self) -> int:
        """Of the window under way, or the epoch that is about to begin."""
        return self._epoch

    @property
    def current_version(self) -> int:
        """Rounds of the training up to the newest this rank has gone through."""
        return self._version

    @property
    def latest_metrics(self) -> EpochMetrics | None:
        """Of the epoch told of last."""
        return self._latest

    # ---- build and attach ------------------------------------------------------------------------

    def begin(self) -> None:
        """Build, wait for the others, attach; if the run has ended meanwhile, there is a state."""
        self._build()
        order = self._session.link.receive(wait_for="the other ranks to build their models")
        if isinstance(order, Finish):
            self._finish(order)
        elif isinstance(order, Attach):
            self._attach(order)
        else:
            raise WeBroke(f"{type(order).__name__} came before Attach")

    def _build(self) -> None:
        job, session = self._job, self._session
        seed_everything(early_seed(job, session))
        self._model = job.build_model(self._device)
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
                names=tensor_facts(layout),
                callbacks=self._errands.has,
            )
        )
        self.is_awaited = True

    def _attach(self, order: Attach) -> None:
        session, plan = self._session, order.plan
        self._plan, self._global_step = plan, order.global_step
        self._version = self._version_before = order.version
        self._meeting, slot = session.attach(order)
        if slot is not None:
            self._replica.bind(slot)
        optimizer = self._job.build_optimizer(self._model)
        parts = Assembly(session, plan, self._source, self._device, self._clock, self._sleep)
        self.runner = parts.runner(self._job, self._model, optimizer, self._meeting)
        rate = parts.free_picks_per_s(self._job) if session.free_run_s > 0 else 0.0
        self._errands.equip(self, optimizer, self.runner.rate)
        parts.take_up(order, self._model, optimizer, self.runner.rate)
        scalars.start()
        self._is_noting = True
        session.link.send(Attached(rank=session.rank, row=session.row, free_picks_per_s=rate))

    # ---- windows ---------------------------------------------------------------------------------

    def next_window(self) -> Grant | None:
        """Open the next window that has a batch for this rank; None: the training has ended.

        Those without one, as the round that spreads the initial state, are gone through.
        """
        while True:
            self._listen()
            grant = self._grant
            if grant is None:
                return None
            if self._open(grant):
                return grant
            self.close_window()

    def _open(self, grant: Grant) -> bool:
        plan, runner = self._plan, self.runner
        if grant.global_step is not None:
            self._global_step = grant.global_step
        order = permutation(plan.picks, seed=plan.seed, epoch=grant.epoch)
        runner.source.epoch = self._epoch = grant.epoch
        queue = PickQueue(grant.spans, order, skip=self._consumed - grant.after)
        return runner.open(grant, queue, position=self._global_step)

    def close_window(self) -> None:
        """Report the open window, go through the round that ends it, and hear what comes next."""
        grant, self._grant = self._grant, None
        assert grant is not None
        self._arrive(grant, self.runner.close())
        self._leave(grant)
        self._listen()

    def _listen(self) -> None:
        """Do as told until there is another window, or the end."""
        while self._grant is None and self.state is None:
            begin = self._clock()
            order = self._next_order()
            came = self._clock()
            self._wait_ns += came - begin
            match order:
                case Grant():
                    self._grant = order
                case Finish():
                    self._finish(order)
                case _:
                    self._epoch = order.epoch if isinstance(order, CallEpochFn) else self._epoch
                    if not self._errands.run(order):
                        kind = type(order).__name__
                        raise WeBroke(f"{kind} came in the middle of training")
                    self._errands_ns += self._clock() - came

    def _next_order(self) -> Order:
        if self._aside:
            return self._aside.popleft()
        order = self._session.link.receive(wait_for="the next window")
        self._note(order)
        return order

    def hear(self) -> None:
        """Take in, without waiting, what has been sent; orders keep their turn."""
        while self.state is None and (order := self._session.link.poll()) is not None:
            self._note(order)
            self._aside.append(order)

    def _note(self, order: Order) -> None:
        """News of epochs are news at once."""
        if isinstance(order, EpochMetrics):
            self._latest = order
            self.metrics.append(order)

    def _arrive(self, grant: Grant, tally: WindowTally) -> None:
        session, stepper = self._session, self.runner.stepper
        before = self._clock()
        stepper.catch_up()
        busy_ns = tally.busy_ns + self._clock() - before
        self._consumed += tally.picks
        self._replica.arrive()
        worth = weigh(self._replica, stepper, grant.round, tally.batches, self._plan.gamma)
        self._meeting.arrive(
            grant.round, grant.roster, steps=worth.steps, mass=worth.mass, picks=self._consumed
        )
        loss_sum, loss_count = stepper.take_losses()
        session.link.send(
            Arrived(
                rank=session.rank,
                row=session.row,
                round=grant.round,
                steps=worth.steps,
                batches=tally.batches,
                picks=self._consumed,
                first_ns=tally.first_ns,
                rest_ns=tally.rest_ns,
                busy_ns=busy_ns,
                data_ns=tally.data_ns,
                wait_ns=self._wait_ns,
                callback_ns=self._errands_ns,
                loss_sum=loss_sum,
                loss_count=loss_count,
                began_at=Nanos(tally.began_at),
                lr=self.runner.rate.value,
                scalars=scalars.take(),
                refused=bool(worth.broken),
                broken=worth.broken,
                reset=worth.reset,
            )
        )
        self._wait_ns = self._errands_ns = 0

    def _leave(self, grant: Grant) -> None:
        session = self._session
        outcome = self._meeting.complete()
        self._replica.leave()
        self._global_step += outcome.steps
        self._version = self._version_before + grant.round
        session.link.send(
            Left(
                rank=session.rank,
                row=session.row,
                round=grant.round,
                contributors=outcome.contributors,
                barrier_ns=outcome.barrier_ns,
                reduce_ns=outcome.reduce_ns,
                divergence=outcome.divergence,
                digest=outcome.digest,
                left_at=Nanos(self._clock()),
            )
        )

    def _finish(self, order: Finish) -> None:
        session = self._session
        self._errands.close()
        self._replica.release()
        self._hush()
        state = replace(
            TrainedState.of(self._model),
            status=order.status,
            global_step=self._global_step,
            evaluation=self._errands.evaluation,
        )
        rss_mib, pss_mib = footprint()
        session.link.send(
            Finished(
                rank=session.rank,
                row=session.row,
                params_sha256=self._replica.sha256(),
                rss_mib=rss_mib,
                pss_mib=pss_mib,
            )
        )
        self.state = state
