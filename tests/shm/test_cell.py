"""One u64, never torn, never misaligned."""

from __future__ import annotations

import pytest

from flodl_shm.errors import WeBroke
from flodl_shm.shm.cell import Cell, words
from flodl_shm.shm.segment import Segment


@pytest.fixture
def memory():
    segment = Segment.create(4096, purpose="test")
    yield segment.view
    segment.close()


@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 1])
def test_a_cell_holds_every_u64(memory, value):
    cell = Cell(memory, 8)
    cell.store(value)
    assert Cell(memory, 8).load() == value
    assert Cell(memory, 0).load() == Cell(memory, 16).load() == 0


def test_an_unaligned_offset_is_refused(memory):
    with pytest.raises(WeBroke, match="offset 60 is not 8-byte aligned"):
        Cell(memory, 60)


def test_an_aligned_offset_into_unaligned_memory_is_refused(memory):
    with pytest.raises(WeBroke, match="do not begin at a multiple of 8"):
        Cell(memory[4:20], 0)


@pytest.mark.parametrize("offset", [-8, 4096])
def test_a_cell_outside_is_refused(memory, offset):
    with pytest.raises(WeBroke, match="outside of 4096 bytes"):
        Cell(memory, offset)


def test_half_a_cell_is_refused(memory):
    with pytest.raises(WeBroke, match="12 bytes are no whole number of cells"):
        words(memory[:12])


def test_another_process_never_sees_half_a_store(memory, children):
    cell, go_on = Cell(memory, 64), Cell(memory, 128)
    go_on.store(1)

    def flip():
        while go_on.load():
            cell.store(2**64 - 1)
            cell.store(0)

    writer = children.fork(flip)
    seen = {cell.load() for _ in range(20_000)}
    go_on.store(0)
    assert children.join(writer) == 0
    assert seen <= {0, 2**64 - 1}
