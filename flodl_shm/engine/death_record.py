"""STEM.rankN.death.json: for tools that look beside the checkpoints, that a rank died, and of what.

One file per rank, so that ranks which die together do not overwrite each other. It tells a crash
from a save that somebody ordered; nothing of ours reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flodl_shm.engine.watch import NO_HEARTBEAT, NO_PROGRESS
from flodl_shm.errors import HostUnfit
from flodl_shm.obs.run_dir import write_json
from flodl_shm.train.checkpoint.durable import why

if TYPE_CHECKING:
    from pathlib import Path

    from flodl_shm.control.messages import Died
    from flodl_shm.ids import Rank

SCHEMA: Final = 1
_MOST_CHARS: Final = 10_000


def write_death(
    stem: Path, *, rank: Rank, world_size: int, error: str, cause: str, unix_time_s: float
) -> str:
    """Write the record, appearing whole; `unix_time_s` 0 where no clock could be read.

    Best effort: never raises, returns why it could not be written, or nothing.
    """
    record = {
        "schema_version": SCHEMA,
        "rank": rank,
        "world_size": world_size,
        "error": _plain(error),
        "cause": _plain(cause),
        "unix_time_secs": int(unix_time_s),
    }
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        write_json(stem.with_name(f"{stem.name}.rank{rank}.death.json"), record)
    except OSError as trouble:
        return f"cannot write {why(trouble)}"
    except HostUnfit as unfit:
        return unfit.what
    return ""


def cause_class(death: Died) -> str:
    """exception, hang, quit, signal, exit or killed: what kind of end it was."""
    if death.user_error:
        return "exception"
    if f": {NO_PROGRESS} for " in death.cause or f": {NO_HEARTBEAT} for " in death.cause:
        return "hang"
    first = death.cause.split(" ", 1)[0]
    return {"left": "quit", "signal": "signal", "exit": "exit"}.get(first, "killed")


def _plain(text: str) -> str:
    return text[:_MOST_CHARS].encode("utf-8", "backslashreplace").decode()
