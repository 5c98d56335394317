"""The same paced ranks under torch's DistributedDataParallel over gloo, for comparison.

A process for each rank on the loopback, the same model, data, picks, pace and jitter as in a row
under `sync`. The pace lies between forward and backward, where a device computes: gradients are
exchanged when the slowest rank has them. What the ranks note down becomes records as our journal
has them, so that one definition of efficiency measures both.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_shm.bench.forked import run_ranks
from flodl_shm.bench.rig_cases import slow_downs, step_ms_of
from flodl_shm.control.messages import Arrived, Attached, Committed, Issued
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.journal import Record
from flodl_shm.train.free_run import LEAST, WARM_UP
from flodl_shm.train.pacing import Pacer
from flodl_shm.workloads import paced

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from flodl_shm.engine.config import RunConfig

LEAST_S, SLACK = 60.0, 4.0  # a run that takes longer, and this many times its due, hangs
_kept: list[object] = []  # lives as long as a rank's process


@dataclass(frozen=True, slots=True)
class RankLog:
    """What one rank notes down; times are monotonic nanoseconds."""

    rate: float  # free picks per second
    began_at: int
    ends: tuple[int, ...]  # of every step


def run_ddp(config: RunConfig) -> list[Record]:
    """Train as the config says. Raises HostUnfit when a rank fails or hangs."""
    importlib.import_module("torch._dynamo")  # DDP's own, which each rank would import anew
    due_s = 2 * config.free_run_s + _steps(config) * max(step_ms_of(config)) / 1e3
    with tempfile.TemporaryDirectory(prefix="bench-ddp-") as folder:
        place = Path(folder)
        run_ranks(
            config.ranks,
            lambda rank: _run_rank(config, rank, place),
            limit_s=LEAST_S + SLACK * due_s,
        )
        logs = [_read(place / f"rank{rank}.json") for rank in range(config.ranks)]
    return records_of(logs, steps_per_epoch=_steps_per_epoch(config))


def _read(path: Path) -> RankLog:
    told = json.loads(path.read_text())
    return RankLog(told["rate"], told["began_at"], tuple(told["ends"]))


def _steps_per_epoch(config: RunConfig) -> int:
    return int(config.workload_options["picks"]) // config.ranks  # type: ignore[arg-type]


def _steps(config: RunConfig) -> int:
    return _steps_per_epoch(config) * (config.wishes.epochs or 1)


def records_of(logs: Sequence[RankLog], *, steps_per_epoch: int) -> list[Record]:
    """Every step is a round of one pick each that commits when its last rank has ended it.

    The first one is the window in which nobody's speed is known; it also holds DDP's first look
    at the order of gradients.
    """
    ranks = tuple(Rank(rank) for rank in range(len(logs)))
    picks = {str(rank): 1 for rank in ranks}
    records: list[Record] = []

    def say(message: Attached | Arrived | Issued | Committed, at: int) -> None:
        is_event = isinstance(message, Attached | Arrived)
        records.append(Record("event" if is_event else "action", Nanos(at), message))

    for rank, log in enumerate(logs):
        seat = Rank(rank), Row(rank)
        say(Attached(*seat, free_picks_per_s=log.rate), log.began_at)
    say(Issued(Round(1), 0, Rank(0), 1, picks, ""), max(log.began_at for log in logs))
    for rank, log in enumerate(logs):
        seat = Rank(rank), Row(rank)
        arrived = Arrived(*seat, Round(1), 1, 1, 1, began_at=Nanos(log.began_at))
        say(arrived, log.ends[0])
    for step, ends in enumerate(zip(*(log.ends for log in logs), strict=True)):
        epoch = step // steps_per_epoch
        mass = dict.fromkeys(picks, 1.0)
        commit = Committed(Round(step + 1), epoch, ranks, picks, picks, mass, step + 1, None, 0, 0)
        say(commit, max(ends))
        if step == 0:
            say(Issued(Round(2), 0, Rank(0), 1, picks, ""), max(ends))
    return records


# ---- in a rank -------------------------------------------------------------------------------


class _Loop:
    """One paced rank's training, with or without the others."""

    def __init__(self, model: nn.Module, pacer: Pacer, data: Any) -> None:
        import torch

        self._model, self._pacer = model, pacer
        self._x, self._y = data.tensors
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, pick: int, step_index: int, epoch: int) -> int:
        """Train one pick; returns the time of its end."""
        began = time.monotonic_ns()
        batch = self._x[pick : pick + 1], self._y[pick : pick + 1]
        self._optimizer.zero_grad()
        loss: torch.Tensor = paced.train_step(self._model, batch)
        pad = self._pacer.pad(time.monotonic_ns() - began, step_index, epoch)
        if pad > 0:
            time.sleep(pad / 1e9)
        loss.backward()
        self._optimizer.step()
        return time.monotonic_ns()


def _run_rank(config: RunConfig, rank: int, place: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(config.wishes.seed or 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{place / 'gloo'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=config.ranks)
    pacer = Pacer(
        slow=slow_downs(config, Rank(rank)),
        step_ms=step_ms_of(config)[rank],
        rank=rank,
        seed=config.wishes.seed or 0,
    )
    data = paced.make_data(int(config.workload_options["picks"]))  # type: ignore[arg-type]
    model = torch.nn.Linear(paced.FEATURES, 1)
    alone = _Loop(copy.deepcopy(model), pacer, data)
    together = _Loop(DistributedDataParallel(model), pacer, data)
    dist.barrier()
    rate = _free_rate(alone, config.free_run_s, len(data))
    dist.barrier()
    log = _train(together, config, rank, rate)
    (place / f"rank{rank}.json").write_text(json.dumps(asdict(log)))
    dist.barrier()  # nobody closes a connection that another one still needs
    # Taken down, gloo's group waits for a thread of its own that may be waiting for the GIL, which
    # whoever takes it down holds (torch 2.13): two processes in a hundred never ended. It ends
    # with the process instead.
    _kept.append(together)


def _free_rate(loop: _Loop, seconds: float, samples: int) -> float:
    """As in our own free run: a few steps to warm up, then for a time and LEAST steps."""
    for step in range(WARM_UP):
        loop.step(step % samples, step, 0)
    began = last = time.monotonic_ns()
    steps = 0
    while steps < LEAST or last - began < seconds * 1e9:
        last = loop.step(steps % samples, WARM_UP + steps, 0)
        steps += 1
    return steps / ((last - began) / 1e9)


def _train(loop: _Loop, config: RunConfig, rank: int, rate: float) -> RankLog:
    per_epoch, ends = _steps_per_epoch(config), []
    began_at = time.monotonic_ns()
    for step in range(_steps(config)):
        epoch, nth = divmod(step, per_epoch)
        ends.append(loop.step(nth * config.ranks + rank, step, epoch))
    return RankLog(rate, began_at, tuple(ends))
