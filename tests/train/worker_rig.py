"""A worker's world in memory: a link that plays orders, a meeting, a session, a small model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flodl_shm.control.messages import Attach, Finish, Grant, Seat
from flodl_shm.control.options import Settled
from flodl_shm.ids import Rank, Round, Row, Slot
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.job import Job
from flodl_shm.train.reduce import Outcome

if TYPE_CHECKING:
    from flodl_shm.train.session import SlowDown

SAMPLES = 24
FINISH = Finish(rank=Rank(1), status="ok", reason="all epochs done")


class Ticking:
    """A clock that moves by one microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1000
        return self.now


@dataclass
class Script:
    """A link that gives its orders one after the other."""

    orders: list
    sent: list = field(default_factory=list)
    waited: list = field(default_factory=list)

    def send(self, report) -> None:
        self.sent.append(report)

    def receive(self, *, wait_for):
        self.waited.append(wait_for)
        return self.orders.pop(0)

    def poll(self):
        """What comes before the next window is there already, as far as anybody has sent it."""
        told = bool(self.orders) and not isinstance(self.orders[0], Grant | Finish)
        return self.orders.pop(0) if told else None

    def of(self, kind):
        return [report for report in self.sent if isinstance(report, kind)]


class Meeting:
    """Others contribute 5 steps to every round and halve this rank's parameters."""

    def __init__(self, slot) -> None:
        self.slot = slot
        self.arrivals: list[dict] = []

    def arrive(self, number, roster, /, **brought) -> None:
        self.arrivals.append({"round": number, "roster": roster, **brought})

    def complete(self):
        mine = self.arrivals[-1]
        if self.slot is not None and mine["steps"]:
            self.slot.mul_(0.5)
        return Outcome(
            round=mine["round"],
            contributors=(Rank(0), Rank(1)),
            steps=mine["steps"] + 5,
            mass=mine["mass"],
            divergence=0.25,
            barrier_ns=7,
            reduce_ns=9,
        )

    def alive(self, row):
        return True

    def publish_step(self, number, done, now, pace_ns):
        pass

    def pace_of(self, row):
        return Round(0), 0, 0, 0


class Session:
    """Rank 1 of 2."""

    rank, row, world_size, device = Rank(1), Row(1), 2, "cpu"
    slow: tuple[SlowDown, ...] = ()
    free_run_s = 0.0
    callback_timeout_s = 5.0
    run_id = save_stem = ""

    def __init__(self, *orders, seed=None, floats=0) -> None:
        self.seed = seed
        self.link = Script(list(orders))
        self.slot = torch.zeros(floats) if floats else None
        self.meeting = Meeting(self.slot)
        self.errand = 0

    def note_errand(self, since):
        self.errand = since

    def attach(self, order):
        return self.meeting, self.slot


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x))


def train_step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def job(**changes):
    draw = torch.Generator().manual_seed(1)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 3, generator=draw), torch.randn(SAMPLES, 1, generator=draw)
    )
    fields = {
        "model": Net,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train_step": train_step,
        "dataset": dataset,
    }
    return Job(**fields | changes)


def attach(**changes):
    fields = {
        "policy": "cadence",
        "world_size": 2,
        "epochs": 2,
        "batch_sizes": (4, 4),
        "seed": 11,
        "tail": "drop",
        "samples": SAMPLES,
        "anchor": 10,
        "max_anchor": 100,
        "overhead_target": 0.05,
        "gamma": 0.5,
        "augment": 1,
        "eval_every": 0,
    }
    plan = Settled(**fields | changes)
    return Attach(rank=Rank(1), plan=plan, slot=Slot(1), seats=(), global_step=0)


def grant(number, batches, spans=(), *, epoch=0, after=0):
    return Grant(
        rank=Rank(1),
        round=Round(number),
        epoch=epoch,
        roster=tuple(Seat(Rank(r), Row(r), Slot(r)) for r in range(2)),
        anchor_rank=Rank(0),
        anchor_steps=batches,
        planned=batches,
        ceiling=batches,
        spans=spans,
        after=after,
    )


def run(session, the_job=None, **times):
    return GpuWorker(the_job or job(), session, clock=Ticking(), **times).run()
