"""Real forked children for the memory room, ended and reaped whatever a test does."""

from __future__ import annotations

import os
import select
import signal
import traceback
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHILD_DEADLINE_S = 20.0


class Children:
    """Forks functions and waits for their processes, always with a deadline."""

    def __init__(self) -> None:
        self._living: dict[int, int] = {}

    def fork(self, work: Callable[[], None]) -> int:
        """Run `work` in a child that leaves by os._exit: 0 when it returned, 1 when it raised."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        self._living[pid] = os.pidfd_open(pid)
        return pid

    def kill(self, pid: int) -> int:
        """SIGKILL it and return its wait status."""
        os.kill(pid, signal.SIGKILL)
        return self.join(pid)

    def join(self, pid: int) -> int:
        """Return its exit code, or minus the signal that ended it."""
        pidfd = self._living[pid]
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(CHILD_DEADLINE_S * 1000), f"child {pid} did not end"
        del self._living[pid]
        os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def end_all(self) -> None:
        for pid in list(self._living):
            self.kill(pid)


@pytest.fixture
def children() -> Iterator[Children]:
    born = Children()
    yield born
    born.end_all()


def await_byte(fd: int) -> bytes:
    """Read one byte with a deadline: how a child says that it is ready."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(CHILD_DEADLINE_S * 1000), "the child never got ready"
    return os.read(fd, 1)


@pytest.fixture
def ready_pipe() -> Iterator[tuple[Callable[[], bytes], Callable[[], int]]]:
    """(wait, tell): the child tells, the parent waits."""
    read_end, write_end = os.pipe()
    yield lambda: await_byte(read_end), lambda: os.write(write_end, b".")
    os.close(read_end)
    os.close(write_end)
