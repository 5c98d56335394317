"""What --dry-run prints: every setting with its value and who said it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.plan import DEFAULTS
from flodl_shm.ids import Rank

if TYPE_CHECKING:
    from flodl_shm.engine.config import RunConfig

SCRIPT_OR_DEFAULT = "script or default"


def settings(config: RunConfig) -> dict[str, tuple[object, str]]:
    """Option -> (value, source). What the script may say shows the default it would replace."""
    values: dict[str, object] = {
        "ranks": config.ranks,
        "devices": ",".join(config.devices),
        "backend": config.backend,
        "script": str(config.script) if config.script else None,
        "script-args": list(config.script_args),
        "workload": config.workload,
        **{name.replace("_", "-"): value for name, value in config.workload_options.items()},
        "slow": [str(one) for one in config.slow],
        "dead-after": config.dead_after_s,
        "stall-timeout": config.stall_timeout_s,
        "grace": config.grace_s,
        "run-dir": str(config.run_root),
        "name": config.name,
        "progress": config.progress,
        "show-ranks": config.show_ranks,
        "summary": str(config.summary) if config.summary else None,
        "quiet": config.quiet,
        "verbose": config.verbose,
    }
    told = {name: (value, config.sources.get(name, "default")) for name, value in values.items()}
    for field in config.wishes.__struct_fields__:
        name = field.replace("_", "-")
        value = getattr(config.wishes, field)
        if value is None:
            told[name] = (getattr(DEFAULTS, field), SCRIPT_OR_DEFAULT)
        else:
            told[name] = (value, config.sources.get(name, "flag"))
    return told


def as_object(config: RunConfig) -> dict[str, object]:
    """For --json."""
    return {
        "schema": 1,
        "dry_run": True,
        "options": {
            name: {"value": value, "source": source}
            for name, (value, source) in settings(config).items()
        },
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
        lines.append(f"  {name:<16} {_shown(value):<24} {source}".rstrip())
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
