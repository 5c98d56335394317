"""A recurrent net that learns the same text as the small GPT: one GRU, an excerpt at a time.

Its recurrent weight is used 64 times in each step, so gradients are large at first and clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flodl_shm.workloads import refuse_options
from flodl_shm.workloads.char_text import evaluate, load, train_step

if TYPE_CHECKING:
    from collections.abc import Mapping

EMBEDDING = 32
WIDTH = 96
EPOCHS = 5
BATCH_SIZE = 16
LR = 6e-3


class CharRnn(nn.Module):
    """Embedding, one GRU, linear head. Every excerpt starts from a state of zeros."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, EMBEDDING)
        self.gru = nn.GRU(EMBEDDING, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, alphabet)

    def forward(self, codes: Tensor) -> Tensor:
        """(batch, time) int64 to logits (batch, time, alphabet)."""
        states, _ = self.gru(self.characters(codes))
        logits: Tensor = self.head(states)
        return logits


def build(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Trainer; see the head of the file."""
    refuse_options("char-rnn", options)
    training, held_out, alphabet = load()
    return {
        "model": lambda: CharRnn(alphabet),
        "optimizer": lambda params: torch.optim.Adam(params, lr=LR),
        "train_step": train_step,
        "dataset": training,
        "eval_fn": evaluate,
        "eval_dataset": held_out,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "max_grad_norm": 1.0,
    }
