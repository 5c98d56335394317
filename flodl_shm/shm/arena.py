"""The arena: typed views over one segment, as `wire/layout.py` maps it. No policy.

The launcher uses the cells only, so torch is imported when somebody asks for floats. Writers: a
row's lines 0 and 1 its rank, its GONE cell and DEATHS the launcher, a shard's cells and redo block
the shard's worker, a slot its rank while training and the shards' workers while reducing.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from flodl_shm.errors import WeBroke
from flodl_shm.ids import Round, Row, Slot
from flodl_shm.shm.fence import fence
from flodl_shm.wire.layout import ARRIVED, FLOAT, GONE, HALVES, PICKS, STATE, STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from flodl_shm.shm.doorbell import Doorbell
    from flodl_shm.shm.segment import Segment
    from flodl_shm.wire.layout import ArenaMap

DEATHS = 0  # index of the cell that counts declarations

# values of a row's STATE cell; HELPING + slot while finishing the shard of a dead owner
TRAINING, ARRIVING, REDUCING, LEAVING, HELPING = 0, 1, 2, 3, 4


class Arena:
    """All shared memory of one reduce group: cells as `q` (u64) and `d` (f64), floats by slot.

    `bells[row]` wakes whoever sits in that row. Raises WeBroke if the segment is too small or a
    row has no bell.
    """

    def __init__(self, segment: Segment, map: ArenaMap, bells: Sequence[Doorbell]) -> None:  # noqa: A002
        if segment.size < map.size:
            raise WeBroke(f"an arena of {map.size} bytes in a segment of {segment.size}")
        if len(bells) < map.rows:
            raise WeBroke(f"{len(bells)} doorbells for {map.rows} rows")
        self.segment = segment
        self.map = map
        self.bells = tuple(bells)
        self.q = segment.view.cast("Q")
        self.d = segment.view.cast("d")

    @cached_property
    def flat(self) -> torch.Tensor:
        """The whole mapping as float32. It keeps the mapping alive as long as any view of it."""
        import torch

        return torch.frombuffer(self.segment.view, dtype=torch.float32)

    @cached_property
    def matrix(self) -> torch.Tensor:
        """[slots, floats with padding]: row s is slot s, so evenly spaced slots are one stride."""
        start = self.map.slots_at // FLOAT
        floats = self.map.slots * self.map.slot_bytes // FLOAT
        return self.flat[start : start + floats].view(self.map.slots, -1)

    def slot(self, slot: Slot) -> torch.Tensor:
        """One replica: 1-D float32 of `map.grid.floats`, a view into the arena."""
        self.map.shard(slot)  # the bounds check
        return self.matrix[slot, : self.map.grid.floats]

    def redo(self, slot: Slot) -> torch.Tensor:
        """The redo block of the shard owned by `slot`: 1-D float32 of one block."""
        start = (self.map.redo_at + slot * self.map.redo_bytes) // FLOAT
        return self.flat[start : start + self.map.grid.block_floats]

    def is_gone(self, row: Row) -> bool:
        """Whether the row's process is known dead. Once true, always true."""
        return self.q[self.map.row(row) + GONE] != 0

    def declare_dead(self, row: Row) -> None:
        """Tell everybody that the row's process is gone. The launcher only, and only when sure.

        GONE before DEATHS: who sees the count move finds the row. Reversed, a waiter could see
        the new count, miss the row, and sleep on a count that never moves again.
        """
        self.q[self.map.row(row) + GONE] = 1
        fence()
        self.q[DEATHS] += 1
        for bell in self.bells:
            bell.ring_always()

    def last_arrival(self, row: Row) -> tuple[Round, int, int]:
        """(round, steps, picks) of the row's last complete arrival; zeros before the first."""
        base = self.map.row(row)
        arrived = self.q[base + ARRIVED]
        half = base + HALVES[arrived & 1]
        return Round(arrived >> 1), self.q[half + STEPS], self.q[half + PICKS]

    def state(self, row: Row) -> int:
        """What the row is doing: TRAINING, ARRIVING, ... For people; nothing depends on it."""
        return self.q[self.map.row(row) + STATE]

    def close(self) -> None:
        """Let go of the cells and the segment; replicas must have left the arena before.

        A float view somebody still holds keeps the mapping until the process ends.
        """
        self.q.release()
        self.d.release()
        self.__dict__.pop("matrix", None)
        self.__dict__.pop("flat", None)
        self.segment.close()
