"""Checksums of a slot: equal for equal floats, and every float has its turn."""

from __future__ import annotations

import pytest
import torch

from flodl_shm.train.digest import TURNS, Digest
from flodl_shm.wire.layout import plan_grid

SIZES = [(16, 0), (48, 16), (50_003, 4_501), (262_144, 65_536 + 7), (0, 4_500), (1_200_000, 0)]


@pytest.mark.parametrize(("params", "buffers"), SIZES)
@pytest.mark.parametrize("every", [1, 4, 16])
def test_equal_floats_have_equal_checksums_whatever_lies_between(params, buffers, every):
    grid = plan_grid(params, buffers)
    one = torch.randn(grid.floats)
    other = one.clone()
    other[params : grid.buffer_start] = 17.0
    for number in (1, 2, 30, 31, 999):
        a, b = (Digest(slot, grid, every=every).of(number) for slot in (one, other))
        assert a == b
        assert 0 <= a < 1 << 32


@pytest.mark.parametrize(("params", "buffers"), SIZES)
def test_each_float_has_its_turn(params, buffers):
    every = 16
    grid = plan_grid(params, buffers)
    slot = torch.randn(grid.floats)
    digest, rounds = Digest(slot, grid, every=every), range(5, 5 + every * TURNS)
    before = [digest.of(number) for number in rounds]
    last = [n for n in (params - 1, grid.floats - 1) if n >= 0 and (n < params or buffers)]
    first = [0] if params else [grid.buffer_start]
    for at in {*first, *last, *(grid.buffer_start,) * bool(buffers), params // 2 * bool(params)}:
        if not (at < params or grid.buffer_start <= at < grid.floats):
            continue
        kept = slot[at].clone()
        slot[at] = kept + 1
        assert before != [digest.of(number) for number in rounds], at
        slot[at] = kept


def test_every_block_is_looked_at_within_16_rounds():
    grid = plan_grid(40 * 65_536, 5 * 65_536)
    slot = torch.randn(grid.floats)
    digest = Digest(slot, grid, every=16)
    before = [digest.of(number) for number in range(100, 116)]
    for block in range(grid.blocks):
        low, high = grid.bounds(block)
        kept = slot[low:high].clone()
        slot[low:high] += 1
        assert before != [digest.of(number) for number in range(100, 116)], block
        slot[low:high] = kept
