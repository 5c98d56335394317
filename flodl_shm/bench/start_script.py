"""What bench-start starts, the same under both launchers: a tiny model, stamped at its first step.

A script, never imported: it is copied next to the stamps of its ranks, each of which writes the
monotonic clock there when its optimizer has stepped for the first time. Its argument says how.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterable

FEATURES, SAMPLES, BATCH = 16, 512, 8


def make_model() -> nn.Module:
    """One layer."""
    return nn.Linear(FEATURES, 1)


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD that stamps its first step."""
    optimizer = torch.optim.SGD(params, lr=0.01)
    optimizer.register_step_post_hook(_stamp)
    return optimizer


def _stamp(*_: Any) -> None:
    path = Path(__file__).with_name(f"stamp-{os.getpid()}")
    if not path.exists():
        path.write_text(str(time.monotonic_ns()))


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return F.mse_loss(model(x), y)


def make_data() -> TensorDataset:
    """Points of a linear function."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def with_torchrun() -> None:
    """The loop of the DDP tutorial."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters())
    data = make_data()
    for batch in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        train_step(model, batch).backward()
        optimizer.step()
    dist.destroy_process_group()


def with_ours() -> None:
    """The same training through the engine."""
    import flodl_shm as fl

    fl.Trainer(
        make_model, make_optimizer, train_step, dataset=make_data(), batch_size=BATCH, epochs=1
    ).run()


if __name__ == "__main__":
    {"ours": with_ours, "torchrun": with_torchrun}[sys.argv[1]]()
