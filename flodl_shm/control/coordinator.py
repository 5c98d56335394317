"""The run's one mind: events in, actions out, time as an argument.

    forming     ranks build their models and report Ready; they must agree on the layout
    attaching   the arena is handed out; each rank reports Attached
    training    rounds are issued, settled and committed, epoch after epoch
    evaluating  one rank scores the consensus; if it dies, another does
    finishing   ranks copy their state out and report the hash of their parameters
    done        an End action has been given; nothing follows

Rules. After any event the one policy function `_advance` runs; no handler acts on its own. A
round is named with its roster before any rank can reach it. A rank is lost only by a Died event.
A pick is done when a round whose arrivals cover it has committed. The same events at the same
times give the same actions, so a journal replays.

Not known here: processes, memory, the clock, how a mean is computed, what a model is.
"""

from __future__ import annotations

from flodl_shm.control import gate, plan, window_plan
from flodl_shm.control.convergence import TrendGuard
from flodl_shm.control.el_che import ElChe, ElCheConfig, Reading
from flodl_shm.control.formation import Formation
from flodl_shm.control.gate import Gate
from flodl_shm.control.ledger import Ledger
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Attach,
    Attached,
    BuildArena,
    Committed,
    Died,
    End,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Finished,
    Grant,
    Issued,
    Left,
    Note,
    Ready,
    Seat,
    Settled,
    Stop,
    Tick,
    Wishes,
)
from flodl_shm.control.schedule import Epoch, Schedule
from flodl_shm.control.window_ledger import Window, WindowLedger
from flodl_shm.control.window_plan import WindowPlan
from flodl_shm.errors import BadConfig, FlodlError, PeerBroke, PeersLost, WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot

GATES = {"sync": gate.sync, "cadence": gate.cadence}


