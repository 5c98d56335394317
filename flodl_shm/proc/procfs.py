"""What /proc and the cgroup say about a process: state, memory, threads, children, OOM kills.

Reading another process's memory figures can wait for a lock of that process, so telemetry reads
them for living, healthy ranks only and control decisions never do. A process that is gone is a
None, not an error.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

GENERATIONS = 8  # from a rank to its launcher there are two


@dataclass(frozen=True, slots=True)
class Stat:
    """The head of /proc/PID/stat."""

    state: str  # R S D T t Z X ...
    parent: int
    group: int
    session: int
    threads: int

    @property
    def is_stopped(self) -> bool:
        """Held by SIGSTOP or a debugger."""
        return self.state in {"T", "t"}

    @property
    def is_dead(self) -> bool:
        """Ended, and only waiting to be reaped."""
        return self.state in {"Z", "X"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used of the machine; one cheap read that waits for no lock."""

    state: str
    cpu_s: float  # of all its threads, user and system, since it began
    rss_mib: float
    threads: int

    @property
    def is_healthy(self) -> bool:
        """Neither stuck in the kernel, nor stopped, nor dead: more may be asked about it."""
        return self.state in {"R", "S"}


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB. `pss` shares what several processes map; `private` is what its end would free."""

    rss: float
    pss: float
    private: float


def read_stat(pid: int) -> Stat | None:
    """State and relatives of a process, None when there is no such process."""
    text = _read(Path(f"/proc/{pid}/stat"))
    if text is None:
        return None
    # The name in parentheses may itself hold spaces and parentheses: count from the last one.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 18:
        return None
    return Stat(
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
    )


def read_usage(pid: int) -> Usage | None:
    """CPU time and resident memory of a process, None when it has ended."""
    text = _read(Path(f"/proc/{pid}/stat"))
    fields = (text or "").rpartition(")")[2].split()
    if len(fields) < 22 or fields[0] in {"Z", "X"}:
        return None
    return Usage(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        rss_mib=int(fields[21]) * PAGE_MIB,
        threads=int(fields[17]),
    )


def read_memory(pid: int) -> Memory | None:
    """Memory of a process, None when it is gone or not ours to read."""
    text = _read(Path(f"/proc/{pid}/smaps_rollup"))
    if not text:
        return None
    kib: dict[str, int] = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            kib[name] = int(words[0])
    private = kib.get("Private_Clean", 0) + kib.get("Private_Dirty", 0)
    return Memory(
        rss=kib.get("Rss", 0) / 1024, pss=kib.get("Pss", 0) / 1024, private=private / 1024
    )


def own_threads() -> int:
    """Threads of this process as the kernel counts them, native ones included."""
    return len(os.listdir("/proc/self/task"))


def children_of(pid: int) -> list[int]:
    """Direct children, zombies included. One pass over /proc: not for every turn of a loop."""
    return [child for child, stat in all_stats() if stat.parent == pid]


def descends(pid: int, ancestor: int) -> bool:
    """Whether the process lives and `ancestor` is its parent, or its parent's, and so on."""
    for _ in range(GENERATIONS):
        stat = read_stat(pid)
        if stat is None or stat.is_dead:
            return False
        if stat.parent == ancestor:
            return True
        pid = stat.parent
    return False


def all_stats() -> Iterator[tuple[int, Stat]]:
    """Every process there is. One pass over /proc, as above."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                yield int(name), stat


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


# ---- out of memory -----------------------------------------------------------------------------


def oom_counters(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> list[Path]:
    """Files with an `oom_kill` count that covers this process, the most telling first.

    Version 2 of cgroups, version 1, as seen from inside and outside a container; last the count
    of the whole kernel, which is all there is without a memory limit.
    """
    found = []
    for line in (_read(proc / "self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = path.lstrip("/")
        if controllers == "":
            found += [root / inner / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            v1 = root / "memory"
            found += [v1 / inner / "memory.oom_control", v1 / "memory.oom_control"]
    found.append(proc / "vmstat")
    return [path for path in dict.fromkeys(found) if read_oom_kills(path) is not None]


def read_oom_kills(path: Path) -> int | None:
    """The number behind `oom_kill` in a counter file, None without one."""
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "oom_kill":
            with contextlib.suppress(ValueError):
                return int(words[1])
    return None


class OomWatch:
    """Says whether the kernel has killed for memory since the last look."""

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        paths = oom_counters() if counters is None else counters
        self._seen = {path: read_oom_kills(path) or 0 for path in paths}

    def look(self) -> str:
        """A clause for a death report naming the counter that rose, or an empty string."""
        told = ""
        for path, before in self._seen.items():
            count = read_oom_kills(path)
            if count is None or count == before:
                continue
            self._seen[path] = count
            told = told or f"oom_kill in {path} went from {before} to {count}"
        return told
