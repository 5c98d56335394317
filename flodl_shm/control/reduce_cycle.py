"""One round after the other: issued, settled, committed.

    issue    the policy says when and how much; roster and grants are made here
    settle   every rank of the roster has arrived or is dead: the balancer is fed
    commit   a living rank has left: picks are done, the guard judges the balancer's proposal

Who lives is told with each call, as is who wants the run to end. At an epoch's edge it stops
and waits to be told to open the next one. Formation, what is done at the edges, and the end of a
run are not known here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from flodl_shm.control.agreement import Agreement
from flodl_shm.control.balance import Balance
from flodl_shm.control.convergence import TrendGuard
from flodl_shm.control.gate import Gate
from flodl_shm.control.half_time import HalfTime
from flodl_shm.control.legacy import Legacy
from flodl_shm.control.mass import mass
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Committed,
    Died,
    Grant,
    Issued,
    Left,
    Note,
    Seat,
)
from flodl_shm.control.policy import Scene, policy_of
from flodl_shm.control.quarantine import Quarantine
from flodl_shm.control.schedule import Epoch, Schedule
from flodl_shm.control.window_ledger import SPREADING, Window, WindowLedger
from flodl_shm.control.window_plan import Belief, WindowPlan
from flodl_shm.errors import PeerBroke, WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot

if TYPE_CHECKING:
    from flodl_shm.control.checkpoint_meta import CheckpointMeta
    from flodl_shm.control.options import Settled

Living = Mapping[Rank, Row]
JOIN_PART = 8  # a joiner trains from the next window on: the one that brings it in is short


class Pause(Enum):
    """Why no further round is issued now."""

    HELD = "held"
    EDGE = "edge"  # of an epoch: the next one may be opened
    JOINED = "joined"  # somebody was put on the newest roster


def seats_of(living: Living) -> tuple[Seat, ...]:
    """The roster of a round in which all of them meet: a rank's replica is in its own slot."""
    return tuple(Seat(rank, row, Slot(rank)) for rank, row in living.items())


def roster_of(living: Living, joiners: Living) -> tuple[Seat, ...]:
    """The same with some who only receive, by rank."""
    guests = (Seat(rank, row, Slot(rank), joiner=True) for rank, row in joiners.items())
    return tuple(sorted((*seats_of(living), *guests), key=lambda seat: seat.rank))


