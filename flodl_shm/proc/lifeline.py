"""The lifeline: a pipe whose write end only the launcher holds, so its end of file means the
launcher is gone, however it went. Nothing is ever written into it.

Also the list of descriptors no other process may hold, since a copy in a child would keep a pipe
or socket open past the launcher's death: the fork server closes them right after it was forked.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# A watcher looks again this often although poll() would wake it: it costs nothing, and no wait in
# the project is without an end.
_LOOK_AGAIN_MS: Final = 10_000

_launcher_only: set[int] = set()


def keep_in_launcher(fd: int) -> None:
    """Note that no forked child may keep a copy of `fd`."""
    _launcher_only.add(fd)


def close_in_launcher(fd: int) -> None:
    """Close a descriptor noted with `keep_in_launcher`; a second call does nothing."""
    if fd in _launcher_only:
        _launcher_only.discard(fd)
        os.close(fd)


def close_launcher_descriptors() -> None:
    """In a child fresh from fork: drop every copy that only the launcher may hold."""
    for fd in list(_launcher_only):
        close_in_launcher(fd)


class Lifeline:
    """Both ends. The read end is inherited by everybody, the write end by nobody."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        keep_in_launcher(self._write_fd)

    def cut(self) -> None:
        """Tell every holder of the read end that the launcher is done."""
        close_in_launcher(self._write_fd)

    def close(self) -> None:
        """Cut it and close the read end too."""
        self.cut()
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1


def is_cut(fd: int, *, timeout_ms: int = 0) -> bool:
    """Whether the launcher is gone. Waits at most `timeout_ms` for it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def watch(fd: int, on_cut: Callable[[], None]) -> threading.Thread:
    """Call `on_cut` once, in a daemon thread, when the launcher is gone. Returns the thread."""

    def look() -> None:
        while not is_cut(fd, timeout_ms=_LOOK_AGAIN_MS):
            pass
        on_cut()

    thread = threading.Thread(target=look, name="flodl-lifeline", daemon=True)
    thread.start()
    return thread
