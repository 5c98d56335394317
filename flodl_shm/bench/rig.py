"""bench-rig: how much of what unequal ranks could do enters the consensus.

Paced ranks stand in for GPUs, so they do not fight for cores and the best possible is known. Each
row is a run of its own: first a free run of all ranks at once, which gives the rates that its
training is divided by, then the training. Rows take turns, one at a time. No speed hints, the
default window; seeds are printed, and the rows of one repeat share theirs, since jitter alone
moves he by a percent. Figures are medians over the repeats; the definition is in rig_figures.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_shm.bench.report import write_report
from flodl_shm.bench.rig_figures import RigFigures, measure
from flodl_shm.control.messages import Wishes
from flodl_shm.engine.config import RunConfig, Slow
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload
from flodl_shm.errors import FlodlError, HostUnfit
from flodl_shm.ids import Rank
from flodl_shm.obs import journal
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.session import SlowDown

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = ("sync", "cadence")
# Under sync every batch is a window, so a fraction of the time has as many of them.
SYNC_PART = 0.25
REPEATS = 3  # of a full run


@dataclass(frozen=True, slots=True)
class Rig:
    """Ranks of known speed, and how long the training of one row lasts."""

    name: str
    step_ms: tuple[float, ...]
    quick_s: float
    full_s: float
    epoch_s: float
    in_quick: bool = True
    stale: tuple[Rank, float] | None = None  # this rank is so much slower in every other epoch


# A window of the default 10 steps of an 80 ms rank takes 0.8 s.
RIGS = (
    Rig("1:2:4", (20.0, 40.0, 80.0), quick_s=19.2, full_s=48.0, epoch_s=9.6),
    Rig("1:1:1", (20.0, 20.0, 20.0), quick_s=6.0, full_s=24.0, epoch_s=3.0),
    # Epochs of three windows: by the time a speed is believed, it is another.
    Rig(
        "stale",
        (20.0, 40.0, 80.0),
        quick_s=21.6,
        full_s=48.0,
        epoch_s=2.4,
        in_quick=False,
        stale=(Rank(1), 1.3),
    ),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    quick: bool
    repeats: int
    free_run_s: float


QUICK = Effort(quick=True, repeats=1, free_run_s=3.0)
FULL = Effort(quick=False, repeats=REPEATS, free_run_s=5.0)


def config_of(rig: Rig, policy: str, effort: Effort, *, seed: int, root: Path) -> RunConfig:
    """One row's run: as many picks as the ranks, at their stated speeds, train in its time."""
    total_s = rig.quick_s if effort.quick else rig.full_s
    per_s = sum(1000 / ms for ms in rig.step_ms)
    if policy == "sync":
        total_s *= SYNC_PART
        per_s = len(rig.step_ms) * 1000 / max(rig.step_ms)
    epochs = max(1, round(total_s / rig.epoch_s))
    return RunConfig(
        ranks=len(rig.step_ms),
        devices=("cpu",) * len(rig.step_ms),
        workload="paced",
        workload_options={"step_ms": rig.step_ms, "picks": round(per_s * total_s / epochs)},
        wishes=Wishes(policy=policy, epochs=epochs, batch_size=1, seed=seed),
        slow=_slow(rig, epochs),
        free_run_s=effort.free_run_s,
        run_root=root,
        progress="none",
        quiet=True,
    )


def _slow(rig: Rig, epochs: int) -> tuple[Slow, ...]:
    if rig.stale is None:
        return ()
    rank, factor = rig.stale
    return tuple(Slow(rank, factor if epoch % 2 else 1.0, epoch) for epoch in range(epochs))


