"""A model with everything in it that a checkpoint must cope with, saved and brought back."""

from __future__ import annotations

import random

import numpy as np
import torch
from checkpoint_rig import RUN, meta
from torch import nn

from flodl_shm.control.messages import Save
from flodl_shm.train.checkpoint.folder import publish
from flodl_shm.train.checkpoint.names import work_folder
from flodl_shm.train.checkpoint.restore import restore
from flodl_shm.train.checkpoint.saver import Saver


class Net(nn.Module):
    """Tied, normalised, with a counter of its own and a scratch buffer."""

    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        hidden = nn.functional.dropout(self.norm(self.embed(x)), 0.2, self.training)
        return self.head(torch.tanh(self.body(hidden)))


def step(model, optimizer):
    """One step on data drawn from all three generators."""
    x = torch.randint(0, 6, (8,))
    scale = random.random() + np.random.rand()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x) * scale
        loss.backward()
        return loss

    optimizer.step(closure)


def save(stem, model, optimizer, *, rank=0, number=1, scheduler=None, step_number=1):
    """A checkpoint of one rank."""
    sent = []
    saver = Saver(lambda n: work_folder(stem, RUN, n), rank, sent.append)
    order = Save(rank=rank, save=number, after=1, epoch=0, has_model=True)
    saver.save(order, model=model, optimizer=optimizer, scheduler_state=scheduler, row=0)
    assert saver.join(20.0)
    assert sent[0].error == ""
    return publish(stem, work_folder(stem, RUN, number), meta(step_number), sent[0].files)


def bring_back(folder, model, optimizer, *, rank=0, state_of=0):
    return restore(
        folder, model=model, optimizer=optimizer, rank=rank, state_of=state_of, device="cpu"
    )


def alike(a, b):
    """Bit-equal state_dicts, nested."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b
