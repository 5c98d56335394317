"""Looks every half second at what each rank uses, whatever the rank is doing: it is not asked.

From /proc, by the launcher's loop. CPU time and resident memory cost one small read each. What
smaps_rollup says (pss, private) makes the kernel walk all pages of a rank and holds up its memory
maps meanwhile: one rank at a time, seldom, and none that is stopped or stuck, since there the read
would not return. Whatever a look has cost, the next one is so far off that all stay well under
1 % of a core.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from flodl_shm.gpu.usage import open_watch
from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.metrics import MetricsFile
from flodl_shm.proc.procfs import read_memory, read_usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flodl_shm.engine.host import Host
    from flodl_shm.engine.recorder import Recorder
    from flodl_shm.proc.procfs import Memory
    from flodl_shm.proc.supervisor import Child

EVERY_NS: Final = 500_000_000
MEMORY_EVERY_NS: Final = 10_000_000_000  # of each rank
MEMORY_FIRST_NS: Final = 2_000_000_000  # after the first sight of it: a short run has one too
THRIFT: Final = 200  # a look that took t is followed by none for 200 t


class Sampler:
    """Fills `recorder.resources` and RUN_DIR/resources.jsonl, one line per look."""

    def __init__(self, host: Host, recorder: Recorder) -> None:
        self._recorder = recorder
        self._file = MetricsFile(host.record.resources, warn=recorder.say)
        self._gpus = open_watch(host.config.devices, host.config.visible_devices)
        self._at = Nanos(0)
        self._memory_at: dict[Rank, Nanos] = {}
        self._memory_free_at = Nanos(0)
        self._memory_took = 0  # ns of this look

    def tick(self, living: Iterable[Child], now: Nanos) -> None:
        """Look, if it is time to. Call as often as convenient."""
        if now < self._at:
            return
        self._memory_took = 0
        began = time.thread_time_ns()
        self._look(living, now)
        took = time.thread_time_ns() - began - self._memory_took
        self._at = Nanos(now + max(EVERY_NS, THRIFT * took))

    def close(self) -> None:
        """Give file and driver back; twice is harmless."""
        self._file.close()
        if self._gpus is not None:
            self._gpus.close()

    def _look(self, living: Iterable[Child], now: Nanos) -> None:
        tally, use = self._recorder.tally, self._recorder.resources.launcher
        me = os.getpid()
        own = read_usage(me)
        told: dict[str, object] = {
            "at_s": round((now - tally.facts.started_at) / 1e9, 3),
            "picks": tally.picks,
            "ranks": [seen for child in living if (seen := self._rank(child, now))],
        }
        if own is not None:
            share = use.sample(me, cpu_s=own.cpu_s, rss_mib=own.rss_mib, now=now)
            told["launcher"] = {"cpu": _rounded(share), "rss_mib": round(own.rss_mib, 1)}
        if self._gpus is not None:
            told["gpus"] = msgspec.to_builtins(self._gpus.sample())
        self._file.write(told)

    def _rank(self, child: Child, now: Nanos) -> dict[str, object]:
        usage = read_usage(child.pid)
        if usage is None:
            return {}
        use = self._recorder.resources.ranks[child.rank]
        share = use.sample(child.pid, cpu_s=usage.cpu_s, rss_mib=usage.rss_mib, now=now)
        told = {
            "rank": child.rank,
            "pid": child.pid,
            "state": usage.state,
            "cpu": _rounded(share),
            "rss_mib": round(usage.rss_mib, 1),
            "threads": usage.threads,
        }
        if usage.is_healthy and self._may_read_memory(child.rank, now):
            memory = self._memory(child, now)
            if memory is not None:
                use.pss_mib, use.private_mib = memory.pss, memory.private
                told["pss_mib"] = round(memory.pss, 1)
                told["private_mib"] = round(memory.private, 1)
        return told

    def _memory(self, child: Child, now: Nanos) -> Memory | None:
        """The dear look, with a pace of its own: the cheap ones go on meanwhile."""
        began = time.thread_time_ns()
        memory = read_memory(child.pid)
        self._memory_took = time.thread_time_ns() - began
        self._memory_at[child.rank] = Nanos(now + MEMORY_EVERY_NS)
        self._memory_free_at = Nanos(now + max(EVERY_NS, 2 * THRIFT * self._memory_took))
        return memory

    def _may_read_memory(self, rank: Rank, now: Nanos) -> bool:
        due = self._memory_at.setdefault(rank, Nanos(now + MEMORY_FIRST_NS))
        return now >= due and now >= self._memory_free_at


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
