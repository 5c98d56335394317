"""Counts a run as it goes: fed every event and action in order, asked for figures at any time.

It only listens. What it says is made of what the coordinator was told and decided, so a journal
fed through it gives the same figures as the run did. The clock is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    Arrived,
    Attached,
    BuildArena,
    Committed,
    Died,
    End,
    EpochClosed,
    Evaluated,
    Finished,
    Left,
    Order,
    Ready,
    Rejoined,
    Report,
    Resumed,
)
from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.efficiency import Efficiency, measure
from flodl_shm.obs.rank_tally import RankTally

if TYPE_CHECKING:
    from flodl_shm.control.messages import Message
    from flodl_shm.control.options import Settled
    from flodl_shm.ids import Round


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known before the first message."""

    workload: str
    backend: str
    world_size: int
    devices: tuple[str, ...]  # one per rank
    started_at: Nanos


@dataclass(slots=True)
class Death:
    """One loss of a rank. `committed_at` is the first commit after it."""

    rank: Rank
    incarnation: int
    cause: str
    at: Nanos
    last_sign_at: Nanos
    committed_at: Nanos | None = None


@dataclass(slots=True)
class Rejoin:
    """One return of a rank. `committed_at` is the first commit it contributed to."""

    rank: Rank
    incarnation: int
    at: Nanos
    committed_at: Nanos | None = None


@dataclass(slots=True)
class Tally:
    """The figures of one run so far."""

    facts: RunFacts
    plan: Settled | None = None
    ranks: dict[Rank, RankTally] = field(init=False)
    epochs: list[EpochClosed] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    rejoins: list[Rejoin] = field(default_factory=list)
    reduces_ns: list[int] = field(default_factory=list)
    epoch_picks: dict[int, int] = field(default_factory=dict)  # committed, by epoch
    picks_before: int = 0  # in epochs that were done when the training was taken up again
    last_commit: Committed | None = None
    last_commit_at: Nanos | None = None
    end: End | None = None
    # Evaluations, callbacks and copies for a save, up to the last commit. They stand before the
    # window of the rank that has them, whose arrival tells them; all others wait for it.
    _outside_ns: int = 0
    _callbacks_ns: dict[Round, int] = field(default_factory=dict)  # the longest of each round

    def __post_init__(self) -> None:
        self.ranks = {
            Rank(number): RankTally(device=device)
            for number, device in enumerate(self.facts.devices)
        }

    # ---- listening ----------------------------------------------------------------------------

    def feed(self, message: Message, now: Nanos) -> None:
        """Take one event or action; messages that carry no figure are passed over."""
        if isinstance(message, Report):
            self.ranks[message.rank].reports += 1
        elif isinstance(message, Order):
            self.ranks[message.rank].orders += 1
        match message:
            case Ready() | Attached():
                self._appear(message, now)
            case Rejoined():
                self._return(message, now)
            case Arrived():
                called_ns = self.ranks[message.rank].arrive(message)
                longest = max(self._callbacks_ns.get(message.round, 0), called_ns)
                self._callbacks_ns[message.round] = longest
            case Left():
                self.ranks[message.rank].leave(message)
            case Committed():
                self._commit(message, now)
            case EpochClosed():
                self.epochs.append(message)
            case Resumed():  # the summary is of the whole training
                self.epochs.extend(message.closed)
                self.picks_before = sum(epoch.picks for epoch in message.closed)
            case Evaluated():
                if message.value is not None:
                    self.evals.append((message.epoch, message.value))
            case Died():
                self._die(message, now)
            case Finished():
                self.ranks[message.rank].finished = message
            case BuildArena():
                self.plan = message.plan
            case End():
                self.end = message
                for rank in self.ranks.values():
                    rank.settle(None)
            case _:
                pass

    def exited(self, rank: Rank, words: str) -> None:
        """How the rank's newest process ended, in words as "exit 0" or "signal 9 (SIGKILL)"."""
        self.ranks[rank].exit = words

    def _appear(self, report: Ready | Attached, now: Nanos) -> None:
        rank = self.ranks[report.rank]
        if not rank.is_dead:  # else it is on its way back, and counts from its return on
            rank.appear(report.row, now)
        if isinstance(report, Ready):
            rank.device = report.device

    def _return(self, back: Rejoined, now: Nanos) -> None:
        self.ranks[back.rank].appear(back.row, now)
        self.rejoins.append(Rejoin(back.rank, back.incarnation, now))

    def _commit(self, commit: Committed, now: Nanos) -> None:
        self.last_commit = commit
        self.last_commit_at = now
        self.reduces_ns.append(commit.reduce_ns)
        for rank, picks in commit.picks.items():
            self.ranks[Rank(int(rank))].committed += picks
        for member in self.ranks.values():
            member.settle(commit.round)
        picks = sum(commit.picks.values())
        self.epoch_picks[commit.epoch] = self.epoch_picks.get(commit.epoch, 0) + picks
        outside_ns = self._callbacks_ns.pop(commit.round, 0)
        self._outside_ns += outside_ns
        for member in self.ranks.values():
            member.excuse(commit.round, outside_ns)
        for death in self.deaths:
            death.committed_at = death.committed_at or now
        for back in self.rejoins:
            if back.rank in commit.contributors:
                back.committed_at = back.committed_at or now

    def _die(self, death: Died, now: Nanos) -> None:
        rank = self.ranks[death.rank]
        if rank.finished is not None or rank.is_dead:
            return  # its work was done, or this death is counted
        rank.die(death, now)
        self.deaths.append(
            Death(death.rank, rank.incarnation, death.cause, now, death.last_sign_at)
        )

    # ---- figures ------------------------------------------------------------------------------

    @property
    def picks(self) -> int:
        """Picks in the consensus."""
        return sum(rank.committed for rank in self.ranks.values())

    @property
    def first_step_at(self) -> Nanos | None:
        """When the last rank made its first step; None while none has."""
        firsts = [r.first_step_at for r in self.ranks.values() if r.first_step_at is not None]
        return max(firsts, default=None)

    @property
    def train_ns(self) -> int:
        """First step on all ranks to the last commit, evaluations and callbacks outside."""
        if self.first_step_at is None or self.last_commit_at is None:
            return 0
        return max(0, self.last_commit_at - self.first_step_at - self._outside_ns)

    @property
    def picks_per_s(self) -> float | None:
        """Committed picks over the time of training."""
        return self.picks / (self.train_ns / 1e9) if self.train_ns else None

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that are not dead."""
        return [number for number, rank in self.ranks.items() if not rank.is_dead]

    def share(self, rank: Rank) -> float:
        """The rank's part of all committed picks, 0 .. 1."""
        return self.ranks[rank].committed / self.picks if self.picks else 0.0

    def efficiency(self) -> Efficiency:
        """Over the training so far."""
        if self.first_step_at is None or self.last_commit_at is None:
            return Efficiency()
        return measure(
            self.ranks.values(),
            start=self.first_step_at,
            stop=self.last_commit_at,
            outside_ns=self._outside_ns,
        )

    def params_sha256(self) -> str | None:
        """The hash all finished ranks agree on; None without one, or when they differ."""
        told = {r.finished.params_sha256 for r in self.ranks.values() if r.finished is not None}
        return told.pop() if len(told) == 1 else None
