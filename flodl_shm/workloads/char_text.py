"""Text for character models: Python's own documentation, cut into excerpts, and how it is scored.

The text comes with every CPython (`pydoc_data.topics`, about 465,000 characters), so nothing is
fetched. One epoch is one pass over the text in excerpts of 64 characters; the last tenth is held
out and scored. What kind of model reads it is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_shm.workloads.modes import evaluating

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTEXT = 64
HELD_OUT = 0.1
SCORED_EXCERPTS = 256  # of the held-out tail: enough for two digits, under a second on one core


class Excerpts:
    """Excerpts of a text: characters 0..63 and, shifted by one, what is to be predicted."""

    def __init__(self, codes: Tensor) -> None:
        """`codes`: the text as 1-D int64."""
        count = (len(codes) - 1) // CONTEXT
        self._codes = codes
        self._starts = torch.arange(count) * CONTEXT
        self._within = torch.arange(CONTEXT + 1)

    def __len__(self) -> int:
        return len(self._starts)

    def get_batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both (len(indices), 64) int64."""
        starts = self._starts[torch.tensor(indices)]
        excerpts = self._codes[starts[:, None] + self._within]
        return excerpts[:, :-1], excerpts[:, 1:]


def read_text() -> str:
    """All topics of Python's documentation in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def load() -> tuple[Excerpts, Excerpts, int]:
    """(training excerpts, held-out excerpts, number of different characters)."""
    text = read_text()
    alphabet = sorted(set(text))
    code_of = {char: code for code, char in enumerate(alphabet)}
    codes = torch.tensor([code_of[char] for char in text])
    cut = int(len(codes) * (1 - HELD_OUT))
    return Excerpts(codes[:cut]), Excerpts(codes[cut:]), len(alphabet)


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per character."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def evaluate(model: nn.Module, held_out: Excerpts) -> float:
    """Minus the mean loss over the beginning of the held-out text: higher is better."""
    device = next(model.parameters()).device
    count = min(SCORED_EXCERPTS, len(held_out))
    total = 0.0
    with evaluating(model):
        for low in range(0, count, 64):
            indices = np.arange(low, min(low + 64, count))
            inputs, targets = held_out.get_batch(indices)
            loss = train_step(model, (inputs.to(device), targets.to(device)))
            total += len(indices) * loss.item()
    return -total / count
