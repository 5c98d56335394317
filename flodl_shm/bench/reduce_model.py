"""Rows of bench-reduce for a whole model: what the end of a window costs, against torch's averager.

Both sides do all that a training loop has to: ours brings the replica in, meets and hands it out;
torch's PeriodicModelAverager is one call over the parameters. Each has a model of its own. After
the timing both average the same values with equal weights, and must agree.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from flodl_shm.bench.reduce_stage import Stage
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Round, Row, Slot
from flodl_shm.train.reduce import Reducer
from flodl_shm.train.replica import Replica

if TYPE_CHECKING:
    from flodl_shm.bench.reduce_stage import Call

MODEL = "gpt-10x360"  # 121 tensors, 63 MB
BLOCKS, WIDTH, WORDS = 10, 360, 256
TOLERANCE = 1e-6  # of values in [0, 1): the two sum in different orders


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    ranks: int
    reps: int


CASES = (Case(2, 40), Case(4, 20))


def make_model() -> nn.Module:
    """The tensors of a small GPT; it is never run."""
    blocks = [
        nn.ModuleList(
            (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )
        )
        for _ in range(BLOCKS)
    ]
    return nn.ModuleList((nn.Embedding(WORDS, WIDTH), *blocks))


def run_case(case: Case, *, make: Any = make_model, name: str = MODEL) -> dict[str, Any]:
    """Measure one row. Raises HostUnfit when a rank fails, as it does when the means differ."""
    floats = Replica(make()).layout.grid.floats
    stage = Stage(ranks=case.ranks, floats=floats, variants=2, reps=case.reps)
    try:
        stage.run(lambda rank: _calls(stage, rank, make), seed=case.ranks)
        row = row_of(name, case.ranks, stage.slowest(0), stage.slowest(1))
        return {**row, "identical": stage.identical()}
    finally:
        stage.close()


def _calls(stage: Stage, rank: int, make: Any) -> tuple[Call, ...]:
    """Ours, torch's, and the comparison of both."""
    warnings.simplefilter("ignore")  # it warns that averaging at every step is dear: that is asked
    ours, theirs = make(), make()
    for param in theirs.parameters():
        param.grad = torch.zeros_like(param)  # it passes over parameters without one
    replica, roster = Replica(ours), stage.roster
    replica.bind(stage.arena.slot(Slot(rank)))
    reducer = Reducer(stage.arena, seat_row=Row(rank), slot=Slot(rank))
    averager = PeriodicModelAverager(period=1)

    def reduce(rep: int) -> None:
        replica.arrive()
        reducer.arrive(Round(rep + 2), roster, steps=1, mass=1.0, picks=rep)
        reducer.complete()
        replica.leave()

    def average(rep: int) -> None:
        averager.average_parameters(theirs.parameters())

    @torch.no_grad()
    def compare(rep: int) -> None:
        for model in (ours, theirs):
            draw = torch.Generator().manual_seed(rank)
            for param in model.parameters():
                param.uniform_(generator=draw)
        reduce(rep)
        average(rep)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            off = float((mine - other).abs().max())
            if off > TOLERANCE:
                raise WeBroke(f"the mean differs from torch's by {off:g}")

    return reduce, average, compare


def row_of(name: str, ranks: int, ours: list[float], pma: list[float]) -> dict[str, Any]:
    """A row's figures from the seconds of every rep."""
    return {
        "model": name,
        "ranks": ranks,
        "ours_ms": 1e3 * statistics.median(ours),
        "pma_ms": 1e3 * statistics.median(pma),
        "x_pma": statistics.median(p / o for o, p in zip(ours, pma, strict=True)),
    }


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    return "{ranks:5d} {model:12s} {ours_ms:8.3f} {pma_ms:8.3f} {x_pma:6.1f}".format(**row) + (
        "" if row["identical"] else "  RANKS DIFFER"
    )


def measure_all() -> list[dict[str, Any]]:
    """All rows; prints as it goes."""
    rows = []
    print("ranks model         ours ms   pma ms  x pma")
    for case in CASES:
        rows.append(run_case(case))
        print(line_of(rows[-1]), flush=True)
    return rows
