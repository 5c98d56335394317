"""bench-reduce: the arena against gloo's all_reduce and against one plain copy of the model.

Figures are medians, ratios are medians of the reps' ratios; how calls are timed is in
reduce_stage.py. The arena runs as shipped, divergence sampling included. The full run also has
whole models against torch's averager (reduce_model.py), and MPI where it is (reduce_mpi.py).
`first_x` is the very first round after attach over the median of later ones: in the full run of
several attaches, since each has only one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flodl_shm.bench import reduce_model, reduce_mpi
from flodl_shm.bench.gates import Gate
from flodl_shm.bench.reduce_stage import Stage
from flodl_shm.bench.report import conclude
from flodl_shm.ids import Round, Row, Slot
from flodl_shm.train.reduce import Reducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.bench.reduce_stage import Call

VARIANTS = ("arena", "gloo", "copy")
FLOATS_PER_MIB = (1 << 20) // 4
TRIED_REPS = 5  # after each further attach


@dataclass(frozen=True, slots=True)
class Case:
    """One row: model size, ranks, timed reps of every variant, and how often to attach."""

    mib: int
    ranks: int
    reps: int
    attaches: int = 1


QUICK = (
    Case(1, 2, 300), Case(16, 2, 60), Case(64, 2, 25), Case(256, 2, 11),
    Case(1, 4, 150), Case(16, 4, 40), Case(64, 4, 15),
)  # fmt: skip
FULL = (
    *(replace(case, reps=3 * case.reps, attaches=5) for case in QUICK),
    Case(4, 2, 300, 5), Case(1024, 2, 7), Case(256, 4, 15, 3),
)  # fmt: skip
NAMES = ("model", "mib", "ranks")
GATES = (
    Gate("first_x", 2, lambda row: row["mib"] >= 16, at_least=False),  # less is one wake-up
    Gate("p90_p50", 2.5, lambda row: row["mib"] >= 16, at_least=False),
    Gate("x_pma", 8, lambda row: True),
)


def run_case(case: Case) -> dict[str, Any]:
    """Measure one case in fresh processes. Raises HostUnfit when a rank fails or hangs."""
    row, first_x = _measure(case)
    tries = [_measure(replace(case, reps=TRIED_REPS))[1] for _ in range(1, case.attaches)]
    return {**row, "first_x": statistics.median([first_x, *tries])}


def _measure(case: Case) -> tuple[dict[str, Any], float]:
    stage = Stage(
        ranks=case.ranks,
        floats=case.mib * FLOATS_PER_MIB,
        variants=len(VARIANTS),
        reps=case.reps,
    )
    try:
        stage.run(lambda rank: _calls(stage, rank), seed=case.mib)
        arena, gloo, copy = (stage.slowest(variant) for variant in range(len(VARIANTS)))
        row = row_of(case, arena, gloo, copy)
        return {**row, "identical": stage.identical()}, stage.first(0) / statistics.median(arena)
    finally:
        stage.close()


def _calls(stage: Stage, rank: int) -> tuple[Call, ...]:
    """The timed calls, in the order of VARIANTS, then one for the comparison of the slots."""
    roster = stage.roster
    reducer = Reducer(stage.arena, seat_row=Row(rank), slot=Slot(rank))
    reducer.prepare(roster)  # as a rank does when it attaches
    slot = stage.arena.slot(Slot(rank)).fill_(rank + 1.0)
    message, copied = slot.clone().zero_(), slot.clone()  # zero: sums of sums stay finite

    def arena(rep: int) -> None:
        reducer.arrive(Round(rep + 2), roster, steps=1 + rank, mass=1.0 + rank, picks=rep)
        reducer.complete()

    def on_new_contributions(rep: int) -> None:
        slot.uniform_(generator=torch.Generator().manual_seed(rank))
        arena(rep)

    return (
        arena,
        lambda rep: dist.all_reduce(message),
        lambda rep: copied.copy_(slot),
        on_new_contributions,
    )


def row_of(
    case: Case, arena: Sequence[float], gloo: Sequence[float], copy: Sequence[float]
) -> dict[str, Any]:
    """A row's figures from the seconds of every rep."""
    return {
        "mib": case.mib,
        "ranks": case.ranks,
        "arena_ms": 1e3 * statistics.median(arena),
        "gloo_ms": 1e3 * statistics.median(gloo),
        "copy_ms": 1e3 * statistics.median(copy),
        "x_gloo": statistics.median(g / a for a, g in zip(arena, gloo, strict=True)),
        "x_copy": statistics.median(a / c for a, c in zip(arena, copy, strict=True)),
        "p90_p50": sorted(arena)[int(0.9 * len(arena))] / statistics.median(arena),
    }


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        "{ranks:5d} {mib:5d} {arena_ms:9.3f} {gloo_ms:9.3f} {copy_ms:9.3f} {x_gloo:7.1f} "
        "{x_copy:7.2f} {p90_p50:8.2f} {first_x:8.2f}".format(**row)
        + ("" if row["identical"] else "  RANKS DIFFER")
    )


def measure_all(*, quick: bool) -> list[dict[str, Any]]:
    """One row after the other; prints as it goes."""
    rows = []
    print("ranks   MiB  arena ms   gloo ms   copy ms  x gloo  x copy  p90/p50  first x")
    for case in QUICK if quick else FULL:
        rows.append(run_case(case))
        print(line_of(rows[-1]), flush=True)
    if not quick:
        rows += reduce_model.measure_all()
        rows += reduce_mpi.measure_all(lambda mib, ranks: run_case(Case(mib, ranks, 25)))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file. 1 if ranks ever ended with different bits."""
    parser = argparse.ArgumentParser(prog="bench-reduce", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the rows that take under a minute")
    options = parser.parse_args(argv)
    return conclude(
        lambda: measure_all(quick=options.quick), options.json, gates=GATES, names=NAMES
    )


if __name__ == "__main__":
    sys.exit(main())
