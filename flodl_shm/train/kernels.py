"""The weighted mean of one block: which kernel, over which views.

Every rank picks the same kernel from the same sources and weights, and a block is always the same
floats, so a helper writes the very bits the owner would have written. Times of the kernels against
a fused C loop (256 KiB blocks, one core): lerp 1.16 for two sources; mv 1.16 against 1.37 for a
lerp chain with four, 1.15 against 1.54 with eight; anything that allocates 22 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from flodl_shm.ids import Slot
    from flodl_shm.shm.arena import Arena

Mean = Callable[[Any, torch.Tensor], object]  # (views from `views_of`, out)


@dataclass(frozen=True, slots=True)
class Mix:
    """Whose blocks are averaged in one region, with which positive weights (not normalised)."""

    slots: tuple[Slot, ...]
    weights: tuple[float, ...]

    @property
    def is_mean(self) -> bool:
        """Two sources or more: something has to be computed, not only copied."""
        return len(self.slots) > 1


def even_stride(slots: Sequence[Slot]) -> int:
    """The common distance of three or more rising slots, which then are one matrix; else 0."""
    gaps = {b - a for a, b in pairwise(slots)}
    stride = gaps.pop() if len(slots) > 2 and len(gaps) == 1 else 0
    return max(stride, 0)


def views_of(arena: Arena, slots: Sequence[Slot], low: int, high: int) -> Any:
    """Floats [low, high) of the sources in the shape that `mean_of` the same slots reads."""
    stride = even_stride(slots)
    if stride:
        return arena.matrix[slots[0] : slots[-1] + 1 : stride, low:high].t()
    return [arena.slot(slot)[low:high] for slot in slots]


def mean_of(mix: Mix) -> Mean:
    """The kernel for a mix of two sources or more. Weights are normalised once, in f64.

    `out` must not overlap a source.
    """
    weights = mix.weights
    if len(weights) == 2:
        return _lerp(weights[1] / (weights[0] + weights[1]))
    if even_stride(mix.slots):
        total = sum(weights)
        shares = torch.tensor([w / total for w in weights], dtype=torch.float64, device="cpu")
        return _matrix_vector(shares.to(torch.float32))
    so_far = weights[0]
    parts = []
    for weight in weights[1:]:
        so_far += weight
        parts.append(weight / so_far)
    return _lerp_chain(parts)


def _lerp(share: float) -> Mean:
    lerp = torch.lerp
    return lambda sources, out: lerp(sources[0], sources[1], share, out=out)


def _matrix_vector(shares: torch.Tensor) -> Mean:
    mv = torch.mv
    return lambda sources, out: mv(sources, shares, out=out)


def _lerp_chain(parts: Sequence[float]) -> Mean:
    def chain(sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.lerp(sources[0], sources[1], parts[0], out=out)
        for source, part in zip(sources[2:], parts[1:], strict=True):
            out.lerp_(source, part)

    return chain


def warm_up() -> None:
    """Run every operation of a round once: each one's first call costs up to 0.3 ms."""
    few = torch.zeros(8, dtype=torch.float32, device="cpu")
    _lerp_chain([0.5])([few[:2], few[2:4]], few[4:6])
    rows = few[:6].view(3, 2)
    _matrix_vector(torch.full((3,), 0.25))(rows.t(), few[6:8])
    torch.sub(few[:2], few[2:4], out=few[4:6])
    float(torch.dot(few[:2], few[2:4]))
    np.copyto(few[:2].numpy(), few[2:4].numpy())
