"""How much shared memory this process may still take: /dev/shm, the host, the container.

Shared pages are charged to the container's memory limit, so the limit counts as well as the
mount. Only reads; what to do about it is the segment's business.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM = Path("/dev/shm")
UNLIMITED = 1 << 62  # cgroup v1 writes a huge number, v2 the word "max"


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free bytes: of the /dev/shm mount, and of memory; and what bounds the memory."""

    shm: int
    memory: int
    bound: str = "the host"


def survey(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory:
    """Read the free bytes now. What cannot be read does not bound (a missing /dev/shm is 0)."""
    memory, bound = _host_available(proc), "the host"
    for place, left in _cgroup_headroom(proc, cgroups):
        if left < memory:
            memory, bound = left, f"the memory limit of cgroup {place}"
    return FreeMemory(shm=_mount_free(SHM), memory=memory, bound=bound)


def _mount_free(mount: Path) -> int:
    try:
        stats = os.statvfs(mount)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize


def _host_available(proc: Path) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return UNLIMITED


def _cgroup_headroom(proc: Path, cgroups: Path) -> Iterator[tuple[str, int]]:
    """Yield (cgroup path, bytes left under its limit) for this process's group and all above."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for place in _ancestry(path):
            here = root / place.lstrip("/")
            bytes_limit = _number(here / limit)
            if bytes_limit < UNLIMITED:
                used = _number(here / usage) - _reclaimable(here / "memory.stat")
                yield place, max(0, bytes_limit - used)


def _ancestry(path: str) -> Iterator[str]:
    # Inside a container the own path may not be visible while the root is the container's group.
    while path not in ("", "/"):
        yield path
        path = path.rpartition("/")[0]
    yield "/"


def _number(file: Path) -> int:
    try:
        word = file.read_text("ascii").strip()
    except OSError:
        return UNLIMITED
    return min(int(word), UNLIMITED) if word.isdigit() else UNLIMITED


def _reclaimable(stat_file: Path) -> int:
    # Page cache counts as used but goes as soon as somebody needs the memory.
    with suppress(OSError, ValueError, IndexError):
        for line in stat_file.read_text("ascii").splitlines():
            if line.startswith(("total_inactive_file ", "inactive_file ")):
                return int(line.split()[1])
    return 0


def largest_files(mount: Path = SHM, count: int = 3) -> list[tuple[str, int]]:
    """Name the largest files of a mount with their allocated bytes, largest first."""
    sizes: list[tuple[str, int]] = []
    with suppress(OSError), os.scandir(mount) as entries:
        for entry in entries:
            with suppress(OSError):
                sizes.append((entry.name, entry.stat(follow_symlinks=False).st_blocks * 512))
    return sorted(sizes, key=lambda pair: -pair[1])[:count]
