"""The fork server's own process: preload once, then fork a rank for every request.

It has one thread, computes nothing, and ends when the launcher does: it sees that in the lifeline,
in the launcher's pidfd and in the socket. It adopts every orphan below it, so at its end it can
kill whatever ranks started, workers in sessions of their own included. That is why it is not
simply killed together with the launcher: PDEATHSIG is SIGKILL only until the preload is done;
then it is SIGCONT, which makes sure that a stopped server wakes up and sees the end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from flodl_shm.proc import parcel
from flodl_shm.proc.exit_status import ExitStatus
from flodl_shm.proc.fork_messages import Answer, Exit, Ready, Refused, Spawn, Spawned
from flodl_shm.proc.forked_child import Entry, Outfit, become_rank, fork, reset_signals
from flodl_shm.proc.leftovers import is_cleaner, kill_groups
from flodl_shm.proc.lifeline import close_launcher_descriptors
from flodl_shm.proc.prctl import adopt_orphans, die_with_parent, set_name
from flodl_shm.proc.procfs import children_of, own_threads
from flodl_shm.proc.signals import SignalPipe

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

IDLE_MS: Final = 60_000  # every event wakes the poll; should one ever not, it costs this much
LAST_KILLS_S: Final = 1.5  # nothing of the run may be left 2 s after the launcher's end
CLEANING_S: Final = 0.3  # of it, for those who remove the names that the others leave
_DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BLAS: Final = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Charter:
    """What the server knows from its start."""

    sock: socket.socket
    launcher_pid: int
    lifeline_fd: int
    preload: Callable[[], None]
    entry: Entry


def become_server(charter: Charter) -> NoReturn:
    """Turn a child fresh from fork, all signals blocked, into the fork server. Never returns."""
    status = 70
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() == charter.launcher_pid:
            _settle()
            status = _serve(charter)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle() -> None:
    """Be deaf to a terminal, hold nothing of the launcher's that would outlive it."""
    reset_signals()
    for signum in _DEAF_TO:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    close_launcher_descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null > 2:
        os.close(null)
    for fd in (1, 2):  # a launcher started without them: received descriptors must be above 2
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    set_name("flodl-forkserver")
    adopt_orphans()


def _serve(charter: Charter) -> int:
    began = time.monotonic_ns()
    blas_before = os.environ.get(_BLAS)
    os.environ[_BLAS] = "1"  # OpenBLAS starts a thread while it is loaded otherwise
    error, collects = "", gc.isenabled()
    gc.disable()  # collections are a fifth of the time that importing torch takes
    try:
        charter.preload()
    except BaseException:
        error = traceback.format_exc()
    preload_ns = time.monotonic_ns() - began
    ready = Ready(pid=os.getpid(), threads=own_threads(), preload_ns=preload_ns, error=error)
    try:
        parcel.send(charter.sock, ready)
    except ConnectionError:  # the launcher has failed meanwhile, and says why
        return 1
    if error:
        return 1
    # Or a collection in a rank would write to, and so copy, every page of the preload. None comes
    # before: it would free 2 % of the objects and keep the first rank waiting for 0.2 s.
    gc.freeze()
    if collects:
        gc.enable()
    server = _Server(charter, env_before={_BLAS: blas_before})
    die_with_parent(signal.SIGCONT)
    try:
        server.run()
    finally:
        server.end_everything()
    return 0


