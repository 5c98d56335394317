"""The control memory of a run: as large as its rings are said to be, for any number of ranks."""

from __future__ import annotations

import os

import pytest

from flodl_shm.errors import WeBroke
from flodl_shm.ids import Row
from flodl_shm.shm.control_block import HEAD_LINES, BlockKit, ControlBlock
from flodl_shm.shm.ring import Reader, Ring, Writer
from flodl_shm.wire.layout import LINE

PAGE = 4096


@pytest.mark.parametrize("ring_bytes", [4096, 64 << 10, 1 << 20])
def test_it_grows_by_two_rings_a_rank_and_every_ring_follows_the_size(ring_bytes):
    each = 2 * Ring.size_for(ring_bytes) + HEAD_LINES * LINE
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
        block.errand(Row(row)).store(row + 4)
    assert [block.beat(Row(row)).load() for row in range(3)] == [1, 2, 3]
    assert [block.errand(Row(row)).load() for row in range(3)] == [4, 5, 6]
    block.close()


def test_a_stranger_with_its_own_descriptors_shares_rings_bells_and_wakeup():
    block = ControlBlock(2, ring_bytes=4096, semaphores=False)
    kit = block.kit()
    copies = {fd: os.dup(fd) for fd in kit.fds}
    theirs = ControlBlock.adopt(
        BlockKit(
            rows=2,
            ring_bytes=4096,
            segment_fd=copies[kit.segment_fd],
            wakeup_fd=copies[kit.wakeup_fd],
            bell_fds=tuple(copies[fd] for fd in kit.bell_fds),
        )
    )
    writer = Writer(theirs.up(Row(1)), ring_bell=theirs.wakeup.notify, peer="us")
    writer.send(b"hello", deadline_ns=0)
    theirs.beat(Row(1)).store(7)
    theirs.bells[1].ring_always()
    assert block.wakeup.drain()
    assert Reader(block.up(Row(1)), peer="them").read() == b"hello"
    assert (block.beat(Row(0)).load(), block.beat(Row(1)).load()) == (0, 7)
    seen = iter((False, True))
    assert block.bells[1].wait(lambda: next(seen), timeout_ns=0)
    theirs.close()
    block.close()


def test_semaphores_cannot_be_passed_on():
    block = ControlBlock(1, ring_bytes=4096)
    if block.bells[0].fd is None:
        with pytest.raises(WeBroke, match="semaphore"):
            block.kit()
    block.close()
