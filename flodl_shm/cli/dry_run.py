"""What --dry-run prints: every setting with its value and who said it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.engine.settings import SCRIPT_OR_DEFAULT, as_options, settings
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from flodl_shm.engine.config import RunConfig


def as_object(config: RunConfig) -> dict[str, object]:
    """For --json."""
    return {
        "schema": 1,
        "dry_run": True,
        "options": as_options(settings(config)),
        "ranks": [
            {"rank": rank, "device": device, "slow": [str(s) for s in config.slow_of(Rank(rank))]}
            for rank, device in enumerate(config.devices)
        ],
    }


def as_text(config: RunConfig) -> str:
    """For people."""
    lines = [f"dry run of {config.title} on {config.ranks} ranks; nothing is started"]
    for rank, device in enumerate(config.devices):
        slow = ", ".join(f"slow {one}" for one in config.slow_of(Rank(rank)))
        lines.append(f"  rank {rank}  {device}  {slow}".rstrip())
    lines.append("")
    for name, (value, source) in settings(config).items():
        said = "default, unless the script says it" if source == SCRIPT_OR_DEFAULT else source
        lines.append(f"  {name:<19} {_shown(value):<24} {said}".rstrip())
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