class Coordinator:
    """Drives one run. `rows[rank]` is the row of the rank's first incarnation."""

    def __init__(self, flags: Wishes, world_size: int) -> None:
        self.flags = flags
        self.world_size = world_size
        self.phase = "forming"
        self.ledger = Ledger(world_size)
        self.settled_plan: Settled | None = None
        self.value: float | None = None
        self._formation = Formation(world_size)
        self._windows = WindowLedger()
        self._consumed: dict[Row, int] = {}
        self._finished: dict[Rank, Finished] = {}
        self._stop: Stop | None = None
        self._scorer: Rank | None = None
        self._sync_ns = 0  # of the newest commit; fed to the balancer once
        self._out: list[Action] = []
        self._now = Nanos(0)
        self._schedule: Schedule
        self._el_che: ElChe
        self._guard: TrendGuard

    @property
    def living(self) -> dict[Rank, Row]:
        """Rows of the ranks that live and have not finished."""
        return self.ledger.living

    @property
    def batch_size(self) -> int:
        """Picks of one batch, once the plan is settled."""
        if self.settled_plan is None:
            raise WeBroke("the plan is not settled yet")
        return self.settled_plan.batch_size

    def step(self, event: Event, now: Nanos) -> list[Action]:
        """Take one event and say what to do. `now` is monotonic and never goes back."""
        self._out, self._now = [], now
        if self.phase == "done":
            return self._out
        try:
            self._absorb(event)
            self._advance()
        except FlodlError as error:  # a plan that cannot hold, a rank that broke the protocol
            self._end("failed", error.exit_code, error.sentence())
        return self._out

    def awaited(self) -> dict[Rank, str]:
        """Living ranks something waits for, and what for: they must make progress."""
        if self.phase == "evaluating" and self._scorer is not None:
            return {self._scorer: "the evaluation"}
        if self.phase == "finishing":
            return dict.fromkeys(self.living, "its state")
        waits: dict[Rank, str] = {}
        for window in self._windows.unsettled()[:1]:
            late = window.awaited(self.living)
            waits.update(dict.fromkeys(late, f"its arrival in round {window.round}"))
        return waits

    # ---- events -----------------------------------------------------------------------------

    def _absorb(self, event: Event) -> None:
        match event:
            case Died():
                self._bury(event)
            case Stop():
                self._stop = event
            case Tick():
                pass
            case _ if self.living.get(event.rank) != event.row:
                self._say("stale", f"{type(event).__name__} of rank {event.rank}, already lost")
            case Ready():
                self._formation.ready(event)
            case Attached():
                self._formation.attached(event)
            case Arrived():
                self._arrive(event)
            case Left():
                self._windows.leave(event)
            case Evaluated():
                self._score(event)
            case Finished():
                self._finished[event.rank] = event
                self.ledger.finish(event.rank, event.row)
                self._say("finished", f"rank {event.rank} has copied its state out")

    def _arrive(self, report: Arrived) -> None:
        self._windows.arrive(report)
        window = self._windows.get(report.round)
        used = report.picks - self._consumed.get(report.row, 0)
        if window is None or used < 0:
            raise PeerBroke(f"rank {report.rank} reports {report.picks} picks in all, fewer than before")
        self._consumed[report.row] = report.picks
        window.picks[report.rank] = used
        if used:
            self._schedule.epochs[window.epoch].pool.consume(report.rank, used, round=report.round)

    def _bury(self, death: Died) -> None:
        """One death, counted once: what it delivered stays, what it held goes back."""
        if not self.ledger.is_living(death.rank, death.row):
            return
        if death.user_error:
            self._end("failed", death.exit_code, f"rank {death.rank} failed: {death.cause}")
            return
        window = self._windows.get(death.arrived)
        if window is not None and death.rank in window.awaited(self.living):
            self._arrive(_arrival_of(death))
        _, told = self.ledger.bury(death.rank, death.row, cause=death.cause, at=self._now)
        back = 0
        if self.phase == "training":
            back = sum(epoch.pool.forfeit(death.rank) for epoch in self._schedule.epochs.values())
            self._el_che.drop(death.rank)
        self._say("death", f"{told}; {back} picks go back to the pool", alert=True)

    def _score(self, report: Evaluated) -> None:
        if report.error:
            text = f"evaluation on rank {report.rank} raised: {report.error}"
            self._say("evaluation", text, alert=True)
        self.value = report.value
        self.phase = "scored"

    # ---- the one policy function --------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase == "done":
            return
        if not self.living:
            self._end_without_living()
            return
        if self._stop is not None and self._stop.level > 1:
            self._end("stopped", 0, self._stop.why)
            return
        if self.phase == "forming":
            self._form()
        if self.phase == "attaching":
            self._begin()
        if self.phase == "training":
            self._train()
        if self.phase == "evaluating":
            self._evaluate()
        if self.phase == "scored":
            self._finish("ok", "all epochs done")

    def _form(self) -> None:
        if self._stop is not None:
            self._end("stopped", 0, self._stop.why)
            return
        reports = self._formation.agreed(self.living)
        if reports is None:
            return
        first = reports[0]
        self.settled_plan = settled = plan.settle(
            self.flags, first.wishes, world_size=self.world_size, samples=first.samples
        )
        self._out.append(BuildArena(params=first.params, buffers=first.buffers, plan=settled))
        for rank in self.living:
            self._out.append(Attach(rank=rank, plan=settled, slot=Slot(rank)))
        self._schedule = Schedule(settled)
        self._el_che = ElChe(_balance(settled))
        self._el_che.cap(self._schedule.batches_per_epoch)
        self._guard = TrendGuard()
        self.phase = "attaching"

    def _begin(self) -> None:
        if not self._formation.all_attached(self.living):
            return
        self.phase = "training"
        idle = dict.fromkeys(self.living, 0)
        epoch = self._open_epoch()
        self._issue(epoch, WindowPlan(idle, dict(idle), True, "spreads the initial state"))

    def _train(self) -> None:
        for window in self._windows.unsettled():
            if window.awaited(self.living):
                break
            self._settle(window)
        for window in self._windows.open():
            if not (window.settled and window.left):
                break
            self._commit(window)
        if self._stop is None:
            self._issue_rounds()
        if not any(self._windows.open()):
            # Ranks still leaving the last round read what comes now after it: orders are in order.
            if self._stop is not None:
                self._finish("stopped", self._stop.why)
            elif self._schedule.finished:
                self.phase = "evaluating"

    # ---- rounds -------------------------------------------------------------------------------

    def _settle(self, window: Window) -> None:
        """Everyone of the roster has arrived or is dead: feed the balancer."""
        window.settled = True
        readings = {
            rank: _reading(report)
            for rank, report in window.arrived.items()
            if rank in self.living and report.rest_ns + report.first_ns
        }
        if readings:
            reason = self._el_che.report(readings, sync_ns=self._sync_ns, living=self.living)
            self._sync_ns = 0
            self._say("balance", reason)

    def _commit(self, window: Window) -> None:
        reports = list(window.left.values())
        told = {left.contributors for left in reports}
        if told != {window.contributors}:
            raise WeBroke(
                f"round {window.round}: ranks saw contributors {sorted(told)}, "
                f"reports say {window.contributors}"
            )
        epoch = self._schedule.epochs[window.epoch]
        epoch.pool.commit(window.round)
        done = [window.arrived[rank] for rank in window.contributors]
        self._schedule.global_step += sum(report.steps for report in done)
        losses = (sum(r.loss_sum for r in done), sum(r.loss_count for r in done))
        epoch.loss_sum += losses[0]
        epoch.loss_count += losses[1]
        divergence = max(left.divergence for left in reports)
        self._sync_ns = max(left.reduce_ns for left in reports)
        self._judge(window, divergence)
        self._out.append(self._committed(window, losses, divergence))
        self._windows.close(window)
        self._out.extend(self._schedule.close_finished())

    def _committed(
        self, window: Window, losses: tuple[float, int], divergence: float
    ) -> Committed:
        done = {rank: window.arrived[rank] for rank in window.contributors}
        gamma = self._schedule.plan.gamma
        return Committed(
            round=window.round,
            epoch=window.epoch,
            contributors=window.contributors,
            steps={str(rank): report.steps for rank, report in done.items()},
            picks={str(rank): window.picks.get(rank, 0) for rank in done},
            mass={str(rank): plan.mass(report.steps, gamma) for rank, report in done.items()},
            global_step=self._schedule.global_step,
            loss=losses[0] / losses[1] if losses[1] else None,
            divergence=divergence,
            reduce_ns=self._sync_ns,
        )

    def _judge(self, window: Window, divergence: float) -> None:
        steps = [report.steps for report in window.arrived.values()]
        if not any(steps):
            return
        verdict, reason = self._guard.report(divergence, k_used=sum(steps), k_max=max(steps))
        self._say("guard", f"{reason}; {self._el_che.judge(verdict)}")

    def _issue_rounds(self) -> None:
        policy = self._schedule.plan.policy
        while True:
            verdict, reason = GATES[policy](self._view())
            if verdict is Gate.HOLD:
                self._say("gate", reason)
                return
            if verdict is Gate.NEXT_EPOCH:
                self._open_epoch()
                continue
            epoch = self._epoch()
            if policy == "sync":
                self._issue_sync(epoch)
            elif verdict is Gate.EARLY:
                self._issue_early(epoch)
            else:
                self._issue_exact(epoch)

    def _view(self) -> gate.View:
        pool, size = self._epoch().pool, self._schedule.plan.batch_size
        flying = self._windows.unsettled()
        counts = self._el_che.counts(self.living)
        return gate.View(
            unsettled=len(flying),
            newest_exact=bool(flying) and flying[-1].exact,
            undealt=pool.undealt // size,
            unused=sum(pool.held(rank) for rank in self.living) // size,
            early_need=sum(self._early_needs(counts).values()) if len(flying) == 1 else 0,
            window=sum(counts.values()),
            calibrated=self._el_che.calibrated,
            epochs_left=self._schedule.has_next(),
        )

    def _early_needs(self, counts: dict[Rank, int]) -> dict[Rank, int]:
        """Batches each rank must be given on top of what it may still hold in the worst case."""
        (flying,) = self._windows.unsettled()
        pool, size = self._epoch().pool, self._schedule.plan.batch_size
        ahead = window_plan.plan_ahead(counts).ceiling
        return {
            rank: max(0, flying.ceiling.get(rank, 0) + most - pool.held(rank) // size)
            for rank, most in ahead.items()
        }

    def _issue_sync(self, epoch: Epoch) -> None:
        size = self._schedule.plan.batch_size
        planned = window_plan.plan_sync(epoch.pool.undealt // size, tuple(self.living))
        for rank, batches in planned.planned.items():
            if batches:
                epoch.pool.take_next(rank, batches * size)
        self._issue(epoch, planned)

    def _issue_early(self, epoch: Epoch) -> None:
        counts = self._el_che.counts(self.living)
        size = self._schedule.plan.batch_size
        for rank, batches in self._early_needs(counts).items():
            if batches:
                epoch.pool.take(rank, batches * size, unit=size)
        self._issue(epoch, window_plan.plan_ahead(counts))

    def _issue_exact(self, epoch: Epoch) -> None:
        pool, size = epoch.pool, self._schedule.plan.batch_size
        for rank in self.living:
            pool.give_back(rank)
        counts = self._el_che.counts(self.living)
        costs = {rank: self._el_che.cost_ns(rank) for rank in self.living}
        planned = window_plan.plan_window(
            pool.undealt // size, counts, costs, calibrated=self._el_che.calibrated
        )
        for rank, batches in planned.ceiling.items():
            if batches:
                pool.take(rank, batches * size, unit=size)
        self._issue(epoch, planned)

    def _issue(self, epoch: Epoch, planned: WindowPlan) -> None:
        """Name the round, its roster and its picks, and tell every rank of it."""
        anchor = self._anchor(planned)
        window = Window(
            round=self._windows.next_round,
            epoch=epoch.number,
            roster=tuple(Seat(rank, row, Slot(rank)) for rank, row in self.living.items()),
            anchor_rank=anchor,
            anchor_steps=planned.planned[anchor],
            planned=planned.planned,
            ceiling={**planned.ceiling, anchor: planned.planned[anchor]},
            exact=planned.exact,
        )
        self._windows.issue(window)
        self._out.append(
            Issued(
                round=window.round,
                epoch=window.epoch,
                anchor_rank=anchor,
                anchor_steps=window.anchor_steps,
                planned={str(rank): count for rank, count in planned.planned.items()},
                reason=planned.reason,
            )
        )
        for rank, row in self.living.items():
            self._out.append(self._grant(window, rank, row, epoch))

    def _grant(self, window: Window, rank: Rank, row: Row, epoch: Epoch) -> Grant:
        return Grant(
            rank=rank,
            round=window.round,
            epoch=window.epoch,
            roster=window.roster,
            anchor_rank=window.anchor_rank,
            anchor_steps=window.anchor_steps,
            planned=window.planned[rank],
            ceiling=window.ceiling[rank],
            spans=epoch.pool.held_spans(rank),
            after=self._consumed.get(row, 0),
        )

    def _anchor(self, planned: WindowPlan) -> Rank:
        """The balancer's anchor rank if it takes part, else the living rank with most to do."""
        chosen = self._el_che.anchor_rank
        if chosen is not None and chosen in self.living and planned.planned[chosen]:
            return chosen
        return min(self.living, key=lambda rank: (-planned.planned[rank], rank))

    def _open_epoch(self) -> Epoch:
        epoch = self._schedule.open_next()
        counts = self._el_che.counts(self.living)
        weights = {rank: float(count) for rank, count in counts.items()}
        epoch.pool.reserve(weights, unit=self._schedule.plan.batch_size)
        return epoch

    def _epoch(self) -> Epoch:
        epoch = self._schedule.current
        if epoch is None:
            raise WeBroke("no epoch is open")
        return epoch

    # ---- the end ------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        if self._stop is not None:
            self._finish("stopped", self._stop.why)
            return
        if self._scorer in self.living:
            return
        self._scorer = min(self.living, key=lambda rank: (self._el_che.cost_ns(rank) or 0, rank))
        self._out.append(Evaluate(rank=self._scorer, epoch=self._schedule.plan.epochs - 1))

    def _finish(self, status: str, reason: str) -> None:
        self._status, self._reason = status, reason
        self.phase = "finishing"
        for rank in self.living:
            self._out.append(Finish(rank=rank, status=status, reason=reason))

    def _end_without_living(self) -> None:
        """Every rank has finished or is dead."""
        if self._finished:
            self._wind_up()
        elif self._formation.nobody_came and {d.cause for d in self.ledger.deaths} == {"exit 0"}:
            raise BadConfig(
                "every rank ended without training", hint="The script must call Trainer(...).run()."
            )
        else:
            self._end("failed", PeersLost.exit_code, f"all {self.world_size} ranks are lost")

    def _wind_up(self) -> None:
        hashes = {report.params_sha256 for report in self._finished.values()}
        if len(hashes) > 1:
            by_rank = {rank: report.params_sha256[:12] for rank, report in self._finished.items()}
            raise WeBroke(f"ranks end with different parameters: {by_rank}")
        self._end(self._status, 0, self._reason)

    def _end(self, status: str, exit_code: int, reason: str) -> None:
        self._out.append(End(status=status, exit_code=exit_code, reason=reason))
        self.phase = "done"

    def _say(self, topic: str, text: str, *, alert: bool = False) -> None:
        self._out.append(Note(topic=topic, text=text, alert=alert))


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
