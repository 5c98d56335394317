"""A whole run in one process on a simulated clock, around the real coordinator.

The world plays ranks, rings, cells and the launcher: it delivers reports and orders with delays,
lets ranks decide at batch boundaries with the very function real ranks use, closes a round when
everyone of its roster has arrived or is known dead, and declares deaths late. It keeps its own
books of which pick entered the consensus, and compares them with the promises, not with the
coordinator's books.

Ties in time are shuffled by the seed, so an order that only happens to work does not pass.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    Attach,
    Committed,
    Died,
    End,
    EpochClosed,
    Evaluate,
    Event,
    Finish,
    Grant,
    Message,
    Report,
    Stop,
)
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round
from flodl_shm.sim.actor import Actor, Cells, Contribution
from flodl_shm.sim.rig import MS, Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.options import Wishes

M = TypeVar("M", bound=Message)

LIMIT = 2_000_000  # simulated happenings of one run; a run that needs more does not end


@dataclass(slots=True)
class Record:
    """What a run did, by the world's own books."""

    actions: list[tuple[Nanos, Action]] = field(default_factory=list)
    events: list[tuple[Nanos, Event]] = field(default_factory=list)
    consensus: dict[int, Counter[int]] = field(default_factory=dict)  # epoch -> picks in it
    end: End | None = None
    first_step: Nanos = Nanos(0)
    last_commit: Nanos = Nanos(0)

    def of(self, kind: type[M]) -> list[M]:
        """All actions of one kind, in order."""
        return [action for _, action in self.actions if isinstance(action, kind)]


