"""bench-reduce: the arena against gloo's all_reduce and against one plain copy of the model.

All variants run in the same processes, one intra-op thread each, in a new random order every rep,
with a blocking barrier before each timed call: a spinning one takes the core from gloo's I/O
thread and makes gloo look 6 to 8 times worse at 1 MiB. A rep's time is the slowest rank's; figures
are medians, ratios are medians of the reps' ratios. The arena runs as shipped, divergence sampling
included.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flodl_shm.bench import host
from flodl_shm.control.messages import Seat
from flodl_shm.errors import HostUnfit
from flodl_shm.ids import Rank, Round, Row, Slot
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.segment import Segment
from flodl_shm.train.reduce import Reducer
from flodl_shm.wire.layout import plan_arena

if TYPE_CHECKING:
    from collections.abc import Callable

VARIANTS = ("arena", "gloo", "copy")
WARM_UP = 3
FLOATS_PER_MIB = (1 << 20) // 4
CASE_S = 300  # a case that takes longer hangs


@dataclass(frozen=True, slots=True)
class Case:
    """One row: model size, ranks, timed reps of every variant."""

    mib: int
    ranks: int
    reps: int


QUICK = (
    Case(1, 2, 300), Case(16, 2, 60), Case(64, 2, 25), Case(256, 2, 11),
    Case(1, 4, 150), Case(16, 4, 40), Case(64, 4, 15),
)  # fmt: skip
FULL = (
    *(Case(case.mib, case.ranks, 3 * case.reps) for case in QUICK),
    Case(4, 2, 300), Case(1024, 2, 7), Case(256, 4, 15),
)  # fmt: skip


class Stage:
    """What the ranks of one case share: the arena, a blocking barrier, the table of times."""

    def __init__(self, case: Case) -> None:
        self.case = case
        floats = case.mib * FLOATS_PER_MIB
        plan = plan_arena(params=floats, buffers=0, slots=case.ranks, rows=case.ranks)
        self.segment = Segment.create(plan.size, purpose="bench-arena")
        self.cells_memory = Segment.create(4096 * (1 + case.ranks), purpose="bench-cells")
        cells = self.cells_memory.view.cast("Q")
        bells = [Doorbell.create(cells, 8 * rank) for rank in range(case.ranks)]
        self.arena = Arena(self.segment, plan, bells)
        self.barrier_bells = [
            Doorbell.create(cells, 8 * (case.ranks + rank)) for rank in range(case.ranks)
        ]
        self.passed = cells[16 * case.ranks :]  # cell 8 * rank: how often the rank has arrived
        rounds = WARM_UP + case.reps
        size = rounds * len(VARIANTS) * case.ranks * 8
        self.times = memoryview(mmap.mmap(-1, size)).cast("d")

    def barrier(self, rank: int, count: int) -> None:
        """Wait without spinning until every rank has come here `count` times."""
        self.passed[8 * rank] = count
        peers = [other for other in range(self.case.ranks) if other != rank]
        for other in peers:
            self.barrier_bells[other].ring()
        self.barrier_bells[rank].wait(
            lambda: all(self.passed[8 * other] >= count for other in peers),
            timeout_ns=CASE_S * 10**9,
            spin_ns=0,
        )

    def time_at(self, rep: int, variant: int, rank: int) -> int:
        """Index of one measurement."""
        return (rep * len(VARIANTS) + variant) * self.case.ranks + rank

    def close(self) -> None:
        self.arena.close()
        for bell in (*self.arena.bells, *self.barrier_bells):
            bell.close()
        self.passed.release()
        self.cells_memory.close()


def run_case(case: Case) -> dict[str, Any]:
    """Measure one case in fresh processes. Raises HostUnfit when a rank fails or hangs."""
    stage = Stage(case)
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "gloo"
            pids = [_fork(stage, rank, store) for rank in range(case.ranks)]
            _await(pids)
        return _row(stage)
    finally:
        stage.close()


def _fork(stage: Stage, rank: int, store: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _run_rank(stage, rank, store)
        code = 0
    except BaseException as exc:
        print(f"rank {rank}: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _await(pids: list[int]) -> None:
    """Reap all; the first failure or the deadline ends the others."""
    deadline, left, failed = time.monotonic() + CASE_S, set(pids), ""
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            if status:
                failed = failed or f"rank {pids.index(pid)} ended with status {status}"
        elif not failed and time.monotonic() > deadline:
            failed = f"not done after {CASE_S} s"
        elif not failed:
            time.sleep(0.02)
            continue
        if failed:
            for other in left:
                os.kill(other, signal.SIGKILL)
            for other in left:
                os.waitpid(other, 0)
            raise HostUnfit(f"a benchmark case failed: {failed}")


def _run_rank(stage: Stage, rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    case = stage.case
    order = random.Random(case.mib)  # the same on all ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    calls = _variants(stage, rank)
    count = 0
    for rep in range(WARM_UP + case.reps):
        for variant in order.sample(range(len(VARIANTS)), len(VARIANTS)):
            count += 1
            stage.barrier(rank, count)
            began = time.perf_counter()
            calls[variant](rep)
            stage.times[stage.time_at(rep, variant, rank)] = time.perf_counter() - began
    # once more on new contributions, for the comparison of the slots
    stage.arena.slot(Slot(rank)).uniform_(generator=torch.Generator().manual_seed(rank))
    calls[0](WARM_UP + case.reps)


def _variants(stage: Stage, rank: int) -> tuple[Callable[[int], object], ...]:
    """The timed calls, in the order of VARIANTS, each taking the rep."""
    case = stage.case
    stage.segment.prefault()
    roster = tuple(Seat(Rank(r), Row(r), Slot(r)) for r in range(case.ranks))
    reducer = Reducer(stage.arena, seat_row=Row(rank), slot=Slot(rank))
    model = stage.arena.slot(Slot(rank)).fill_(rank + 1.0)
    message, copied = model.clone().zero_(), model.clone()  # zero: sums of sums stay finite

    def arena(rep: int) -> None:
        reducer.arrive(Round(rep + 2), roster, steps=1 + rank, mass=1.0 + rank, picks=rep)
        reducer.complete()

    return arena, lambda rep: dist.all_reduce(message), lambda rep: copied.copy_(message)


def _row(stage: Stage) -> dict[str, Any]:
    case, times = stage.case, stage.times
    slowest = [
        [
            max(times[stage.time_at(rep, variant, rank)] for rank in range(case.ranks))
            for rep in range(WARM_UP, WARM_UP + case.reps)
        ]
        for variant in range(len(VARIANTS))
    ]
    arena, gloo, copy = slowest
    first = stage.arena.slot(Slot(0))
    same = (torch.equal(first, stage.arena.slot(Slot(r))) for r in range(1, case.ranks))
    return {
        "mib": case.mib,
        "ranks": case.ranks,
        "arena_ms": 1e3 * statistics.median(arena),
        "gloo_ms": 1e3 * statistics.median(gloo),
        "copy_ms": 1e3 * statistics.median(copy),
        "x_gloo": statistics.median(g / a for a, g in zip(arena, gloo, strict=True)),
        "x_copy": statistics.median(a / c for a, c in zip(arena, copy, strict=True)),
        "p90_p50": sorted(arena)[int(0.9 * len(arena))] / statistics.median(arena),
        "identical": all(same),
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file. 1 if ranks ever ended with different bits."""
    parser = argparse.ArgumentParser(prog="bench-reduce", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="the rows that take under a minute")
    options = parser.parse_args(argv)
    rows = []
    print("ranks   MiB  arena ms   gloo ms   copy ms  x gloo  x copy  p90/p50")
    for case in QUICK if options.quick else FULL:
        row = run_case(case)
        rows.append(row)
        print(
            "{ranks:5d} {mib:5d} {arena_ms:9.3f} {gloo_ms:9.3f} {copy_ms:9.3f} {x_gloo:7.1f} "
            "{x_copy:7.2f} {p90_p50:8.2f}".format(**row)
            + ("" if row["identical"] else "  RANKS DIFFER"),
            flush=True,
        )
    if options.json:
        text = json.dumps({"schema": 1, "host": host.describe(), "rows": rows}, indent=1)
        options.json.write_text(text + "\n")
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
