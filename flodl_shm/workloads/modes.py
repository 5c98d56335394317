"""Evaluation without traces: eval mode, no gradients, and every module's mode put back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from flodl_shm.train.modes import modes_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Score a model inside of this; a model trained in pieces keeps its mixed modes."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield
