"""Whether checkpoints can be put where the user wants them, asked before the training starts."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from flodl_shm.errors import BadConfig, HostUnfit
from flodl_shm.train.checkpoint.durable import why

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024
HINT = "Choose another place with --save STEM, as in --save ckpt/model."


def check_writable(stem: Path) -> None:
    """Make the folder the checkpoints go into and try it out.

    Raises BadConfig when `stem` cannot be a prefix of folders, HostUnfit when the system refuses.
    """
    if stem.name in ("", "..") or not stem.name.isprintable():
        raise BadConfig(f"{str(stem)!r} is no prefix of checkpoint names", hint=HINT)
    for parent in stem.parents:
        if os.path.lexists(parent) and not parent.is_dir():
            raise BadConfig(
                f"checkpoints cannot go to {stem}: {parent} is not a directory", hint=HINT
            )
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        # As long as the longest name that will be needed here, near enough.
        probe = stem.with_name(f"{stem.name}.probe-{secrets.token_hex(24)}.tmp")
        probe.mkdir(mode=0o700)
        probe.rmdir()
    except OSError as error:
        raise HostUnfit(
            f"checkpoints cannot go to {stem}: {error.strerror or error}", hint=HINT
        ) from None


def room_for(stem: Path, wanted_bytes: int) -> str:
    """A warning in one sentence when the disk has less than `wanted_bytes` free; else empty."""
    place = next((parent for parent in stem.absolute().parents if parent.is_dir()), None)
    if place is None:
        return ""
    try:
        disk = os.statvfs(place)
    except OSError as error:
        return f"cannot tell how much room there is for checkpoints: {why(error)}"
    free = disk.f_bavail * disk.f_frsize
    if free >= wanted_bytes:
        return ""
    return (
        f"checkpoints need about {wanted_bytes / MIB:.0f} MiB, {free / MIB:.0f} MiB are free"
        f" in {place}: saves may fail, the training goes on"
    )
