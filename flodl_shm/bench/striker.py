"""Strikes the ranks of a run as a list of blows says: real signals at seeded moments.

A process of its own, forked before the launcher starts anything, so the launcher stays as it is
shipped. It follows the run's journal; each blow comes a number of windows after the one before,
at a random moment of a window. What was done, and when on the monotonic clock, goes line by line
into `blows.jsonl`. The last living rank is never struck. After the last blow it waits for some
more windows and asks the launcher to stop, if that is wanted.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from flodl_shm.bench.run_follower import RunFollower
from flodl_shm.ids import Nanos, Rank
from flodl_shm.proc.prctl import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from flodl_shm.ids import Row

BLOWS = "blows.jsonl"
LOOK_S = 0.002
LOOK_CLOSELY_S = 0.0003  # a reduce of a small model lasts a millisecond
PATIENCE_S = 60.0  # for a reduce to strike in, and for the last windows
GONE_S = 5.0  # for a killed process to be gone
IN_REDUCE_S = 0.1  # a blow inside a reduce falls so long after the last arrival, at most
DEADLY = ("kill", "stop", "raise")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing to do. `rank` None: whoever is drawn of those that train.

    `do`: kill; stop (for good); pause (for `seconds`); or another word, an order that the script
    itself carries out (see faults_script.py).
    """

    do: str
    commits: int  # windows after the blow before it, or after the first commit
    rank: Rank | None = None
    full: bool = False  # count only windows that all ranks of the run were in
    in_reduce: bool = False
    seconds: float = 0.0  # of a pause
    after_s: float = 0.0  # nor sooner than this after the blow before it


class Struck(msgspec.Struct, frozen=True):
    """A line of `blows.jsonl`. `at`: just before the signal was sent, or by the rank itself."""

    do: str
    rank: Rank
    at: Nanos
    gone_at: Nanos | None = None  # of a kill: the kernel was done with the process


class Striker:
    """Carries out one list of blows against one run. `seed` gives the moments and the victims."""

    def __init__(self, root: Path, *, ranks: int, seed: str, launcher: int) -> None:
        self._root, self._ranks, self._launcher = root, ranks, launcher
        self._draw = random.Random(seed)
        self._run = RunFollower(root)
        self._struck: dict[Rank, Row] = {}  # the newest incarnation that was to die

    def work(self, blows: Sequence[Blow], *, stop_after: int | None) -> None:
        """Do all of it. Returns early when the run ends."""
        since, at_s = 1, time.monotonic()
        for blow in blows:
            part, lot = self._draw.random(), self._draw.random()  # whatever else happens
            if not self._until(partial(self._is_due, blow, since, at_s)):
                return
            self._moment(blow, part)
            if (victim := self._victim(blow, lot)) is not None:
                self._strike(blow, victim)
            since, at_s = len(self._run.commits), time.monotonic()
        if stop_after is not None:
            self._until(lambda: len(self._run.commits) >= since + stop_after, limit_s=PATIENCE_S)
            if not self._run.ended:
                os.kill(self._launcher, signal.SIGINT)

    # ---- when ---------------------------------------------------------------------------------

    def _is_due(self, blow: Blow, since: int, at_s: float) -> bool:
        newer = [commit for _, commit in self._run.commits[since:]]
        if blow.full:
            newer = [commit for commit in newer if len(commit.contributors) == self._ranks]
        has_trained = bool(self._run.commits) and len(newer) >= blow.commits
        if not has_trained or time.monotonic() - at_s < blow.after_s:
            return False
        fit = self._eligible()
        return len(fit) > 1 and (blow.rank is None or blow.rank in fit)

    def _until(self, is_so: Callable[[], bool], *, limit_s: float | None = None) -> bool:
        """Wait until it is so; False when the run ended before, or the limit passed."""
        give_up = None if limit_s is None else time.monotonic() + limit_s
        while not self._run.ended and os.getppid() == self._launcher:
            if is_so():
                return True
            if give_up is not None and time.monotonic() > give_up:
                return False
            self._run.wait(LOOK_S)
        return False

    def _moment(self, blow: Blow, part: float) -> None:
        """Wait for a moment of a window, or for one inside of a reduce if it comes in time."""
        if not blow.in_reduce:
            self._run.wait(part * self._run.window_s)
            return
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit and not self._run.ended:
            if self._run.in_reduce:
                time.sleep(part * IN_REDUCE_S)
                return
            self._run.wait(LOOK_CLOSELY_S)

    # ---- whom ---------------------------------------------------------------------------------

    def _eligible(self) -> list[Rank]:
        """Who trains and was not struck, or is back since."""
        living = self._run.living
        return [r for r in self._run.training if living[r] != self._struck.get(r)]

    def _victim(self, blow: Blow, lot: float) -> Rank | None:
        """Never the only one that trains; None where there is no choice any more."""
        fit = self._eligible()
        if len(fit) < 2 or self._run.ended:
            return None
        if blow.rank is None:
            return fit[int(lot * len(fit))]
        return blow.rank if blow.rank in fit else None

    def _strike(self, blow: Blow, victim: Rank) -> None:
        try:
            pid = self._run.pid(victim)
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended meanwhile: there is nobody to strike
        try:
            self._carry_out(blow, victim, pidfd)
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)
        if blow.do in DEADLY:
            self._struck[victim] = self._run.living[victim]

    def _carry_out(self, blow: Blow, victim: Rank, pidfd: int) -> None:
        """Do it and write it down; an order is written down by who carries it out."""
        if blow.do not in SIGNALS:
            (self._root / f"order-{blow.do}-{victim}").touch()
            return
        at = Nanos(time.monotonic_ns())
        signal.pidfd_send_signal(pidfd, SIGNALS[blow.do])
        gone_at = None
        if blow.do == "kill":
            select.select([pidfd], [], [], GONE_S)
            gone_at = Nanos(time.monotonic_ns())
        note(self._root, Struck(blow.do, victim, at, gone_at))
        if blow.do == "pause":
            time.sleep(blow.seconds)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def note(root: Path, struck: Struck) -> None:
    """Append a line; those of several processes stay whole."""
    fd = os.open(root / BLOWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.encode(struck) + b"\n")
    finally:
        os.close(fd)


def blows_of(root: Path) -> list[Struck]:
    """What was done to the run under `root`, in order."""
    try:
        lines = (root / BLOWS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return sorted((msgspec.json.decode(line, type=Struck) for line in lines), key=lambda s: s.at)


def fork_striker(
    root: Path, blows: Sequence[Blow], *, ranks: int, seed: str, stop_after: int | None = None
) -> int:
    """Start it, before the run under `root` is; its process id, for `reap`.

    `stop_after` so many windows after the last blow the launcher, this process, gets SIGINT.
    """
    launcher = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        striker = Striker(root, ranks=ranks, seed=seed, launcher=launcher)
        striker.work(blows, stop_after=stop_after)
        code = 0
    except BaseException as exc:
        print(f"the striker failed: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def reap(pid: int) -> bool:
    """End the striker of a run that is over; False if it had failed."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:  # it sees the end of the run in its own time, which nobody waits for
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True
    return os.waitstatus_to_exitcode(status) == 0
