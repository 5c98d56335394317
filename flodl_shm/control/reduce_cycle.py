"""One round after the other: issued, settled, committed.

    issue    the gate says when, the window plan how much; pool, roster and grants are made here
    settle   every rank of the roster has arrived or is dead: the balancer is fed
    commit   a living rank has left: picks are done, the guard judges the balancer's proposal

Who lives is told with each call, as is who wants the run to end. Formation, evaluation and the
end of a run are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from flodl_shm.control import gate, window_plan
from flodl_shm.control.balance import Balance
from flodl_shm.control.convergence import TrendGuard
from flodl_shm.control.gate import Gate
from flodl_shm.control.mass import mass
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Committed,
    Died,
    Evaluate,
    Grant,
    Issued,
    Left,
    Note,
    Seat,
)
from flodl_shm.control.schedule import Epoch, Schedule
from flodl_shm.control.window_ledger import Window, WindowLedger
from flodl_shm.control.window_plan import Belief, WindowPlan
from flodl_shm.errors import PeerBroke, WeBroke
from flodl_shm.ids import Rank, Row, Slot

if TYPE_CHECKING:
    from flodl_shm.control.options import Settled

GATES = {"sync": gate.sync, "cadence": gate.cadence}
Living = Mapping[Rank, Row]


def seats_of(living: Living) -> tuple[Seat, ...]:
    """The roster of a round in which all of them meet: a rank's replica is in its own slot."""
    return tuple(Seat(rank, row, Slot(rank)) for rank, row in living.items())


