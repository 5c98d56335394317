"""The front door: says what to train; checks every argument before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from flodl_shm.control import plan
from flodl_shm.control.options import Wishes
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank
from flodl_shm.train import session as sessions
from flodl_shm.train.arguments import check_callback_rank, check_functions
from flodl_shm.train.data.source import as_source
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.handle import Handle
from flodl_shm.train.job import Job
from flodl_shm.train.lr import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.train.cooperative import Worker
    from flodl_shm.train.epoch_handle import EpochHandle
    from flodl_shm.train.state import TrainedState
    from flodl_shm.train.turnstile import Turnstile

# Arguments of later versions. Refused, not ignored: a run without them is another run.
LATER = ("outer_optimizer",)
WHOLE = (
    "epochs",
    "seed",
    "anchor",
    "max_anchor",
    "augment",
    "max_batch_diff",
    "eval_every",
    "save_every",
)
REAL = ("overhead_target", "gamma", "max_grad_norm")


class Trainer:
    """One training: model, optimizer, step, data, and how the ranks shall work together.

    `model`: an nn.Module, or a factory `model()` / `model(device)`.
    `optimizer`: a factory `optimizer(params)`, or an instance if `model` is one.
    `train_step(model, batch)`: returns the loss, a 0-dim floating tensor; the engine calls
        zero_grad, backward and step. One batch is one optimizer step.
    `dataset`: map-style, or an object with `__len__` and `get_batch(indices)`, where indices is a
        1-D int64 numpy array of samples.
    `eval_fn(model, eval_dataset)`: a float, higher is better, on the consensus and in eval mode.
        What it changes in the model is put back.
    `epoch_fn(epoch, worker)`: called before each epoch's first step; see train/epoch_handle.py
        for the worker, which can change the learning rate of all ranks.
    `checkpoint_fn(version, model)`: called with each checkpoint, on the rank that writes the
        model. `metrics_fn(metrics)`: called with an EpochMetrics after each epoch, and once more
        with the value of its evaluation. These four run on one rank each, chosen by
        `epoch_callback_rank` but for the last; random numbers they draw are put back, what they
        raise is shown and the training goes on.
    `batch_size`: samples of one step; a sequence gives each rank its own.
    `augment`, `transform`: an epoch has samples x augment picks; `transform(batch, keys)` gets one
        int64 key per pick, the same whichever rank trains it, to draw its randomness from.
    `partition_ratios`: fixed shares by rank, summing to 1. `speed_hint`: (slowest rank, how many
        times faster the others are), a first guess. `max_batch_diff`: batches a rank may be ahead.
    `eval_every`: epochs between evaluations of the consensus; 0: only the final one.
    `save_every`: epochs between checkpoints; 0: only when asked for, or when the run is stopped.
    `scheduler`: a function of the global step that returns the learning rate, or a factory
        `(optimizer, world_size)`; see train/lr.py.
    `step_ms`: one time in milliseconds per rank; each step waits until it has lasted as long: a
        stand-in for devices of unequal speed.
    The other options are those of the command line, which wins over what is said here.

    Raises BadConfig, with the value and the way out, for an argument that cannot hold.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module],
        optimizer: Optimizer | Callable[..., Optimizer],
        train_step: Callable[[nn.Module, Any], Tensor],
        *,
        dataset: Any,
        eval_fn: Callable[[nn.Module, Any], float] | None = None,
        eval_dataset: Any = None,
        epoch_fn: Callable[[int, EpochHandle], object] | None = None,
        checkpoint_fn: Callable[[int, nn.Module], object] | None = None,
        metrics_fn: Callable[[EpochMetrics], object] | None = None,
        scheduler: Callable[..., Any] | None = None,
        policy: str | None = None,
        epochs: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        seed: int | None = None,
        tail: str | None = None,
        anchor: int | None = None,
        max_anchor: int | None = None,
        overhead_target: float | None = None,
        gamma: float | None = None,
        max_grad_norm: float | None = None,
        augment: int | None = None,
        transform: Callable[[Any, Tensor], Any] | None = None,
        partition_ratios: Sequence[float] | None = None,
        speed_hint: tuple[int, float] | None = None,
        max_batch_diff: int | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        epoch_callback_rank: str | int | None = None,
        step_ms: Sequence[float] = (),
        **later: Any,
    ) -> None:
        _refuse_later(later)
        _check_callables(model, optimizer, train_step)
        if scheduler is not None:
            kind_of(scheduler)
        as_source(dataset)
        wishes = Wishes(
            policy=policy,
            epochs=epochs,
            batch_size=_checked_sizes(batch_size),
            seed=seed,
            tail=tail,
            anchor=anchor,
            max_anchor=max_anchor,
            overhead_target=overhead_target,
            gamma=gamma,
            max_grad_norm=max_grad_norm,
            augment=augment,
            partition_ratios=tuple(partition_ratios) if partition_ratios else None,
            speed_hint=(Rank(speed_hint[0]), speed_hint[1]) if speed_hint else None,
            max_batch_diff=max_batch_diff,
            eval_every=eval_every,
            save_every=save_every,
            epoch_callback_rank=check_callback_rank(epoch_callback_rank),
        )
        _check_types(wishes)
        plan.check(wishes)
        self.job = Job(
            model=model,
            optimizer=optimizer,
            train_step=train_step,
            dataset=dataset,
            eval_fn=eval_fn,
            eval_dataset=eval_dataset,
            epoch_fn=epoch_fn,
            checkpoint_fn=checkpoint_fn,
            metrics_fn=metrics_fn,
            scheduler=scheduler,
            transform=transform,
            wishes=wishes,
            step_ms=_checked_step_ms(step_ms),
        )
        check_functions(self.job)

    def run(self) -> TrainedState:
        """Train to the end and return the consensus.

        Under the launcher this process is one rank of it. Under plain python it trains here on one
        device, or launches ranks for several, each of which runs the script again. Raises what
        the user's functions raise, FlodlError for the rest.
        """
        _refuse_while_imported_by_a_worker()
        if sessions.CURRENT is not None:
            return _run_as_rank(self.job, sessions.CURRENT)
        from flodl_shm.cli.plain_python import train_by_ranks
        from flodl_shm.train.solo import run_alone

        state = train_by_ranks(self.job)
        return run_alone(self.job) if state is None else state

    def worker(self) -> Worker:
        """Train in a loop of the script's own, in a rank or alone: see train/cooperative.py.

        `train_step` is not called then. Builds the model and waits for the other ranks.
        """
        _refuse_while_imported_by_a_worker()
        from flodl_shm.train.cooperative import Alone, Worker

        if sessions.CURRENT is not None:
            turnstile = sessions.CURRENT
            worker = turnstile.enter(self.job)
            return Worker(worker, partial(turnstile.leave, worker))
        from flodl_shm.cli.plain_python import refuse_to_launch
        from flodl_shm.train.solo import alone

        refuse_to_launch("worker()")
        return Worker(GpuWorker(self.job, alone()), Alone.enter(), is_alone=True)

    def start(self) -> Handle:
        """Train in the background, in a rank or alone: poll_metrics(), abort(), join()."""
        _refuse_while_imported_by_a_worker()
        if sessions.CURRENT is not None:
            turnstile = sessions.CURRENT
            worker = turnstile.enter(self.job)
            return Handle(worker, lambda: turnstile.train(worker))
        from flodl_shm.cli.plain_python import refuse_to_launch
        from flodl_shm.train.solo import alone

        refuse_to_launch("start()")
        worker = GpuWorker(self.job, alone())
        return Handle(worker, worker.run)


