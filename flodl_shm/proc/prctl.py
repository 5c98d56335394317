"""The three prctl(2) calls the process room needs, and flushing the C library's stdio.

Python has no binding for them. Knows nothing of ranks.
"""

from __future__ import annotations

import ctypes
import os

from flodl_shm.errors import HostUnfit

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    word = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    none = ctypes.c_ulong(0)  # without the type the kernel may see garbage in the upper half
    if _libc.prctl(option, word, none, none, none) != 0:
        error = ctypes.get_errno()
        raise HostUnfit(f"prctl({option}) failed: {os.strerror(error)}")


def die_with_parent(signum: int) -> None:
    """Ask for `signum` when the thread that forked us ends.

    The parent may be gone already: the caller compares getppid() with what it expects afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, in place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """What `ps` and `top` show, 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def flush_c_stdio() -> None:
    """What printf in a native library left in its buffers; os._exit would drop it."""
    _libc.fflush(None)
