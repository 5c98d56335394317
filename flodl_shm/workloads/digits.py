"""Four classifiers and an autoencoder on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

The split is fixed: every fifth digit is held out. `digits-logistic` and `digits-mlp` are the quick
ones; the BatchNorm layers of `digits-lenet` and `digits-resnet` show whether buffers are averaged
as they should be; `digits-ae` has no labels and a real number for a score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flodl_shm.errors import BadConfig
from flodl_shm.workloads import digits_models as models
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


def reconstruct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error between the image and what the model makes of it; labels unused."""
    images, _ = batch
    return F.mse_loss(model(images), images)


def fidelity(model: nn.Module, held_out: TensorDataset) -> float:
    """Minus the reconstruction loss over the held-out digits: higher is better."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in held_out.tensors)
    with evaluating(model):
        return -float(reconstruct(model, (images, labels)).item())


def build_logistic(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-logistic."""
    refuse_options("digits-logistic", options)
    return _classifier(models.make_logistic, lr=0.1)


def build_mlp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-mlp."""
    refuse_options("digits-mlp", options)
    return _classifier(models.make_mlp, lr=0.1)


def build_lenet(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-lenet."""
    refuse_options("digits-lenet", options)
    return _classifier(models.make_lenet, lr=0.02)


def build_resnet(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-resnet."""
    refuse_options("digits-resnet", options)
    return _classifier(models.make_resnet, lr=0.05)


def build_autoencoder(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer for digits-ae."""
    refuse_options("digits-ae", options)
    return _on_digits() | {
        "model": models.make_autoencoder,
        "optimizer": lambda params: torch.optim.Adam(params, lr=3e-3),
        "train_step": reconstruct,
        "eval_fn": fidelity,
        "epochs": 24,
    }


def _classifier(model: Callable[[], nn.Module], *, lr: float) -> dict[str, Any]:
    return _on_digits() | {
        "model": model,
        "optimizer": lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "train_step": train_step,
        "eval_fn": accuracy,
        "epochs": 12,
    }


def _on_digits() -> dict[str, Any]:
    """What all of them have in common."""
    training, held_out = load()
    return {"dataset": training, "eval_dataset": held_out, "batch_size": 32}
