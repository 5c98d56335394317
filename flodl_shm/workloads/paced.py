"""A stand-in for GPUs of known speed: a tiny real step, then a wait inside the timed step.

Ranks do not fight for the CPU, so the best possible efficiency is known: at 20, 40 and 80 ms the
ranks together make 50 + 25 + 12.5 batches per second. Batch size 1: a pick is a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flodl_shm.errors import BadConfig
from flodl_shm.train.pacing import default_step_ms
from flodl_shm.workloads.modes import evaluating

if TYPE_CHECKING:
    from collections.abc import Mapping

PICKS = 1000
FEATURES = 16
MOST_RANKS = 8  # that the default has a time for: the eighth takes 2.56 s a step


def make_data(picks: int) -> TensorDataset:
    """`picks` noisy points of one fixed linear function: (picks, 16) and (picks, 1) float32."""
    draw = torch.Generator().manual_seed(2718)
    x = torch.randn(picks, FEATURES, generator=draw)
    slope = torch.randn(FEATURES, 1, generator=draw)
    return TensorDataset(x, x @ slope + 0.1 * torch.randn(picks, 1, generator=draw))


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return F.mse_loss(model(x), y)


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """Minus the mean squared error over the data."""
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in data.tensors)
    with evaluating(model):
        return -float(F.mse_loss(model(x), y).item())


def build(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer. Options: `picks` per epoch, `step_ms` per rank."""
    for option in options:
        if option not in ("picks", "step_ms"):
            raise BadConfig(
                f"workload paced has no option {option!r}", hint="It has picks and step_ms."
            )
    picks = options.get("picks", PICKS)
    if isinstance(picks, bool) or not isinstance(picks, int) or picks < 1:
        raise BadConfig(f"picks is {picks!r}", hint="Give a whole number, at least 1.")
    points = make_data(picks)
    return {
        "model": lambda: nn.Linear(FEATURES, 1),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "train_step": train_step,
        "dataset": points,
        "eval_fn": evaluate,
        "eval_dataset": points,
        "epochs": 1,
        "batch_size": 1,
        "step_ms": tuple(options.get("step_ms") or default_step_ms(MOST_RANKS)),
    }
