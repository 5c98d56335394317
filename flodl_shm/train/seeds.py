"""Seeds the three random generators a training script can meet: torch, numpy and random.

The model is built with the run's seed, so all ranks build the same one; training uses seed + rank,
so dropout and augmentation differ between ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy's global generator and random with `seed` >= 0."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # numpy's legacy generator takes 32 bits only
    random.seed(seed)
