"""Chaos for as long as one likes: `scripts/soak chaos [--minutes M] [--seed K]`.

Real runs, one after the other in one launcher process. In each a striker kills, stops and pauses
ranks as a schedule says that follows from the seed and the run's number; ranks come back. After
each run: it ended as it should, each pick of each epoch counts once, ranks agree, commits came
all along, and the launcher has no more descriptors, threads, mappings or children than before.
`--run N` plays the schedule of one run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from flodl_shm.bench.striker import Blow, blows_of, fork_striker, reap
from flodl_shm.control.messages import Committed, Left, Rejoined
from flodl_shm.control.options import Survival, Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.launch import conduct
from flodl_shm.engine.rank_main import preload
from flodl_shm.obs import journal
from flodl_shm.proc.procfs import children_of
from flodl_shm.shm import janitor

DEAD_AFTER_S = 1.0
LAST_WINDOWS = 6
PICKS = 150  # of an epoch: several are closed in every run
FEW_WINDOWS = 5
# A stopped rank holds the others until it is given up; what is left is a shared machine's.
SLACK_S = DEAD_AFTER_S + 3.0
PAUSES_S = (0.05, 0.3, 0.6)
LEAST_SLOPE_S = 120.0  # a slope over less says nothing
MOST_MIB_A_MINUTE = 1.0
WARM_RUNS = 2  # until the allocator and the imports have what they need


@dataclass(frozen=True)
class Plan:
    """One run and what is done to it, both from a seed."""

    seed: str
    ranks: int
    policy: str
    step_ms: tuple[float, ...]
    blows: tuple[Blow, ...]


def plan_of(seed: int, number: int) -> Plan:
    """The schedule of the n-th run."""
    draw = random.Random(f"chaos {seed} {number}")
    ranks = draw.choice((2, 3, 4))
    return Plan(
        seed=f"{seed} {number}",
        ranks=ranks,
        policy=draw.choice(("cadence", "sync")),
        step_ms=tuple(draw.choice((5.0, 10.0, 20.0)) for _ in range(ranks)),
        blows=tuple(_blow(draw) for _ in range(draw.randrange(4, 9))),
    )


def _blow(draw: random.Random) -> Blow:
    do = draw.choices(("kill", "pause", "stop"), weights=(6, 3, 2))[0]
    return Blow(
        do,
        commits=draw.randrange(1, 6),
        seconds=draw.choice(PAUSES_S) if do == "pause" else 0.0,
        after_s=draw.uniform(0.1, 1.2),
    )


def config_of(plan: Plan, root: Path) -> RunConfig:
    """The run, which goes on until it is asked to stop."""
    return RunConfig(
        ranks=plan.ranks,
        devices=("cpu",) * plan.ranks,
        workload="paced",
        workload_options={"step_ms": plan.step_ms, "picks": PICKS},
        wishes=Wishes(policy=plan.policy, epochs=100_000, batch_size=1),
        survival=Survival(restarts=100),
        dead_after_s=DEAD_AFTER_S,
        run_root=root,
        progress="none",
        quiet=True,
    )


@dataclass(frozen=True)
class Footprint:
    """What a launcher holds between two runs."""

    fds: int
    threads: int
    mappings: int
    children: int

    @classmethod
    def now(cls) -> Footprint:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            fds=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=sum("flodl" in line or "memfd:" in line for line in maps),
            children=len(children_of(os.getpid())),
        )


@dataclass
class Soak:
    """What all runs together have shown."""

    done: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)  # (minutes, MiB) after each run
    before: Footprint | None = None

    def run(self, plan: Plan) -> None:
        """One run, and all that can be said of it."""
        with tempfile.TemporaryDirectory(prefix="soak-chaos-") as folder:
            root = Path(folder)
            striker = fork_striker(
                root, plan.blows, ranks=plan.ranks, seed=plan.seed, stop_after=LAST_WINDOWS
            )
            outcome = conduct(config_of(plan, root))
            fine = reap(striker)
            for word in (struck.do for struck in blows_of(root)):
                self.done[word] += 1
            faults = [] if fine else ["the striker failed"]
            if outcome.end.status != "stopped":
                faults.append(f"it ended otherwise: {outcome.end}")
            summary = json.loads(outcome.run_dir.summary.read_text())
            faults += faults_of(summary)
            faults += self._rounds(outcome.run_dir.journal)
            self.done["deaths"] += len(summary["deaths"])
        self.done["runs"] += 1
        faults += self._leaks()
        self.faults += [f"{fault}: {plan}" for fault in faults]

    def _rounds(self, path: Path) -> list[str]:
        commits, digests = [], {}
        for record in journal.read(path, only=(Committed, Left, Rejoined)):
            match getattr(record, "message", None):
                case Committed():
                    commits.append(record.at / 1e9)
                case Left(round=number, digest=int(digest)):
                    digests.setdefault(number, set()).add(digest)
                case Rejoined():
                    self.done["rejoins"] += 1
        self.done["commits"] += len(commits)
        odd = [number for number, told in digests.items() if len(told) > 1]
        return late(commits) + ([f"ranks differ after rounds {odd}"] if odd else [])

    def _leaks(self) -> list[str]:
        self.rss.append((time.monotonic() / 60, rss_mib()))
        now, before = Footprint.now(), self.before or Footprint.now()
        self.before = before
        left = janitor.sweep()
        return ([f"the launcher held {before}, holds {now}"] if now != before else []) + (
            [f"left in /dev/shm: {left}"] if left else []
        )


def faults_of(summary: dict) -> list[str]:
    """Of the epochs that are closed, and of the end."""
    faults = [
        f"coverage is not exact: {epoch}"
        for epoch in summary["coverage"]
        if not epoch["done_once"] == epoch["picks"] == PICKS
        or epoch["duplicated"]
        or epoch["missing"]
    ]
    if not summary["coverage"]:
        faults.append("no epoch was closed: nothing is known of its picks")
    if summary["params_sha256"] is None:
        faults.append("ranks did not end with the same parameters")
    return faults


def late(commits: list[float]) -> list[str]:
    """Whether the time from one commit to the next was ever longer than some windows."""
    gaps = [later - sooner for sooner, later in pairwise(commits)]
    if not gaps:
        return ["no two commits"]
    most = FEW_WINDOWS * statistics.median(gaps) + SLACK_S
    return [f"{max(gaps):.1f} s without a commit, at most {most:.1f}"] if max(gaps) > most else []


def rss_mib() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(rss: list[tuple[float, float]]) -> float | None:
    """MiB a minute, by least squares; None while there is too little to say."""
    known = rss[WARM_RUNS:]
    if len(known) < 3 or (known[-1][0] - known[0][0]) * 60 < LEAST_SLOPE_S:
        return None
    times, sizes = zip(*known, strict=True)
    return statistics.linear_regression(times, sizes).slope


def soak(minutes: float, seed: int, only: int | None) -> Soak:
    """Runs until the time is over; the last one is finished."""
    found = Soak()
    end, number = time.monotonic() + 60 * minutes, 0
    while only is None or not found.done["runs"]:
        count = len(found.faults)
        found.run(plan_of(seed, number if only is None else only))
        for fault in found.faults[count:]:
            print(f"FAILED seed {seed} run {number}: {fault}", flush=True)
        number += 1
        if time.monotonic() > end:
            break
    slope = growth(found.rss)
    if slope is not None and slope >= MOST_MIB_A_MINUTE:
        found.faults.append(f"the launcher grows by {slope:.2f} MiB a minute")
        print(found.faults[-1])
    told = "not known yet" if slope is None else f"{slope:+.2f} MiB a minute"
    print(f"seed {seed}: {dict(found.done)}, {len(found.faults)} faults, growth {told}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--run", type=int, default=None, help="only this one of the seed's runs")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    preload()
    return 1 if soak(given.minutes, seed, given.run).faults else 0


if __name__ == "__main__":
    sys.exit(main())