class _Server:
    def __init__(self, charter: Charter, *, env_before: dict[str, str | None]) -> None:
        self._charter = charter
        self._sock = charter.sock
        self._sock.setblocking(False)
        self._env_before = env_before  # a rank's environment is the launcher's, not ours
        self._decoder = msgspec.msgpack.Decoder(Spawn)
        self._signals = SignalPipe((signal.SIGCHLD,))
        self._launcher_pidfd = os.pidfd_open(charter.launcher_pid)
        self._outbox: deque[tuple[Answer, int]] = deque()  # -1: no descriptor travels along
        self._ranks: set[int] = set()

    def run(self) -> None:
        """Serve until the launcher is gone or closes the socket."""
        if os.getppid() != self._charter.launcher_pid:
            return  # it went before we held its pidfd, which may name anybody
        ends = (self._charter.lifeline_fd, self._launcher_pidfd)
        while True:
            poller = select.poll()
            for fd in (*ends, self._signals.fd):
                poller.register(fd, select.POLLIN)
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            ready = dict(poller.poll(IDLE_MS))
            if any(fd in ready for fd in ends):
                return
            self._signals.read()
            self._reap()
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT and not self._take_requests():
                return
            if not self._send_answers():
                return

    def _take_requests(self) -> bool:
        """Fork for every request there is; False when the launcher closed the socket."""
        while True:
            try:
                packet = parcel.receive(self._sock, self._decoder)
            except BlockingIOError:
                return True
            if packet is None:
                return False
            request, fds = packet
            try:
                self._fork(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _fork(self, request: Spawn, fds: list[int]) -> None:
        server_pid = os.getpid()
        outfit = Outfit(
            ticket=request.ticket,
            stdout=fds[0],
            stderr=fds[1],
            fds=tuple(fds[2:]),
            env={**self._env_before, **request.env},
            not_ours=self._own_fds(),
        )
        # Blocked, or a signal that hits the child before it has its own handlers would be
        # written into the server's pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = -1
        try:
            pid = fork()
            if pid == 0:
                become_rank(self._charter.entry, outfit, server_pid=server_pid)
            self._ranks.add(pid)
            # Before any reaping, so the number cannot have been given to another process.
            pidfd = os.pidfd_open(pid)
            self._outbox.append((Spawned(number=request.number, pid=pid), pidfd))
        except OSError as error:
            if pid > 0:
                os.kill(pid, signal.SIGKILL)  # without a pidfd nobody could watch it
            why = f"{error.strerror} (errno {error.errno})"
            self._outbox.append((Refused(number=request.number, why=why), -1))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _own_fds(self) -> tuple[int, ...]:
        waiting = tuple(fd for _, fd in self._outbox if fd >= 0)
        pipe = (self._signals.fd, self._signals.write_fd)
        return (self._sock.fileno(), self._launcher_pidfd, *pipe, *waiting)

    def _reap(self) -> None:
        """Report every rank that ended; reap adopted orphans silently."""
        for pid, status in _ended(self._ranks):
            if pid in self._ranks:
                self._ranks.discard(pid)
                self._outbox.append((Exit(pid=pid, status=status), -1))

    def _send_answers(self) -> bool:
        """Send what the socket takes now; False when the launcher is gone."""
        while self._outbox:
            answer, fd = self._outbox[0]
            try:
                parcel.send(self._sock, answer, () if fd < 0 else (fd,))
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._outbox.popleft()
            if fd >= 0:
                os.close(fd)
        return True

    def end_everything(self) -> None:
        """Kill all ranks, their groups and every orphan adopted, and wait for them, bounded.

        Cleaners are waited for less long and never killed: they end with the others, by themselves.
        """
        began = time.monotonic()
        if self._ranks:
            kill_groups(self._ranks)
        while (now := time.monotonic()) < began + LAST_KILLS_S:
            # Every kill can hand us new orphans, so look again until there is none.
            children = children_of(os.getpid())
            victims = [pid for pid in children if not is_cleaner(pid)]
            if not victims and (not children or now > began + CLEANING_S):
                return
            for pid in victims:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._signals.read()
            _ended(self._ranks)
            select.select([self._signals.fd], [], [], 0.02)


def _ended(ranks: Collection[int]) -> list[tuple[int, ExitStatus]]:
    """Reap every child that ended; what was left of a rank's process group is killed before.

    Before, since the zombie keeps its process id, and with it the id of the group, from being
    given to somebody else.
    """
    ended = []
    with contextlib.suppress(ChildProcessError):
        while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            pid = info.si_pid
            with contextlib.suppress(OSError):
                # A rank that died before its setsid() is still in our group.
                if pid in ranks and os.getpgid(pid) == pid:
                    kill_groups({pid})
            os.waitpid(pid, 0)
            ended.append((pid, ExitStatus.from_siginfo(info)))
    return ended
