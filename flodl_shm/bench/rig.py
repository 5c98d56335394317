"""bench-rig: how much of what unequal ranks could do enters the consensus.

Paced ranks stand in for GPUs, so they do not fight for cores and the best possible is known. Each
row is a run of its own: first a free run of all ranks at once, which gives the rates that its
training is divided by, then the training. Rows take turns, one at a time. No speed hints, the
default window; seeds are printed, and the rows of one repeat share theirs, since jitter alone
moves he by a percent. Figures are medians over the repeats; the definition is in rig_figures.py.
What is run is in rig_cases.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_shm.bench.gates import Gate
from flodl_shm.bench.report import conclude
from flodl_shm.bench.rig_cases import (
    FULL,
    POLICIES,
    QUICK,
    QUICK_POLICIES,
    RIGS,
    Effort,
    Rig,
    changed_at,
    config_of,
    slowed_s,
)
from flodl_shm.bench.rig_ddp import run_ddp
from flodl_shm.bench.rig_figures import RigFigures, measure
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload
from flodl_shm.errors import HostUnfit
from flodl_shm.obs import journal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flodl_shm.engine.config import RunConfig
    from flodl_shm.obs.journal import Header, Record

NAMES = ("rig", "policy")
GATES = (
    Gate("he", 0.94, lambda row: (row["rig"], row["policy"]) == ("8x4", "cadence")),
    Gate("x_ddp", 2.2, lambda row: (row["rig"], row["policy"]) == ("1:2:4", "cadence")),
    Gate("windows_to_recover", 4, lambda row: row["policy"] == "cadence", at_least=False),
)

Runs = dict[tuple[str, str], list[RigFigures]]  # (rig, policy) -> its repeats


def run_row(rig: Rig, policy: str, effort: Effort, seed: int) -> RigFigures:
    """Run once and measure. Raises HostUnfit when the run did not end well."""
    with tempfile.TemporaryDirectory(prefix="bench-rig-") as folder:
        config = config_of(rig, policy, effort, seed=seed, root=Path(folder))
        return measure(
            run_ddp(config) if policy == "ddp" else _our_records(rig, policy, config),
            lambda rank, epoch: slowed_s(config, rank, epoch),
            changed_at=changed_at(rig, config),
        )


def _our_records(rig: Rig, policy: str, config: RunConfig) -> Iterator[Header | Record]:
    code = launch(config)
    if code:
        raise HostUnfit(f"the run of {rig.name} under {policy} ended with exit code {code}")
    return journal.read(config.run_root / "latest" / "journal.jsonl")


def row_of(rig: str, policy: str, runs: Sequence[RigFigures]) -> dict[str, object]:
    """One row of the file: medians over the repeats."""

    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs)

    row = {
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
    if all(run.windows_to_recover is not None for run in runs):
        row["windows_to_recover"] = median("windows_to_recover")
    return row


def measure_all(
    rigs: Sequence[Rig], policies: Sequence[str], effort: Effort, seed: int
) -> list[dict[str, object]]:
    """Every rig under every policy, taking turns; prints as it goes."""
    runs: Runs = {}
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


def _add_ratios(rows: Sequence[dict[str, object]], runs: Runs) -> None:
    """`x_sync`, he over that of sync, and `x_ddp`, picks per second over those of DDP.

    Medians over pairs of the same repeat.
    """
    for row in rows:
        rig, policy = str(row["rig"]), str(row["policy"])
        ours = runs[rig, policy]
        if (rig, "sync") in runs:
            pairs = zip(ours, runs[rig, "sync"], strict=True)
            row["x_sync"] = statistics.median(run.he / sync.he for run, sync in pairs)
        if (rig, "ddp") in runs and policy == "cadence":
            pairs = zip(ours, runs[rig, "ddp"], strict=True)
            row["x_ddp"] = statistics.median(
                run.picks_per_s / ddp.picks_per_s for run, ddp in pairs
            )


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-rig", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the rows that take under a minute")
    names = [rig.name for rig in RIGS]
    parser.add_argument("--rig", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="the same")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--repeats", type=int, help="runs of each row")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    if options.repeats:
        effort = replace(effort, repeats=options.repeats)
    wanted = options.rig or [rig.name for rig in RIGS if rig.in_quick or not options.quick]
    policies = options.policy or (QUICK_POLICIES if options.quick else POLICIES)
    began = time.monotonic()
    preload()  # once: the fork servers of all rows find torch imported
    code = conclude(
        lambda: measure_all(
            [rig for rig in RIGS if rig.name in wanted],
            [policy for policy in POLICIES if policy in policies],
            effort,
            options.seed,
        ),
        options.json,
        gates=GATES,
        names=NAMES,
    )
    print(f"{time.monotonic() - began:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
