"""Signals as bytes in a pipe, for a loop that waits in one poll().

The Python handlers do nothing, so nothing is ever raised out of one; the interpreter's wakeup
descriptor carries the signal numbers in the order they came. What a signal means is decided by
whoever reads the pipe.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

LAUNCHER_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def _note_nothing(signum: int, frame: FrameType | None) -> None:
    """The byte is in the pipe already; a handler must exist for the interpreter to write it."""


class SignalPipe:
    """Installs handlers for `signals` at construction; `restore` puts everything back.

    Only the main thread may construct and restore one (ValueError from `signal` otherwise). A
    SIGHUP that is ignored when we come stays ignored: that is what nohup asks for.
    """

    def __init__(self, signals: Iterable[int] = LAUNCHER_SIGNALS) -> None:
        self.fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, signal._HANDLER] = {}
        # A full pipe loses the byte and nothing else: 64 KiB of unread signals say enough.
        self._wakeup_before = signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)
        for signum in signals:
            before = signal.getsignal(signum)
            if signum == signal.SIGHUP and before == signal.SIG_IGN:
                continue
            signal.signal(signum, _note_nothing)
            self._before[signum] = before

    def read(self) -> list[int]:
        """Signal numbers that came since the last call, in order. Never blocks."""
        came = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fd, 4096):
                came += chunk
        return [signum for signum in came if signum in self._before]

    def restore(self) -> None:
        """Put back the handlers and the wakeup descriptor found at construction."""
        if self.write_fd < 0:
            return
        for signum, before in self._before.items():
            # None: a handler installed from C, which Python can neither name nor put back.
            signal.signal(signum, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self.write_fd)
        self.fd = self.write_fd = -1


def die_of(signum: int) -> NoReturn:
    """End this process by `signum`, so that the parent sees what a plain program would show.

    The very last act: exit handlers do not run. Standard streams are flushed. Leaves no core file.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    os.kill(os.getpid(), signum)
    # As process 1 of a container we survive a signal with the default action.
    os._exit(128 + signum)
