"""Functions a user gives to Trainer: refused before anything starts if they cannot be called.

An evaluation with one parameter too few would be found out after the last epoch.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.train.job import Job

# What each is called with, and what it is for.
CALLED_WITH: Final = {
    "eval_fn": "(model, eval_dataset)",
    "epoch_fn": "(epoch, worker)",
    "checkpoint_fn": "(version, model)",
    "metrics_fn": "(metrics)",
    "transform": "(batch, keys)",
}


def check_functions(job: Job) -> None:
    """Each is callable with its arguments, or None; a score has its data. Raises BadConfig."""
    for name in CALLED_WITH:
        function: object = getattr(job, name)
        if function is None:
            continue
        hint = f"Give a function {CALLED_WITH[name]}."
        if not callable(function):
            raise BadConfig(f"{name} is {function!r}", hint=hint)
        why = _why_not(function, CALLED_WITH[name].count(",") + 1)
        if why:
            raise BadConfig(f"{name} cannot be called with {CALLED_WITH[name]}: {why}", hint=hint)
    if job.eval_fn is not None and job.eval_dataset is None:
        raise BadConfig(
            "the evaluation function has no data",
            hint="Give eval_dataset=...; the training data again, if that is meant.",
        )
    if job.eval_fn is None and job.eval_dataset is not None:
        raise BadConfig("eval_dataset has no effect without eval_fn", hint="Give eval_fn too.")


def check_callback_rank(given: object) -> str | None:
    """ "fastest" or a rank's number, as a wish knows it. Raises BadConfig for what is neither."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadConfig(
            f"epoch_callback_rank is {given!r}", hint="Give 'fastest' or a rank's number."
        )
    return str(given)


def _why_not(function: Callable[..., object], arguments: int) -> str:
    """Python's own words, or empty: it can be called, or does not say."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, mostly
        return ""
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        return str(error)
    return ""
