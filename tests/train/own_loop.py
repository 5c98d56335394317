"""A user's own loop over a scripted session or alone: what the tests of Worker have in common."""

from __future__ import annotations

import torch
from torch import nn
from worker_rig import FINISH, SAMPLES, Session, Ticking, attach, grant, job, train_step

from flodl_shm import Trainer
from flodl_shm.train.cooperative import Worker
from flodl_shm.train.gpu_worker import GpuWorker

TWO = (attach(), grant(1, 0), grant(2, 2, ((0, 8),)), grant(3, 1, ((8, 12),), after=8), FINISH)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


class Drops(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


class Records:
    """A dataset that remembers what was asked for."""

    def __init__(self, samples=SAMPLES) -> None:
        self.samples, self.seen = samples, []

    def __len__(self) -> int:
        return self.samples

    def get_batch(self, indices):
        self.seen.append(indices.tolist())
        return torch.ones(len(indices), 3), torch.ones(len(indices), 1)


def trainer(**changes):
    fields = {"dataset": job().dataset, "epochs": 3, "batch_size": 4, "seed": 7}
    return Trainer(changes.pop("model", Drops), adam, train_step, **fields | changes)


def train(worker):
    """The loop of the contract; plans as they came."""
    plans = []
    with worker as w:
        for plan in w.plans():
            plans.append(plan)
            for batch in w.batches():
                loss = train_step(w.model, batch)
                loss.backward()
                if w.step(loss).shutdown:
                    break
    return plans


def worker(*orders, leave=lambda failure: None, the_job=None, **more):
    """(worker over these orders, its session)."""
    session = Session(*orders, **more)
    return Worker(GpuWorker(the_job or job(), session, clock=Ticking()), leave), session


def step(w, batch=None):
    batch = w.next_batch() if batch is None else batch
    loss = train_step(w.model, batch)
    loss.backward()
    return w.step(loss)
