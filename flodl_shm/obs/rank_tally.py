"""What one rank did in a run, in sums, over all its incarnations.

Fed by obs/tally.py. A rank is on the clock from its first step: what it waited for before is the
run's start-up, not a loss of the training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.ids import Nanos, Round

if TYPE_CHECKING:
    from flodl_shm.control.messages import Arrived, Died, Finished, Left
    from flodl_shm.ids import Row


@dataclass(slots=True)
class _Waits:
    """Of the window that ended with a round not yet committed."""

    round: Round = Round(0)
    callback_ns: int = 0
    wait_ns: int = 0
    barrier_ns: int = 0


@dataclass(slots=True)
class RankTally:
    """Sums of one rank. `reported` picks were trained, `committed` ones are in the consensus."""

    device: str = ""
    rows: list[Row] = field(default_factory=list)  # one per incarnation, in order
    batches: int = 0
    windows: int = 0
    window_batches: int = 0  # of the newest window
    refused: int = 0  # windows whose parameters were not finite
    reports: int = 0  # messages from it
    orders: int = 0  # messages to it
    reported: int = 0
    committed: int = 0
    busy_ns: int = 0
    wait_ns: int = 0
    data_ns: int = 0
    callback_ns: int = 0  # the user's functions and copies for a save, between windows
    barrier_ns: int = 0
    reduce_ns: int = 0
    lost_ns: int = 0  # dead incarnations: from their last reduce to their last sign of life
    away: list[tuple[Nanos, Nanos | None]] = field(default_factory=list)  # dead from, back at
    first_step_at: Nanos | None = None
    last_left_at: Nanos = Nanos(0)
    last_left_round: Round = Round(0)
    finished: Finished | None = None
    exit: str | None = None
    _open: dict[Round, int] = field(default_factory=dict)  # picks of rounds not yet committed
    _newest: _Waits = field(default_factory=_Waits)
    _counted: dict[Row, int] = field(default_factory=dict)  # picks of an incarnation, seen so far

    @property
    def rate(self) -> float:
        """Its own speed: picks per busy second; 0 before its first report."""
        return self.reported / (self.busy_ns / 1e9) if self.busy_ns else 0.0

    @property
    def in_flight(self) -> int:
        """Picks that were trained and reported, in rounds that may still commit."""
        return sum(self._open.values())

    @property
    def is_dead(self) -> bool:
        """True while no incarnation lives."""
        return bool(self.away) and self.away[-1][1] is None

    @property
    def incarnation(self) -> int:
        """0 for the first process of this rank, 1 for the one that came after it, ..."""
        return sum(back is not None for _, back in self.away)

    def appear(self, row: Row, now: Nanos) -> None:
        """A process of this rank has spoken for the first time."""
        if row in self.rows:
            return
        self.rows.append(row)
        if self.is_dead:
            self.away[-1] = (self.away[-1][0], now)

    def arrive(self, report: Arrived) -> int:
        """Add one window; what of the time since the one before went into callbacks."""
        called_ns = 0
        new = report.picks - self._counted.get(report.row, 0)
        self._counted[report.row] = report.picks
        if self.first_step_at is None:
            if not report.began_at:
                return 0  # round 1: nothing was trained, and the wait for it is start-up
            self.first_step_at = report.began_at  # so is what was called before it
            self._newest = _Waits(report.round)
        else:
            called_ns = report.callback_ns
            self.wait_ns += report.wait_ns
            self._newest = _Waits(report.round, called_ns, report.wait_ns)
        self.windows += 1
        self.window_batches = report.batches
        self.refused += report.refused
        self.batches += report.batches
        self.callback_ns += called_ns
        self.reported += new
        self._open[report.round] = self._open.get(report.round, 0) + new
        self.busy_ns += report.busy_ns
        self.data_ns += report.data_ns
        return called_ns

    def settle(self, last: Round | None) -> None:
        """Rounds up to `last` have committed, with or without it; None: no round will any more."""
        self._open = {r: n for r, n in self._open.items() if last is not None and r > last}

    def leave(self, report: Left) -> None:
        """Add one reduce."""
        self.last_left_at = report.left_at
        self.last_left_round = report.round
        if self.first_step_at is None:
            return
        self.barrier_ns += report.barrier_ns
        if report.round == self._newest.round:
            self._newest.barrier_ns = report.barrier_ns
        self.reduce_ns += report.reduce_ns

    def excuse(self, number: Round, outside_ns: int) -> None:
        """`outside_ns` of the window before this round are no training, whoever was called.

        A rank that waited for another one's callback has not wasted that time.
        """
        newest = self._newest
        if newest.round != number:
            return
        left = max(0, outside_ns - newest.callback_ns)
        at_start = min(left, newest.wait_ns)
        self.wait_ns -= at_start
        self.barrier_ns -= min(left - at_start, newest.barrier_ns)
        self._newest = _Waits()

    def die(self, death: Died, now: Nanos) -> Nanos:
        """Take the incarnation off the clock; say since when. Told twice, it counts once."""
        gone_at = death.last_sign_at or now
        if self.is_dead:
            return gone_at
        # Arrived in a round it never left: its window is in the consensus, nothing is lost.
        if self.first_step_at is not None and death.arrived <= self.last_left_round:
            back_at = (self.away[-1][1] if self.away else None) or Nanos(0)
            since = max(self.first_step_at, self.last_left_at, back_at)
            self.lost_ns += max(0, gone_at - since)
        self.away.append((gone_at, None))
        return gone_at

    def lived_ns(self, start: Nanos, stop: Nanos) -> int:
        """How much of [start, stop) one of its processes was alive."""
        lived = max(0, stop - start)
        for gone, back in self.away:
            lived -= max(0, min(stop, back or stop) - max(start, gone))
        return max(0, lived)
