"""When the next round is dealt on top of the one under way, where dead ranks may come back.

A rank that comes back can only be put on a round that is not dealt yet. Dealt at the window's
beginning, the next round would cost it a whole window more; dealt at the end, everybody would wait
for it. So it is dealt when half of the window's predicted length is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.ids import Nanos, Round

if TYPE_CHECKING:
    from flodl_shm.control.window_ledger import Window

# A window shorter than this is soon over anyway, and looking at the clock twice in it is not free.
WORTH_IT_NS = 50_000_000


class HalfTime:
    """Of the round under way. `matters`: False where nobody ever comes back."""

    def __init__(self, *, matters: bool) -> None:
        self._matters = matters
        self._round = Round(0)
        self._at = Nanos(0)
        self.next_at: Nanos | None = None  # when a round is held until then

    def holds(self, flying: list[Window], length_ns: float, now: Nanos) -> str:
        """Why nothing is dealt on top of the only round that flies; empty: it may be.

        The first time it is asked about a round, that round has just begun. `length_ns` is how
        long it is thought to last; 0 where nobody knows.
        """
        self.next_at = None
        if not self._matters or len(flying) != 1 or length_ns < WORTH_IT_NS:
            return ""
        if flying[0].round != self._round:
            self._round, self._at = flying[0].round, Nanos(now + int(length_ns / 2))
        if now >= self._at:
            return ""
        self.next_at = self._at
        return f"half of round {self._round} is not over"
