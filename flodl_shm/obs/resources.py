"""What each rank has used of the machine, folded from samples: peaks, last values, averages.

Knows neither /proc nor a clock; samples are handed in by whoever takes them. A rank that comes
back as another process goes on in the same sums.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flodl_shm.ids import Nanos, Rank


@dataclass(slots=True)
class RankUse:
    """One rank. MiB; None for what was never sampled."""

    rss_mib: float | None = None
    rss_peak_mib: float | None = None
    pss_mib: float | None = None
    private_mib: float | None = None
    _pid: int = 0
    _cpu_s: float = 0.0  # of `_pid`, at the newest sample
    _at: Nanos | None = None
    _busy_s: float = 0.0
    _watched_s: float = 0.0

    @property
    def cpu_share(self) -> float | None:
        """Cores it kept busy on average, from its first sample to the newest."""
        return self._busy_s / self._watched_s if self._watched_s else None

    def sample(self, pid: int, *, cpu_s: float, rss_mib: float, now: Nanos) -> float | None:
        """Take one sample; cores kept busy since the last one, None for the first of a process."""
        self.rss_mib = rss_mib
        self.rss_peak_mib = max(self.rss_peak_mib or 0.0, rss_mib)
        before, began = self._cpu_s, self._at
        is_first = pid != self._pid
        self._pid, self._cpu_s, self._at = pid, cpu_s, now
        if is_first or began is None or now <= began:
            return None
        passed_s = (now - began) / 1e9
        busy_s = max(0.0, cpu_s - before)
        self._watched_s += passed_s
        self._busy_s += busy_s
        return busy_s / passed_s


@dataclass(slots=True)
class Resources:
    """All ranks of a run, and the launcher itself."""

    ranks: defaultdict[Rank, RankUse] = field(default_factory=lambda: defaultdict(RankUse))
    launcher: RankUse = field(default_factory=RankUse)
