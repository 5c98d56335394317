"""Large segments lie where huge pages fit, and outlive everybody who looks in."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest

from flodl_shm.errors import HostUnfit
from flodl_shm.shm import huge_pages
from flodl_shm.shm.huge_pages import HUGE_BYTES, LEAST_BYTES, AlignedMap
from flodl_shm.shm.segment import Segment

SIZE = LEAST_BYTES + 4096  # a tail that fills no huge page


@pytest.fixture
def segment():
    made = Segment.create(SIZE, purpose="test")
    yield made
    made.close()


def mappings(fd_size: int) -> list[str]:
    """Lines of our address space that are as long as the segment."""
    lines = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if high - low == fd_size:
            lines.append(line)
    return lines


def test_a_large_segment_lies_at_a_multiple_of_a_huge_page(segment):
    (line,) = mappings(SIZE)
    assert int(line.split("-")[0], 16) % HUGE_BYTES == 0
    assert re.search(r" rw-s ", line)


def test_it_is_shared_and_every_byte_can_be_used(segment):
    other = Segment.adopt(os.dup(segment.fd), SIZE)
    other.view[0] = 7
    other.view[SIZE - 1] = 9
    assert (segment.view[0], segment.view[SIZE - 1]) == (7, 9)
    other.close()


def test_asking_keeps_what_lies_there(segment):
    segment.view[HUGE_BYTES : HUGE_BYTES + 3] = b"abc"
    granted = segment.ask_for_huge_pages()
    assert granted in {True, False}  # as the kernel likes
    segment.prefault()
    assert bytes(segment.view[HUGE_BYTES : HUGE_BYTES + 3]) == b"abc"


def test_a_kernel_that_refuses_is_no_failure(segment, monkeypatch):
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 12345)
    assert segment.ask_for_huge_pages() is False


def test_small_segments_are_not_asked_for():
    small = Segment.create(4096, purpose="test")
    assert small.ask_for_huge_pages() is False
    small.close()


def test_the_mapping_goes_with_the_last_view():
    segment = Segment.create(SIZE, purpose="test")
    kept = segment.view[100:200].cast("B")
    segment.close()
    kept[0] = 1  # a segmentation fault if it were gone
    del kept, segment
    gc.collect()
    assert mappings(SIZE) == []


def test_closing_without_views_unmaps_at_once():
    segment = Segment.create(SIZE, purpose="test")
    segment.close()
    gc.collect()
    assert mappings(SIZE) == []


def test_no_address_space_is_told_with_its_bytes():
    with pytest.raises(HostUnfit, match=r"\d+ bytes of shared memory could not be mapped"):
        AlignedMap(-1, 1 << 60)
