"""The launcher's side of waking: one inherited descriptor that ranks write and it polls.

The launcher waits for processes, sockets and signals in the same poll, so it cannot park on a
semaphore. What happened stands in the rings; this says only "look".
"""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """An eventfd, readable from the first `notify` until the next `drain`."""

    def __init__(self, fd: int | None = None) -> None:
        """Create one before the fork that shares it, or own a non-blocking one received."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def notify(self) -> None:
        """Make it readable. Written by: any rank, after it has published what to look at."""
        with contextlib.suppress(BlockingIOError):  # the counter is full: it is readable already
            os.eventfd_write(self.fd, 1)

    def drain(self) -> bool:
        """Make it unreadable; say whether anybody had notified. Drain first, then look.

        The other way round, a message published between the look and the drain would lie
        unseen until the next one.
        """
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close this process's descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
