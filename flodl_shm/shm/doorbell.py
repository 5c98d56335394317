"""How one process wakes another: a semaphore used only as a bell, and a flag that says "asleep".

The bell carries no data and guards nothing: truth is in the cells, every park is bounded and
looks again, a token too many is a spurious wake-up. It does not know who rings or why.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Protocol

import posix_ipc

from flodl_shm.errors import HostUnfit
from flodl_shm.shm.fence import fence
from flodl_shm.shm.janitor import create_exclusive, uid_lock

if TYPE_CHECKING:
    from collections.abc import Callable

PARK_NS = 50_000_000  # a lost or clock-bent wake-up costs at most this
SPIN_NS = 20_000  # about one wake-up of a halted core: at most twice the best possible wait
MISSES_TO_STOP = 4  # spins in a row that found nothing turn spinning off
PROBE_EVERY = 32  # then one wait in so many tries again


class Bell(Protocol):
    """What wakes: `release` adds a token, `acquire` takes one or gives up after the timeout."""

    def release(self) -> None: ...
    def acquire(self, timeout_ns: int) -> bool: ...
    def close(self) -> None: ...


class SemaphoreBell:
    """A POSIX semaphore without a name; only children born by fork share it."""

    def __init__(self) -> None:
        """Create and unlink it. Raises OSError, posix_ipc.Error or HostUnfit where it cannot."""
        with uid_lock():
            self._semaphore = create_exclusive(
                lambda name: posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600)
            )
            self._semaphore.unlink()

    def release(self) -> None:
        # Refused only at 2^31 tokens, and then the waiter wakes anyhow.
        with contextlib.suppress(ValueError, OSError, posix_ipc.Error):
            self._semaphore.release()

    def acquire(self, timeout_ns: int) -> bool:
        try:
            self._semaphore.acquire(timeout_ns / 1e9)
        except posix_ipc.BusyError:
            return False
        except posix_ipc.SignalError:
            # A handled signal ended the wait; its Python handler runs before the next line of
            # the caller, who computes what is left of the monotonic time and parks again.
            return False
        return True

    def close(self) -> None:
        self._semaphore.close()


class EventBell:
    """An eventfd that counts like a semaphore; its descriptor may also go over a socket."""

    def __init__(self, fd: int | None = None) -> None:
        """Create one, or own `fd`, which must be a non-blocking EFD_SEMAPHORE eventfd."""
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.fd = os.eventfd(0, flags) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def release(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: readable, so the waiter wakes anyhow
            os.eventfd_write(self.fd, 1)

    def acquire(self, timeout_ns: int) -> bool:
        # Rounded up to poll's milliseconds: rounded down, the last one would be a busy loop.
        if not self._poll.poll(-(-timeout_ns // 1_000_000)):
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
            return True
        return False

    def close(self) -> None:
        os.close(self.fd)


class Doorbell:
    """The bell of one waiter. Anybody may ring; only the owner waits.

    `cells[index]` is the asleep flag, written by: the waiter; read by: wakers. Were it cleared
    by the waker, one that comes late would wipe the flag of the next sleep: 2 of 300,000
    wake-ups were lost that way, none since.
    """

    def __init__(self, cells: memoryview, index: int, bell: Bell) -> None:
        """Join a flag and a bell. `cells` is shared memory cast to "Q"."""
        self._cells = cells
        self._index = index
        self._bell = bell
        self._misses = 0
        self._waits = 0

    @classmethod
    def create(cls, cells: memoryview, index: int, *, semaphores: bool = True) -> Doorbell:
        """Make a bell before the fork that shares it: a semaphore, else an eventfd."""
        cells[index] = 0
        if semaphores:
            with contextlib.suppress(OSError, posix_ipc.Error, HostUnfit):
                return cls(cells, index, SemaphoreBell())
        return cls(cells, index, EventBell())

    @classmethod
    def adopt(cls, cells: memoryview, index: int, fd: int) -> Doorbell:
        """Take over an eventfd bell whose descriptor came over a socket."""
        return cls(cells, index, EventBell(fd))

    @property
    def fd(self) -> int | None:
        """The descriptor to pass on, or None for a semaphore, which only fork shares."""
        return self._bell.fd if isinstance(self._bell, EventBell) else None

    def ring(self) -> None:
        """Wake the waiter if it sleeps. The caller has made its store before."""
        # Without the fence the flag could be read before the store is visible: the waiter
        # re-checks, sees nothing, parks, and nobody rings.
        fence()
        if self._cells[self._index]:
            self._bell.release()

    def ring_always(self) -> None:
        """Wake the waiter whatever its flag says: for deaths and deadlines."""
        fence()
        self._bell.release()

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        timeout_ns: int | None = None,
        spin_ns: int = SPIN_NS,
    ) -> bool:
        """Wait until `ready()` or for `timeout_ns`; False when the time is over.

        Without a timeout `ready` must end the wait by itself (a death counts as ready). It is
        asked at least every 50 ms. What a signal handler raises passes through.
        """
        if ready():
            return True
        deadline = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        if self._spin(ready, spin_ns, deadline):
            return True
        return self._park_until(ready, deadline)

    def _spin(self, ready: Callable[[], bool], spin_ns: int, deadline: int | None) -> bool:
        # A pure spin: sched_yield costs a scheduler slice of 4 ms beside a busy process.
        self._waits += 1
        if self._misses >= MISSES_TO_STOP and self._waits % PROBE_EVERY:
            return False
        clock = time.monotonic_ns
        end = clock() + spin_ns
        if deadline is not None:
            end = min(end, deadline)
        while clock() < end:
            if ready():
                self._misses = 0
                return True
        self._misses += 1
        return False

    def _park_until(self, ready: Callable[[], bool], deadline: int | None) -> bool:
        while True:
            left = PARK_NS if deadline is None else min(PARK_NS, deadline - time.monotonic_ns())
            if left <= 0:
                return ready()
            self._cells[self._index] = 1
            try:
                fence()  # the flag must be out before the re-check, see `ring`
                if ready():
                    return True
                self._bell.acquire(left)
            finally:
                self._cells[self._index] = 0
            if ready():
                return True

    def drain(self) -> None:
        """Throw away all tokens, for instance before a new incarnation waits here."""
        while self._bell.acquire(0):
            pass

    def close(self) -> None:
        """Give the bell back; the flag's memory belongs to its segment."""
        self._bell.close()
