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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    Action,
    AdjustRate,
    Attach,
    CallEpochFn,
    Committed,
    Died,
    End,
    EpochClosed,
    Evaluate,
    Event,
    Finish,
    Grant,
    Kill,
    Message,
    Publish,
    Published,
    Report,
    Save,
    SaveRequest,
    Stop,
    Tick,
)
from flodl_shm.control.resume import Resume
from flodl_shm.control.roles import FASTEST
from flodl_shm.control.saves import PATIENCE
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round
from flodl_shm.sim.actor import Actor, Cells
from flodl_shm.sim.books import Books, Consensus, Contribution
from flodl_shm.sim.errand_watch import ErrandWatch, Rate
from flodl_shm.sim.rig import MS, Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.options import Wishes

M = TypeVar("M", bound=Message)

LIMIT = 2_000_000  # simulated happenings of one run; a run that needs more does not end


@dataclass(slots=True)
class Record:
    """What a run did, by the world's own books."""

    actions: list[tuple[Nanos, Action]] = field(default_factory=list)
    events: list[tuple[Nanos, Event]] = field(default_factory=list)
    end: End | None = None
    first_step: Nanos = Nanos(0)
    last_commit: Nanos = Nanos(0)

    def of(self, kind: type[M]) -> list[M]:
        """All actions of one kind, in order."""
        return [action for _, action in self.actions if isinstance(action, kind)]


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint of another world, and what its state holds by that world's books."""

    meta: CheckpointMeta
    consensus: Consensus


class World:
    """One run of `rig`. `run()` returns its record; any broken promise raises WeBroke."""

    def __init__(
        self,
        rig: Rig,
        *,
        wishes: Wishes,
        samples: int,
        seed: int,
        callbacks: tuple[str, ...] = ("evaluation",),
        start: Start | None = None,
    ) -> None:
        self.rig, self.samples, self.callbacks = rig, samples, callbacks
        self.rng = random.Random(seed)
        self.now = Nanos(0)
        self.record = Record()
        self.start = start
        resume = Resume("ckpt/model-0", start.meta) if start else None
        self.coordinator = Coordinator(wishes, len(rig.ranks), resume)
        self.books = Books(start.consensus, start.meta.reduce) if start else Books()
        begun = start.meta.open_epochs if start else ()
        policy = wishes.epoch_callback_rank or FASTEST
        self.errands = ErrandWatch(
            "epoch" in callbacks,
            called_before=begun[0].epoch if begun else None,
            named=None if policy == FASTEST else Rank(int(policy)),
        )
        self.cells = {sim.rank: Cells() for sim in rig.ranks}
        self.actors = {sim.rank: Actor(sim, self) for sim in rig.ranks}
        self.dead: set[Rank] = set()  # declared, as every rank can see it
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._serial = 0
        self._sent = 0
        self._clear: dict[tuple[str, Rank], Nanos] = {}  # channels deliver in order
        self._rosters: dict[Round, tuple[Rank, ...]] = {}
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
        if self.rig.errands.save_at_ms < float("inf"):
            wish = SaveRequest(why="SIGUSR1")
            self.after(self.rig.errands.save_at_ms * MS, lambda: self.deliver(wish))
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
        self.errands.event(event)
        for action in self.coordinator.step(event, self.now):
            self.record.actions.append((self.now, action))
            self.errands.action(action, self.books)
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Attach | Grant | CallEpochFn | AdjustRate | Save | Evaluate | Finish):
            actor = self.actors[action.rank]
            self._travel(("down", action.rank), lambda: actor.take(action))
        elif isinstance(action, Committed):
            self.record.last_commit = self.now
            self.books.check_commit(action)
        elif isinstance(action, Publish):
            self._publish(action)
        elif isinstance(action, Kill):
            self.actors[action.rank].kill()
        elif isinstance(action, End):
            self.record.end = action

    # ---- checkpoints ----------------------------------------------------------------------------

    def _publish(self, action: Publish) -> None:
        """The launcher's thread makes it visible, fails, or is never heard of again."""
        errands = self.rig.errands
        if self.rng.random() < errands.publish_hangs:
            self.never_answer(action.save)
            return
        error = "no space left" if self.rng.random() < errands.publish_fails else ""
        told = Published(action.save, folder="" if error else f"ckpt/{action.save}", error=error)
        took = self.rng.expovariate(1 / (errands.publish_ms * MS))
        self.after(took, lambda: self.deliver(told))

    def never_answer(self, save: int) -> None:
        """Something of it will never come: let the coordinator look when its patience is over.

        Twice, as that begins at a commit that may still be on its way.
        """
        self.errands.hanging.add(save)
        plan = self.coordinator.settled_plan
        assert plan is not None
        wait_ns = PATIENCE * plan.callback_timeout_s * 1e9
        for times in (1.1, 2.2):
            self.after(times * wait_ns + 1e12, lambda: self.deliver(Tick()))

    def check_rate(self, grant: Grant, rate: Rate) -> None:
        """A rank begins its window."""
        self.errands.trains_at(grant.round, rate)

    def restart(self, published: Publish) -> Start:
        """What a run begins with that is resumed from this checkpoint."""
        after = Round(published.meta.reduce - self.books.rounds_before)
        return Start(published.meta, self.books.consensus(after))

    # ---- deaths ---------------------------------------------------------------------------------

    def die(self, rank: Rank) -> None:
        """The process is gone; the launcher finds out later, after its last reports."""
        self.after(self.rig.death_notice_ms * MS, lambda: self._declare(rank))

    def _declare(self, rank: Rank) -> None:
        self.dead.add(rank)
        for number in list(self.books.brought):
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
        self.books.brought.setdefault(grant.round, {})[rank] = brought
        self._rosters[grant.round] = tuple(seat.rank for seat in grant.roster)
        self.try_close(grant.round)

    def try_close(self, number: Round) -> None:
        """Close the round a reduce later, once everybody has arrived or is dead."""
        came = self.books.brought[number]
        missing = [r for r in self._rosters[number] if r not in came and r not in self.dead]
        if missing or number in self._closing:
            return
        self._closing.add(number)
        self.after(self.rig.reduce_ms * MS, lambda: self._close(number))

    def _close(self, number: Round) -> None:
        came = self.books.brought[number]
        order = tuple(rank for rank in self._rosters[number] if rank in came)
        survivors = [rank for rank in order if self.actors[rank].inside(number)]
        if not survivors:
            return  # nobody was left to finish it: nothing entered any living consensus
        self.books.closed[number] = order
        for rank in survivors:
            self.actors[rank].leave(number, order)

    # ---- promises -------------------------------------------------------------------------------

    def _check_end(self) -> None:
        end = self.record.end
        self.books.check_once()
        if end is not None:
            self.books.check_finite(end)
        if end is None or end.status == "failed":
            return
        self.errands.check_end()
        if end.status == "stopped":
            return
        plan = self.coordinator.settled_plan
        if plan is None:
            raise WeBroke("ended ok without a plan")
        meta = self.start.meta if self.start else None
        before = meta.closed_epochs if meta else ()
        dealt = {past.epoch: past.picks for past in before}
        dealt |= {begun.epoch: begun.picks for begun in (meta.open_epochs if meta else ())}
        closed = self.record.of(EpochClosed)
        self.books.check_whole(plan, (*before, *closed), dealt)
        first = meta.epoch if meta else 0
        if [cover.epoch for cover in closed] != list(range(first, plan.epochs)):
            raise WeBroke(f"epochs closed: {[cover.epoch for cover in closed]}")
