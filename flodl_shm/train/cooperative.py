"""The user's own loop around the engine's windows: what `Trainer.worker()` gives.

    with trainer.worker() as w:
        for plan in w.plans():
            for batch in w.batches():
                loss = loss_fn(w.model, batch)
                loss.backward()
                w.step(loss)
    state = w.state

A plan is one window of this rank. The coordinator decides how many there are and how long they
last, the user how a batch becomes gradients; what is done with those, and in which order, is what
`Trainer.run()` does, so both give the same parameters. Windows without a batch for this rank are
gone through unseen.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    import torch
    from torch import nn

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.ids import Rank, Round
    from flodl_shm.train.gpu_worker import GpuWorker
    from flodl_shm.train.state import TrainedState

IDLE_PLANS = 10  # plans in a row left without a step: others wait for such a rank for nothing


@dataclass(frozen=True, slots=True)
class Plan:
    """One unit of work: train batches until there are none, then ask for the next plan."""

    epoch: int  # repeats as long as the epoch lasts
    round: Round  # the reduce that ends it
    batches: int  # believed to fill it; `batches()` knows when it is full


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step has brought."""

    shutdown: bool  # nothing is left to train: all is done, or the run was told to stop


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What the evaluation function said of the consensus, on whichever rank."""

    epoch: int
    value: float


class Worker:
    """One rank's part of the training, driven by the script. For use by one thread at a time.

    With plans(), batches() and step(); or step by step with next_plan(), next_batch(), step() and
    finish(). What is used wrongly raises BadConfig and changes nothing. A worker that is left
    unfinished is out of the training: the other ranks go on without it.
    """

    def __init__(
        self,
        worker: GpuWorker,
        leave: Callable[[BaseException | None], None],
        *,
        is_alone: bool = False,
    ) -> None:
        """Build the model and wait for the other ranks. `leave` is called once, at the end of it
        all, with what went wrong; `is_alone`: there is no launcher."""
        self._worker = worker
        self._is_alone = is_alone
        self._stay = _Stay(worker, leave)
        self._leaves_unseen = weakref.finalize(
            self, self._stay.abandon, "the script dropped its worker before the plans were over"
        )
        self._plan: Plan | None = None
        self._is_open = False  # the plan has more to train
        self._holds = False  # a batch that is not stepped yet
        self._steps = 0  # of the plan
        self._idle_plans = 0  # left without a step, one after the other
        self._is_finished = False
        self._values: list[EvalResult] = []
        self._news: list[EpochMetrics] = []
        try:
            worker.begin()
        except BaseException as error:
            self._stay.end(error)
            raise
        self._see_the_end()

    # ---- what there is -----------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """This rank's replica: what to compute the loss with."""
        return self._worker.model

    @property
    def device(self) -> torch.device:
        """Where the model is and batches come to."""
        return self._worker.device

    @property
    def rank(self) -> Rank:
        """Of this process."""
        return self._worker.rank

    @property
    def world_size(self) -> int:
        """Ranks the run began with."""
        return self._worker.world_size

    @property
    def state(self) -> TrainedState:
        """The consensus, once the plans are over; BadConfig before."""
        if self._worker.state is None:
            raise BadConfig(
                "there is no trained state yet" if self._stay.is_open else _UNFINISHED,
                hint="It is there when plans() has come to its end, or next_plan() gave None.",
            )
        return self._worker.state

    # ---- the loop ----------------------------------------------------------------------------

    def plans(self) -> Iterator[Plan]:
        """All that is to be trained, one window after the other."""
        while (plan := self.next_plan()) is not None:
            yield plan

    def batches(self) -> Iterator[Any]:
        """The batches of the plan under way, as the dataset and `transform` make them.

        Each is to be stepped before the next one comes. Leaving them early is allowed: what was
        not stepped is dealt out again, to this rank or another.
        """
        plan = self._plan
        self._check_plan("batches()")
        while self._plan is plan and self._is_open:
            yield self.next_batch()

    def next_plan(self) -> Plan | None:
        """The next unit of work; None when all is done or the run was told to stop.

        Leaves the plan under way, if it has more to train. Waits for the other ranks.
        """
        self._check_usable("next_plan()")
        if self._is_open:
            self._leave_plan()
        self._plan = None
        if self._worker.state is None:
            grant = self._worker.next_window()
            if grant is not None:
                self._is_open, self._steps = True, 0
                self._plan = Plan(grant.epoch, grant.round, grant.planned)
        self._see_the_end()
        return self._plan

    def next_batch(self) -> Any | None:
        """The plan's next batch, on `device`; None when the plan is over."""
        self._check_plan("next_batch()")
        if self._holds:
            raise BadConfig(
                "next_batch() was called before the batch at hand was stepped",
                hint="One batch is one step: call step(loss) for each.",
            )
        if not self._is_open:
            return None
        batch = self._worker.runner.fetch()
        self._worker.runner.stepper.clear()
        self._holds = True
        return batch

    def step(self, loss: Tensor) -> StepOutcome:
        """Move the parameters by the gradients of the batch at hand, for which `loss` stands.

        backward() is the caller's. Clips and steps the optimizer at the scheduled rate, forgets
        the gradients, keeps the loss. When the plan is over it also reports and goes through the
        round, so that the model then holds the consensus: that waits for the other ranks.
        """
        self._check_usable("step()")
        if not self._holds:
            raise BadConfig(
                "step() was called without a batch at hand",
                hint="Call it once for each batch, after next_batch() or in batches().",
            )
        _check_loss(loss)
        worker = self._worker
        worker.runner.stepper.update(loss)
        worker.runner.stepper.clear()
        self._holds = False
        worker.runner.took()
        self._steps += 1
        self._idle_plans = 0
        if not worker.runner.wants:
            self._close_plan()
        return StepOutcome(shutdown=worker.state is not None)

    def finish(self) -> TrainedState:
        """The consensus, when the plans are over. Leaving the `with` block does the same."""
        if self._is_finished:
            raise BadConfig(
                "finish() was called twice", hint="Keep what it returned, or use state."
            )
        self._check_usable("finish()")
        if self._worker.state is None:
            raise BadConfig(
                "finish() was called before the plans were over",
                hint="Call next_plan() until it gives None.",
            )
        self._is_finished = True
        return self._worker.state

    def _leave_plan(self) -> None:
        if self._holds:
            self._worker.runner.stepper.clear()
        if not self._steps:
            self._idle_plans += 1
            if self._idle_plans > IDLE_PLANS:
                raise BadConfig(
                    f"{self._idle_plans} plans in a row were left without a step",
                    hint="Train the batches of each plan; step() ends it when it is full.",
                )
        self._close_plan()

    def _close_plan(self) -> None:
        self._is_open = self._holds = False
        self._worker.close_window()
        self._see_the_end()

    # ---- news and wishes ---------------------------------------------------------------------

    def poll_metrics(self) -> list[EpochMetrics]:
        """Epochs that have closed since the last call, in order; one that is evaluated comes a
        second time, with its value. Never waits. Alone, without a launcher, there are none."""
        self._hear()
        news, self._news = self._news, []
        return news

    def poll_eval(self) -> list[EvalResult]:
        """Evaluations of the consensus since the last call, in order: those of the schedule, the
        final one after the last plan, and those asked for. Never waits. None of them alone."""
        self._hear()
        values, self._values = self._values, []
        return values

    @property
    def epoch_metrics(self) -> EpochMetrics | None:
        """Of the epoch told of last; None before. Never waits."""
        self._hear()
        return None if self._is_alone else self._worker.latest_metrics

    def request_eval(self) -> None:
        """Have the consensus evaluated when this window is over. Returns at once."""
        self._request("evaluation")

    def request_checkpoint(self) -> None:
        """Have a checkpoint written when this window is over. Returns at once."""
        self._request("checkpoint")

    def _request(self, what: str) -> None:
        if not self._is_alone and self._worker.state is None and self._stay.is_open:
            self._worker.request(what)

    def _hear(self) -> None:
        if self._stay.is_open:
            self._worker.hear()
        while self._worker.metrics:
            told = self._worker.metrics.popleft()
            if self._is_alone:
                continue
            if told.closed:
                self._news.append(told)
            if told.value is not None:
                self._values.append(EvalResult(told.epoch, told.value))

    # ---- the end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check_usable("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stay.abandon(f"{type(error).__name__}: {error}", error)
        elif self._worker.state is None and self._stay.is_open:
            text = "the script left its worker before the plans were over"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._stay.abandon(text)
        self._is_finished = True

    def _see_the_end(self) -> None:
        if self._worker.state is not None:
            self._stay.end()

    def _check_usable(self, what: str) -> None:
        if self._is_finished or (self._worker.state is None and not self._stay.is_open):
            over = "the training is over" if self._worker.state is not None else _UNFINISHED
            raise BadConfig(f"{what} was called, but {over}", hint=_AGAIN)

    def _check_plan(self, what: str) -> None:
        self._check_usable(what)
        if self._plan is None:
            raise BadConfig(
                f"{what} was called without a plan", hint="Call it after next_plan() or in plans()."
            )


