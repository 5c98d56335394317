"""The order of an epoch's picks: the same on every rank, from nothing but seed and epoch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from flodl_shm.errors import HostUnfit

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=1)
def permutation(picks: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Pick numbers 0 .. picks - 1 in the order of this epoch, read-only, 1-D int64.

    Seed and epoch are mixed, not added: epoch 1 of seed 0 is not epoch 0 of seed 1. One epoch is
    kept, since a rank goes through them in order. Raises HostUnfit where there is no memory for it.
    """
    try:
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(picks)
    except (MemoryError, ValueError):
        raise HostUnfit(
            f"no memory for the order of {picks} picks, {8 * picks} bytes in each rank",
            hint="An epoch has each sample of the dataset once, times --augment.",
        ) from None
    order = order.astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
