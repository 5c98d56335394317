"""One piece of shared memory: reserved, locked by its owner, nameless from the start.

Children get it through fork, strangers get the descriptor over a socket. It knows nothing of
what lies inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Literal

import posix_ipc

from flodl_shm.errors import HostUnfit, PeerBroke, WeBroke
from flodl_shm.shm.free_memory import FreeMemory, largest_files, survey
from flodl_shm.shm.huge_pages import LEAST_BYTES, AlignedMap
from flodl_shm.shm.janitor import create_exclusive, uid_lock

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["shm", "memfd"]

# torch's DataLoader sends batches through the same mount, and its workers die of SIGBUS when it
# is full. A segment that would leave less than this becomes a memfd, which no mount bounds.
SPARE_BYTES = 64 << 20
# tmpfs undoes an interrupted fallocate; in pieces a process with a busy timer still gets on.
RESERVE_PIECE = 64 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module of CPython 3.11
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One shared mapping. `view` is its memory, writable bytes; `fd` can be passed on."""

    def __init__(self, fd: int, size: int, kind: Kind) -> None:
        """Map `size` bytes of `fd` and own the descriptor. Use `create` or `adopt`."""
        self.fd = fd
        self.size = size
        self.kind: Kind = kind
        self._map: mmap.mmap | AlignedMap
        if size >= LEAST_BYTES:
            self._map = AlignedMap(fd, size)
            self.view = self._map.view
        else:
            self._map = mmap.mmap(fd, size)
            self.view = memoryview(self._map)

    @classmethod
    def create(
        cls,
        size: int,
        *,
        purpose: str,
        fallback: bool = True,
        free: Callable[[], FreeMemory] = survey,
    ) -> Segment:
        """Reserve and map `size` zeroed bytes.

        In /dev/shm where that leaves room for others, else as a sealed memfd (`fallback`).
        Raises HostUnfit when there is no memory for it, before anything is reserved.
        """
        if size <= 0:
            raise WeBroke(f"a segment of {size} bytes was asked for ({purpose})")
        room = free()
        why = ""
        for kind in _kinds_to_try(size, room, fallback=fallback):
            try:
                fd = _open_nameless() if kind == "shm" else _open_memfd(purpose)
                return cls._mapped(_reserved(fd, size, kind), size, kind)
            except (OSError, posix_ipc.Error, HostUnfit) as exc:
                why = str(exc)
        raise _no_room(size, purpose, room, why)

    @classmethod
    def adopt(cls, fd: int, size: int) -> Segment:
        """Map `size` bytes of a descriptor that came over a socket, and own the descriptor.

        Raises PeerBroke when there is less behind it; the descriptor is closed then.
        """
        try:
            behind = os.fstat(fd).st_size
            if size <= 0 or behind < size:
                raise PeerBroke(f"the segment received holds {behind} bytes, {size} were announced")
        except BaseException:
            os.close(fd)
            raise
        return cls._mapped(fd, size, _kind_of(fd))

    @classmethod
    def _mapped(cls, fd: int, size: int, kind: Kind) -> Segment:
        try:
            return cls(fd, size, kind)
        except BaseException:
            os.close(fd)
            raise

    def ask_for_huge_pages(self) -> bool:
        """Whether the kernel has put huge pages under it; the creator asks, before others map."""
        return isinstance(self._map, AlignedMap) and self._map.collapse()

    def prefault(self) -> None:
        """Map every page into this process now, without changing a byte."""
        try:
            self._map.madvise(MADV_POPULATE_WRITE)
        except OSError:
            # An older kernel. Only read: peers may be writing here already, and writing back
            # what was read would undo their stores. The pages exist since they were reserved.
            self.view[:: mmap.PAGESIZE].tobytes()

    def close(self) -> None:
        """Give mapping and descriptor back. Views still in use keep the mapping until they go."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # BufferError: somebody (a tensor, a traceback) still looks in. It must not replace the
        # error that is being handled; the mapping ends with the last view or with the process.
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def _open_nameless() -> int:
    """Create a segment in /dev/shm and take its name away again at once."""
    with uid_lock():
        memory = create_exclusive(
            lambda name: posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        )
        try:
            # Locked before the uid lock goes: a sweep never sees a live name without its lock.
            fcntl.flock(memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(memory.fd)
            raise
        finally:
            memory.unlink()
        return int(memory.fd)


def _open_memfd(purpose: str) -> int:
    return os.memfd_create(f"flodl-{purpose}"[:64], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _kinds_to_try(size: int, room: FreeMemory, *, fallback: bool) -> list[Kind]:
    if size > room.memory:
        return []  # reserving would wake the OOM killer
    fits = size <= room.shm
    if not fallback:
        return ["shm"] if fits else []
    if size + SPARE_BYTES <= room.shm:
        return ["shm", "memfd"]
    return ["memfd", "shm"] if fits else ["memfd"]


def _reserved(fd: int, size: int, kind: Kind) -> int:
    """Size the file and reserve its pages: ftruncate alone over-commits, SIGBUS comes later."""
    try:
        os.ftruncate(fd, size)
        for start in range(0, size, RESERVE_PIECE):
            os.posix_fallocate(fd, start, min(RESERVE_PIECE, size - start))
        if kind == "memfd":  # no holder of the descriptor can pull pages from under the others
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _kind_of(fd: int) -> Kind:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "shm"
    return "memfd" if seals & fcntl.F_SEAL_SHRINK else "shm"


def _no_room(size: int, purpose: str, room: FreeMemory, why: str) -> HostUnfit:
    held = ", ".join(f"{name} ({used} bytes)" for name, used in largest_files() if used)
    return HostUnfit(
        f"no shared memory for the {purpose}: {size} bytes wanted, {room.shm} bytes free in "
        f"/dev/shm, {room.memory} bytes of memory available (bounded by {room.bound})"
        + (f"; {why}" if why else ""),
        hint="In a container, raise --shm-size and the memory limit, which shared memory counts "
        "against; or use a smaller model or fewer ranks."
        + (f" Largest files in /dev/shm: {held}." if held else ""),
    )
