"""Picks: one sample x one augmentation. From pick numbers to the batch the user's step sees.

An epoch of S samples and k augmentations has k * S picks; pick p is sample p % S in its variant
p // S. Each pick of each epoch has a key of its own, derived from the run's seed, so a random
augmentation can be the same whichever rank trains it, and differs from epoch to epoch. It is
applied to the batch after it was fetched: inside the dataset, a cache would freeze it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from flodl_shm.train.data.source import Source

    Transform = Callable[[Any, torch.Tensor], Any]

# splitmix64 (Steele, Lea, Flood 2014): one multiply-xor round trip per number, no state.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(slots=True)
class PickSource:
    """Fetches batches by pick number; `transform(batch, keys)` is applied if there is one."""

    source: Source
    seed: int
    transform: Transform | None = None
    epoch: int = 0
    augmented: bool = True  # False: every pick is the number of a sample

    def fetch(self, picks: NDArray[np.int64]) -> Any:
        """The batch of these picks, 1-D int64, as the dataset and the transform make it."""
        if not self.augmented and self.transform is None:
            return self.source.fetch(picks)  # which may write to them: nobody needs them after
        batch = self.source.fetch(picks % len(self.source))
        if self.transform is None:
            return batch
        keys = pick_keys(picks, seed=self.seed, epoch=self.epoch)
        return self.transform(batch, torch.from_numpy(keys))


def pick_keys(picks: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
    """One 63-bit key per pick, the same on every rank: 1-D int64, not negative."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        start = _mix(_mix(np.uint64(seed) + GOLDEN) ^ np.uint64(epoch))
        keys = _mix(picks.astype(np.uint64) * GOLDEN + start)
    return (keys >> np.uint64(1)).astype(np.int64)


def _mix(number: Any) -> Any:
    number = (number ^ (number >> np.uint64(30))) * MIX_1
    number = (number ^ (number >> np.uint64(27))) * MIX_2
    return number ^ (number >> np.uint64(31))
