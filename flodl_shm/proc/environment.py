"""The environment variables every rank finds, as other launchers set them, and threads per rank.

Pure but for counting cores; reads no environment itself.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flodl_shm.ids import Rank


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all ranks of a run have in common.

    `threads` is what OMP_NUM_THREADS becomes; None leaves the user's own value alone.
    `master_port` is told, not opened: it is there for scripts that start torch.distributed.
    """

    world_size: int
    run_id: str
    run_dir: Path
    threads: int | None
    master_port: int
    master_addr: str = "127.0.0.1"


def rank_environment(rank: Rank, facts: RunFacts) -> dict[str, str]:
    """The variables one rank of a one-host run is given on top of the launcher's."""
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(facts.world_size),
        "LOCAL_WORLD_SIZE": str(facts.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": str(facts.master_port),
        "FLODL_RUN_ID": facts.run_id,
        "FLODL_RUN_DIR": str(facts.run_dir),
    }
    if facts.threads is not None:
        env["OMP_NUM_THREADS"] = str(facts.threads)
    return env


def threads_per_rank(cores: int, ranks: int) -> int:
    """An equal share of the cores, at least one."""
    return max(1, cores // max(1, ranks))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity, and the cgroup's CPU quota rounded up."""
    cores = len(os.sched_getaffinity(0))
    versions = (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu.cfs_period_us"))
    for quota_file, period_file in versions:
        quota = _quota(cgroup / quota_file, period_file)
        if quota is not None:
            cores = min(cores, max(1, math.ceil(quota)))
    return cores


def _quota(path: Path, period_file: str | None) -> float | None:
    """CPUs' worth of time per period; None without a limit or without the file."""
    try:
        words = path.read_text().split()
        if period_file is not None:
            words += (path.parent / period_file).read_text().split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return None  # "max" is no number either
    return quota / period if quota > 0 and period > 0 else None
