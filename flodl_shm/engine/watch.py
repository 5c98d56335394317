"""Which ranks hang: stopped, or without progress while others wait for them.

Slow is not dead. A rank is given up only if its heart has not beaten for `dead_after_s` and the
kernel says it is stopped, or if it has shown no progress for `stall_timeout_s` while something
waits for it. Who holds the GIL for long shows neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.proc.supervisor import is_stopped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flodl_shm.engine.host import Host
    from flodl_shm.ids import Nanos, Rank


class Watch:
    """Remembers when each rank last moved."""

    def __init__(self, dead_after_s: float, stall_timeout_s: float) -> None:
        self._dead_after_ns = int(dead_after_s * 1e9)
        self._stall_ns = int(stall_timeout_s * 1e9)
        self._stall_s = stall_timeout_s
        self._moved: dict[Rank, tuple[object, Nanos]] = {}

    def look(self, host: Host, awaited: Mapping[Rank, str], now: Nanos) -> list[tuple[Rank, str]]:
        """Ranks to be killed, and why."""
        lost = []
        for rank in host.alive():
            why = self._stopped(host, rank, now) or self._stalled(host, rank, awaited, now)
            if why:
                lost.append((rank, why))
        return lost

    def _stopped(self, host: Host, rank: Rank, now: Nanos) -> str:
        beat = host.block.beat(host.members[rank].row).load()
        silent_ns = now - beat
        if not beat or silent_ns < self._dead_after_ns:
            return ""
        if not is_stopped(host.supervisor.children[rank]):
            return ""
        return f"stopped, no heartbeat for {silent_ns / 1e9:.1f} s"

    def _stalled(self, host: Host, rank: Rank, awaited: Mapping[Rank, str], now: Nanos) -> str:
        mark = host.progress_mark(rank)
        before, since = self._moved.get(rank, (None, now))
        if rank not in awaited or mark != before:
            self._moved[rank] = (mark, now)
            return ""
        if now - since < self._stall_ns:
            return ""
        return f"no progress for {self._stall_s:g} s; {awaited[rank]} is waited for"
