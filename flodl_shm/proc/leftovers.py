"""Ends what a dead rank has left behind: the members of its process group, but for the cleaners.

Python's resource tracker removes the names of semaphores and shared memory that its rank's loader
workers had made, torch's manager those of its shared files. Both do so when the last process that
could use a name is gone, the manager two seconds later, and then end by themselves. Killed along
with the others, they leave the names in /dev/shm for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl_shm.proc.procfs import all_stats, read_stat

if TYPE_CHECKING:
    from collections.abc import Collection

_TRACKER: Final = b"from multiprocessing.resource_tracker import main"  # an argument of its python
_MANAGER: Final = b"torch_shm_manager"  # its program
# Each pass finds what was forked during the one before; somebody who forks faster is not chased.
_PASSES: Final = 20


def kill_groups(groups: Collection[int]) -> None:
    """SIGKILL to every member of these process groups that is no cleaner. Waits for nobody."""
    struck: set[int] = set()
    for _ in range(_PASSES):
        found = {
            pid: stat.group
            for pid, stat in all_stats()
            if stat.group in groups and not stat.is_dead and pid not in struck
        }
        if not found:
            return
        for pid, group in found.items():
            struck.add(pid)
            if not is_cleaner(pid):
                _kill(pid, group)


def is_cleaner(pid: int) -> bool:
    """Whether the process only removes what others leave. False for one that is gone."""
    try:
        program, *words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    is_tracker = any(word.startswith(_TRACKER) for word in words)
    return is_tracker or program.rpartition(b"/")[2] == _MANAGER


def _kill(pid: int, group: int) -> None:
    """By pidfd, and asked again: the number may be somebody else's since the look."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            stat = read_stat(pid)
            if stat is not None and stat.group == group:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
