"""Picks and their keys: which sample, which variant, which randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl_shm.train.data.picks import PickSource, pick_keys
from flodl_shm.train.data.source import as_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

PICKS = np.arange(30, dtype=np.int64)


class Numbers:
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 10

    def get_batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor]:
        return (torch.from_numpy(np.array(indices)),)


def test_a_pick_is_a_sample_in_a_variant() -> None:
    (batch,) = PickSource(as_source(Numbers()), seed=0).fetch(np.array([3, 13, 29]))
    assert batch.tolist() == [3, 3, 9]


def test_without_augmentation_a_pick_is_a_sample() -> None:
    class Scribbles(Numbers):
        def get_batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor]:
            batch = super().get_batch(indices)
            indices[:] = 0  # it may
            return batch

    source = PickSource(as_source(Scribbles()), seed=0, augmented=False)
    assert source.fetch(np.array([3, 7]))[0].tolist() == [3, 7]
    source.transform = lambda batch, keys: keys
    picks = np.array([3, 7])
    assert source.fetch(picks).tolist() == pick_keys(np.array([3, 7]), seed=0, epoch=0).tolist()


def test_the_transform_gets_one_key_for_each_pick() -> None:
    def shift(batch: Any, keys: torch.Tensor) -> Any:
        return batch[0] + keys % 7, keys

    source = PickSource(as_source(Numbers()), seed=4, transform=shift, epoch=2)
    values, keys = source.fetch(PICKS)
    assert keys.tolist() == pick_keys(PICKS, seed=4, epoch=2).tolist()
    assert values.tolist() == (PICKS % 10 + keys.numpy() % 7).tolist()


def test_keys_depend_on_pick_epoch_and_seed_alone() -> None:
    keys = pick_keys(PICKS, seed=1, epoch=3)
    assert len(set(keys.tolist())) == len(PICKS)
    assert (keys >= 0).all()
    assert pick_keys(PICKS[5:6], seed=1, epoch=3)[0] == keys[5]
    assert not set(keys.tolist()) & set(pick_keys(PICKS, seed=1, epoch=4).tolist())
    assert not set(keys.tolist()) & set(pick_keys(PICKS, seed=2, epoch=3).tolist())


def test_keys_spread_over_all_bits() -> None:
    keys = pick_keys(np.arange(4096, dtype=np.int64), seed=0, epoch=0)
    for bit in range(63):
        share = float((keys >> bit & 1).mean())
        assert 0.45 < share < 0.55, f"bit {bit}: {share}"
