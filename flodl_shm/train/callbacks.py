"""The user's functions that are no part of a step: called, timed, contained.

One that raises costs its own result and nothing else: the traceback goes to stderr, a line with
the place in the user's code goes back to the caller, and the training goes on. One that hangs is
left after a while (time_limit.py). KeyboardInterrupt and SystemExit are not caught: those mean the
process. Whoever is called and when is the coordinator's business, not known here.

A function leaves the training as it found it: modes, gradients and random numbers are put back,
since which rank calls it depends on speed and must not show in the result. An evaluation, which
may do anything to the model, leaves no trace in that either.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flodl_shm.proc import failpoints
from flodl_shm.proc.error_file import in_words
from flodl_shm.train import time_limit
from flodl_shm.train.time_limit import Abandoned, within
from flodl_shm.train.untouched import kept, untouched

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import nn

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.train.epoch_handle import EpochHandle
    from flodl_shm.train.job import Job

OURS = (__file__, time_limit.__file__)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a function went. `value` is an evaluation's; `error` says what went wrong, if it did."""

    value: float | None = None
    elapsed_ns: int = 0
    error: str = ""


class Callbacks:
    """The functions of one job. In the rank, and `metrics` also in a launcher."""

    def __init__(
        self, job: Job, *, timeout_s: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`timeout_s`: how long each may last, where it can be left."""
        self._job = job
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def has(self) -> tuple[str, ...]:
        """Which there are, as the coordinator calls them."""
        job = self._job
        functions = {
            "epoch": job.epoch_fn,
            "checkpoint": job.checkpoint_fn,
            "evaluation": job.eval_fn,
            "metrics": job.metrics_fn,
        }
        return tuple(name for name, function in functions.items() if function is not None)

    def epoch(self, epoch: int, handle: EpochHandle) -> Ran:
        """`epoch_fn(epoch, handle)`, right before the epoch's first window.

        What it asks of the learning rate is in `handle.wanted` then, unless it failed.
        """
        function = self._job.epoch_fn
        if function is None:
            return Ran()
        ran = self._run("epoch_fn", kept(handle.model), lambda: function(epoch, handle))
        handle.close(keep=not ran.error)
        return ran

    def checkpoint(self, version: int, model: nn.Module) -> Ran:
        """`checkpoint_fn(version, model)`: the model holds the consensus of that many rounds."""
        function = self._job.checkpoint_fn
        if function is None:
            return Ran()
        return self._run("checkpoint_fn", kept(model), lambda: function(version, model))

    def metrics(self, metrics: EpochMetrics, model: nn.Module | None = None) -> Ran:
        """`metrics_fn(metrics)`. A `model` is guarded, should the function know it too."""
        function = self._job.metrics_fn
        if function is None:
            return Ran()
        return self._run("metrics_fn", kept(model), lambda: function(metrics))

    def evaluate(self, model: nn.Module, device: torch.device) -> Ran:
        """`eval_fn(model, eval_dataset)` in eval mode; `value` is its number, which may be nan."""
        function = self._job.eval_fn
        if function is None:
            return Ran()

        def score() -> float:
            model.eval()
            return _number(function, function(model, self._job.eval_dataset))

        return self._run("eval_fn", untouched(model, device), score)

    def _run(
        self, name: str, guard: AbstractContextManager[None], function: Callable[[], Any]
    ) -> Ran:
        began = self._clock()
        value, error = None, ""
        try:
            with guard:
                value = within(self._timeout_s, _faulty(function))
        except _NoNumber as fault:
            error = str(fault)
            _log(name, error)
        except (Exception, Abandoned) as failure:
            error, trace = in_words(failure.with_traceback(_users(failure.__traceback__)))
            if isinstance(failure, Abandoned):
                error = error.partition(": ")[2]  # it is no failure of a kind the user knows
            _log(name, trace)
        is_number = isinstance(value, float) and not error
        return Ran(value if is_number else None, self._clock() - began, error)


def _faulty(function: Callable[[], Any]) -> Callable[[], Any]:
    """With a test's faults in front of it, if there are any."""
    if not failpoints.ARMED:
        return function

    def strike_first() -> Any:
        failpoints.hit("callback")
        return function()

    return strike_first


class _NoNumber(Exception):
    """An evaluation's result is none."""


def _number(function: Callable[..., Any], result: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if not isinstance(result, str | bytes):
            return float(result.detach() if isinstance(result, torch.Tensor) else result)
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    what = type(result).__name__
    if isinstance(result, torch.Tensor):
        what = f"a tensor of shape {tuple(result.shape)} and {result.dtype}"
    raise _NoNumber(f"eval_fn returned {what}, which is not one number{place}")


def _users(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame that is not ours on; that function is where a reader begins."""
    while trace is not None and trace.tb_next is not None:
        if trace.tb_frame.f_code.co_filename not in OURS:
            break
        trace = trace.tb_next
    return trace


def _log(name: str, text: str) -> None:
    """On stderr, which the launcher keeps; a closed one is nobody's loss."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{name} failed; the training goes on:\n{text.rstrip()}", file=sys.stderr, flush=True)
