"""One simulated rank: takes orders, trains, arrives, leaves, and may die on the way."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    AdjustRate,
    Arrived,
    Attach,
    Attached,
    CallbackRan,
    CallEpochFn,
    Evaluate,
    Evaluated,
    Finish,
    Finished,
    Grant,
    Left,
    Lend,
    Order,
    Ready,
    Request,
    Save,
)
from flodl_shm.control.pace import Pace
from flodl_shm.control.window_turn import AnchorView, takes_another
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.sim.books import Contribution
from flodl_shm.sim.rig import MS, SimRank
from flodl_shm.sim.writer import Writer

if TYPE_CHECKING:
    from flodl_shm.sim.world import World


@dataclass(slots=True)
class Cells:
    """What a rank has published, readable after its death."""

    arrived: Round = Round(0)
    steps: int = 0
    picks: int = 0
    round: Round = Round(0)  # pace: steps done are of this round
    done: int = 0
    last: Nanos = Nanos(0)
    pace_ns: int = 0


class Actor:
    """A rank in the world. `state` says where it is, in the words of DEATH_POINTS."""

    def __init__(self, sim: SimRank, world: World, row: Row, incarnation: int = 0) -> None:
        self.sim, self.world = sim, world
        self.rank, self.row = sim.rank, row
        self._death = sim.death_of(incarnation)
        self.state = "building"
        self.busy_ns = 0
        self.batches = 0
        self.holds = Round(0)  # the consensus of this round, until the next window begins
        self._rate: tuple[float | None, float] = (None, 1.0)
        self._writer = Writer(self)
        self._inbox: deque[Order] = deque()
        self._passed: Counter[str] = Counter()
        self._consumed = 0
        self._size = 1
        self._pace = Pace()
        self._grant: Grant | None = None
        self._queue: deque[int] = deque()
        self._taken: list[int] = []
        self._times: list[int] = []
        self._began = Nanos(0)

    # ---- dying ------------------------------------------------------------------------------

    def _enter(self, state: str) -> bool:
        """Be in `state` from now on; False if the rank dies there, or was killed before."""
        if self.state == "dead":
            return False
        self.state = state
        return not self.dies_at(state)

    def dies_at(self, point: str) -> bool:
        """Pass a point of DEATH_POINTS; True if the rank dies there."""
        self._passed[point] += 1
        death = self._death
        if death is None or death.point != point or self._passed[point] != death.nth:
            return False
        self.state = "dead"
        self.world.die(self, raises=death.raises)
        return True

    def kill(self) -> None:
        """Die now, whatever is under way."""
        if self.state != "dead":
            self.state = "dead"
            self.world.die(self)

    def inside(self, number: Round) -> bool:
        """True while the rank lives and waits for this round to close."""
        here = self.state in ("arrived", "reducing")
        return here and self._grant is not None and self._grant.round == number

    # ---- orders -----------------------------------------------------------------------------

    def build(self) -> None:
        """Build the model and report."""
        if self.state == "dead" or not self._enter("building"):
            return
        samples = self.world.samples
        self.world.report(
            self.rank,
            Ready(
                self.rank,
                self.row,
                "same",
                params=8,
                buffers=0,
                samples=samples,
                device="sim",
                callbacks=self.world.callbacks,
            ),
        )
        self.state = "idle"
        self._turn()  # a run that is stopped early tells ranks to finish before they are ready

    def take(self, order: Order) -> None:
        """An order reaches the rank's ring."""
        self._inbox.append(order)
        self._turn()

    def _turn(self) -> None:
        """Take the next order if nothing is under way."""
        if self.state != "idle" or not self._inbox:
            return
        match self._inbox.popleft():
            case Attach() as attach:
                self._size = attach.plan.batch_sizes[self.rank]
                self.world.check_slot(self)
                if self._enter("attaching"):
                    self.world.report(self.rank, Attached(self.rank, self.row))
                    self.state = "idle"
            case Grant() as grant:
                self._window(grant)
            case CallEpochFn() as order:
                self._call_epoch_fn(order)
            case AdjustRate() as order:
                self._rate = (order.lr, order.scale)
            case Save() as order:
                if self._enter("saving"):
                    self._writer.save(order)
                    self.state = "idle"
            case Lend() as order:
                if self._enter("lending"):
                    self._writer.lend(order)
                    self.state = "idle"
            case Evaluate() as order:
                if self._enter("evaluating"):
                    report = Evaluated(
                        self.rank, self.row, order.epoch, value=float(self.world.now)
                    )
                    self.world.report(self.rank, report)
                    self.state = "idle"
            case Finish():
                if self._enter("finishing"):
                    self.world.report(self.rank, Finished(self.rank, self.row, "same"))
                    self.state = "idle"
        self._turn()

    # ---- errands ------------------------------------------------------------------------------

    def _call_epoch_fn(self, order: CallEpochFn) -> None:
        if not self._enter("epoch function"):
            return
        took = self.world.rng.uniform(0, 2) * self.world.rig.errands.epoch_fn_ms * MS
        self.world.after(took, lambda: self._epoch_fn_ran(order.epoch))

    def _epoch_fn_ran(self, epoch: int) -> None:
        if not self._enter("epoch function"):
            return
        lr = self.world.rng.choice((None, 0.1 / (epoch + 1)))
        self.world.report(self.rank, CallbackRan(self.rank, self.row, "epoch", epoch, lr=lr))
        self.state = "idle"
        self._turn()

    def _ask(self) -> None:
        """What a script may want after a batch."""
        if self.world.rng.random() < self.world.rig.errands.requests:
            what = self.world.rng.choice(("checkpoint", "evaluation"))
            self.world.report(self.rank, Request(self.rank, self.row, what))

    # ---- one window ---------------------------------------------------------------------------

    def _window(self, grant: Grant) -> None:
        if not self._enter("waiting"):
            return
        self._grant, self._taken, self._times = grant, [], []
        picks = [pick for start, stop in grant.spans for pick in range(start, stop)]
        self._queue = deque(picks[self._consumed - grant.after :])
        if not self._enter("training"):
            return
        if grant.global_step is None:
            self.world.check_rate(grant, self._rate)
            if self.holds != grant.round - 1:
                raise WeBroke(f"rank {self.rank} begins {grant.round} and holds {self.holds}")
        cells = self.world.cells[self.row]
        cells.round, cells.done, cells.last = grant.round, 0, self.world.now
        self._boundary()

    def _boundary(self) -> None:
        grant = self._grant
        assert grant is not None
        leaves = self.world.rng.random() < self.world.rig.errands.leaves
        if (
            not leaves
            and self._queue
            and takes_another(
                grant,
                done=len(self._times),
                now=self.world.now,
                own_ns=self._pace.mean_ns,
                anchor_view=self._anchor_view(grant),
            )
        ):
            self.batches += 1
            took = self.sim.batch_ns(self.world.now, self.batches, self.world.rng)
            self.world.after(took, lambda: self._batch_done(took))
        else:
            self._arrive()

    def _anchor_view(self, grant: Grant) -> AnchorView | None:
        if grant.anchor_rank == self.rank:
            return None
        (row,) = [seat.row for seat in grant.roster if seat.rank == grant.anchor_rank]
        cells = self.world.cells[row]
        same = cells.round == grant.round
        alive = row not in self.world.dead
        done = cells.done if same else 0
        return AnchorView(alive, done, cells.last if same else self._began, cells.pace_ns)

    def _batch_done(self, took: int) -> None:
        if self.state == "dead":
            return
        batch = [self._queue.popleft() for _ in range(min(self._size, len(self._queue)))]
        self._taken.extend(batch)
        self._times.append(took)
        self._pace.add(took)
        self._consumed += len(batch)
        self.busy_ns += took
        cells = self.world.cells[self.row]
        cells.done, cells.last, cells.pace_ns = len(self._times), self.world.now, self._pace.mean_ns
        self._ask()
        if self._enter("training"):
            self._boundary()

    def _arrive(self) -> None:
        grant = self._grant
        assert grant is not None
        if not self._enter("before arrival"):
            return
        self.state = "published"  # readable by others before the rank can die there
        batches, times = len(self._times), self._times
        refused = bool(batches) and self.world.rng.random() < self.world.rig.errands.refuses
        steps = 0 if refused else batches
        joins = grant.global_step is not None
        brought = Contribution(grant.epoch, tuple(self._taken), steps, refused, joins)
        self.world.publish(self.row, grant, brought, self._consumed)
        if not self._enter("published"):
            return
        report = Arrived(
            rank=self.rank,
            row=self.row,
            round=grant.round,
            steps=steps,
            batches=batches,
            picks=self._consumed,
            first_ns=times[0] if times else 0,
            rest_ns=sum(times[1:]),
            busy_ns=sum(times),
            loss_sum=float(steps),
            loss_count=steps,
            refused=refused,
        )
        self.world.report(self.rank, report)
        if self._enter("arrived"):
            self.world.after(0.01 * MS, lambda: self._reduce(grant.round))

    def _reduce(self, number: Round) -> None:
        if self.inside(number) and self.state == "arrived":
            self._enter("reducing")

    def leave(self, number: Round, contributors: tuple[Rank, ...]) -> None:
        """The round has closed."""
        if not self._enter("left"):
            return
        reduce_ns = int(self.world.rig.reduce_ms * MS)
        report = Left(self.rank, self.row, number, contributors, reduce_ns=reduce_ns, digest=number)
        self.world.report(self.rank, report)
        self._began = self.world.now
        if contributors:
            self.holds = number
        if self._grant is not None and self._grant.global_step is not None:
            self.world.check_position(self._grant)
        self.state = "idle"
        self._turn()
