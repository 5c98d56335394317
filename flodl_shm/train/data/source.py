"""One way to ask any dataset for a batch: `fetch(indices)`.

A TensorDataset is sliced in one call per tensor, an object with `get_batch` does its own work, any
other map-style dataset is read sample by sample and collated as a DataLoader would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Source(Protocol):
    """A dataset as the training loop sees it."""

    def __len__(self) -> int: ...

    def fetch(self, indices: NDArray[np.int64]) -> Any:
        """The batch of these samples; `indices` is 1-D int64 and may be written to."""


class _Tensors:
    """Slices a TensorDataset; the batch is a tuple of tensors with the samples in dim 0."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors
        self._length = len(dataset)
        self._in_memory = all(t.device.type == "cpu" for t in dataset.tensors)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        index = torch.from_numpy(indices)
        if self._in_memory:  # where a step can be so short that asking each time shows
            return tuple([t.index_select(0, index) for t in self._tensors])
        return tuple(t.index_select(0, index.to(t.device)) for t in self._tensors)


class _Batched:
    """An object that makes its own batches."""

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        self.fetch = dataset.get_batch

    def __len__(self) -> int:
        return self._length


class _Mapped:
    """Reads sample by sample, or all at once through `__getitems__`, and collates."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._length = len(dataset)  # picks are dealt by it: that it changes later must not count
        self._many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64]) -> Any:
        wanted = indices.tolist()
        if self._many is not None:
            return default_collate(self._many(wanted))
        dataset = self._dataset
        return default_collate([dataset[i] for i in wanted])


def as_source(dataset: Any) -> Source:
    """Wrap a dataset. Raises BadConfig for one that has no length, no samples, or no way in."""
    source: Source
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise BadConfig(
            f"the dataset ({type(dataset).__name__}) has no length",
            hint="Every pick is dealt by its position: give a map-style dataset with __len__.",
        )
    if isinstance(dataset, TensorDataset) and (
        type(dataset).__getitem__ is TensorDataset.__getitem__
    ):
        source = _Tensors(dataset)
    elif callable(getattr(dataset, "get_batch", None)):
        source = _Batched(dataset)
    elif hasattr(dataset, "__getitem__"):
        source = _Mapped(dataset)
    else:
        raise BadConfig(
            f"the dataset ({type(dataset).__name__}) has neither __getitem__ nor get_batch",
            hint="Give a map-style dataset, or an object with get_batch(indices).",
        )
    if len(source) == 0:
        raise BadConfig(
            f"the dataset ({type(dataset).__name__}) is empty: its length is 0",
            hint="Nothing can be trained; check where its samples come from.",
        )
    return source


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`; tuples, lists and dicts are gone through."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(part, device) for part in batch)
    return batch
