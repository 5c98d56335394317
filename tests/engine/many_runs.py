"""Run by the tests: many short runs in one launcher process, so that torch is imported once.

    python many_runs.py DIR SEED RUNS     kills a random rank at a random moment of each run

Prints one JSON line per run: what was killed, the exit code, and the summary's path. The killer
is a process of its own, so the launcher stays single-threaded.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from flodl_shm.control.options import Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload

PATIENCE_S = 20.0


def config_of(root: Path, rng: random.Random, *, ranks: int, policy: str) -> RunConfig:
    """A run of about a second."""
    steps = tuple(rng.choice((3.0, 6.0, 9.0)) for _ in range(ranks))
    return RunConfig(
        ranks=ranks,
        devices=("cpu",) * ranks,
        workload="paced",
        workload_options={"step_ms": steps, "picks": 80},
        wishes=Wishes(
            epochs=2, batch_size=1, policy=policy, anchor=4 if policy == "cadence" else None
        ),
        run_root=root,
        progress="none",
        summary=root / "summary.json",
    )


def fork_killer(root: Path, victim: int, delay_s: float) -> int:
    """Kill the rank `delay_s` after its pid file appears. Returns the killer's pid."""
    started = time.time()
    pid = os.fork()
    if pid:
        return pid
    try:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            files = [
                path
                for path in root.glob(f"2*/ranks/rank{victim}/pid")
                if path.stat().st_mtime >= started
            ]
            if files:
                time.sleep(delay_s)
                os.kill(int(files[0].read_text().split()[0]), signal.SIGKILL)
                break
            time.sleep(0.001)
    except ProcessLookupError:
        os._exit(3)  # it had ended before
    os._exit(0)


def main() -> None:
    root, seed, runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    preload()  # once: the fork servers find everything imported
    for number in range(runs):
        ranks = rng.choice((2, 3))
        policy = rng.choice(("cadence", "cadence", "sync"))
        victim, delay_s = rng.randrange(ranks), rng.uniform(0, 0.7)
        place = root / str(number)
        place.mkdir()
        config = config_of(place, rng, ranks=ranks, policy=policy)
        killer = fork_killer(place, victim, delay_s)
        code = launch(config)
        _, status = os.waitpid(killer, 0)
        print(
            json.dumps(
                {
                    "ranks": ranks,
                    "policy": policy,
                    "victim": victim,
                    "delay_s": round(delay_s, 3),
                    "struck": os.waitstatus_to_exitcode(status) == 0,
                    "exit": code,
                    "summary": str(config.summary),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
