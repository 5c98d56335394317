"""The control memory of a run: per row two rings, a heartbeat, and the flag of its doorbell.

    per row:  line 0   asleep    cell   written by: the rank; read by: whoever rings it
              line 1   beat      cell   written by: the rank's bridge thread; monotonic ns
              up ring                   rank -> launcher
              down ring                 launcher -> rank

It exists before the first fork, unlike the arena, whose size nobody knows until a rank has built
its model. What the messages mean is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.shm.cell import LINE_BYTES, Cell
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.eventfd import Wakeup
from flodl_shm.shm.ring import Ring
from flodl_shm.shm.segment import Segment

if TYPE_CHECKING:
    from flodl_shm.ids import Row

# A window's reports and grants are a few hundred bytes; long lists of tensor names travel in
# pieces. Two rings of this size cost a rank 128 KiB.
RING_BYTES = 64 << 10
HEAD_LINES = 2


class ControlBlock:
    """Made by the launcher, inherited by every rank."""

    def __init__(self, rows: int, *, ring_bytes: int = RING_BYTES) -> None:
        """Reserve the memory. Raises HostUnfit when there is none."""
        ring = Ring.size_for(ring_bytes)
        stride = HEAD_LINES * LINE_BYTES + 2 * ring
        self.rows = rows
        self.segment = Segment.create(rows * stride, purpose="control rings")
        view = self.segment.view
        cells = view.cast("Q")
        self.bells: list[Doorbell] = []
        self._beats: list[Cell] = []
        self._up: list[Ring] = []
        self._down: list[Ring] = []
        for row in range(rows):
            base = row * stride
            self.bells.append(Doorbell.create(cells, base // 8))
            self._beats.append(Cell(view, base + LINE_BYTES))
            first = base + HEAD_LINES * LINE_BYTES
            self._up.append(Ring(view[first : first + ring], create=True))
            self._down.append(Ring(view[first + ring : first + 2 * ring], create=True))
        self.wakeup = Wakeup()

    def beat(self, row: Row) -> Cell:
        """When the row's process last showed a sign of life; 0 before its first."""
        return self._beats[row]

    def up(self, row: Row) -> Ring:
        """Rank to launcher."""
        return self._up[row]

    def down(self, row: Row) -> Ring:
        """Launcher to rank."""
        return self._down[row]

    def close(self) -> None:
        """Give descriptors and memory back."""
        for bell in self.bells:
            bell.close()
        self.wakeup.close()
        self.segment.close()