class ReduceCycle:
    """All rounds of a run that follows `settled`, from the beginning or from a checkpoint."""

    def __init__(self, settled: Settled, meta: CheckpointMeta | None = None) -> None:
        self.plan = settled
        self.schedule = Schedule(settled, meta)
        self.committed = Round(0)  # the newest round that is
        self.before = meta.reduce if meta else 0  # rounds of the training before this run
        self.last_epoch = max(0, meta.epoch - 1) if meta else 0  # of the newest round issued
        self.guard = TrendGuard()
        self.quarantine = Quarantine()
        self._agreement = Agreement()
        self._policy = policy_of(settled.policy)
        self.balance = Balance(settled, one_batch=self._policy.one_batch)
        self._windows = WindowLedger()
        self._consumed: dict[Row, int] = {}
        self._sync_ns = 0  # of the newest commit; fed to the balancer once
        self.legacy = Legacy()
        self._joined: dict[Rank, Row] = {}  # put on the newest roster
        # Somebody is about to come back: a round dealt ahead now is a window more to wait for.
        self.holds_a_place = False
        self.half_time = HalfTime(matters=settled.survival.restarts > 0)

    # ---- what ranks report --------------------------------------------------------------------

    def arrive(self, report: Arrived, now: Nanos) -> None:
        """A rank's window is over. Raises PeerBroke if that cannot be."""
        self._windows.arrive(report)
        window = self._windows.get(report.round)
        used = report.picks - self._consumed.get(report.row, 0)
        if window is None or used < 0:
            raise PeerBroke(f"rank {report.rank} reports {report.picks} picks, fewer than before")
        self._consumed[report.row] = report.picks
        window.picks[report.rank] = used
        if window.round > SPREADING:
            self.schedule.tallies[window.epoch].arrived(report, used, now)
        if used:
            pool = self.schedule.epochs[window.epoch].pool
            pool.consume(report.rank, used, round=report.round)

    def leave(self, report: Left) -> None:
        """A rank holds the consensus of a round. Raises WeBroke if it is not the others'."""
        self._windows.leave(report)
        self._agreement.left(report)
        self.legacy.left(report)

    def bury(self, death: Died, living: Living, now: Nanos) -> int:
        """Keep what the dead rank delivered; the picks it held go back. Says how many.

        `living` still holds the dead rank.
        """
        window = self._windows.get(death.arrived)
        if window is not None and death.rank in window.awaited(living):
            self.arrive(_arrival_of(death, self._consumed.get(death.row, 0)), now)
        self.legacy.bury(death, self.balance.costs([death.rank])[death.rank])
        self.balance.drop(death.rank)
        return sum(epoch.pool.forfeit(death.rank) for epoch in self.schedule.epochs.values())

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when no round is on its way."""
        return not any(self._windows.open())

    @property
    def newest(self) -> Round:
        """The newest round that is issued; 0 before the first."""
        return Round(self._windows.next_round - 1)

    def awaited(self, living: Living) -> dict[Rank, str]:
        """Living ranks that the oldest open round waits for, and what for."""
        for window in self._windows.open():
            if not window.settled:
                late, what = window.awaited(living), "its arrival in"
            else:
                late = [rank for rank in window.ranks if rank in living and rank not in window.left]
                what = "its part of the reduce of"
            return dict.fromkeys(late, f"{what} round {window.round}")
        return {}

    def fastest(self, living: Living) -> Rank:
        """The rank whose batches cost least; the lowest while that is unknown."""
        return self.balance.fastest(living)

    # ---- who comes back -----------------------------------------------------------------------

    def slot_is_free(self, rank: Rank) -> bool:
        """Whether no open round uses the memory of the dead rank's replica."""
        return self.legacy.slot_is_free(rank, self.committed)

    def has_contributed(self, row: Row) -> bool:
        """Whether any pick of this incarnation went into a round."""
        return self._consumed.get(row, 0) > 0

    def is_held(self, living: Living) -> bool:
        """Whether a living rank holds the consensus, or will when a round has closed."""
        return self.legacy.is_held(set(living.values()), self._windows.open())

    def take_joined(self) -> dict[Rank, Row]:
        """Who was put on a roster since the last call."""
        joined, self._joined = self._joined, {}
        return joined

    def _take_in(self, epoch: Epoch, living: Living, joiners: Living) -> None:
        """From the next round on they are like the others: shares and spans are dealt anew."""
        for rank in joiners:
            self.balance.recall(rank, self.legacy.cost_ns(rank))
        self._reserve(epoch, {**living, **joiners})
        self._joined = dict(joiners)

    @property
    def _global_step(self) -> int:
        """When everything that is on its way has committed. Right once all rounds are settled."""
        flying = (
            window.arrived[rank].steps
            for window in self._windows.open()
            for rank in window.contributors
        )
        return self.schedule.global_step + sum(flying)

    # ---- settle and commit ----------------------------------------------------------------------

    def settle(self, living: Living) -> Iterator[Action]:
        """Settle what can be, oldest first."""
        for window in self._windows.unsettled():
            if window.awaited(living):
                break
            yield from self._settle(window, living)

    def commit_oldest(self) -> list[Action]:
        """Commit the oldest round if it has closed, and say what follows; else nothing."""
        window = next(self._windows.open(), None)
        if window is None or not (window.settled and window.left):
            return []
        return list(self._commit(window))

    def _settle(self, window: Window, living: Living) -> Iterator[Action]:
        window.settled = True
        yield from self.quarantine.judge(window, living)
        reason = self.balance.report(window.arrived, sync_ns=self._sync_ns, living=living)
        if reason:
            self._sync_ns = 0
            yield Note(topic="balance", text=reason)

    def _commit(self, window: Window) -> Iterator[Action]:
        reports = list(window.left.values())
        told = {left.contributors for left in reports}
        if told != {window.contributors}:
            raise WeBroke(
                f"round {window.round}: ranks saw contributors {sorted(told)}, "
                f"reports say {window.contributors}"
            )
        epoch = self.schedule.epochs[window.epoch]
        epoch.pool.commit(window.round)
        done = {rank: window.arrived[rank] for rank in window.contributors}
        loss_sum = sum(report.loss_sum for report in done.values())
        loss_count = sum(report.loss_count for report in done.values())
        epoch.loss_sum += loss_sum
        epoch.loss_count += loss_count
        self.schedule.global_step += sum(report.steps for report in done.values())
        self._sync_ns = max(left.reduce_ns for left in reports)
        divergence = max(left.divergence for left in reports)
        yield from self._judge(window, divergence)
        yield Committed(
            round=window.round,
            epoch=window.epoch,
            contributors=window.contributors,
            steps={str(rank): report.steps for rank, report in done.items()},
            picks={str(rank): window.picks.get(rank, 0) for rank in done},
            mass={str(r): mass(report.steps, self.plan.gamma) for r, report in done.items()},
            global_step=self.schedule.global_step,
            loss=loss_sum / loss_count if loss_count else None,
            divergence=divergence,
            reduce_ns=self._sync_ns,
        )
        self._windows.close(window)
        self.committed = window.round
        yield from self.schedule.close_finished()

    def _judge(self, window: Window, divergence: float) -> Iterator[Action]:
        steps = [report.steps for report in window.arrived.values()]
        if any(steps):
            verdict, reason = self.guard.report(divergence, k_used=sum(steps), k_max=max(steps))
            yield Note(topic="guard", text=f"{reason}; {self.balance.judge(verdict)}")

    # ---- issue ----------------------------------------------------------------------------------

    def begin(self, living: Living, now: Nanos) -> Iterator[Action]:
        """Issue round 1, which spreads the initial state and trains nothing."""
        idle = dict.fromkeys(living, 0)
        epoch = self.open_epoch(living)
        nothing = WindowPlan(idle, dict(idle), True, "spreads the initial state")
        yield from self._issue(epoch, nothing, living, {}, now=now)

    def issue(self, living: Living, joiners: Living, now: Nanos) -> Generator[Action, None, Pause]:
        """Issue every round the policy's gate lets through, and say what stopped it.

        With joiners it is one round at most, and only when no other is under way: then it is
        certain how far the training is, which they must know. At an epoch's edge no round is
        issued before the next epoch is open.
        """
        while True:
            epoch, flying = self.epoch(), self._windows.unsettled()
            belief = self._belief(living)
            if joiners:
                short = {rank: -(-count // JOIN_PART) for rank, count in belief.counts.items()}
                belief = replace(belief, counts=short)
            scene = Scene(epoch.pool, belief, flying, epochs_left=self.schedule.has_next())
            verdict, reason = self._policy.gate(scene)
            if flying and (joiners or self.holds_a_place):
                verdict, reason = Gate.HOLD, f"{len(flying)} rounds end before ranks come back"
            elif verdict is Gate.EARLY and (held := self._half_time(flying, belief, now)):
                verdict, reason = Gate.HOLD, held
            if verdict is Gate.HOLD:
                yield Note(topic="gate", text=reason)
                return Pause.HELD
            if verdict is Gate.NEXT_EPOCH:
                return Pause.EDGE
            planned = self._policy.deal(verdict, scene)
            yield from self._issue(epoch, planned, living, joiners, now=now)
            if joiners:
                self._take_in(epoch, living, joiners)
                return Pause.JOINED

    def _half_time(self, flying: list[Window], belief: Belief, now: Nanos) -> str:
        """See half_time.py; the anchor rank's steps say how long a window lasts."""
        anchor = flying[-1].anchor_rank
        cost_ns = belief.costs.get(anchor) if belief.calibrated else None
        return self.half_time.holds(flying, (cost_ns or 0.0) * flying[-1].anchor_steps, now)

    def open_epoch(self, living: Living) -> Epoch:
        """Open the next epoch and share its picks out among the living."""
        epoch = self.schedule.open_next()
        self._reserve(epoch, living)
        return epoch

    def _reserve(self, epoch: Epoch, living: Living) -> None:
        belief = self._belief(living)
        weights = {rank: float(n * belief.sizes[rank]) for rank, n in belief.counts.items()}
        epoch.pool.reserve(weights, unit=self.plan.pick_unit)

    def epoch(self) -> Epoch:
        """The epoch whose picks are dealt now."""
        epoch = self.schedule.current
        if epoch is None:
            raise WeBroke("no epoch is open")
        return epoch

    def _belief(self, living: Living) -> Belief:
        return Belief(
            counts=self.balance.counts(living),
            costs=self.balance.costs(living),
            sizes={rank: self.plan.batch_sizes[rank] for rank in living},
            calibrated=self.balance.calibrated,
            elastic=self.balance.elastic,
            most_ahead=self.plan.max_batch_diff,
        )

    def _issue(
        self, epoch: Epoch, planned: WindowPlan, living: Living, joiners: Living, *, now: Nanos
    ) -> Iterator[Action]:
        """Name the round, its roster and its picks, and tell every rank of it."""
        anchor_rank = self._anchor_rank(planned, living)
        anchor_steps = planned.planned[anchor_rank]
        window = Window(
            round=self._windows.next_round,
            epoch=epoch.number,
            roster=roster_of(living, joiners),
            anchor_rank=anchor_rank,
            anchor_steps=anchor_steps,
            planned=planned.planned,
            ceiling={**planned.ceiling, anchor_rank: anchor_steps},
            exact=planned.exact,
        )
        self._windows.issue(window)
        self.last_epoch = epoch.number
        if window.round > SPREADING:
            self.schedule.tallies[epoch.number].issued(now)
        yield Issued(
            round=window.round,
            epoch=window.epoch,
            anchor_rank=anchor_rank,
            anchor_steps=anchor_steps,
            planned={str(rank): count for rank, count in planned.planned.items()},
            reason=planned.reason,
        )
        for rank, row in {**living, **joiners}.items():
            yield Grant(
                rank=rank,
                round=window.round,
                epoch=window.epoch,
                roster=window.roster,
                anchor_rank=anchor_rank,
                anchor_steps=anchor_steps,
                planned=window.planned.get(rank, 0),
                ceiling=window.ceiling.get(rank, 0),
                spans=epoch.pool.held_spans(rank),
                after=self._consumed.get(row, 0),
                global_step=self._global_step if rank in joiners else None,
            )

    def _anchor_rank(self, planned: WindowPlan, living: Living) -> Rank:
        """The balancer's anchor rank if it takes part, else the living rank with most to do."""
        chosen = self.balance.anchor_rank
        if chosen is not None and chosen in living and planned.planned[chosen]:
            return chosen
        return min(living, key=lambda rank: (-planned.planned[rank], rank))


def _arrival_of(death: Died, before: int) -> Arrived:
    """The arrival a dead rank published but never reported: known work, unknown times.

    `before` are the picks it had consumed until then: some more without a step were refused.
    """
    return Arrived(
        rank=death.rank,
        row=death.row,
        round=death.arrived,
        steps=death.steps,
        batches=death.steps,
        picks=death.picks,
        refused=death.picks > before and not death.steps,
    )
