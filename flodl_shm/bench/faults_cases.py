"""What bench-faults runs: ranks of known speed, and what is done to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.bench.striker import Blow
from flodl_shm.control.options import Survival, Wishes
from flodl_shm.engine.config import RunConfig

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
FLOAT = 4
PICKS = 20_000  # of an epoch: no run here comes to its end, all are stopped
RESTARTS = 200
DEAD_AFTER_S = 1.0
LAST_WINDOWS = 5  # after the last blow


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `blows`: of a quick run and of a full one; None: not in the quick run.

    Windows of the anchor rank's ten steps last as long as ten of the largest `step_ms`.
    """

    fault: str
    step_ms: tuple[float, ...]
    full: tuple[Blow, ...]
    quick: tuple[Blow, ...] | None = None
    restarts: int = RESTARTS
    replica_mib: int = 2
    repeats: int = 3  # of a full run


def _times(count: int, blow: Blow) -> tuple[Blow, ...]:
    return (blow,) * count


CASES = (
    # One after the other, until one is left. In between the rest must be efficient again.
    Case(
        "sigkill",
        (20.0, 20.0, 40.0, 40.0),
        full=_times(3, Blow("kill", commits=10)),
        quick=_times(3, Blow("kill", commits=7)),
        restarts=0,
        repeats=6,
    ),
    # Every other one falls inside of a reduce, which lasts a good part of a second here.
    Case(
        "sigkill_256mib",
        (40.0, 40.0, 80.0),
        full=(
            Blow("kill", commits=3, full=True),
            Blow("kill", commits=3, full=True, in_reduce=True),
        )
        * 4,
        replica_mib=256,
        repeats=2,
    ),
    Case(
        "sigstop",
        (20.0, 20.0, 40.0),
        full=_times(8, Blow("stop", commits=2, full=True)),
        quick=_times(2, Blow("stop", commits=2, full=True)),
    ),
    Case("exception", (20.0, 20.0, 40.0), full=_times(8, Blow("raise", commits=2, full=True))),
    Case("nan", (20.0, 20.0, 40.0), full=_times(8, Blow("nan", commits=3, full=True))),
    Case(
        "rejoin",
        (20.0, 20.0, 40.0),
        full=_times(10, Blow("kill", commits=4, full=True)),
        quick=_times(3, Blow("kill", commits=3, full=True)),
    ),
    # The window of the design's rig, 0.8 s; in the quick run shorter ones.
    Case(
        "mtbf",
        (20.0, 40.0, 80.0),
        full=_times(6, Blow("kill", commits=1, after_s=15.0)),
        quick=_times(3, Blow("kill", commits=10)),
        repeats=1,
    ),
)
QUICK_STEP_MS = {"sigkill": (10.0, 10.0, 20.0, 20.0), "mtbf": (15.0, 15.0, 30.0)}


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    quick: bool
    free_run_s: float


QUICK = Effort(quick=True, free_run_s=1.0)
FULL = Effort(quick=False, free_run_s=5.0)


def blows_of(case: Case, effort: Effort) -> tuple[Blow, ...]:
    """What is done in one run."""
    return (case.quick or ()) if effort.quick else case.full


def step_ms_of(case: Case, effort: Effort) -> tuple[float, ...]:
    """The stated time of a step, by rank."""
    return QUICK_STEP_MS.get(case.fault, case.step_ms) if effort.quick else case.step_ms


def config_of(case: Case, effort: Effort, *, seed: int, root: Path) -> RunConfig:
    """One run of a row; its files and the orders for its ranks lie under `root`."""
    step_ms = step_ms_of(case, effort)
    ranks = len(step_ms)
    return RunConfig(
        ranks=ranks,
        devices=("cpu",) * ranks,
        module="flodl_shm.bench.faults_script",
        script_args=(
            *("--floats", str(case.replica_mib * MIB // FLOAT), "--picks", str(PICKS)),
            *("--orders", str(root), "--step-ms", *(f"{ms:g}" for ms in step_ms)),
        ),
        wishes=Wishes(policy="cadence", epochs=100, batch_size=1, seed=seed),
        survival=Survival(restarts=case.restarts),
        dead_after_s=DEAD_AFTER_S,
        free_run_s=effort.free_run_s,
        run_root=root,
        progress="none",
        quiet=True,
    )