def run_row(rig: Rig, policy: str, effort: Effort, seed: int) -> RigFigures:
    """Run once and measure. Raises HostUnfit when the run did not end well."""
    with tempfile.TemporaryDirectory(prefix="bench-rig-") as folder:
        config = config_of(rig, policy, effort, seed=seed, root=Path(folder))
        code = launch(config)
        if code:
            raise HostUnfit(f"the run of {rig.name} under {policy} ended with exit code {code}")
        records = journal.read(Path(folder) / "latest" / "journal.jsonl")
        return measure(records, lambda rank, epoch: _factor(config, rank, epoch))


def _factor(config: RunConfig, rank: Rank, epoch: int) -> float:
    """How much slower than in the free run, which is of epoch 0, the rank is in an epoch."""
    pacer = Pacer(slow=[SlowDown(one.factor, one.from_epoch) for one in config.slow_of(rank)])
    return pacer.factor(epoch) / pacer.factor(0)


def row_of(rig: str, policy: str, runs: Sequence[RigFigures]) -> dict[str, object]:
    """One row of the file: medians over the repeats."""

    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs)

    return {
        "rig": rig,
        "policy": policy,
        "he": median("he"),
        "he_whole": median("he_whole"),
        "vs_fastest": median("vs_fastest"),
        "sync_bound": median("sync_bound"),
        "gain": statistics.median(run.he / run.sync_bound for run in runs),
        "picks_per_s": median("picks_per_s"),
        "rates": [
            statistics.median(rates) for rates in zip(*(run.rates for run in runs), strict=True)
        ],
        "windows": min(run.windows for run in runs),
        "picks": min(run.picks for run in runs),
        "he_all": [run.he for run in runs],
    }


def measure_all(
    rigs: Sequence[Rig], policies: Sequence[str], effort: Effort, seed: int
) -> list[dict[str, object]]:
    """Every rig under every policy, taking turns; prints as it goes."""
    runs: dict[tuple[str, str], list[RigFigures]] = {}
    cases = [(rig, policy) for rig in rigs for policy in policies]
    print("seed rig    policy      he  he whole  vs fastest  sync bound   gain  picks/s  windows")
    for repeat in range(effort.repeats):
        for rig, policy in cases:
            run = run_row(rig, policy, effort, seed + repeat)
            runs.setdefault((rig.name, policy), []).append(run)
            print(
                f"{seed + repeat:4d} {rig.name:6s} {policy:8s} {run.he:6.4f} {run.he_whole:9.4f} "
                f"{run.vs_fastest:11.3f} {run.sync_bound:11.4f} {run.he / run.sync_bound:6.3f} "
                f"{run.picks_per_s:8.2f} {run.windows:8d}",
                flush=True,
            )
    rows = [row_of(rig, policy, figures) for (rig, policy), figures in runs.items()]
    _add_ratios(rows, runs)
    return rows


def _add_ratios(
    rows: Sequence[dict[str, object]], runs: dict[tuple[str, str], list[RigFigures]]
) -> None:
    """`x_sync`: how many times the he of sync, as the median over pairs of the same repeat."""
    for row in rows:
        name = str(row["rig"])
        if (name, "sync") not in runs:
            continue
        pairs = zip(runs[name, str(row["policy"])], runs[name, "sync"], strict=True)
        row["x_sync"] = statistics.median(run.he / sync.he for run, sync in pairs)


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-rig", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the rows that take under a minute")
    names = [rig.name for rig in RIGS]
    parser.add_argument("--rig", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="the same")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    options = parser.parse_args(argv)
    wanted = options.rig or [rig.name for rig in RIGS if rig.in_quick or not options.quick]
    began = time.monotonic()
    preload()  # once: the fork servers of all rows find torch imported
    try:
        rows = measure_all(
            [rig for rig in RIGS if rig.name in wanted],
            [policy for policy in POLICIES if policy in (options.policy or POLICIES)],
            QUICK if options.quick else FULL,
            options.seed,
        )
        if options.json:
            write_report(options.json, rows)
    except FlodlError as error:
        print(f"error: {error.sentence()}", file=sys.stderr)
        return error.exit_code
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
