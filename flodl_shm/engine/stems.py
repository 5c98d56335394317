"""Under which stem a run's checkpoints lie: STEM-<step>/, STEM.rankN.death.json and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def stem_in(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints when nobody said where."""
    return run_dir / "ckpt" / "model"


def stem_of_run(stem: str, number: int) -> str:
    """The stem of a script's n-th run: every run has its own, or one would resume another."""
    return stem if number == 1 else f"{stem}.run-{number}"
