"""What each rank was granted, did and delivered in every window.

One entry per round, from issue to commit:

    issued     the roster is named; ranks are training towards the round
    settled    every rank of the roster has arrived or is dead: the contributors are certain
    committed  a living rank has left the round, so all shards are closed

The ledger only remembers and answers; who acts on it is the coordinator's business. It does not
know epochs' pools, balancing or time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.errors import PeerBroke, WeBroke
from flodl_shm.ids import Rank, Round

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from flodl_shm.control.messages import Arrived, Left, Seat

SPREADING = Round(1)  # the round that spreads the initial state, and trains nothing


@dataclass(slots=True)
class Window:
    """One round and the window that leads to it."""

    round: Round
    epoch: int
    roster: tuple[Seat, ...]
    anchor_rank: Rank
    anchor_steps: int
    planned: dict[Rank, int]
    ceiling: dict[Rank, int]
    exact: bool
    arrived: dict[Rank, Arrived] = field(default_factory=dict)
    picks: dict[Rank, int] = field(default_factory=dict)  # consumed in this window
    left: dict[Rank, Left] = field(default_factory=dict)
    settled: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The roster's ranks, in its order."""
        return tuple(seat.rank for seat in self.roster)

    @property
    def contributors(self) -> tuple[Rank, ...]:
        """Who arrived completely, dead or not; final once the window is settled."""
        return tuple(s.rank for s in self.roster if s.rank in self.arrived and not s.joiner)

    def awaited(self, living: Collection[Rank]) -> list[Rank]:
        """Living ranks that have not arrived yet."""
        return [rank for rank in self.ranks if rank in living and rank not in self.arrived]


class WindowLedger:
    """All windows of a run that are not committed yet, and the number of the next round."""

    def __init__(self) -> None:
        self.next_round = Round(1)
        self._open: dict[Round, Window] = {}

    def issue(self, window: Window) -> None:
        """Write down a round that was issued. Rounds are issued in order, without gaps."""
        if window.round != self.next_round:
            raise WeBroke(f"round {window.round} issued out of order, {self.next_round} is next")
        self._open[window.round] = window
        self.next_round = Round(window.round + 1)

    def arrive(self, report: Arrived) -> None:
        """Write down an arrival; a second one for the same round is refused."""
        window = self._open.get(report.round)
        if window is None or report.rank not in window.ranks:
            raise PeerBroke(f"rank {report.rank} arrived in round {report.round}, not its own")
        if report.rank in window.arrived:
            raise PeerBroke(f"rank {report.rank} arrived twice in round {report.round}")
        window.arrived[report.rank] = report

    def leave(self, report: Left) -> None:
        """Write down that a rank left. A round that is committed already needs no more of it."""
        window = self._open.get(report.round)
        if window is not None:
            window.left[report.rank] = report
        elif report.round >= self.next_round:
            raise PeerBroke(f"rank {report.rank} left round {report.round}, never issued")

    def close(self, window: Window) -> None:
        """Forget a committed window."""
        del self._open[window.round]

    def open(self) -> Iterator[Window]:
        """Windows not committed, oldest first."""
        return iter(list(self._open.values()))

    def unsettled(self) -> list[Window]:
        """Windows whose contributors are not certain yet, oldest first."""
        return [window for window in self._open.values() if not window.settled]

    def get(self, number: Round) -> Window | None:
        """The open window of this round, if there is one."""
        return self._open.get(number)
