"""The control memory of a run: per row two rings, a heartbeat, and the flag of its doorbell.

    per row:  line 0   asleep    cell   written by: the rank; read by: whoever rings it
              line 1   beat      cell   written by: the rank's bridge thread; monotonic ns
                       errand    cell   written by: the rank's training thread; monotonic ns
              up ring                   rank -> launcher
              down ring                 launcher -> rank

It exists before the first fork, unlike the arena, whose size nobody knows until a rank has built
its model. What the messages mean is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flodl_shm.errors import WeBroke
from flodl_shm.shm.cell import Cell
from flodl_shm.shm.doorbell import Doorbell
from flodl_shm.shm.eventfd import Wakeup
from flodl_shm.shm.ring import Ring
from flodl_shm.shm.segment import Segment
from flodl_shm.wire.layout import CELL, LINE

if TYPE_CHECKING:
    from flodl_shm.ids import Row

# A window's reports and grants are a few hundred bytes; long lists of tensor names travel in
# pieces. Two rings of this size cost a rank 128 KiB.
RING_BYTES = 64 << 10
HEAD_LINES = 2


class BlockKit(msgspec.Struct, frozen=True):
    """A block as a process that shares its descriptors, but not its memory, takes it over."""

    rows: int
    ring_bytes: int
    segment_fd: int
    wakeup_fd: int
    bell_fds: tuple[int, ...]  # by row

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (self.segment_fd, self.wakeup_fd, *self.bell_fds)


class ControlBlock:
    """Made by the launcher, inherited by every rank, or adopted where nothing is inherited."""

    bells: list[Doorbell]

    def __init__(self, rows: int, *, ring_bytes: int = RING_BYTES, semaphores: bool = True) -> None:
        """Reserve the memory. Raises HostUnfit when there is none.

        `semaphores=False`: bells are eventfds, which can be passed on to strangers.
        """
        segment = Segment.create(rows * _stride(ring_bytes), purpose="control rings")
        cells = segment.view.cast("Q")
        self._lay_out(
            segment,
            [
                Doorbell.create(cells, row * _stride(ring_bytes) // CELL, semaphores=semaphores)
                for row in range(rows)
            ],
            ring_bytes=ring_bytes,
            create=True,
        )
        self.wakeup = Wakeup()

    @classmethod
    def adopt(cls, kit: BlockKit) -> ControlBlock:
        """The block of another process, by descriptors that are ours from now on.

        Raises PeerBroke or WeBroke when what lies behind them is no such block.
        """
        segment = Segment.adopt(kit.segment_fd, kit.rows * _stride(kit.ring_bytes))
        cells = segment.view.cast("Q")
        bells = [
            Doorbell.adopt(cells, row * _stride(kit.ring_bytes) // CELL, fd)
            for row, fd in enumerate(kit.bell_fds)
        ]
        block = cls.__new__(cls)
        block._lay_out(segment, bells, ring_bytes=kit.ring_bytes, create=False)
        block.wakeup = Wakeup(kit.wakeup_fd)
        return block

    def _lay_out(
        self, segment: Segment, bells: list[Doorbell], *, ring_bytes: int, create: bool
    ) -> None:
        self.rows, self.segment, self.bells = len(bells), segment, bells
        self._ring_bytes = ring_bytes
        self._beats: list[Cell] = []
        self._errands: list[Cell] = []
        self._up: list[Ring] = []
        self._down: list[Ring] = []
        ring, view = Ring.size_for(ring_bytes), segment.view
        for row in range(self.rows):
            base = row * _stride(ring_bytes)
            self._beats.append(Cell(view, base + LINE))
            self._errands.append(Cell(view, base + LINE + CELL))
            first = base + HEAD_LINES * LINE
            self._up.append(Ring(view[first : first + ring], create=create))
            self._down.append(Ring(view[first + ring : first + 2 * ring], create=create))

    def kit(self) -> BlockKit:
        """What `adopt` needs. Raises WeBroke for bells that only children by fork can share."""
        bells = [bell.fd for bell in self.bells]
        return BlockKit(
            rows=self.rows,
            ring_bytes=self._ring_bytes,
            segment_fd=self.segment.fd,
            wakeup_fd=self.wakeup.fd,
            bell_fds=tuple(_given(fd) for fd in bells),
        )

    def beat(self, row: Row) -> Cell:
        """When the row's process last showed a sign of life; 0 before its first."""
        return self._beats[row]

    def errand(self, row: Row) -> Cell:
        """Since when the row's rank is in an errand, which has a limit of its own; 0: it is not."""
        return self._errands[row]

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


def _stride(ring_bytes: int) -> int:
    return HEAD_LINES * LINE + 2 * Ring.size_for(ring_bytes)


def _given(fd: int | None) -> int:
    if fd is None:
        raise WeBroke("a bell is a semaphore: it has no descriptor to pass on")
    return fd
