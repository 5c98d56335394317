"""The launcher's side of the fork server: start it, ask it for ranks, hear of their ends.

The server is forked, not exec'd, from the launcher while that has one thread, imports what the
preload imports once, and forks a rank per request, so ranks share the pages of torch and start in
milliseconds. What a rank does is the entry, fixed at the start. Policy about deaths lives
elsewhere. Use it from one thread, the main one: the server is told when that thread ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from flodl_shm.errors import HostUnfit, PeersLost
from flodl_shm.proc import parcel
from flodl_shm.proc.exit_status import ExitStatus
from flodl_shm.proc.fork_loop import Charter, become_server
from flodl_shm.proc.fork_messages import Answer, Exit, Ready, Refused, Spawn, Spawned
from flodl_shm.proc.forked_child import Entry, fork
from flodl_shm.proc.leftovers import kill_groups
from flodl_shm.proc.lifeline import Lifeline, close_in_launcher, keep_in_launcher
from flodl_shm.proc.procfs import own_threads

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from flodl_shm.ids import Nanos

CLOSE_NS: Final = 3_000_000_000  # the server gives its own last kills 1.5 s
KILL_NS: Final = 2_000_000_000  # from SIGKILL to the end; more only in uninterruptible sleep
_LONGEST_POLL_MS: Final = 3_600_000  # poll() takes a C int; every wait here looks again anyway


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """One rank to be. Descriptors are copied on the way; the caller's stay the caller's.

    `env` is put on top of the launcher's environment; None removes a variable. `stdout` and
    `stderr` become the rank's descriptors 1 and 2; `fds` are handed to the entry in this order,
    under new numbers, closed on exec.
    """

    ticket: bytes
    stdout: int
    stderr: int
    fds: Sequence[int] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)


class ForkServer:
    """Made by `start`. A descriptor of `poll_fds` is readable when `exits` has something to say."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.ready: Ready | None = None
        self.lost = ""  # once nothing more can come: why, in words
        self.launcher_threads = own_threads()  # more than 1 at the fork is a risk to name
        self._sock = sock
        self._sock.setblocking(False)
        self._pidfd = os.pidfd_open(pid)  # our own unreaped child: the number is still its own
        keep_in_launcher(self._pidfd)
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._last_number = 0
        self._awaited = 0  # the request whose answer is waited for; 0: none
        self._answer: tuple[Spawned | Refused, int] | None = None  # to that request
        self._exits: list[Exit] = []
        self._ranks: set[int] = set()  # spawned, and not known to have been reaped

    @classmethod
    def start(cls, entry: Entry, *, preload: Callable[[], None], lifeline: Lifeline) -> ForkServer:
        """Fork the server; returns at once, while the preload runs.

        `preload()` runs in the server with OPENBLAS_NUM_THREADS=1. `entry(ticket, fds)` runs in
        every rank; whatever it does, the rank's process ends with it.
        """
        ours, theirs = parcel.pair()
        keep_in_launcher(ours.fileno())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # or what waits in the buffer would be there twice
        charter = Charter(
            sock=theirs,
            launcher_pid=os.getpid(),
            lifeline_fd=lifeline.read_fd,
            preload=preload,
            entry=entry,
        )
        # Blocked, or a Ctrl-C in the instant after the fork would reach the launcher's signal
        # pipe twice: the child still has it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = fork()
            if pid == 0:
                become_server(charter)
        except OSError as error:
            close_in_launcher(ours.detach())
            raise HostUnfit(f"the fork server could not be started: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        return cls(ours, pid)

    def poll_fds(self) -> list[int]:
        """What to poll for reading; empty once the server is gone."""
        return [] if self.lost else [self._sock.fileno(), self._pidfd]

    def wait_ready(self, *, deadline: Nanos) -> Ready:
        """Wait for the end of the preload.

        Raises HostUnfit with the preload's traceback if it failed, PeersLost if the server died
        or the deadline passed.
        """
        self._wait(lambda: self.ready is not None, deadline=deadline, what="to finish its imports")
        assert self.ready is not None
        if self.ready.error:
            raise HostUnfit(f"the fork server's imports failed:\n{self.ready.error.rstrip()}")
        return self.ready

    def spawn(self, request: SpawnRequest, *, deadline: Nanos) -> tuple[int, int]:
        """Fork one rank; its process id and its pidfd, which is the caller's to close.

        Waits for the preload first. Raises HostUnfit if the fork failed, PeersLost if the server
        died or the deadline passed (a rank that comes after all is killed).
        """
        self.wait_ready(deadline=deadline)
        self._last_number += 1
        message = Spawn(number=self._last_number, ticket=request.ticket, env=dict(request.env))
        fds = (request.stdout, request.stderr, *request.fds)
        self._awaited = self._last_number
        try:
            self._send(message, fds, deadline=deadline)
            self._wait(lambda: self._answer is not None, deadline=deadline, what="to fork a rank")
        finally:
            self._awaited = 0
        answer, pidfd = self._take_answer()
        if isinstance(answer, Refused):
            raise HostUnfit(
                f"a rank could not be started: {answer.why}",
                hint="check ulimit -u and the pids limit of the container",
            )
        return answer.pid, pidfd

    def exits(self) -> list[Exit]:
        """Ranks reaped since the last call, in order. Never blocks.

        Raises PeersLost once the server is gone and everything it said has been handed out.
        """
        self._pump()
        exits, self._exits = self._exits, []
        if not exits and self.lost:
            raise PeersLost(self.lost)
        return exits

    def close(self) -> None:
        """End the server with every rank it still has and all they started; bounded."""
        if self._pidfd < 0:
            return
        self._pump()
        self.lost = self.lost or f"the fork server (pid {self.pid}) was closed"
        close_in_launcher(self._sock.detach())
        if not _ends(self._pidfd, within_ns=CLOSE_NS):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            _ends(self._pidfd, within_ns=KILL_NS)
        self._reap()
        self._kill_groups()
        close_in_launcher(self._pidfd)
        self._pidfd = -1

    # ---- inside ----------------------------------------------------------------------------

    def _take_answer(self) -> tuple[Spawned | Refused, int]:
        assert self._answer is not None
        answer, self._answer = self._answer, None
        return answer

    def _send(self, message: Spawn, fds: Sequence[int], *, deadline: Nanos) -> None:
        while True:
            try:
                parcel.send(self._sock, message, fds)
            except BlockingIOError:
                left = deadline - time.monotonic_ns()
                if left <= 0:
                    raise self._too_late("to read a request") from None
                _poll([self._sock.fileno()], select.POLLOUT, left)
            except ConnectionError:
                self._wait(lambda: False, deadline=deadline, what="to read a request")
            else:
                return

    def _wait(self, done: Callable[[], bool], *, deadline: Nanos, what: str) -> None:
        """Pump until `done()`; PeersLost when the server is gone or the deadline has passed."""
        while True:
            self._pump()
            if done():
                return
            if self.lost:
                raise PeersLost(f"{self.lost} while the launcher waited for it {what}")
            left = deadline - time.monotonic_ns()
            if left <= 0:
                raise self._too_late(what)
            _poll(self.poll_fds(), select.POLLIN, left)

    def _too_late(self, what: str) -> PeersLost:
        return PeersLost(f"the fork server (pid {self.pid}) took too long {what}")

    def _pump(self) -> None:
        """Read everything the server has said. Its pidfd first: what it said before is complete."""
        if self.lost:
            return
        gone = bool(_poll([self._pidfd], select.POLLIN, 0))
        while True:
            try:
                packet = parcel.receive(self._sock, self._decoder)
            except BlockingIOError:
                break
            if packet is None:
                # It closed its end, so it is about to end: its status is worth the wait.
                gone = gone or _ends(self._pidfd, within_ns=KILL_NS)
                self._note_loss()
                return
            self._note(*packet)
        if gone:
            self._note_loss()

    def _note(self, answer: Answer, fds: list[int]) -> None:
        if isinstance(answer, Ready):
            self.ready = answer
        elif isinstance(answer, Exit):
            self._ranks.discard(answer.pid)
            self._exits.append(answer)
        else:
            pidfd = fds.pop() if fds else -1
            if isinstance(answer, Spawned):
                self._ranks.add(answer.pid)
            if answer.number == self._awaited:
                self._answer = (answer, pidfd)
            elif pidfd >= 0:  # it came after its deadline: nobody wants this rank any more
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)

    def _note_loss(self) -> None:
        status = self._reap()
        how = status.words() if status else "status unknown"
        self.lost = f"the fork server (pid {self.pid}) is gone: {how}"
        self._kill_groups()

    def _reap(self) -> ExitStatus | None:
        # Unknown when the user's program, in whose process we may live, waits for any child.
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            return ExitStatus.from_siginfo(info) if info else None
        return None

    def _kill_groups(self) -> None:
        """Ranks die with the server by PDEATHSIG; what they had started does not.

        Their numbers are still theirs as long as a member of the group lives.
        """
        if self._ranks:
            kill_groups(self._ranks)
        self._ranks.clear()


def _poll(fds: Sequence[int], events: int, left_ns: int) -> list[tuple[int, int]]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    return poller.poll(min(-(-left_ns // 1_000_000), _LONGEST_POLL_MS))


def _ends(pidfd: int, *, within_ns: int) -> bool:
    return bool(_poll([pidfd], select.POLLIN, within_ns))
