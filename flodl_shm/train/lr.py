"""The learning rate as a function of the position in the whole training.

Position = optimizer steps of all ranks at the last reduce + own steps since. Between two reduces
a rank sees only its own steps, then the position jumps by what the others did.

A scheduler is either a function of the global step that returns the absolute learning rate (for
every parameter group), or a factory `(optimizer, world_size)` that returns such a function or a
torch LRScheduler. Which one it is follows from the number of parameters it cannot be called
without: 1 or 2. A factory may also take only `optimizer`, if the parameter is named so.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

Kind = Literal["of_step", "of_optimizer", "of_optimizer_and_world"]

HINT = (
    "Give a function of the global step that returns the learning rate,"
    " or a factory (optimizer, world_size) -> LRScheduler."
)


def kind_of(scheduler: object) -> Kind:
    """What a user's `scheduler` argument is. Raises BadConfig if it cannot be told."""
    if isinstance(scheduler, LRScheduler):
        raise BadConfig(
            f"scheduler is a finished {type(scheduler).__name__}, bound to one optimizer", hint=HINT
        )
    if inspect.isclass(scheduler) and issubclass(scheduler, LRScheduler):
        raise BadConfig(
            f"scheduler is the class {scheduler.__name__}: its arguments are missing", hint=HINT
        )
    if not callable(scheduler):
        raise BadConfig(f"scheduler is {scheduler!r}, which cannot be called", hint=HINT)
    try:
        required = _required(scheduler)
    except ValueError:
        raise BadConfig(
            f"scheduler {scheduler!r} does not tell its parameters", hint=HINT
        ) from None
    if len(required) == 1:
        return "of_optimizer" if required[0] == "optimizer" else "of_step"
    if len(required) == 2:
        return "of_optimizer_and_world"
    raise BadConfig(
        f"scheduler needs {len(required)} arguments ({', '.join(required) or 'none'}),"
        " so it is neither a function of the step nor a factory",
        hint=HINT,
    )


def _required(function: Callable[..., Any]) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in positional and p.default is p.empty
    ]


class LearningRate:
    """Sets one optimizer's learning rate for a position; without a scheduler it does nothing.

    What the run adjusts (`adjust`) lies on top of the schedule, which goes on beneath it.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: Callable[..., Any] | None, world_size: int
    ) -> None:
        self._optimizer = optimizer
        self._of_step: Callable[[int], Any] | None = None
        self._torch: LRScheduler | None = None
        self._position = 0
        self._fixed: float | None = None
        self._scale = 1.0
        self._plain: list[float] | None = None  # the schedule's, by group; None: as it stands there
        if scheduler is not None:
            self._adopt(_settle(scheduler, optimizer, world_size))

    def _adopt(self, schedule: object) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise BadConfig(
                "scheduler made a ReduceLROnPlateau, which follows a metric, not the global step",
                hint="Use a scheduler that is a function of the step.",
            )
        if isinstance(schedule, LRScheduler):
            self._torch = schedule
        elif callable(schedule):
            self._of_step = schedule
        else:
            raise BadConfig(f"the scheduler factory returned {schedule!r}", hint=HINT)

    def move_to(self, position: int) -> None:
        """Make the learning rate that of optimizer step `position` (0 is the first)."""
        if self._of_step is not None:
            if self._fixed is None:
                self._set(self._of_step(position) * self._scale)
        elif self._torch is not None and position > self._position:
            steps, self._position = position - self._position, position
            if self._plain is None:
                self._step_torch(steps)
                return
            # Most of torch's schedulers work from the last value they find in the optimizer.
            self._write(self._plain)
            self._step_torch(steps)
            self._plain = self._read()
            self._write_adjusted()

    def adjust(self, lr: float | None, scale: float) -> None:
        """From here on `lr` in every group, or if None the schedule's; either times `scale`.

        Replaces what was said before. Without a scheduler the schedule is what the groups had
        when the first adjustment came.
        """
        if self._plain is None:
            self._plain = self._read()
        self._fixed, self._scale = lr, scale
        self._write_adjusted()

    def follow(self, of_step: Callable[[int], Any]) -> None:
        """From here on a function of the global step, in the place of any scheduler."""
        self._torch, self._of_step = None, of_step

    def state(self) -> dict[str, Any]:
        """What a file must hold to go on from here: plain values, those of a torch scheduler
        included. A function of the step needs none."""
        return {
            "position": self._position,
            "plain": self._plain,
            "torch": None if self._torch is None else self._torch.state_dict(),
        }

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` said, the optimizer's own state being restored already.

        None, or a state without a torch scheduler where there is one now: it begins anew and
        catches up with the position step by step. Adjustments come from the run, not from here.
        """
        state = state or {}
        if state.get("plain") is not None:
            self._write(state["plain"])  # as found they were adjusted
        if self._torch is None:
            return
        if state.get("torch") is not None:
            self._torch.load_state_dict(state["torch"])
            self._position = int(state["position"])
        else:
            self._write([float(lr) for lr in self._torch.base_lrs])

    def _write_adjusted(self) -> None:
        if self._fixed is not None:
            self._set(self._fixed * self._scale)
        elif self._plain is not None:
            self._write([lr * self._scale for lr in self._plain])

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _set(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            _put(group, lr)

    def _write(self, rates: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, rates, strict=True):
            _put(group, lr)

    def _step_torch(self, steps: int) -> None:
        # One by one: most of torch's schedulers work from the last value, so a jump would skip
        # their milestones. 10 us each, once per reduce.
        scheduler = self._torch
        assert scheduler is not None
        if getattr(self._optimizer, "_opt_called", False):
            for _ in range(steps):
                scheduler.step()
            return
        with warnings.catch_warnings():  # a rank that joins late catches up before its first step
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps):
                scheduler.step()

    @property
    def value(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0].get("lr", 0.0))


def _put(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)  # a captured or compiled optimizer reads this very tensor
    else:
        group["lr"] = float(lr)


def _settle(scheduler: Callable[..., Any], optimizer: Optimizer, world_size: int) -> object:
    kind = kind_of(scheduler)
    if kind == "of_step":
        return scheduler
    return scheduler(optimizer) if kind == "of_optimizer" else scheduler(optimizer, world_size)
