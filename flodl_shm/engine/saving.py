"""Where a run's checkpoints lie, and the one it goes on from: decided before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.control.resume import Resume
from flodl_shm.errors import BadConfig
from flodl_shm.obs.run_dir import LATEST, SETTINGS
from flodl_shm.train.checkpoint.find import Found, load, newest
from flodl_shm.train.checkpoint.owner import sweep
from flodl_shm.train.checkpoint.room import check_writable, room_for

if TYPE_CHECKING:
    from flodl_shm.control.messages import BuildArena
    from flodl_shm.control.options import Wishes
    from flodl_shm.engine.config import RunConfig

AUTO = "auto"
FLOAT = 4  # bytes; the arena counts in them


def stem_in(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints when nobody said where."""
    return run_dir / "ckpt" / "model"


def stem_of(config: RunConfig, run_dir: Path) -> Path:
    """The stem of the script's first run, absolute: ranks may change their directory."""
    return (config.save or stem_in(run_dir)).absolute()


def stem_of_run(stem: str, number: int) -> str:
    """The stem of a script's n-th run: every run has its own, or one would resume another."""
    return stem if number == 1 else f"{stem}.run-{number}"


def flags_of(config: RunConfig, number: int = 1) -> Wishes:
    """What is settled outside of the script, as the coordinator and the journal know it.

    In a script's second run and later ones no rank comes back: a new process begins with the first.
    """
    restarts = config.survival.restarts if number == 1 else 0
    survival = msgspec.structs.replace(config.survival, restarts=restarts, grace_s=config.grace_s)
    return msgspec.structs.replace(
        config.wishes,
        can_save=True,
        save_at_end=True if config.save is not None else None,
        metrics_on_rank=config.earlier is None,
        callback_timeout_s=config.callback_timeout_s,
        survival=survival,
    )


def room_told(stem: Path, order: BuildArena) -> str:
    """A warning, before anything is trained, when the disk is too small for the saves to come.

    At least the model twice: a checkpoint is written before an older one is removed. What the
    optimizers will keep is not known yet.
    """
    plan = order.plan
    if not plan.can_save or not (plan.save_every or plan.save_at_end):
        return ""
    return room_for(stem, 2 * FLOAT * (order.params + order.buffers))


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with, and sentences about it for the screen."""

    resume: Resume | None = None
    told: tuple[str, ...] = ()


def prepare(config: RunConfig) -> Start:
    """Try out the place for checkpoints, tidy up there, find the one to go on from.

    Raises BadConfig for something that is no checkpoint or cannot be gone on from, HostUnfit for a
    place that cannot be written; nothing has been touched then.
    """
    start = _start(config)
    if config.save is None:
        return start
    stem = config.save.absolute()
    check_writable(stem)
    return Start(start.resume, (*start.told, *sweep(stem)))


def _start(config: RunConfig) -> Start:
    if config.resume is None:
        return Start()
    if config.resume != AUTO:
        return _start_from(load(Path(config.resume).absolute()))
    places = [config.save.absolute()] if config.save else _stems_of_runs(config)
    skipped: list[tuple[Path, str]] = []
    for stem in places:
        found = newest(stem)
        skipped.extend(found.skipped)
        if found.folder is not None:
            return _start_from(Found(found.folder, found.meta, tuple(skipped)))
    where = f"{places[0]}-*" if config.save else f"the runs in {config.run_root}"
    nothing = f"--resume auto: no checkpoint in {where}, the training starts afresh"
    return Start(None, (*map(_passed_over, skipped), nothing))


def _start_from(found: Found) -> Start:
    assert found.folder is not None
    assert found.meta is not None
    return Start(Resume(str(found.folder), found.meta), tuple(map(_passed_over, found.skipped)))


def _passed_over(skipped: tuple[Path, str]) -> str:
    folder, why = skipped
    return f"checkpoint {folder} is passed over: {why}"


def _stems_of_runs(config: RunConfig) -> list[Path]:
    """The default stems of earlier runs of the same training, the newest first."""
    root = config.run_root.absolute()
    try:
        runs = sorted((path for path in root.iterdir() if path.name != LATEST), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadConfig(f"cannot look for earlier runs in {root}: {error.strerror}") from None
    return [stem_in(run) for run in runs if _title(run) == config.title]


def _title(run: Path) -> str | None:
    """What a run trained; None for what is no run, or cannot be read."""
    try:
        told = msgspec.json.decode((run / SETTINGS).read_bytes(), type=_Settings)
    except (OSError, msgspec.MsgspecError):
        return None
    return told.title


class _Settings(msgspec.Struct):
    """What matters here of run.json."""

    title: str
