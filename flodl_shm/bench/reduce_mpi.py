"""Rows of bench-reduce against MPI's Allreduce, where an MPI and mpi4py are installed.

MPI starts its own processes, so the two cannot share any: runs of both take turns, and `x_mpi` is
the median of the turns' ratios. Run as a module by mpiexec, this file is one MPI rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flodl_shm.errors import HostUnfit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    OurRow = Callable[[int, int], dict[str, Any]]  # of (MiB, ranks)

CASES = ((16, 2), (64, 2), (16, 4))  # (MiB, ranks)
TURNS = 3
WARM_UP, REPS = 3, 25
LIMIT_S = 120.0


def why_not() -> str:
    """What is missing for these rows; empty: nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if _mpiexec() else "there is no mpiexec"


def _mpiexec() -> str | None:
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def measure_all(our_row: OurRow) -> list[dict[str, Any]]:
    """All rows, or one line that says why there are none; prints as it goes."""
    rows: list[dict[str, Any]] = []
    why = why_not()
    try:
        for mib, ranks in () if why else CASES:
            turns = [(_mpi_ms(mib, ranks), our_row(mib, ranks)["arena_ms"]) for _ in range(TURNS)]
            rows.append(row_of(mib, ranks, turns))
            print(line_of(rows[-1]), flush=True)
    except HostUnfit as error:  # an MPI that does not run here is no reason to lose other rows
        why = error.sentence()
    if why:
        print(f"mpi left out: {why}")
    return rows


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    return "{ranks:5d} {mib:5d} {arena_ms:9.3f}, mpi {mpi_ms:9.3f}, x mpi {x_mpi:.1f}".format(**row)


def row_of(mib: int, ranks: int, turns: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A row from (MPI's, our) milliseconds of every turn."""
    return {
        "mib": mib,
        "ranks": ranks,
        "arena_ms": statistics.median(ours for _, ours in turns),
        "mpi_ms": statistics.median(theirs for theirs, _ in turns),
        "x_mpi": statistics.median(theirs / ours for theirs, ours in turns),
    }


def _mpi_ms(mib: int, ranks: int) -> float:
    command = [
        *("env", "OMP_NUM_THREADS=1", str(_mpiexec()), "-n", str(ranks)),
        *(sys.executable, "-m", "flodl_shm.bench.reduce_mpi", str(mib)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise HostUnfit(f"mpiexec with {ranks} ranks was not done after {LIMIT_S:g} s") from None
    if done.returncode:
        raise HostUnfit(f"mpiexec ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(json.loads(done.stdout))


def _as_a_rank(mib: int) -> None:
    """Time the Allreduce; rank 0 prints the median of the slowest ranks' milliseconds."""
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    message = np.zeros((mib << 20) // 4, dtype=np.float32)  # zero: sums of sums stay finite
    times = []
    for _ in range(WARM_UP + REPS):
        world.Barrier()
        began = time.perf_counter()
        world.Allreduce(mpi.IN_PLACE, message)
        times.append(world.allreduce(time.perf_counter() - began, op=mpi.MAX))
    if world.rank == 0:
        print(json.dumps(1e3 * statistics.median(times[WARM_UP:])))


if __name__ == "__main__":
    _as_a_rank(int(sys.argv[1]))
