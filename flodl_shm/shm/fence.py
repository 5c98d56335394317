"""Memory order between processes, from pure Python.

x86-64 keeps stores in order and loads in order; the one thing it may do is let a load overtake
an earlier store, which is what "publish, then look whether the other side sleeps" must prevent.
CPython offers no fence, but a lock's acquire and release are atomic operations of the processor.
"""

from __future__ import annotations

import platform
from _thread import allocate_lock

STRONG_ORDER = platform.machine().lower() in ("x86_64", "amd64")


def fence() -> None:
    """Full fence: every store before it is visible before any load after it is done.

    One locked instruction is a full barrier on x86-64. Elsewhere acquire and release are each
    one-way: an earlier store may sink into the critical section and a later load rise into it.
    The release of the first pair and the acquire of the second keep their order.
    """
    # A fresh lock each time (145 ns against 92 ns for a shared one): nobody else can hold it,
    # neither a thread that a fork left behind nor the frame a signal handler interrupted.
    if STRONG_ORDER:
        allocate_lock().acquire()  # let go of where it is freed, a moment later
        return
    lock = allocate_lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def order() -> None:
    """Store-store and load-load order: free on x86-64, a full fence elsewhere."""
    if not STRONG_ORDER:
        fence()
