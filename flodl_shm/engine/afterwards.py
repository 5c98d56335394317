"""Scripts that go on after their training: for how long nobody of them has done anything.

A script may evaluate, plot and save as long as it likes. What only waits, an exit handler for a
process that never ends, say, is not waited for for ever. Done is what uses the processor: more of
it than the thread that beats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flodl_shm.proc.procfs import read_usage

if TYPE_CHECKING:
    from flodl_shm.engine.host import Host
    from flodl_shm.ids import Nanos

EVERY_NS: Final = 1_000_000_000  # the kernel counts in hundredths of a second
AT_WORK: Final = 0.03  # of a core; a rank that only beats takes a thousandth


class Afterwards:
    """Asked again and again from a good end on; `limit_s` 0: nobody is waited for."""

    def __init__(self, limit_s: float, now: Nanos) -> None:
        self._limit_ns = int(limit_s * 1e9)
        self._worked_at = now
        self._looked: dict[int, tuple[Nanos, float]] = {}  # by pid: when, CPU seconds by then

    def is_over(self, host: Host, now: Nanos) -> bool:
        """Whether no living rank has worked for that long."""
        for rank in host.alive():
            if self._works(host.supervisor.children[rank].pid, now):
                self._worked_at = now
        return now - self._worked_at >= self._limit_ns

    def _works(self, pid: int, now: Nanos) -> bool:
        before, cpu_s = self._looked.get(pid, (None, 0.0))
        if before is not None and now - before < EVERY_NS:
            return False
        usage = read_usage(pid)
        if usage is None:
            return False
        self._looked[pid] = now, usage.cpu_s
        return before is not None and usage.cpu_s - cpu_s > AT_WORK * (now - before) / 1e9
