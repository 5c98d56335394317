"""Maps of large segments that huge pages fit into, and the wish for them.

With small pages an arena of a few hundred MiB has more page-table entries than caches hold: two
ranks that averaged 2 x 64 MiB and 2 x 256 MiB took 0.82 and 0.89 to 0.93 of the time on huge pages.
tmpfs gives none by itself where `shmem_enabled` is "never", the kernels' default; MADV_COLLAPSE
asks for these pages alone. A page is mapped as a huge one only where address and file offset agree
modulo its size, so every process maps at such an address. Not getting them is no failure.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from flodl_shm.errors import HostUnfit

HUGE_BYTES = 2 << 20  # of x86-64 and, with 4 KiB pages, of aarch64
LEAST_BYTES = 8 * HUGE_BYTES  # below, looking for huge pages costs more than it brings
MADV_COLLAPSE = 25  # Linux 6.1; not in the mmap module of CPython 3.11
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class AlignedMap:
    """A shared mapping of a whole file at a multiple of HUGE_BYTES.

    It lives as long as any view of it, like memory that Python counts itself: unmapped any
    earlier, a tensor somebody still holds would be a segmentation fault.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Map `size` bytes of `fd`. Raises HostUnfit when there is no address space for it."""
        room = _mapped(None, size + HUGE_BYTES, _PROT_NONE, _NOWHERE, -1)
        self._address = -(-room // HUGE_BYTES) * HUGE_BYTES
        _mapped(self._address, size, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        self._size = size
        # A subclass, since the plain array type takes no weak references.
        kind: type[ctypes.Array[ctypes.c_char]] = type("Bytes", (ctypes.c_char * size,), {})
        self._bytes = kind.from_address(self._address)
        gone = weakref.finalize(self._bytes, _libc.munmap, room, size + HUGE_BYTES)
        gone.atexit = False  # the process's end unmaps; before it somebody may still look in

    @property
    def view(self) -> memoryview:
        """All of it, writable bytes."""
        return memoryview(self._bytes).cast("B")

    def madvise(self, advice: int) -> None:
        """Advise the kernel on all of it. Raises OSError where it does not know the advice."""
        self._advise(self._size, advice)

    def collapse(self) -> bool:
        """Ask for huge pages under every whole one of them; whether that was granted."""
        try:
            self._advise(self._size // HUGE_BYTES * HUGE_BYTES, MADV_COLLAPSE)
        except OSError:  # an older kernel, forbidden ones, none free: small pages serve too
            return False
        return True

    def close(self) -> None:
        """Let go; the mapping goes with the last view of it."""
        del self._bytes

    def _advise(self, size: int, advice: int) -> None:
        if _libc.madvise(self._address, size, advice) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NOWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _mapped(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found in {None, _FAILED}:
        error = ctypes.get_errno()
        raise HostUnfit(
            f"{size} bytes of shared memory could not be mapped: {os.strerror(error)}",
            hint="A low limit of address space is the usual cause (ulimit -v).",
        )
    return int(found)
