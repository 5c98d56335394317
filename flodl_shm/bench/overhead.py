"""bench-overhead: what a rank's loop costs on top of the same training written by hand.

One rank without a reduce: the window runner and stepper of every rank, parameters in a real
arena, progress published to it at every step, against a bare loop on a copy of the model. Blocks
of both take turns, whichever first is drawn; `us_per_step` is the median of the differences of
neighbouring blocks, in microseconds per step. Models are tiny: on others it drowns in the noise.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flodl_shm.bench.report import conclude
from flodl_shm.control.messages import Grant, Seat
from flodl_shm.errors import BadConfig
from flodl_shm.ids import Rank, Round, Row, Slot
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.control_block import ControlBlock
from flodl_shm.shm.segment import Segment
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.picks import PickSource
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.data.source import as_source
from flodl_shm.train.lr import LearningRate
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.reduce import Reducer
from flodl_shm.train.replica import Replica
from flodl_shm.train.step import Stepper
from flodl_shm.train.window import WindowRunner
from flodl_shm.wire.layout import plan_arena
from flodl_shm.workloads import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

WARM_UP = 3  # reps that do not count
BLOCK = 100  # steps of one loop before the other takes over
SAMPLES = 4096
FEATURES = 16
BATCH = 8


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure."""

    reps: int
    workloads: tuple[str, ...]


QUICK = Effort(reps=60, workloads=("linear", "digits-mlp"))
FULL = Effort(reps=300, workloads=("linear", "digits-mlp", "digits-lenet"))


@dataclass(frozen=True, slots=True)
class Task:
    """What both loops train."""

    model: nn.Module
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    train_step: Callable[[nn.Module, Any], torch.Tensor]
    dataset: TensorDataset
    batch_size: int

    def order(self, seed: int) -> NDArray[Any]:
        """Sample numbers of one block; a small dataset is gone through again."""
        epoch = permutation(len(self.dataset), seed=0, epoch=seed)
        return np.resize(epoch, BLOCK * self.batch_size)


def task_of(workload: str) -> Task:
    """`linear`, one layer and nothing else to do, or a built-in workload by its name."""
    if workload != "linear":
        parts = build(workload)
        return Task(
            model=parts["model"](),
            make_optimizer=parts["optimizer"],
            train_step=parts["train_step"],
            dataset=parts["dataset"],
            batch_size=parts["batch_size"],
        )
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=draw)
    return Task(
        model=nn.Linear(FEATURES, 1),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train_step=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        dataset=TensorDataset(x, x.sum(dim=1, keepdim=True)),
        batch_size=BATCH,
    )


class BareLoop:
    """The training as a user writes it without an engine."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = copy.deepcopy(task.model)
        self._optimizer = task.make_optimizer(self._model.parameters())

    def run(self, order: NDArray[Any]) -> None:
        """Train one block."""
        task, model, optimizer = self._task, self._model, self._optimizer
        tensors, train_step = task.dataset.tensors, task.train_step
        total = 0.0
        for picks in torch.from_numpy(order).split(task.batch_size):
            batch = tuple(tensor[picks] for tensor in tensors)
            optimizer.zero_grad()
            loss = train_step(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item()


class EngineLoop:
    """The same through the engine: one window is one block."""

    def __init__(self, task: Task) -> None:
        model = copy.deepcopy(task.model)
        replica = Replica(model)
        layout = replica.layout
        shape = plan_arena(
            params=layout.param_floats, buffers=layout.buffer_floats, slots=1, rows=1
        )
        self._block = ControlBlock(1)
        segment = Segment.create(shape.size, purpose="bench-arena")
        self._arena = Arena(segment, shape, self._block.bells)
        self._replica = replica
        replica.bind(self._arena.slot(Slot(0)))
        optimizer = task.make_optimizer(model.parameters())
        self._runner = WindowRunner(
            rank=Rank(0),
            batch_size=task.batch_size,
            source=PickSource(as_source(task.dataset), seed=0, augmented=False),
            stepper=Stepper(model, optimizer, task.train_step, device=torch.device("cpu")),
            rate=LearningRate(optimizer, None, 1),
            pacer=Pacer(),
            meeting=Reducer(self._arena, seat_row=Row(0), slot=Slot(0)),
            device=torch.device("cpu"),
        )

    def run(self, order: NDArray[Any]) -> None:
        """Train one block."""
        queue = PickQueue([(0, len(order))], order)
        self._runner.run(_GRANT, queue, position=0)

    def close(self) -> None:
        """Give the arena back."""
        self._replica.release()
        self._arena.close()
        self._block.close()


_GRANT = Grant(  # an elastic window: the anchor rank asks its rule before every batch
    rank=Rank(0),
    round=Round(2),
    epoch=0,
    roster=(Seat(Rank(0), Row(0), Slot(0)),),
    anchor_rank=Rank(0),
    anchor_steps=BLOCK,
    planned=BLOCK,
    ceiling=BLOCK + 20,
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One rep: a block of each, in seconds."""

    engine_s: float
    bare_s: float


def run_row(workload: str, reps: int, *, seed: int) -> dict[str, object]:
    """Measure one workload. Raises BadConfig when its data are not there."""
    task, draw = task_of(workload), random.Random(seed)
    bare, engine = BareLoop(task), EngineLoop(task)
    try:
        pairs = [_pair(engine, bare, task.order(rep), draw) for rep in range(WARM_UP + reps)]
    finally:
        engine.close()
    return row_of(workload, pairs[WARM_UP:])


def _pair(engine: EngineLoop, bare: BareLoop, order: NDArray[Any], draw: random.Random) -> Pair:
    times: dict[EngineLoop | BareLoop, float] = {}
    loops: list[EngineLoop | BareLoop] = [engine, bare]
    for loop in draw.sample(loops, 2):
        began = time.perf_counter()
        loop.run(order)
        times[loop] = time.perf_counter() - began
    return Pair(engine_s=times[engine], bare_s=times[bare])


def row_of(workload: str, pairs: Sequence[Pair]) -> dict[str, object]:
    """Microseconds per step: the median difference, and both loops for comparison."""
    per_step = 1e6 / BLOCK
    return {
        "workload": workload,
        "us_per_step": per_step * statistics.median(p.engine_s - p.bare_s for p in pairs),
        "engine_us": per_step * statistics.median(p.engine_s for p in pairs),
        "bare_us": per_step * statistics.median(p.bare_s for p in pairs),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench-overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="fewer reps: well under a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the loops")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    with _one_thread():
        return conclude(lambda: measure_all(effort, options.seed), options.json)


def measure_all(effort: Effort, seed: int) -> list[dict[str, Any]]:
    """One row after the other; prints as it goes."""
    rows = []
    print("workload      us per step  engine us  bare us")
    for workload in effort.workloads:
        try:
            row = run_row(workload, effort.reps, seed=seed)
        except BadConfig as error:  # the digits need an extra package
            print(f"{workload} left out: {error.sentence()}")
            continue
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def line_of(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    return "{workload:13s} {us_per_step:11.1f} {engine_us:10.1f} {bare_us:8.1f}".format(**row)


if __name__ == "__main__":
    sys.exit(main())