class ReduceCycle:
    """All rounds of a run that follows `settled`."""

    def __init__(self, settled: Settled) -> None:
        self.plan = settled
        self.schedule = Schedule(settled)
        self._windows = WindowLedger()
        self._balance = Balance(settled)
        self._guard = TrendGuard()
        self._consumed: dict[Row, int] = {}
        self._sync_ns = 0  # of the newest commit; fed to the balancer once

    # ---- what ranks report --------------------------------------------------------------------

    def arrive(self, report: Arrived) -> None:
        """A rank's window is over. Raises PeerBroke if that cannot be."""
        self._windows.arrive(report)
        window = self._windows.get(report.round)
        used = report.picks - self._consumed.get(report.row, 0)
        if window is None or used < 0:
            raise PeerBroke(f"rank {report.rank} reports {report.picks} picks, fewer than before")
        self._consumed[report.row] = report.picks
        window.picks[report.rank] = used
        if used:
            pool = self.schedule.epochs[window.epoch].pool
            pool.consume(report.rank, used, round=report.round)

    def leave(self, report: Left) -> None:
        """A rank holds the consensus of a round."""
        self._windows.leave(report)

    def bury(self, death: Died, living: Living) -> int:
        """Keep what the dead rank delivered; the picks it held go back. Says how many.

        `living` still holds the dead rank.
        """
        window = self._windows.get(death.arrived)
        if window is not None and death.rank in window.awaited(living):
            self.arrive(_arrival_of(death))
        self._balance.drop(death.rank)
        return sum(epoch.pool.forfeit(death.rank) for epoch in self.schedule.epochs.values())

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when no round is on its way."""
        return not any(self._windows.open())

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
        return self._balance.fastest(living)

    # ---- settle and commit ----------------------------------------------------------------------

    def advance(self, living: Living) -> Iterator[Action]:
        """Settle and commit what can be, oldest first."""
        for window in self._windows.unsettled():
            if window.awaited(living):
                break
            yield from self._settle(window, living)
        for window in self._windows.open():
            if not (window.settled and window.left):
                break
            yield from self._commit(window)

    def _settle(self, window: Window, living: Living) -> Iterator[Action]:
        window.settled = True
        reason = self._balance.report(window.arrived, sync_ns=self._sync_ns, living=living)
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
        yield from self.schedule.close_finished()

    def _judge(self, window: Window, divergence: float) -> Iterator[Action]:
        steps = [report.steps for report in window.arrived.values()]
        if any(steps):
            verdict, reason = self._guard.report(divergence, k_used=sum(steps), k_max=max(steps))
            yield Note(topic="guard", text=f"{reason}; {self._balance.judge(verdict)}")

    # ---- issue ----------------------------------------------------------------------------------

    def begin(self, living: Living) -> Iterator[Action]:
        """Issue round 1, which spreads the initial state and trains nothing."""
        idle = dict.fromkeys(living, 0)
        epoch = self._open_epoch(living)
        nothing = WindowPlan(idle, dict(idle), True, "spreads the initial state")
        yield from self._issue(epoch, nothing, living)

    def issue(self, living: Living) -> Iterator[Action]:
        """Issue every round the policy's gate lets through."""
        policy = self.plan.policy
        while True:
            verdict, reason = GATES[policy](self._view(living))
            if verdict is Gate.HOLD:
                yield Note(topic="gate", text=reason)
                return
            if verdict is Gate.NEXT_EPOCH:
                yield from self._evaluation(living)
                self._open_epoch(living)
                continue
            epoch = self._epoch()
            if policy == "sync":
                planned = self._deal_sync(epoch, living)
            elif verdict is Gate.EARLY:
                planned = self._deal_ahead(epoch, living)
            else:
                planned = self._deal(epoch, living)
            yield from self._issue(epoch, planned, living)

    def _evaluation(self, living: Living) -> Iterator[Action]:
        """Have the epoch's consensus scored: the order is read between its last round and the
        next window, when the replica holds just that."""
        every, epoch = self.plan.eval_every, self._epoch().number
        if every and (epoch + 1) % every == 0:
            yield Evaluate(rank=self.fastest(living), epoch=epoch)

    def _view(self, living: Living) -> gate.View:
        pool = self._epoch().pool
        flying = self._windows.unsettled()
        belief = self._belief(living)
        ahead = self._needs_ahead(belief) if len(flying) == 1 else {}
        return gate.View(
            unsettled=len(flying),
            newest_exact=bool(flying) and flying[-1].exact,
            undealt=pool.undealt,
            unused=sum(pool.held(rank) for rank in living),
            early_need=sum(ahead.values()),
            window=belief.picks,
            calibrated=belief.calibrated,
            epochs_left=self.schedule.has_next(),
        )

    def _belief(self, living: Living) -> Belief:
        return Belief(
            counts=self._balance.counts(living),
            costs=self._balance.costs(living),
            sizes={rank: self.plan.batch_sizes[rank] for rank in living},
            calibrated=self._balance.calibrated,
            elastic=self._balance.elastic,
            most_ahead=self.plan.max_batch_diff,
        )

    def _needs_ahead(self, belief: Belief) -> dict[Rank, int]:
        """Picks each rank must be given on top of what it may still hold in the worst case."""
        (flying,) = self._windows.unsettled()
        pool = self._epoch().pool
        needs = {}
        for rank, most in window_plan.plan_ahead(belief.counts).ceiling.items():
            batches = flying.ceiling.get(rank, 0) + most
            needs[rank] = max(0, batches * belief.sizes[rank] - pool.held(rank))
        return needs

    def _deal_sync(self, epoch: Epoch, living: Living) -> WindowPlan:
        sizes = self._belief(living).sizes
        planned = window_plan.plan_sync(epoch.pool.undealt, sizes)
        for rank, batches in planned.planned.items():
            if batches:
                epoch.pool.take_next(rank, sizes[rank])
        return planned

    def _deal_ahead(self, epoch: Epoch, living: Living) -> WindowPlan:
        belief = self._belief(living)
        for rank, picks in self._needs_ahead(belief).items():
            if picks:
                epoch.pool.take(rank, picks, unit=belief.sizes[rank])
        return window_plan.plan_ahead(belief.counts)

    def _deal(self, epoch: Epoch, living: Living) -> WindowPlan:
        """Nothing is in flight: take back what was not used and deal anew."""
        for rank in living:
            epoch.pool.give_back(rank)
        belief = self._belief(living)
        planned = window_plan.plan_window(epoch.pool.undealt, belief)
        for rank, batches in planned.ceiling.items():
            if batches:
                size = belief.sizes[rank]
                epoch.pool.take(rank, batches * size, unit=size)
        return planned

    def _issue(self, epoch: Epoch, planned: WindowPlan, living: Living) -> Iterator[Action]:
        """Name the round, its roster and its picks, and tell every rank of it."""
        anchor_rank = self._anchor_rank(planned, living)
        anchor_steps = planned.planned[anchor_rank]
        window = Window(
            round=self._windows.next_round,
            epoch=epoch.number,
            roster=seats_of(living),
            anchor_rank=anchor_rank,
            anchor_steps=anchor_steps,
            planned=planned.planned,
            ceiling={**planned.ceiling, anchor_rank: anchor_steps},
            exact=planned.exact,
        )
        self._windows.issue(window)
        yield Issued(
            round=window.round,
            epoch=window.epoch,
            anchor_rank=anchor_rank,
            anchor_steps=anchor_steps,
            planned={str(rank): count for rank, count in planned.planned.items()},
            reason=planned.reason,
        )
        for rank, row in living.items():
            yield Grant(
                rank=rank,
                round=window.round,
                epoch=window.epoch,
                roster=window.roster,
                anchor_rank=anchor_rank,
                anchor_steps=anchor_steps,
                planned=window.planned[rank],
                ceiling=window.ceiling[rank],
                spans=epoch.pool.held_spans(rank),
                after=self._consumed.get(row, 0),
            )

    def _anchor_rank(self, planned: WindowPlan, living: Living) -> Rank:
        """The balancer's anchor rank if it takes part, else the living rank with most to do."""
        chosen = self._balance.anchor_rank
        if chosen is not None and chosen in living and planned.planned[chosen]:
            return chosen
        return min(living, key=lambda rank: (-planned.planned[rank], rank))

    def _open_epoch(self, living: Living) -> Epoch:
        epoch = self.schedule.open_next()
        belief = self._belief(living)
        weights = {rank: float(n * belief.sizes[rank]) for rank, n in belief.counts.items()}
        epoch.pool.reserve(weights, unit=self.plan.pick_unit)
        return epoch

    def _epoch(self) -> Epoch:
        epoch = self.schedule.current
        if epoch is None:
            raise WeBroke("no epoch is open")
        return epoch


def _arrival_of(death: Died) -> Arrived:
    """The arrival a dead rank published but never reported: known work, unknown times."""
    return Arrived(
        rank=death.rank,
        row=death.row,
        round=death.arrived,
        steps=death.steps,
        batches=death.steps,
        picks=death.picks,
    )
