"""Whose work folders are alive: each run holds one locked file beside its checkpoints.

The kernel lets go of the lock when the launcher is gone, however it ended; what it was making is
stale then, and the next run that saves there removes it. Never a pid: numbers are used again. One
file for the run instead of one in each folder, since it is there before the first rank can make a
folder, so no folder is ever seen without its owner.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import HostUnfit
from flodl_shm.shm.file_lock import is_same_file, try_flock
from flodl_shm.train.checkpoint.durable import remove_tree, why
from flodl_shm.train.checkpoint.folder import recover
from flodl_shm.train.checkpoint.names import is_ours, is_owner, is_work, is_work_of, owner_file

if TYPE_CHECKING:
    from pathlib import Path

# Between making the file and locking it another run's sweep may take it for a dead one's.
_TRIES: Final = 100


class Owner:
    """One run's claim on its work folders; held from construction until `release`.

    Raises HostUnfit with the path when the file cannot be made.
    """

    def __init__(self, stem: Path, run_id: str) -> None:
        self._path = owner_file(stem, run_id)
        self._stem = stem
        try:
            self._fd = _make(self._path)
        except OSError as error:
            raise HostUnfit(
                f"cannot save checkpoints: {why(error)}", hint="Choose another place with --save."
            ) from None

    def work_folders(self) -> list[Path]:
        """Those of this run, finished or not. Raises OSError."""
        here = list(self._path.parent.iterdir())
        return [path for path in here if is_work_of(self._path.name, path.name)]

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._fd >= 0:
            # Unlinked while held, so nobody takes the name for a living run's afterwards.
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _make(path: Path) -> int:
    for _ in range(_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if try_flock(fd) and is_same_file(fd, path):
            return fd
        os.close(fd)
    raise HostUnfit(
        f"{path} is held by another process", hint="Two runs cannot have the same name and stem."
    )


def sweep(stem: Path) -> list[str]:
    """Remove what dead runs were making under the stem; say in words what was done.

    Living runs' folders stay, and so does a folder with a file in it that is not ours. What
    cannot be removed is said too: it hinders nobody.
    """
    done: list[str] = []
    if not stem.parent.is_dir():
        return done
    try:
        # Folders before owners: the owner of a folder seen here was there before it.
        folders = sorted(path for path in stem.parent.iterdir() if is_work(stem, path.name))
        alive = _living_owners(stem)
        done += [
            _remove_stale(folder)
            for folder in folders
            if not any(is_work_of(owner, folder.name) for owner in alive)
        ]
        done += [f"{path} {what}" for path, what in recover(stem)]
    except OSError as error:
        done.append(f"could not tidy up: {why(error)}")
    return done


def _living_owners(stem: Path) -> list[str]:
    """Names of the owner files that somebody holds; the others are removed."""
    alive = []
    for path in stem.parent.iterdir():
        if not is_owner(stem, path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            alive.append(path.name)  # another user's, say: not ours to judge
            continue
        try:
            if not try_flock(fd):
                alive.append(path.name)
            elif is_same_file(fd, path):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return alive


def _remove_stale(folder: Path) -> str:
    try:
        strange = [path.name for path in folder.iterdir() if not is_ours(path.name)]
        if strange or folder.is_symlink():
            return f"{folder} was left as it is: it holds {min(strange, default='elsewhere')}"
        remove_tree(folder)
    except OSError as error:
        return f"{folder} could not be removed: {why(error)}"
    return f"{folder} removed: the run that was making it is gone"
