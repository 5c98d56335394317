"""Evaluation without traces: eval mode, no gradients, and every module's mode put back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Score a model inside of this; a model trained in pieces keeps its mixed modes."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
