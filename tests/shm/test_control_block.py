"""The control memory of a run: as large as its rings are said to be, for any number of ranks."""

from __future__ import annotations

import os

import pytest

from flodl_shm.ids import Row
from flodl_shm.shm.cell import LINE_BYTES
from flodl_shm.shm.control_block import HEAD_LINES, ControlBlock
from flodl_shm.shm.ring import Ring

PAGE = 4096


@pytest.mark.parametrize("ring_bytes", [4096, 64 << 10, 1 << 20])
def test_it_grows_by_two_rings_a_rank_and_every_ring_follows_the_size(ring_bytes):
    each = 2 * Ring.size_for(ring_bytes) + HEAD_LINES * LINE_BYTES
    for rows in (1, 2, 4, 8):
        block = ControlBlock(rows, ring_bytes=ring_bytes)
        assert block.segment.size == rows * each
        reserved = os.fstat(block.segment.fd).st_blocks * 512
        assert rows * each <= reserved < rows * each + PAGE
        for row in range(rows):
            for ring in (block.up(Row(row)), block.down(Row(row))):
                assert ring.capacity >= ring_bytes
        block.close()


def test_rows_do_not_share_a_byte():
    block = ControlBlock(3, ring_bytes=4096)
    for row in range(3):
        block.beat(Row(row)).store(row + 1)
    assert [block.beat(Row(row)).load() for row in range(3)] == [1, 2, 3]
    block.close()
