"""Names of checkpoints, of the folders they are made in, and of the files in them.

STEM is a path prefix: `runs/x/ckpt/model` has checkpoints `runs/x/ckpt/model-000000012345/`. It
touches no disk.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MODEL: Final = "model.safetensors"
META: Final = "meta.json"
MANIFEST: Final = "manifest.json"
WORK: Final = ".tmp"
OWNER: Final = ".owner"
OLD: Final = ".old"  # a checkpoint whose place another one of the same step is taking

_STEP_DIGITS: Final = 12  # names sort as numbers up to a trillion steps
_NO_NAME: Final = re.compile(r"[^\w.-]", re.ASCII)
_OURS: Final = re.compile(
    r"\.?(model\.safetensors|optimizer-rank\d+\.(safetensors|json)|meta\.json|manifest\.json)"
    r"(\.\d+\.partial)?"
)


def optimizer_tensors(rank: int) -> str:
    """File of a rank's optimizer tensors."""
    return f"optimizer-rank{rank}.safetensors"


def optimizer_json(rank: int) -> str:
    """File of all else that is a rank's own: structure, groups, random states, scheduler."""
    return f"optimizer-rank{rank}.json"


def work_folder(stem: Path, run_id: str, save: int) -> Path:
    """Where the parts of a run's `save` are put together. The same for ranks and launcher.

    A run id of several path components (a script's second run) becomes one.
    """
    return stem.with_name(f"{stem.name}.{_plain(run_id)}.{save}{WORK}")


def loan_folder(loans: str, row: int) -> Path:
    """Where the optimizer state lies that another rank has written for the one in `row`."""
    return Path(loans) / f"row{row}"


def owner_file(stem: Path, run_id: str) -> Path:
    """The file a living run holds locked."""
    return stem.with_name(f"{stem.name}.{_plain(run_id)}{OWNER}")


def final_folder(stem: Path, global_step: int) -> Path:
    """The checkpoint after so many optimizer steps of all ranks together."""
    return stem.with_name(f"{stem.name}-{global_step:0{_STEP_DIGITS}d}")


def doomed_folder(work: Path, final: Path) -> Path:
    """Where a checkpoint goes to be removed by the run that `work` is of."""
    step = final.name.removesuffix(OLD).rpartition("-")[2]
    return work.with_name(f"{work.name.removesuffix(WORK)}-{step}{WORK}")


def is_final(stem: Path, name: str) -> bool:
    """Whether `name` is a checkpoint's under this stem, one that is being replaced included."""
    head = re.escape(stem.name)
    return re.fullmatch(rf"{head}-\d{{{_STEP_DIGITS},}}({re.escape(OLD)})?", name) is not None


def is_work(stem: Path, name: str) -> bool:
    """Whether `name` is that of a work folder, of whatever run."""
    return re.fullmatch(rf"{re.escape(stem.name)}\..+\.\d+(-\d+)?{WORK}", name) is not None


def is_work_of(owner: str, name: str) -> bool:
    """Whether the run with this owner file has a work folder `name`."""
    head = re.escape(owner.removesuffix(OWNER))
    return re.fullmatch(rf"{head}\.\d+(-\d+)?{WORK}", name) is not None


def is_owner(stem: Path, name: str) -> bool:
    """Whether `name` is an owner file's under this stem."""
    return name.startswith(f"{stem.name}.") and name.endswith(OWNER)


def is_ours(name: str) -> bool:
    """Whether a file of this name in a work folder was put there by us, half written or whole."""
    return _OURS.fullmatch(name) is not None


def _plain(run_id: str) -> str:
    return _NO_NAME.sub("-", run_id)
