"""What the kills of oracle_kills.py are about: a training small enough to repeat in one process.

run by every rank:    oracle_script.py PLACE STEP_MS...     writes PLACE/final-RANK.npy
imported by oracle.py for model, data and rate
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, EPOCHS, BATCH, RATE = 160, 2, 2, 0.02


def data() -> TensorDataset:
    """Noisy points of a line in six dimensions."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=draw)
    return TensorDataset(x, x.sum(dim=1, keepdim=True) + torch.randn(SAMPLES, 1, generator=draw))


def model() -> nn.Module:
    """Two layers: not convex, so what is trained when does matter."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(net(x), y)


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def main() -> None:
    import flodl_shm as fl

    place, step_ms = Path(sys.argv[1]), [float(word) for word in sys.argv[2:]]
    rank = int(os.environ["RANK"])

    def step(net: nn.Module, batch) -> torch.Tensor:
        time.sleep(step_ms[rank] / 1e3)
        return loss_of(net, batch)

    trainer = fl.Trainer(model, sgd, step, dataset=data(), batch_size=BATCH, epochs=EPOCHS)
    state = trainer.run()
    flat = torch.cat([tensor.reshape(-1) for tensor in state.params.values()])
    partial = place / f"partial-{rank}.npy"
    np.save(partial, flat.numpy())
    partial.rename(place / f"final-{rank}.npy")  # a kill may come here, too


if __name__ == "__main__":
    main()
