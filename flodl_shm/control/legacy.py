"""What outlives a rank's death: its slot, what its batches cost, and the consensus in others.

Asked when the rank comes back, and when nearly everybody is gone. Knows no files and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.ids import Rank, Round, Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flodl_shm.control.messages import Died, Left
    from flodl_shm.control.window_ledger import Window


class Legacy:
    """Of all ranks of one run."""

    def __init__(self) -> None:
        self._last_use: dict[Rank, Round] = {}  # of a dead rank's slot
        self._last_cost: dict[Rank, float | None] = {}  # of its batches, in ns
        self._holders: set[Row] = set()  # those who hold, or held, a consensus

    def found(self, rows: Iterable[Row]) -> None:
        """These begin the training together: each holds what there is of it."""
        self._holders.update(rows)

    def left(self, report: Left) -> None:
        """A rank has gone through a round; one without contributors gave it nothing."""
        if report.contributors:
            self._holders.add(report.row)

    def bury(self, death: Died, cost_ns: float | None) -> None:
        """A rank is dead, whose batches cost this much."""
        rank = death.rank
        self._last_use[rank] = max(death.arrived, self._last_use.get(rank, Round(0)))
        self._last_cost[rank] = cost_ns or self._last_cost.get(rank)

    def cost_ns(self, rank: Rank) -> float | None:
        """What a batch of the dead rank cost; None if it was never known."""
        return self._last_cost.get(rank)

    def slot_is_free(self, rank: Rank, committed: Round) -> bool:
        """Whether no round is open that uses the memory of the dead rank's replica.

        Rounds in which it never arrived do not: who has not arrived is no member.
        """
        return self._last_use.get(rank, Round(0)) <= committed

    def is_held(self, rows: Collection[Row], rounds: Iterable[Window]) -> bool:
        """Whether one of `rows` holds the consensus, or will when an open round has closed.

        Only the round that brings a rank in can give it what it never had.
        """
        return not self._holders.isdisjoint(rows) or any(
            (not window.settled or window.contributors)
            and any(seat.joiner and seat.row in rows for seat in window.roster)
            for window in rounds
        )
