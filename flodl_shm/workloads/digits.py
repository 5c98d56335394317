"""Two classifiers on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

The split is fixed: every fifth digit is held out. `digits-mlp` is the quick one, `digits-lenet`
the demanding one: its BatchNorm layers show whether buffers are averaged as they should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flodl_shm.errors import BadConfig
from flodl_shm.workloads import refuse_options
from flodl_shm.workloads.modes import evaluating

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HELD_OUT_EVERY = 5


def load() -> tuple[TensorDataset, TensorDataset]:
    """(training, held out): images (n, 1, 8, 8) float32 in 0..1, labels (n,) int64.

    Raises BadConfig without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadConfig(
            "the digits workloads need scikit-learn, which is not installed",
            hint='Install the extra: pip install "flodl_shm[examples]".',
        ) from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def make_mlp() -> nn.Module:
    """64 pixels, 64 hidden, 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_lenet() -> nn.Module:
    """Two convolutions with BatchNorm and pooling, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    """Part of the held-out digits that is recognised, 0..1."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in held_out.tensors)
    with evaluating(model):
        right = model(images).argmax(dim=1) == labels
    return float(right.float().mean().item())


def build_mlp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-mlp."""
    refuse_options("digits-mlp", options)
    return _arguments(make_mlp, lr=0.1)


def build_lenet(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-lenet."""
    refuse_options("digits-lenet", options)
    return _arguments(make_lenet, lr=0.02)


def _arguments(model: Callable[[], nn.Module], *, lr: float) -> dict[str, Any]:
    training, held_out = load()
    return {
        "model": model,
        "optimizer": lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "train_step": train_step,
        "dataset": training,
        "eval_fn": accuracy,
        "eval_dataset": held_out,
        "epochs": 12,
        "batch_size": 32,
    }
