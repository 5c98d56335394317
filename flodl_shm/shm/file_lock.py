"""A lock on a file as the sign that its owner lives: the kernel lets go of it with the process.

Used for segments and for checkpoints in the making. What a file stands for is not known here.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def try_flock(fd: int) -> bool:
    """Take the lock of an open file, if nobody holds it. Never waits; raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still at `path`: between opening and locking it may be replaced.

    Raises OSError.
    """
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