def _run_as_rank(job: Job, turnstile: Turnstile) -> TrainedState:
    one = sessions.ONE_RUN
    state = one.answer() if one is not None else None
    if state is not None:
        return state
    state = turnstile.train(turnstile.enter(job))
    if one is not None:
        one.leave(state)
    return state


def _refuse_while_imported_by_a_worker() -> None:
    """A worker that is not forked imports the script; it would train in there instead of work."""
    if getattr(current_process(), "_inheriting", False):
        raise BadConfig(
            "the script trains while a worker process imports it",
            hint='Put the training under `if __name__ == "__main__":`, or let workers be forked.',
        )


def _refuse_later(later: dict[str, Any]) -> None:
    for name, value in later.items():
        if name not in LATER:
            raise TypeError(f"Trainer() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise BadConfig(f"{name} is not available in this version", hint="Leave it out.")


def _check_callables(model: object, optimizer: object, train_step: object) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise BadConfig(
            f"model is {model!r}", hint="Give an nn.Module, or a function that returns one."
        )
    if isinstance(optimizer, Optimizer):
        if not isinstance(model, nn.Module):
            raise BadConfig(
                f"optimizer is a finished {type(optimizer).__name__}, but the model is not built",
                hint="Give a factory: lambda params: torch.optim.SGD(params, lr=0.1).",
            )
    elif not callable(optimizer):
        raise BadConfig(
            f"optimizer is {optimizer!r}",
            hint="Give a factory: lambda params: torch.optim.SGD(params, lr=0.1).",
        )
    if not callable(train_step):
        raise BadConfig(
            f"train_step is {train_step!r}", hint="Give a function (model, batch) -> loss."
        )


def _checked_sizes(given: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """One batch size, or one for each rank: whole numbers either way."""
    if given is None:
        return None
    alone = not isinstance(given, Sequence) or isinstance(given, str)
    sizes: tuple[Any, ...] = (given,) if alone else tuple(cast("Sequence[int]", given))
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise BadConfig(
                f"batch_size is {given!r}", hint="Give a whole number, or one per rank."
            )
    return sizes[0] if alone else sizes


def _check_types(wishes: Wishes) -> None:
    """Numbers that are numbers: True is no epoch count, "5" neither."""
    for name in WHOLE:
        value: object = getattr(wishes, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadConfig(f"{name} is {value!r}", hint="Give a whole number.")
    for name in REAL:
        value = getattr(wishes, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadConfig(f"{name} is {value!r}", hint="Give a number.")


def _checked_step_ms(step_ms: Sequence[float]) -> tuple[float, ...]:
    times = tuple(float(ms) for ms in step_ms)
    for ms in times:
        if not 0 < ms <= plan.LONGEST_STEP_MS:
            hint = f"Give times in milliseconds, above 0 and {plan.LONGEST_STEP_MS:g} at most."
            raise BadConfig(f"step_ms has {ms}", hint=hint)
    return times
