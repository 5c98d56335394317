"""How much memory this process holds."""

from __future__ import annotations

import psutil

MIB = 1024 * 1024


def footprint() -> tuple[float, float]:
    """(rss, pss) of this process in MiB; pss counts shared pages by their share."""
    memory = psutil.Process().memory_full_info()
    return memory.rss / MIB, memory.pss / MIB
