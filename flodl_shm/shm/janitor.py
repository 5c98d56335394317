"""Names in /dev/shm: how ours look, the lock under which they exist, and the sweep of orphans.

A name lives only between creation and unlink, microseconds under one per-uid lock. Whoever is
killed inside leaves a file without an owner; the next start removes it. Liveness is an flock on
the file itself, which the kernel releases with the owner, never a pid.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import posix_ipc

from flodl_shm.errors import HostUnfit
from flodl_shm.shm.file_lock import is_same_file, try_flock
from flodl_shm.shm.free_memory import SHM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

NAME_TRIES = 16  # 32 random bits: a second collision in a row means something else is wrong
LOCK_PATIENCE_S = 10.0  # the lock is held for microseconds; this long means a stopped holder
LOCK_RETRY_S = 0.001


def fresh_name() -> str:
    """Draw a POSIX name "/flodl-<uid>-<8 hex>": at most 26 characters, macOS allows 31."""
    return f"/flodl-{os.getuid()}-{os.urandom(4).hex()}"


def create_exclusive(create: Callable[[str], T]) -> T:
    """What `create` makes of a fresh name, under the uid lock.

    `create` raises posix_ipc.ExistentialError where the name is taken: that is somebody's leftover
    and is never opened, whatever it holds. Raises HostUnfit after 16 names.
    """
    for _ in range(NAME_TRIES):
        with suppress(posix_ipc.ExistentialError):
            return create(fresh_name())
    raise HostUnfit(f"{NAME_TRIES} random names in a row exist already in /dev/shm")


@contextmanager
def uid_lock(shm: Path = SHM, *, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
    """Hold the one lock under which names of this uid appear and go.

    The lock file lives beside the names, so whoever shares the names shares the lock, and only
    while it is held, so nothing stays behind. Raises HostUnfit after `patience_s` seconds and
    OSError where `shm` cannot be written.
    """
    path = shm / f"flodl-{os.getuid()}.lock"
    fd = _locked(path, patience_s)
    try:
        yield
    finally:
        # Unlinked while held: whoever waits for this file sees that the path has gone and makes
        # a new one. So a copy of the descriptor in a forked child holds up nobody either.
        path.unlink(missing_ok=True)
        os.close(fd)


def _locked(path: Path, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if try_flock(fd) and is_same_file(fd, path):
            return fd
        os.close(fd)
        if time.monotonic() >= deadline:
            raise HostUnfit(
                f"waited {patience_s:g} s for the lock {path}, held by another flodl process",
                hint="A stopped process (state T) may hold it: look with `fuser`.",
            )
        time.sleep(LOCK_RETRY_S)


def sweep(shm: Path = SHM, *, patience_s: float = LOCK_PATIENCE_S) -> list[str]:
    """Remove the segments and semaphores of this uid that no process owns; return their names.

    A segment with an flock on it belongs to a live run and stays. A semaphore has no owner
    lock, but its name exists only under the uid lock, so one seen here is an orphan. Where
    there is no writable `shm` there is nothing of ours either: an empty list.
    """
    try:
        with uid_lock(shm, patience_s=patience_s):
            return [entry.name for entry in _ours(shm) if _remove_orphan(entry)]
    except OSError:
        return []


def _ours(shm: Path) -> list[Path]:
    pattern = re.compile(rf"(sem\.)?flodl-{os.getuid()}-[0-9a-f]{{8}}")
    return sorted(entry for entry in shm.iterdir() if pattern.fullmatch(entry.name))


def _remove_orphan(path: Path) -> bool:
    # O_NONBLOCK | O_NOFOLLOW: whatever lies there under our name must neither hang nor lead away.
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(fd)
        is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()
        if not (is_ours and try_flock(fd)):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
