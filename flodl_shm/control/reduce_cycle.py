"""One round after the other: issued, settled, committed.

    issue    the gate says when, the window plan how much; pool, roster and grants are made here
    settle   every rank of the roster has arrived or is dead: the balancer is fed
    commit   a living rank has left: picks are done, the guard judges the balancer's proposal

Who lives is told with each call, as is who wants the run to end. Formation, evaluation and the
end of a run are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flodl_shm.control import gate, plan, window_plan
from flodl_shm.control.convergence import TrendGuard
from flodl_shm.control.el_che import ElChe, ElCheConfig, Reading
from flodl_shm.control.gate import Gate
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
    Settled,
)
from flodl_shm.control.schedule import Epoch, Schedule
from flodl_shm.control.window_ledger import Window, WindowLedger
from flodl_shm.control.window_plan import WindowPlan
from flodl_shm.errors import PeerBroke, WeBroke
from flodl_shm.ids import Rank, Row, Slot

GATES = {"sync": gate.sync, "cadence": gate.cadence}
Living = Mapping[Rank, Row]


class ReduceCycle:
    """All rounds of a run that follows `settled`."""

    def __init__(self, settled: Settled) -> None:
        self.plan = settled
        self.schedule = Schedule(settled)
        self._windows = WindowLedger()
        self._el_che = ElChe(_balance(settled))
        self._el_che.cap(self.schedule.batches_per_epoch)
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
        self._el_che.drop(death.rank)
        return sum(epoch.pool.forfeit(death.rank) for epoch in self.schedule.epochs.values())

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when no round is on its way."""
        return not any(self._windows.open())

    def awaited(self, living: Living) -> dict[Rank, str]:
        """Living ranks that the oldest unsettled round waits for."""
        waits: dict[Rank, str] = {}
        for window in self._windows.unsettled()[:1]:
            late = window.awaited(living)
            waits.update(dict.fromkeys(late, f"its arrival in round {window.round}"))
        return waits

    def fastest(self, living: Living) -> Rank:
        """The rank whose batches cost least; the lowest while that is unknown."""
        return min(living, key=lambda rank: (self._el_che.cost_ns(rank) or 0, rank))

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
        readings = {
            rank: _reading(report)
            for rank, report in window.arrived.items()
            if rank in living and report.rest_ns + report.first_ns
        }
        if readings:
            reason = self._el_che.report(readings, sync_ns=self._sync_ns, living=living)
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
            mass={str(r): plan.mass(report.steps, self.plan.gamma) for r, report in done.items()},
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
            yield Note(topic="guard", text=f"{reason}; {self._el_che.judge(verdict)}")

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

    def _view(self, living: Living) -> gate.View:
        pool, size = self._epoch().pool, self.plan.batch_size
        flying = self._windows.unsettled()
        counts = self._el_che.counts(living)
        return gate.View(
            unsettled=len(flying),
            newest_exact=bool(flying) and flying[-1].exact,
            undealt=pool.undealt // size,
            unused=sum(pool.held(rank) for rank in living) // size,
            early_need=sum(self._needs_ahead(counts).values()) if len(flying) == 1 else 0,
            window=sum(counts.values()),
            calibrated=self._el_che.calibrated,
            epochs_left=self.schedule.has_next(),
        )

    def _needs_ahead(self, counts: dict[Rank, int]) -> dict[Rank, int]:
        """Batches each rank must be given on top of what it may still hold in the worst case."""
        (flying,) = self._windows.unsettled()
        pool, size = self._epoch().pool, self.plan.batch_size
        ahead = window_plan.plan_ahead(counts).ceiling
        return {
            rank: max(0, flying.ceiling.get(rank, 0) + most - pool.held(rank) // size)
            for rank, most in ahead.items()
        }

    def _deal_sync(self, epoch: Epoch, living: Living) -> WindowPlan:
        size = self.plan.batch_size
        planned = window_plan.plan_sync(epoch.pool.undealt // size, tuple(living))
        for rank, batches in planned.planned.items():
            if batches:
                epoch.pool.take_next(rank, batches * size)
        return planned

    def _deal_ahead(self, epoch: Epoch, living: Living) -> WindowPlan:
        counts = self._el_che.counts(living)
        self._take(epoch, self._needs_ahead(counts))
        return window_plan.plan_ahead(counts)

    def _deal(self, epoch: Epoch, living: Living) -> WindowPlan:
        """Nothing is in flight: take back what was not used and deal anew."""
        for rank in living:
            epoch.pool.give_back(rank)
        planned = window_plan.plan_window(
            epoch.pool.undealt // self.plan.batch_size,
            self._el_che.counts(living),
            {rank: self._el_che.cost_ns(rank) for rank in living},
            calibrated=self._el_che.calibrated,
        )
        self._take(epoch, planned.ceiling)
        return planned

    def _take(self, epoch: Epoch, batches: Mapping[Rank, int]) -> None:
        size = self.plan.batch_size
        for rank, count in batches.items():
            if count:
                epoch.pool.take(rank, count * size, unit=size)

    def _issue(self, epoch: Epoch, planned: WindowPlan, living: Living) -> Iterator[Action]:
        """Name the round, its roster and its picks, and tell every rank of it."""
        anchor = self._anchor(planned, living)
        window = Window(
            round=self._windows.next_round,
            epoch=epoch.number,
            roster=tuple(Seat(rank, row, Slot(rank)) for rank, row in living.items()),
            anchor_rank=anchor,
            anchor_steps=planned.planned[anchor],
            planned=planned.planned,
            ceiling={**planned.ceiling, anchor: planned.planned[anchor]},
            exact=planned.exact,
        )
        self._windows.issue(window)
        yield Issued(
            round=window.round,
            epoch=window.epoch,
            anchor_rank=anchor,
            anchor_steps=window.anchor_steps,
            planned={str(rank): count for rank, count in planned.planned.items()},
            reason=planned.reason,
        )
        for rank, row in living.items():
            yield Grant(
                rank=rank,
                round=window.round,
                epoch=window.epoch,
                roster=window.roster,
                anchor_rank=anchor,
                anchor_steps=window.anchor_steps,
                planned=window.planned[rank],
                ceiling=window.ceiling[rank],
                spans=epoch.pool.held_spans(rank),
                after=self._consumed.get(row, 0),
            )

    def _anchor(self, planned: WindowPlan, living: Living) -> Rank:
        """The balancer's anchor rank if it takes part, else the living rank with most to do."""
        chosen = self._el_che.anchor_rank
        if chosen is not None and chosen in living and planned.planned[chosen]:
            return chosen
        return min(living, key=lambda rank: (-planned.planned[rank], rank))

    def _open_epoch(self, living: Living) -> Epoch:
        epoch = self.schedule.open_next()
        counts = self._el_che.counts(living)
        weights = {rank: float(count) for rank, count in counts.items()}
        epoch.pool.reserve(weights, unit=self.plan.batch_size)
        return epoch

    def _epoch(self) -> Epoch:
        epoch = self.schedule.current
        if epoch is None:
            raise WeBroke("no epoch is open")
        return epoch


def _balance(settled: Settled) -> ElCheConfig:
    sync = settled.policy == "sync"
    return ElCheConfig(
        world_size=settled.world_size,
        anchor=1 if sync else settled.anchor,
        max_anchor=settled.max_anchor,
        overhead_target=settled.overhead_target,
        grows=not sync,
    )


def _reading(report: Arrived) -> Reading:
    return Reading(
        steps=report.steps,
        batches=report.batches,
        busy_ns=report.busy_ns,
        first_ns=report.first_ns,
        rest_ns=report.rest_ns,
        callback_ns=report.callback_ns,
    )


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