class World:
    """One run of `rig`. `run()` returns its record; any broken promise raises WeBroke."""

    def __init__(self, rig: Rig, *, wishes: Wishes, samples: int, seed: int) -> None:
        self.rig, self.samples = rig, samples
        self.rng = random.Random(seed)
        self.now = Nanos(0)
        self.record = Record()
        self.coordinator = Coordinator(wishes, len(rig.ranks))
        self.cells = {sim.rank: Cells() for sim in rig.ranks}
        self.actors = {sim.rank: Actor(sim, self) for sim in rig.ranks}
        self.dead: set[Rank] = set()  # declared, as every rank can see it
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._serial = 0
        self._sent = 0
        self._clear: dict[tuple[str, Rank], Nanos] = {}  # channels deliver in order
        self._contributions: dict[Round, dict[Rank, Contribution]] = {}
        self._rosters: dict[Round, tuple[Rank, ...]] = {}
        self._closed: dict[Round, tuple[Rank, ...]] = {}
        self._closing: set[Round] = set()

    # ---- time ---------------------------------------------------------------------------------

    def after(self, delay_ns: float, happen: Callable[[], None]) -> None:
        """Let something happen later; what falls on one instant is shuffled."""
        self._serial += 1
        at = int(self.now + max(0, delay_ns))
        heapq.heappush(self._heap, (at, self.rng.random(), self._serial, happen))

    def run(self) -> Record:
        """Play until the coordinator ends the run. Raises WeBroke if it never does."""
        for actor in self.actors.values():
            self.after(self.rng.uniform(0, 50) * MS, actor.build)
        if self.rig.stop_at_ms < float("inf"):
            stop = Stop(level=1, why="SIGINT")
            self.after(self.rig.stop_at_ms * MS, lambda: self.deliver(stop))
        happenings = 0
        while self._heap and self.record.end is None:
            at, _, _, happen = heapq.heappop(self._heap)
            self.now = Nanos(at)
            happen()
            happenings += 1
            if happenings > LIMIT:
                raise WeBroke(f"no end after {LIMIT} happenings: {self.who_waits()}")
        if self.record.end is None:
            raise WeBroke(f"everybody waits: {self.who_waits()}")
        self._check_end()
        return self.record

    def who_waits(self) -> str:
        """One line: every actor's state and the coordinator's phase."""
        states = {rank: actor.state for rank, actor in self.actors.items()}
        return f"coordinator {self.coordinator.phase}, ranks {states}, dead {sorted(self.dead)}"

    # ---- messages -------------------------------------------------------------------------------

    def report(self, rank: Rank, message: Report) -> None:
        """A rank sends to the coordinator; its reports arrive in order."""
        self._travel(("up", rank), lambda: self.deliver(message))

    def _travel(self, channel: tuple[str, Rank], arrive: Callable[[], None]) -> None:
        self._sent += 1
        delay = self.rng.expovariate(1 / (self.rig.message_ms * MS))
        if self.rig.late_every and self._sent % self.rig.late_every == 0:
            delay += self.rig.late_ms * MS
        at = max(self.now + delay, self._clear.get(channel, Nanos(0)) + 1)
        self._clear[channel] = Nanos(int(at))
        self.after(at - self.now, arrive)

    def deliver(self, event: Event) -> None:
        """The coordinator takes one event; its actions are carried out."""
        self.record.events.append((self.now, event))
        for action in self.coordinator.step(event, self.now):
            self.record.actions.append((self.now, action))
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Attach | Grant | Evaluate | Finish):
            actor = self.actors[action.rank]
            self._travel(("down", action.rank), lambda: actor.take(action))
        elif isinstance(action, Committed):
            self.record.last_commit = self.now
            self._check_commit(action)
        elif isinstance(action, End):
            self.record.end = action

    # ---- deaths ---------------------------------------------------------------------------------

    def die(self, rank: Rank) -> None:
        """The process is gone; the launcher finds out later, after its last reports."""
        self.after(self.rig.death_notice_ms * MS, lambda: self._declare(rank))

    def _declare(self, rank: Rank) -> None:
        self.dead.add(rank)
        for number in list(self._contributions):
            self.try_close(number)
        cells = self.cells[rank]
        death = Died(
            rank=rank,
            row=self.actors[rank].row,
            cause="signal 9",
            arrived=cells.arrived,
            steps=cells.steps,
            picks=cells.picks,
        )
        self._travel(("up", rank), lambda: self.deliver(death))

    # ---- the round ------------------------------------------------------------------------------

    def publish(self, rank: Rank, grant: Grant, brought: Contribution, total: int) -> None:
        """Store an arrival in the cells."""
        cells = self.cells[rank]
        cells.arrived, cells.steps, cells.picks = grant.round, brought.steps, total
        self._contributions.setdefault(grant.round, {})[rank] = brought
        self._rosters[grant.round] = tuple(seat.rank for seat in grant.roster)
        self.try_close(grant.round)

    def try_close(self, number: Round) -> None:
        """Close the round a reduce later, once everybody has arrived or is dead."""
        came = self._contributions[number]
        missing = [r for r in self._rosters[number] if r not in came and r not in self.dead]
        if missing or number in self._closing:
            return
        self._closing.add(number)
        self.after(self.rig.reduce_ms * MS, lambda: self._close(number))

    def _close(self, number: Round) -> None:
        came = self._contributions[number]
        order = tuple(rank for rank in self._rosters[number] if rank in came)
        survivors = [rank for rank in order if self.actors[rank].inside(number)]
        if not survivors:
            return  # nobody was left to finish it: nothing entered any living consensus
        self._closed[number] = order
        for rank in order:
            brought = came[rank]
            self.record.consensus.setdefault(brought.epoch, Counter()).update(brought.picks)
        for rank in survivors:
            self.actors[rank].leave(number, order)

    # ---- promises -------------------------------------------------------------------------------

    def _check_commit(self, commit: Committed) -> None:
        order = self._closed.get(commit.round)
        if order is None or order != commit.contributors:
            raise WeBroke(f"round {commit.round} committed {commit.contributors}, closed {order}")
        for rank in order:
            brought, told = self._contributions[commit.round][rank], str(rank)
            if commit.picks[told] != len(brought.picks) or commit.mass[told] != brought.steps:
                raise WeBroke(f"round {commit.round}: rank {rank} did {brought}, told {commit}")

    def _check_end(self) -> None:
        end = self.record.end
        for picks in self.record.consensus.values():
            if any(count != 1 for count in picks.values()):
                raise WeBroke("a pick entered the consensus twice")
        if end is None or end.status != "ok":
            return
        plan = self.coordinator.settled_plan
        if plan is None:
            raise WeBroke("ended ok without a plan")
        total = plan.epoch_picks
        for epoch in range(plan.epochs):
            picks = self.record.consensus.get(epoch, Counter())
            if len(picks) != total:
                raise WeBroke(f"epoch {epoch}: {len(picks)} of {total} picks in the consensus")
        closed = self.record.of(EpochClosed)
        if [c.epoch for c in closed] != list(range(plan.epochs)):
            raise WeBroke(f"epochs closed: {[c.epoch for c in closed]}")
        for cover in closed:
            if (cover.done_once, cover.duplicated, cover.missing) != (total, 0, 0):
                raise WeBroke(f"coverage {cover}")
