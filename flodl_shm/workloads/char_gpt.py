"""A small GPT that learns Python's own documentation, character by character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_shm.workloads import refuse_options
from flodl_shm.workloads.char_text import CONTEXT, evaluate, load, train_step

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 64
HEADS = 4
LAYERS = 2
EPOCHS = 6
BATCH_SIZE = 16
PEAK_LR = 4e-3


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
