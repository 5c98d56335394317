"""bench-faults: what a fault costs, in real runs with real signals at seeded moments.

Each row is one or more runs of paced ranks. A process of its own (striker.py) strikes ranks at
random moments of a window; figures come from the run's journal and from when the striker struck,
on one clock. `p99` is over all blows of a row: of fewer than a hundred the worst. Seeds are
printed; they give moments and victims. What is run is in faults_cases.py, what each figure means
in faults_figures.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_shm.bench.faults_cases import (
    CASES,
    DEAD_AFTER_S,
    FULL,
    LAST_WINDOWS,
    QUICK,
    Case,
    Effort,
    blows_of,
    config_of,
)
from flodl_shm.bench.faults_figures import FaultFigures, measure
from flodl_shm.bench.gates import Gate
from flodl_shm.bench.report import conclude
from flodl_shm.bench.striker import blows_of as struck_in
from flodl_shm.bench.striker import fork_striker, reap
from flodl_shm.engine.launch import conduct
from flodl_shm.engine.rank_main import preload
from flodl_shm.engine.watch import BEAT_NS
from flodl_shm.errors import HostUnfit
from flodl_shm.obs import journal
from flodl_shm.obs.summary import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


NAMES = ("fault",)
MS = 1e6


def _of(*faults: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: row["fault"] in faults


GATES = (
    Gate("detected_ms_p99", 20, _of("sigkill"), at_least=False),
    Gate("next_commit_windows", 1.5, _of("sigkill"), at_least=False),
    Gate("he_after", 0.93, _of("sigkill")),
    Gate("out_ms_p99", 250, _of("sigkill_256mib"), at_least=False),
    Gate("detected_ms_p99", DEAD_AFTER_S * 1e3 + BEAT_NS / MS, _of("sigstop"), at_least=False),
    Gate("rejoin_windows", 3, _of("rejoin"), at_least=False),
    Gate("start_ms_p99", 300, _of("rejoin"), at_least=False),
    Gate("goodput", 0.90, _of("mtbf")),
)


def run_once(case: Case, effort: Effort, seed: int) -> FaultFigures:
    """Run once and measure. Raises HostUnfit when the run did not end as it was told to."""
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder:
        root = Path(folder)
        config = config_of(case, effort, seed=seed, root=root)
        striker = fork_striker(
            root,
            blows_of(case, effort),
            ranks=config.ranks,
            seed=f"{seed} {case.fault}",
            stop_after=LAST_WINDOWS,
        )
        try:
            outcome = conduct(config)
        finally:
            fine = reap(striker)
        if outcome.end.status != "stopped" or not fine:
            raise HostUnfit(f"the run of {case.fault} ended otherwise: {outcome.end.reason}")
        return measure(journal.read(outcome.run_dir.journal), struck_in(root))


def row_of(fault: str, runs: Sequence[FaultFigures]) -> dict[str, object]:
    """One row of the file: over all blows of its runs. None where there is no such figure."""
    after = [one for run in runs for one in run.aftermaths]
    ideal = sum(one.ideal_later for one in after)
    return {
        "fault": fault,
        "detected_ms_p50": _percentile((one.detected_ns for one in after), 50, MS),
        "detected_ms_p99": _percentile((one.detected_ns for one in after), 99, MS),
        "out_ms_p99": _percentile((one.out_ns for one in after), 99, MS),
        "next_commit_windows": _percentile((one.next_commit_windows for one in after), 99),
        "rejoin_windows": _percentile((one.rejoin_windows for one in after), 99),
        "work_lost_picks": _mean(one.lost_picks for one in after),
        "he_after": sum(one.picks_later for one in after) / ideal if ideal else None,
        "goodput": statistics.median(run.goodput for run in runs),
        "kernel_ms_p50": _percentile((one.gone_ns for one in after), 50, MS),
        "kernel_ms_p99": _percentile((one.gone_ns for one in after), 99, MS),
        "start_ms_p99": _percentile((one.start_ns for one in after), 99, MS),
        "next_commit_windows_p50": _percentile((one.next_commit_windows for one in after), 50),
        "rejoin_windows_p50": _percentile((one.rejoin_windows for one in after), 50),
        "blows": len(after),
        "blows_in_reduce": sum(one.out_ns is not None for one in after),
        "runs": len(runs),
    }


def _percentile(values: Iterable[float | None], percent: int, unit: float = 1.0) -> float | None:
    known = [round(value * 1000) for value in values if value is not None]
    found = percentile(known, percent)
    return None if found is None else found / 1000 / unit


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


COLUMNS = (  # heading, key, digits
    ("detected p50", "detected_ms_p50", 1),
    ("p99", "detected_ms_p99", 1),
    ("kernel p99", "kernel_ms_p99", 1),
    ("out p99", "out_ms_p99", 1),
    ("next commit", "next_commit_windows", 2),
    ("rejoin", "rejoin_windows", 2),
    ("start p99", "start_ms_p99", 0),
    ("lost picks", "work_lost_picks", 1),
    ("he after", "he_after", 3),
    ("goodput", "goodput", 3),
)


def measure_all(cases: Sequence[Case], effort: Effort, seed: int) -> list[dict[str, object]]:
    """Every case, one run at a time; prints as it goes."""
    print("times in ms, commits and returns in windows")
    print(f"{'fault':15s}blows" + "".join(f"  {heading}" for heading, _, _ in COLUMNS))
    rows = []
    for case in cases:
        repeats = 1 if effort.quick else case.repeats
        row = row_of(case.fault, [run_once(case, effort, seed + n) for n in range(repeats)])
        rows.append(row)
        cells = (_cell(row[key], len(heading), digits) for heading, key, digits in COLUMNS)
        print(f"{case.fault:15s}{row['blows']:5d}" + "".join(cells), flush=True)
    return rows


def _cell(value: object, width: int, digits: int) -> str:
    words = f"{value:.{digits}f}" if isinstance(value, float) else "-"
    return f"  {words:>{width}}"


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-faults", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the rows that take under a minute")
    names = [case.fault for case in CASES]
    parser.add_argument("--fault", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each row")
    parser.add_argument("--repeats", type=int, help="runs of each row, but for --quick")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    cases = [case for case in CASES if case.quick is not None or not options.quick]
    if options.fault:
        cases = [case for case in CASES if case.fault in options.fault]
        # A row that is asked for by name has its full blows where it has no quick ones.
        cases = [replace(case, quick=case.quick or case.full) for case in cases]
    if options.repeats:
        cases = [replace(case, repeats=options.repeats) for case in cases]
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    preload()  # once: the fork servers of all runs find torch imported
    code = conclude(
        lambda: measure_all(cases, effort, options.seed), options.json, gates=GATES, names=NAMES
    )
    print(f"{time.monotonic() - began:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
