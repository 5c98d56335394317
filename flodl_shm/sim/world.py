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
    Lend,
    Message,
    Publish,
    Published,
    Report,
    Save,
    SaveRequest,
    Seat,
    Spawn,
    Stop,
    Tick,
)
from flodl_shm.control.resume import Resume
from flodl_shm.control.roles import FASTEST
from flodl_shm.control.saves import PATIENCE
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.sim.actor import Actor, Cells
from flodl_shm.sim.books import Books, Consensus, Contribution
from flodl_shm.sim.errand_watch import ErrandWatch, Rate
from flodl_shm.sim.rig import MS, Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.options import Wishes

M = TypeVar("M", bound=Message)

FOR_RANKS = Attach | Grant | CallEpochFn | AdjustRate | Save | Evaluate | Lend | Finish
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
        self.cells = {Row(sim.rank): Cells() for sim in rig.ranks}
        self.actors = {sim.rank: Actor(sim, self, Row(sim.rank)) for sim in rig.ranks}
        self.dead: set[Row] = set()  # declared, as every rank can see it
        self.raised = False  # a script, in some rank
        self._alarm: Nanos | None = None  # the coordinator wants to look then
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._serial = 0
        self._sent = 0
        self._incarnations = {sim.rank: 1 for sim in rig.ranks}
        self._clear: dict[tuple[str, Rank], Nanos] = {}  # channels deliver in order
        self._rosters: dict[Round, tuple[Seat, ...]] = {}
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
        self._set_alarm()

    def _set_alarm(self) -> None:
        at = self.coordinator.next_at
        if at is None or (self._alarm is not None and self.now < self._alarm <= at):
            return
        self._alarm = at
        self.after(at - self.now, lambda: self.deliver(Tick()))

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, FOR_RANKS):
            actor = self.actors[action.rank]
            self._travel(("down", action.rank), lambda: actor.take(action))
        elif isinstance(action, Committed):
            self.record.last_commit = self.now
            self.books.check_commit(action)
        elif isinstance(action, Publish):
            self._publish(action)
        elif isinstance(action, Spawn):
            self._spawn(action)
        elif isinstance(action, Kill) and self.actors[action.rank].row == action.row:
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

    def die(self, actor: Actor, *, raises: bool = False) -> None:
        """The process is gone; the launcher finds out later, after its last reports."""
        self.raised = self.raised or raises
        self.after(self.rig.death_notice_ms * MS, lambda: self._declare(actor, raises=raises))

    def _spawn(self, action: Spawn) -> None:
        """The launcher starts a process, or cannot."""
        rank, row = action.rank, action.row
        if self.actors[rank].state != "dead":
            raise WeBroke(f"rank {rank} is started twice")
        actor = Actor(self.actors[rank].sim, self, row, self._incarnations[rank])
        self._incarnations[rank] += 1
        self.actors[rank], self.cells[row] = actor, Cells()
        if self.rng.random() < self.rig.spawn_fails:
            actor.state = "dead"
            self.after(0, lambda: self._declare(actor, raises=False))
        else:
            self.after(self.rng.expovariate(1 / (self.rig.start_ms * MS)), actor.build)

    def _declare(self, actor: Actor, *, raises: bool) -> None:
        rank, row = actor.rank, actor.row
        self.dead.add(row)
        for number in list(self.books.brought):
            self.try_close(number)
        cells = self.cells[row]
        death = Died(
            rank=rank,
            row=row,
            cause="ValueError: x" if raises else "signal 9",
            user_error=raises,
            arrived=cells.arrived,
            steps=cells.steps,
            picks=cells.picks,
        )
        self._travel(("up", rank), lambda: self.deliver(death))

    # ---- the round ------------------------------------------------------------------------------

    def publish(self, row: Row, grant: Grant, brought: Contribution, total: int) -> None:
        """Store an arrival in the cells."""
        cells, rank = self.cells[row], grant.rank
        cells.arrived, cells.steps, cells.picks = grant.round, brought.steps, total
        self.books.brought.setdefault(grant.round, {})[rank] = brought
        self._rosters[grant.round] = grant.roster
        self.try_close(grant.round)

    def try_close(self, number: Round) -> None:
        """Close the round a reduce later, once everybody has arrived or is dead."""
        came = self.books.brought[number]
        roster = self._rosters[number]
        missing = [s for s in roster if s.rank not in came and s.row not in self.dead]
        if missing or number in self._closing:
            return
        self._closing.add(number)
        self.after(self.rig.reduce_ms * MS, lambda: self._close(number))

    def _close(self, number: Round) -> None:
        came = self.books.brought[number]
        here = [seat for seat in self._rosters[number] if seat.rank in came]
        order = tuple(seat.rank for seat in here if not seat.joiner)
        survivors = [self.actors[seat.rank] for seat in here if self._is_inside(seat, number)]
        if not survivors:
            return  # nobody was left to finish it: nothing entered any living consensus
        self.books.closed[number] = order
        for actor in survivors:
            actor.leave(number, order)

    def _is_inside(self, seat: Seat, number: Round) -> bool:
        actor = self.actors[seat.rank]
        return actor.row == seat.row and actor.inside(number)

    def check_slot(self, actor: Actor) -> None:
        """A rank binds its model to its slot: no open round may use that memory."""
        for number, came in self.books.brought.items():
            if actor.rank in came and number not in self.books.closed:
                raise WeBroke(f"the slot of rank {actor.rank} is taken while {number} uses it")

    def check_position(self, grant: Grant) -> None:
        """A joiner knows how many steps went into the consensus before its window."""
        steps = self.start.meta.global_step if self.start else 0
        for number, ranks in self.books.closed.items():
            if number < grant.round:
                steps += sum(self.books.brought[number][rank].steps for rank in ranks)
        if steps != grant.global_step:
            raise WeBroke(f"rank {grant.rank} joins at step {grant.global_step}, not {steps}")

    # ---- promises -------------------------------------------------------------------------------

    def _check_loss(self) -> None:
        """A run fails only because a script raised, too many are missing, or nobody is left."""
        end, survival = self.record.end, self.coordinator.survival
        is_limited = survival.max_failures is not None or survival.on_death == "abort"
        left = [actor for actor in self.actors.values() if actor.state != "dead" and actor.holds]
        if left and end is not None and end.exit_code != 1 and not is_limited:
            raise WeBroke(f"given up ({end.reason}), though rank {left[0].rank} is alive")

    def _check_end(self) -> None:
        end = self.record.end
        self.books.check_once()
        if end is not None:
            self.books.check_finite(end, raised=self.raised)
        if end is None or end.status == "failed":
            self._check_loss()
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
