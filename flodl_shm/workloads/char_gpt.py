"""A small GPT that learns Python's own documentation, character by character.

The text comes with every CPython (`pydoc_data.topics`, about 465,000 characters), so nothing is
fetched. One epoch is one pass over the text in windows of 64 characters; the last tenth is held
out and scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_shm.workloads import refuse_options
from flodl_shm.workloads.modes import evaluating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
HELD_OUT = 0.1
EPOCHS = 6
BATCH_SIZE = 16
PEAK_LR = 4e-3
SCORED_WINDOWS = 256  # of the held-out tail: enough for two digits, under a second on one core


class TextWindows:
    """Windows of a text: characters 0..63 and, shifted by one, what is to be predicted."""

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
        windows = self._codes[starts[:, None] + self._within]
        return windows[:, :-1], windows[:, 1:]


def read_text() -> str:
    """All topics of Python's documentation in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def load() -> tuple[TextWindows, TextWindows, int]:
    """(training windows, held-out windows, number of different characters)."""
    text = read_text()
    alphabet = sorted(set(text))
    code_of = {char: code for code, char in enumerate(alphabet)}
    codes = torch.tensor([code_of[char] for char in text])
    cut = int(len(codes) * (1 - HELD_OUT))
    return TextWindows(codes[:cut]), TextWindows(codes[cut:]), len(alphabet)


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.to_heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.from_heads = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, length, _ = x.shape
        heads = self.to_heads(self.before_attention(x))
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in heads.chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class CharGpt(nn.Module):
    """Two blocks over character and position embeddings; the head is the embedding, tied."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, alphabet, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, codes: Tensor) -> Tensor:
        """(batch, time) int64 to logits (batch, time, alphabet)."""
        place = torch.arange(codes.shape[1], device=codes.device)
        x = self.characters(codes) + self.positions(place)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per character."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def evaluate(model: nn.Module, held_out: TextWindows) -> float:
    """Minus the mean loss over the beginning of the held-out text: higher is better."""
    device = next(model.parameters()).device
    count = min(SCORED_WINDOWS, len(held_out))
    total = 0.0
    with evaluating(model):
        for low in range(0, count, 64):
            indices = np.arange(low, min(low + 64, count))
            inputs, targets = held_out.get_batch(indices)
            loss = train_step(model, (inputs.to(device), targets.to(device)))
            total += len(indices) * loss.item()
    return -total / count


def warm_up(step: int) -> float:
    """A short linear warm-up, then a slow decay by the square root."""
    return PEAK_LR * min(1.0, (step + 1) / 100, (1000 / (step + 1)) ** 0.5)


def build(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer; see the head of the file."""
    refuse_options("char-gpt", options)
    training, held_out, alphabet = load()
    return {
        "model": lambda: CharGpt(alphabet),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=PEAK_LR, weight_decay=0.01),
        "train_step": train_step,
        "dataset": training,
        "eval_fn": evaluate,
        "eval_dataset": held_out,
        "scheduler": warm_up,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "max_grad_norm": 1.0,
    }
