"""Run by the tests: the launcher's part of many runs, one after the other, in one process.

python cycles.py DIR COUNT     a line of JSON after each run: exit code and what is held
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

from flodl_shm.control.options import Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload
from flodl_shm.proc.procfs import children_of


def held() -> dict[str, object]:
    """Everything a run might leave in this process, and beside it."""
    status = Path("/proc/self/status").read_text().splitlines()
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "segments": sum("flodl" in line for line in maps),
        "names": [name for name in os.listdir("/dev/shm") if "flodl" in name],
        "children": len(children_of(os.getpid())),
        "rss_kib": rss,
    }


def main() -> None:
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    preload()
    for number in range(count):
        config = RunConfig(
            ranks=2,
            devices=("cpu",) * 2,
            workload="paced",
            workload_options={"step_ms": (1.0, 1.0), "picks": 4},
            wishes=Wishes(epochs=1, batch_size=1, policy="sync"),
            run_root=root / str(number),
            progress="none",
            start="fork",
        )
        code = launch(config)
        print(json.dumps({"code": code, **held()}), flush=True)
        shutil.rmtree(root / str(number))


if __name__ == "__main__":
    main()
