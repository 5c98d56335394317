"""`python train.py`: whether run() shall launch ranks, read from the environment alone.

No command line was there, so every option is FLODL_<OPTION> or its default. A script that is not
asked for more trains in its own process unless there are two GPUs.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flodl_shm.cli import dry_run as dry
from flodl_shm.cli.run import run, settle, sources_of
from flodl_shm.cli.strangers import strangers
from flodl_shm.errors import BadConfig
from flodl_shm.gpu.inventory import usable_cuda_devices

if TYPE_CHECKING:
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.train.job import Job
    from flodl_shm.train.state import TrainedState

SAYS_HOW_MANY = ("FLODL_RANKS", "FLODL_NPROC_PER_NODE", "FLODL_DEVICES", "FLODL_CONFIG")
INSIDE = "FLODL_RUN_ID"  # a program that a rank has started trains for itself


def train_by_ranks(job: Job) -> TrainedState | None:
    """Launch and wait where that is wanted; None: train in this process.

    The job's metrics function is called here, in the process that has launched.
    """
    config = ranks_wanted()
    if config is None:
        return None
    from flodl_shm.engine.self_launch import train_by_ranks as train

    return train(config, job)


def ranks_wanted() -> RunConfig | None:
    """The run to launch; None: train in this process. Raises BadConfig and HostUnfit."""
    if os.environ.get(INSIDE):
        return None
    said = any(os.environ.get(name) for name in SAYS_HOW_MANY)
    if not said and _gpus() < 2:
        return None
    again = _how_to_start_again()
    try:
        context = run.make_context("run", again or [])
    except click.ClickException as error:
        raise BadConfig(f"the environment's options: {error.format_message()}") from None
    with context:
        config = settle(context.params, sources_of(context))
    for sentence in strangers(os.environ, run.params):
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)
    by_default = config.sources["ranks"] == config.sources["devices"] == "default"
    if config.ranks < 2 or (by_default and _gpus() < 2):
        return None
    if again is None:
        sentence = f"{config.ranks} ranks need a script to start again, so this trains alone here"
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)
        return None
    if threading.current_thread() is not threading.main_thread():
        raise cannot_launch("run() in a thread")
    if config.dry_run:
        click.echo(dry.as_text(config))
        raise SystemExit(0)
    return config


def refuse_to_launch(what: str) -> None:
    """For a way to train that cannot launch ranks. Raises BadConfig where there should be some."""
    if ranks_wanted() is not None:
        raise cannot_launch(what)


def cannot_launch(what: str) -> BadConfig:
    """The one sentence for it."""
    return BadConfig(
        f"{what} cannot launch ranks itself",
        hint="Start the script with python -m flodl_shm.run, or set FLODL_RANKS=1.",
    )


def _gpus() -> int:
    return usable_cuda_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _how_to_start_again() -> list[str] | None:
    """The words that run this very program in a rank; None where it is no file: a prompt, -c."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if file is None or not Path(file).is_file():
        return None
    as_given = Path(sys.argv[0])
    same = as_given.is_file() and as_given.samefile(file)
    return ["--", str(as_given) if same else file, *sys.argv[1:]]
