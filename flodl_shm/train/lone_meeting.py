"""A reducer for one: whoever trains with nobody to meet, for good or for a while, gets this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.ids import Nanos, Rank, Round
from flodl_shm.train.reduce import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.control.messages import Seat
    from flodl_shm.ids import Row


class LoneMeeting:
    """Rounds of one: whoever arrives is the consensus."""

    def __init__(self) -> None:
        self._arrival = (Round(0), 0, 0.0)

    def arrive(
        self, number: Round, roster: Sequence[Seat], /, *, steps: int, mass: float, picks: int
    ) -> None:
        """Remember what `complete` will say."""
        self._arrival = (number, steps, mass)

    def complete(self) -> Outcome:
        """The mean over one is the one."""
        number, steps, mass = self._arrival
        return Outcome(
            round=number,
            contributors=(Rank(0),),
            steps=steps,
            mass=mass,
            divergence=0.0,
            barrier_ns=0,
            reduce_ns=0,
        )

    def alive(self, row: Row) -> bool:
        """There is only this rank."""
        return True

    def publish_step(self, number: Round, done: int, now: Nanos, pace_ns: int) -> None:
        """Nobody reads it."""

    def pace_of(self, row: Row) -> tuple[Round, int, Nanos, int]:
        """Nothing is published."""
        return Round(0), 0, Nanos(0), 0
