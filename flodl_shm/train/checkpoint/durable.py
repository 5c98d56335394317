"""Files and folders that outlast a crash of the machine: write, sync, rename, remove.

Every step is one call of the os module, so a test can stop before each of them. Errors are
OSErrors that carry the path; `why` words them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl_shm.control.checkpoint_meta import SavedFile
from flodl_shm.proc import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterable

CHUNK: Final = 8 * 1024 * 1024  # between two of these other threads and signals get their turn
# Some network and FUSE file systems cannot sync a folder; their renames are durable or not.
_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_durably(folder: Path, name: str, pieces: Iterable[bytes | memoryview]) -> SavedFile:
    """Put `pieces` one after the other at folder/name; it appears whole, and synced.

    Of several processes that write the same name at once, the last to be done stays.
    A piece is bytes or a contiguous buffer of bytes. Raises OSError with the path; whatever is
    raised, nothing half written stays.
    """
    path, partial = folder / name, folder / f".{name}.{os.getpid()}.partial"
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(partial, flags, 0o666)
        try:
            for piece in pieces:
                for chunk in _chunks(memoryview(piece)):
                    if failpoints.ARMED:
                        failpoints.hit("save.write")
                    digest.update(chunk)
                    size += len(chunk)
                    _write_all(fd, chunk)
            if failpoints.ARMED:
                failpoints.hit("save.fsync")
            os.fsync(fd)
        finally:
            os.close(fd)
        if failpoints.ARMED:
            failpoints.hit("save.rename")
        os.replace(partial, path)
    except BaseException as error:
        remove_quietly(partial)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # write() and fsync() name no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    return SavedFile(name=name, bytes=size, sha256=digest.hexdigest())


def _chunks(piece: memoryview) -> Iterable[memoryview]:
    return (piece[at : at + CHUNK] for at in range(0, len(piece), CHUNK))


def _write_all(fd: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(fd, chunk) :]


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, a link or a file; nothing there is fine.

    Raises OSError.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_unless_gone)
    else:
        path.unlink(missing_ok=True)


def _unless_gone(_call: object, _path: str, caught: tuple[object, BaseException, object]) -> None:
    if not isinstance(caught[1], FileNotFoundError):  # a late writer, or another sweep
        raise caught[1]


def remove_quietly(path: Path) -> None:
    """Remove a file if that works: what was raised before is what matters."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # the disk that refused the write refuses this too


def make_folder(folder: Path) -> None:
    """Make a work folder, closed to others until it is published; being there is fine.

    Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_to_readers(folder: Path) -> None:
    """Give the folder the mode it would have had from the start, had it not been private."""
    os.chmod(folder, 0o777 & ~_umask())


def _umask() -> int:
    # Asking os.umask means setting it for a moment, which other threads would see.
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError):
        return 0o077  # closed rather than open


def why(error: BaseException) -> str:
    """An error in words: an OSError's reason and path, others by their text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return "not enough memory"
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
