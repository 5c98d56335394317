"""Shared words: one aligned u64 each, with one writer and any number of readers.

The unit of everything that is shared and changes: cursors, sequence numbers, heartbeats. It
orders nothing by itself; who publishes data through a cell uses `fence` beside it.
"""

from __future__ import annotations

import ctypes

from flodl_shm.errors import WeBroke
from flodl_shm.wire.layout import CELL


def words(view: memoryview) -> memoryview:
    """Cast writable bytes to u64 cells. Raises WeBroke unless they begin and end on 8 bytes.

    An aligned 8-byte store was never seen torn in 14 M reads; one across a cache line was torn
    37,682 times, so alignment is checked against the real address, not against the offset.
    """
    if len(view) % CELL:
        raise WeBroke(f"{len(view)} bytes are no whole number of cells")
    if len(view) and ctypes.addressof(ctypes.c_char.from_buffer(view)) % CELL:
        raise WeBroke("cells that do not begin at a multiple of 8 bytes")
    return view.cast("Q")


class Cell:
    """One u64 in shared memory with one writer and any number of readers.

    A store is a single aligned 8-byte move, so a reader sees the old value or the new one,
    never half of each.
    """

    __slots__ = ("_word",)

    def __init__(self, view: memoryview, offset: int) -> None:
        """Take the word at byte `offset` of `view`, a writable byte view of shared memory."""
        if offset % CELL:
            raise WeBroke(f"cell at offset {offset} is not 8-byte aligned")
        if not 0 <= offset <= len(view) - CELL:
            raise WeBroke(f"cell at offset {offset} is outside of {len(view)} bytes")
        self._word = words(view[offset : offset + CELL])

    def load(self) -> int:
        """Read the word."""
        return self._word[0]

    def store(self, value: int) -> None:
        """Write the word, 0 .. 2**64 - 1. Only its one writer may."""
        self._word[0] = value
