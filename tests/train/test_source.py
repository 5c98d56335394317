"""Any dataset gives the batches a DataLoader would give, by position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from flodl_shm.errors import BadConfig
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.data.source import as_source, to_device

X = torch.arange(12.0).reshape(6, 2)
Y = torch.arange(6)


class Pairs(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        assert isinstance(index, int)
        return X[index], Y[index]


class Named(Pairs):
    def __getitem__(self, index):
        return {"x": X[index], "y": int(Y[index])}


class Batches:
    def __len__(self):
        return 6

    def get_batch(self, indices):
        assert isinstance(indices, np.ndarray)
        return X[indices], Y[indices]


class Shifted(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, y


@pytest.mark.parametrize(
    "dataset", [TensorDataset(X, Y), Pairs(), Batches(), Subset(Pairs(), range(6))]
)
def test_every_kind_of_dataset_gives_the_same_batch(dataset):
    source = as_source(dataset)
    assert len(source) == 6
    x, y = source.fetch(np.array([4, 1]))
    assert torch.equal(x, X[[4, 1]])
    assert torch.equal(y, Y[[4, 1]])


def test_a_batch_of_picks_may_be_written_to():
    """torch warns of read-only arrays; and what a dataset does to them must not reach the epoch."""
    order = permutation(6, seed=1, epoch=0)
    wanted = order[:3].tolist()
    for dataset in (TensorDataset(X, Y), Pairs(), Batches()):
        picks = PickQueue([(0, 3)], order).take(3)
        x, _ = as_source(dataset).fetch(picks)
        assert torch.equal(x, X[wanted])
        picks[:] = 0
    assert order[:3].tolist() == wanted


def test_samples_that_are_dicts_are_collated_as_dicts():
    batch = as_source(Named()).fetch(np.array([0, 5]))
    assert torch.equal(batch["x"], X[[0, 5]])
    assert batch["y"].tolist() == [0, 5]


def test_a_tensor_dataset_with_its_own_items_is_not_sliced():
    x, _ = as_source(Shifted(X, Y)).fetch(np.array([2]))
    assert torch.equal(x, X[[2]] + 1)


def test_many_items_at_once_are_asked_for_at_once():
    class Many(Pairs):
        def __getitems__(self, indices):
            return [(X[i] * 10, Y[i]) for i in indices]

    x, _ = as_source(Many()).fetch(np.array([3]))
    assert torch.equal(x, X[[3]] * 10)


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Sized:
    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Stream(), "has no length"),
        (iter([1]), "has no length"),
        (Sized(), "neither __getitem__ nor get_batch"),
        ([], "is empty: its length is 0"),
        (TensorDataset(torch.empty(0, 2)), "is empty"),
    ],
)
def test_a_dataset_that_cannot_be_dealt_is_refused(dataset, words):
    with pytest.raises(BadConfig, match=words):
        as_source(dataset)


def test_a_batch_moves_as_a_whole():
    batch = {"a": [X, (Y,)], "p": Point(X, 1), "n": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["p"].x.device.type == "meta"
    assert isinstance(moved["p"], Point)
    assert moved["n"] == 3


def test_the_length_is_that_of_the_beginning():
    samples = [1, 2, 3]
    source = as_source(samples)
    samples.append(4)
    assert len(source) == 3