_UNFINISHED = "this worker has left the training unfinished"
_AGAIN = "A new training begins with Trainer(...).worker()."


class _Stay:
    """A worker's stay in the training: it ends once, well or not."""

    def __init__(self, worker: GpuWorker, leave: Callable[[BaseException | None], None]) -> None:
        self._worker, self._leave = worker, leave
        self._pid = os.getpid()
        self.is_open = True

    def end(self, failure: BaseException | None = None) -> None:
        """Leave, maybe because of a failure that has been told."""
        if self.is_open:
            self.is_open = False
            self._leave(failure)

    def abandon(self, why: str, failure: BaseException | None = None) -> None:
        """Leave unfinished and let the others know. A forked copy of the process has no stay."""
        if self.is_open and os.getpid() == self._pid:
            self._worker.quit(why)
            self.end(failure or BadConfig(_UNFINISHED, hint="See to it that its loop goes on."))


def _check_loss(loss: object) -> None:
    if isinstance(loss, Tensor) and loss.is_floating_point() and not loss.dim():
        return
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
    raise BadConfig(
        f"step() got {what}", hint="Give the loss, a floating-point tensor without dimensions."
    )


class Alone:
    """Lets one worker at a time train in a process without a launcher."""

    _pid = 0  # of the process one is open in

    @classmethod
    def enter(cls) -> Callable[[BaseException | None], None]:
        """Pass; what is returned is to be called at the end. Raises BadConfig for a second one."""
        if cls._pid == os.getpid():
            raise BadConfig(
                "another worker is still open in this process",
                hint="Finish it, or leave its `with` block, before the next one.",
            )
        cls._pid = os.getpid()

        def leave(failure: BaseException | None) -> None:
            cls._pid = 0

        return leave
