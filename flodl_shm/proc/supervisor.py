"""The launcher's book of rank processes: who lives, who is gone, and how it ended.

A readable pidfd is the death, nothing else; the status comes from the fork server a moment later
and says only how. What a death means for the run is not known here.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import PeersLost, WeBroke
from flodl_shm.ids import Nanos, Rank, Row
from flodl_shm.proc.procfs import OomWatch, read_stat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.proc.exit_status import ExitStatus
    from flodl_shm.proc.fork_server import ForkServer, SpawnRequest

SETTLE_NS: Final = 2_000_000_000  # from a readable pidfd to the server's word; usually under 1 ms
KILL_NS: Final = 2_000_000_000  # from SIGKILL to the end; more only in uninterruptible sleep


@dataclass(slots=True)
class Child:
    """One incarnation of a rank as a process."""

    rank: Rank
    row: Row
    pid: int
    pidfd: int  # -1 once the death is settled
    gone_at: Nanos | None = None  # when its pidfd was seen readable
    status: ExitStatus | None = None
    settled: bool = False  # nothing more will be learnt about its end
    killed_why: str = ""  # we sent the SIGKILL, and this is why
    oom: str = ""  # the counter that rose, if the kernel killed for memory
    aside: str = ""  # what else is to be said about the end

    @property
    def is_alive(self) -> bool:
        return self.gone_at is None

    def cause(self) -> str:
        """How it ended, in words: `exit 3`, `signal 9 (SIGKILL), probably out of memory: ...`."""
        if self.is_alive:
            return "alive"
        words = self.status.words() if self.status else "ended, status unknown"
        for more in (self.killed_why and f"killed by the launcher: {self.killed_why}", self.aside):
            words += f", {more}" if more else ""
        return f"{words}, probably out of memory: {self.oom}" if self.oom else words


@dataclass(frozen=True, slots=True)
class Deaths:
    """What one look has found."""

    gone: list[Child] = field(default_factory=list)  # dead since this look; no status yet
    settled: list[Child] = field(default_factory=list)  # status known, or given up on


class Supervisor:
    """Children by rank, the newest incarnation of each."""

    def __init__(self, server: ForkServer, *, oom: OomWatch | None = None) -> None:
        self.children: dict[Rank, Child] = {}
        self.server_lost = ""  # once the fork server is gone: why. Every rank dies with it
        self._server = server
        self._oom = oom or OomWatch()
        self._unsettled: dict[int, Child] = {}  # by pid

    def spawn(self, rank: Rank, row: Row, request: SpawnRequest, *, deadline: Nanos) -> Child:
        """Start an incarnation. Raises as `ForkServer.spawn`; WeBroke if the last one lives."""
        before = self.children.get(rank)
        if before is not None and before.is_alive:
            raise WeBroke(f"rank {rank} is to be started twice: pid {before.pid} lives")
        pid, pidfd = self._server.spawn(request, deadline=deadline)
        child = Child(rank=rank, row=row, pid=pid, pidfd=pidfd)
        self.children[rank] = self._unsettled[pid] = child
        return child

    def living(self) -> list[Child]:
        """Children whose pidfd has not been seen readable."""
        return [child for child in self.children.values() if child.is_alive]

    def poll_fds(self) -> list[int]:
        """What to poll for reading: a death, a status, or the end of the fork server."""
        pidfds = [child.pidfd for child in self._unsettled.values() if child.is_alive]
        return pidfds + ([] if self.server_lost else self._server.poll_fds())

    def collect(self, *, now: Nanos) -> Deaths:
        """Everything that has happened to the children. Never blocks; cheap enough for a loop."""
        deaths = Deaths(gone=self._look(now))
        try:
            for exit_ in self._server.exits():
                child = self._unsettled.get(exit_.pid)
                if child is not None:
                    self._settle(child, exit_.status, deaths, now)
        except PeersLost as error:
            self.server_lost = str(error)
        for child in list(self._unsettled.values()):
            overdue = child.gone_at is not None and now - child.gone_at > SETTLE_NS
            if child.gone_at is not None and (overdue or self.server_lost):
                child.aside = self.server_lost
                self._settle(child, None, deaths, now)
        return deaths

    def kill(self, rank: Rank, why: str) -> bool:
        """SIGKILL a rank. False if it is gone already.

        Dead is it when its pidfd says so. What it had started goes when the server reaps it.
        """
        child = self.children.get(rank)
        if child is None or not self.send(rank, signal.SIGKILL):
            return False
        child.killed_why = child.killed_why or why
        return True

    def send(self, rank: Rank, signum: int) -> bool:
        """Send a signal to a rank alone. False if it is gone already."""
        child = self.children.get(rank)
        if child is None or not child.is_alive:
            return False
        try:
            signal.pidfd_send_signal(child.pidfd, signum)
        except ProcessLookupError:
            return False
        return True

    def terminate_all(self, *, grace_ns: int, why: str) -> list[Child]:
        """SIGTERM to all, SIGKILL to who is left after the grace; those who survive even that.

        A survivor is stuck in the kernel: it is to be named and left behind. Blocks at most
        `grace_ns` + 4 s.
        """
        for child in self.living():
            self.send(child.rank, signal.SIGTERM)
            self.send(child.rank, signal.SIGCONT)  # a stopped one cannot act on it otherwise
        self._await_ends(grace_ns)
        for child in self.living():
            self.kill(child.rank, why)
        self._await_ends(KILL_NS)
        return self.living()

    def close(self) -> None:
        """Close the descriptors; kills nobody."""
        for child in self.children.values():
            self._release(child)
        self._unsettled.clear()

    def _await_ends(self, limit_ns: int) -> None:
        deadline = time.monotonic_ns() + limit_ns
        while self._unsettled:
            now = Nanos(time.monotonic_ns())
            self.collect(now=now)
            if not self._unsettled or now >= deadline:
                return
            # Not longer than 100 ms, since a status that never comes makes nothing readable.
            left_ms = min(100, (deadline - now) // 1_000_000 + 1)
            _readable(self.poll_fds(), left_ms)

    def _look(self, now: Nanos) -> list[Child]:
        by_fd = {child.pidfd: child for child in self._unsettled.values() if child.is_alive}
        gone = [by_fd[fd] for fd in _readable(by_fd, 0)]
        for child in gone:
            child.gone_at = now
        return gone

    def _settle(self, child: Child, status: ExitStatus | None, deaths: Deaths, now: Nanos) -> None:
        if child.gone_at is None:  # it died between our look at the pidfds and the server's word
            child.gone_at = now
            deaths.gone.append(child)
        child.status = status
        child.settled = True
        if status is not None and status.signum == signal.SIGKILL and not child.killed_why:
            child.oom = self._oom.look()
        self._release(child)
        del self._unsettled[child.pid]
        deaths.settled.append(child)

    @staticmethod
    def _release(child: Child) -> None:
        if child.pidfd >= 0:
            os.close(child.pidfd)
            child.pidfd = -1


def is_stopped(child: Child) -> bool:
    """Whether the kernel holds the process by SIGSTOP or a debugger."""
    stat = read_stat(child.pid) if child.is_alive else None
    return stat is not None and stat.is_stopped


def _readable(fds: Iterable[int], timeout_ms: int) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(timeout_ms)]
