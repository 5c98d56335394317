"""Which ranks hang: stopped, or without progress while others wait for them.

Slow is not dead. A rank is given up only if its heart has not beaten for `dead_after_s` and the
kernel says it is stopped, or if it has shown no progress for `stall_timeout_s` while something
waits for it. In an errand, where a user's function has a limit of its own, the second time begins
when that limit has passed. Who holds the GIL for long shows neither. While this process itself
stood still nobody was watched, and nothing of that time counts.

A rank that stalls is asked for its stacks first. It is given up when they are there or after half
a second; if it moves meanwhile, it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flodl_shm.engine.hang import NOWHERE, Place, in_lines, place_of, report_of
from flodl_shm.ids import Nanos
from flodl_shm.proc import stacks
from flodl_shm.proc.error_file import write_for
from flodl_shm.proc.supervisor import is_stopped
from flodl_shm.shm.arena import REDUCING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.engine.host import Host
    from flodl_shm.ids import Rank, Row
    from flodl_shm.proc.stacks import StackCall

BEAT_NS: Final = 100_000_000  # between two heartbeats, see engine/rank_session.py
ANSWER_NS: Final = 5_000_000  # between two looks at what was asked for
NO_PROGRESS, NO_HEARTBEAT = "no progress", "stopped, no heartbeat"  # how a death's words begin
ASLEEP_NS: Final = 2_000_000_000  # looks come every half second, or this process stood still


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank to be killed. `place` is None for one that is stopped: it was not asked."""

    rank: Rank
    why: str
    place: Place | None = None
    stacks: str = ""


class Watch:
    """Remembers when each rank last moved, and who was asked for stacks."""

    def __init__(
        self, dead_after_s: float, stall_timeout_s: float, callback_timeout_s: float
    ) -> None:
        self._dead_after_ns = int(dead_after_s * 1e9)
        self._stall_ns = int(stall_timeout_s * 1e9)
        self._stall_s = stall_timeout_s
        self._errand_ns = int((stall_timeout_s + callback_timeout_s) * 1e9)
        self._moved: dict[Rank, tuple[object, Nanos]] = {}
        self._calls: dict[Rank, StackCall] = {}
        self._given_up: set[Row] = set()  # killed, though some take their time to go
        self._looked_at = self._awake_since = Nanos(0)
        self.due = Nanos(0)  # when to look again at the latest

    def look(self, host: Host, awaited: Mapping[Rank, str], now: Nanos) -> list[Lost]:
        """Ranks to be killed, and why."""
        if now - self._looked_at > ASLEEP_NS:
            self._awake_since = now
        self._looked_at = now
        self.due = Nanos(now + self._dead_after_ns)
        lost = []
        for rank in host.alive():
            if host.members[rank].row in self._given_up:
                continue
            one = self._stopped(host, rank, now) or self._stalled(host, rank, awaited, now)
            if one is not None:
                self._given_up.add(host.members[rank].row)
                lost.append(one)
        return lost

    def _look_again(self, at: int) -> None:
        self.due = Nanos(min(self.due, at))

    def _stopped(self, host: Host, rank: Rank, now: Nanos) -> Lost | None:
        beat = host.block.beat(host.members[rank].row).load()
        if not beat:
            return None
        silent_ns = now - max(beat, self._awake_since)
        if silent_ns < self._dead_after_ns:
            self._look_again(now + self._dead_after_ns - silent_ns)
            return None
        self._look_again(now + BEAT_NS)
        if not is_stopped(host.supervisor.children[rank]):
            return None
        return Lost(rank, f"{NO_HEARTBEAT} for {silent_ns / 1e9:.1f} s")

    def _stalled(
        self, host: Host, rank: Rank, awaited: Mapping[Rank, str], now: Nanos
    ) -> Lost | None:
        errand = host.block.errand(host.members[rank].row).load()
        mark = host.progress_mark(rank), errand
        before, since = self._moved.get(rank, (None, now))
        if rank not in awaited or mark != before:
            self._moved[rank] = (mark, now)
            self._calls.pop(rank, None)
            return None
        since = max(since, self._awake_since)
        if now - since < (self._errand_ns if errand else self._stall_ns):
            return None
        call = self._calls.get(rank)
        if call is None:
            call = self._calls[rank] = ask_for_stacks(host, rank, now)
        answer = call.poll(now)
        if answer is None:
            self._look_again(now + ANSWER_NS)
            return None
        del self._calls[rank]
        place = place_of(answer, guess_of(host, rank))
        length_s = (now - since) / 1e9 if errand else self._stall_s
        why = (
            f"{NO_PROGRESS} for {length_s:.4g} s in {place.words()}; {awaited[rank]} is waited for"
        )
        return Lost(rank, why if answer else f"{why}; it gave no stacks", place, answer)


class StackView:
    """Stacks of all ranks for somebody who looks on: asked for at once, shown when they come."""

    def __init__(self) -> None:
        self._calls: dict[Rank, StackCall] = {}

    @property
    def is_open(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._calls)

    def ask(self, host: Host, now: Nanos) -> None:
        """Ask every living rank that has not been asked already."""
        for rank in host.alive():
            if rank not in self._calls:
                self._calls[rank] = ask_for_stacks(host, rank, now)

    def lines(self, now: Nanos) -> list[str]:
        """What has come since the last call, or will not come any more."""
        lines = []
        for rank, call in list(self._calls.items()):
            answer = call.poll(now)
            if answer is not None:
                del self._calls[rank]
                lines += in_lines(rank, answer)
        return lines


def give_up(host: Host, lost: Lost, now: Nanos) -> str:
    """Kill a rank that hangs, and say in its error file what it was at; why not, if not."""
    fault = None
    if lost.place is not None:
        seat = lost.rank, host.members[lost.rank].row
        pid = host.supervisor.children[lost.rank].pid
        report = report_of(lost.place, lost.stacks, seat=seat, pid=pid, now=now, why=lost.why)
        fault = write_for(host.run_dir.error_file(lost.rank), report)
    host.supervisor.kill(lost.rank, lost.why)
    return f"rank {lost.rank}: its error file was not written: {fault}" if fault else ""


def ask_for_stacks(host: Host, rank: Rank, now: Nanos) -> StackCall:
    """Ask, if the rank would survive it."""
    call = stacks.StackCall(host.run_dir.stacks_file(rank), now)
    if stacks.is_listening(host.supervisor.children[rank].pid):
        host.supervisor.send(rank, stacks.SIGNAL)
    return call


def guess_of(host: Host, rank: Rank) -> str:
    """What class of thing the rank is at, by what it has published."""
    row = host.members[rank].row
    if host.block.errand(row).load():
        return "callback"
    in_reduce = host.arena is not None and host.arena.state(row) >= REDUCING
    return "reduce" if in_reduce else NOWHERE
