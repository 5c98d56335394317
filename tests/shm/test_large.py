"""Beyond 2 and 4 GiB: sizes and places are whole numbers of 64 bits, from end to end."""

from __future__ import annotations

import os

import pytest

from flodl_shm.ids import Slot
from flodl_shm.shm.arena import Arena
from flodl_shm.shm.free_memory import survey
from flodl_shm.shm.segment import Segment
from flodl_shm.wire.layout import plan_arena

GIB = 1 << 30


class NoBell:
    def ring_always(self):
        pass


@pytest.mark.parametrize("gib", [2, 4])
@pytest.mark.parametrize("more", [-64, 0, 64])
def test_the_last_float_of_the_last_slot_is_where_it_belongs(gib, more, children):
    """On pages that nobody has touched, so that it costs no memory."""
    floats = (gib * GIB + more) // 4
    shape = plan_arena(params=floats, buffers=0, slots=2, rows=2)
    assert shape.size > 2 * (gib * GIB + more)
    fd = os.memfd_create("flodl-test")
    os.ftruncate(fd, shape.size)
    arena = Arena(Segment(fd, shape.size, "memfd"), shape, [NoBell(), NoBell()])
    arena.slot(Slot(0))[-1] = 1.5
    arena.slot(Slot(1))[floats - 1] = 2.5

    def look():
        assert arena.slot(Slot(0))[-1] == 1.5
        assert arena.slot(Slot(1))[floats - 1] == 2.5
        assert arena.slot(Slot(1))[0] == 0

    assert children.join(children.fork(look)) == 0
    arena.close()


@pytest.mark.slow
@pytest.mark.skipif(survey().memory < 6 * GIB, reason="needs 6 GiB of free memory")
def test_more_than_two_gib_are_reserved_to_the_last_byte():
    size = 2 * GIB + 4096
    segment = Segment.create(size, purpose="test")
    assert os.fstat(segment.fd).st_blocks * 512 >= size
    segment.view[-1] = 7
    assert segment.view[size - 1] == 7
    segment.close()
