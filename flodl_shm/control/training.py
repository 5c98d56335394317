"""The training itself: its rounds, and what is done at their edges.

An edge is where orders stand between two rounds' grants (edge.py). At the end of an epoch, in this
order: the evaluation, the save, the epoch function of the next epoch, the rate it wants. So a
checkpoint knows how its state was scored, and a run that goes on from it calls the epoch function
again. Scripts and signals ask for saves and evaluations at any edge.

Formation, the order of phases and the end of a run are not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control.edge import Edge
from flodl_shm.control.epoch_function import EpochFunction
from flodl_shm.control.epoch_news import EpochNews
from flodl_shm.control.evaluations import Evaluations
from flodl_shm.control.messages import (
    Action,
    Arrived,
    CallbackRan,
    Died,
    EpochClosed,
    Evaluated,
    Left,
    Note,
    PartSaved,
    Published,
    Request,
    SaveRequest,
)
from flodl_shm.control.reduce_cycle import Pause, ReduceCycle
from flodl_shm.control.resume import stand
from flodl_shm.control.roles import Roles
from flodl_shm.control.saves import Saves
from flodl_shm.errors import PeerBroke

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flodl_shm.control.messages import Ready
    from flodl_shm.control.options import Settled
    from flodl_shm.control.reduce_cycle import Living
    from flodl_shm.control.resume import Resume
    from flodl_shm.ids import Nanos, Rank

# What reaches Training; everything else is about the beginning or the end of a run.
Reported = Arrived | Left | Evaluated | CallbackRan | Request | PartSaved | SaveRequest | Published


class Training:
    """From the arena's being there to the last orders before Finish."""

    def __init__(self, plan: Settled, reports: Sequence[Ready], resume: Resume | None) -> None:
        """`reports` are those of the living ranks, which agree on the model."""
        first, meta = reports[0], resume.meta if resume else None
        devices = dict.fromkeys(range(plan.world_size), "")
        devices |= {report.rank: report.device for report in reports}
        self.plan = plan
        self.rounds = ReduceCycle(plan, meta)
        self.rounds.legacy.found(report.row for report in reports)
        self.rounds.quarantine.saved(resume.folder if resume else "")
        self.value: float | None = None  # of the final evaluation
        self.is_scored = False  # the final evaluation has come, or never will
        self._roles = roles = Roles(plan.epoch_callback_rank, first.callbacks)
        self._epoch_fn = EpochFunction(roles, meta)
        self._evaluations = Evaluations(roles, meta.evaluations if meta else ())
        self._news = EpochNews(plan, roles, self.rounds.schedule, tuple(devices.values()))
        self._saves = Saves(
            plan,
            roles,
            stand=lambda: stand(self.rounds, first, self._epoch_fn, resume),
            scored=self._evaluations.until,
        )

    # ---- what can be asked --------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Every epoch is in the consensus."""
        return self.rounds.idle and self.rounds.schedule.finished

    @property
    def is_saving(self) -> bool:
        """A save is due, or a rank's part of one is awaited."""
        return self._saves.collecting

    @property
    def is_publishing(self) -> bool:
        """A save is not visible yet, nor given up."""
        return self._saves.pending

    def in_callback(self, living: Living) -> dict[Rank, str]:
        """Living ranks in a function of the user that others wait for, and in which."""
        scorer, caller = self._evaluations.scorer, self._epoch_fn.caller
        if scorer is not None and scorer in living:
            return {scorer: "the evaluation"}
        if caller is not None and caller in living:
            return {caller: "the epoch function"}
        return {}

    # ---- what is reported ---------------------------------------------------------------------

    def absorb(self, event: Reported, living: Living, now: Nanos) -> Iterator[Action]:
        """Take a report or a wish. Raises PeerBroke on one that cannot be."""
        match event:
            case Arrived():
                self.rounds.arrive(event, now)
            case Left():
                self.rounds.leave(event)
            case Evaluated():
                yield from self._score(event, living, now)
            case CallbackRan(role="epoch"):
                yield from self._epoch_fn.ran(event, living)
            case CallbackRan():
                if event.error:
                    text = f"the {event.role} function raised on rank {event.rank}: {event.error}"
                    yield Note("callback", text, alert=True)
            case Request(what="checkpoint"):
                self._saves.wish("request")
            case Request(what="evaluation"):
                self._evaluations.wish()
            case Request():
                raise PeerBroke(f"rank {event.rank} asks for {event.what!r}, which nobody knows")
            case PartSaved():
                yield from self._saves.part(event)
            case SaveRequest():
                self._saves.wish("signal")
            case Published():
                self.rounds.quarantine.saved(event.folder)
                yield from self._saves.published(event)

    def bury(self, death: Died, living: Living, now: Nanos) -> tuple[int, list[Action]]:
        """A rank is dead: how many picks go back to the pool, and what else follows."""
        back = self.rounds.bury(death, living, now)
        said = [*self._evaluations.bury(death.rank), *self._saves.bury(death.rank)]
        return back, said

    def _score(self, report: Evaluated, living: Living, now: Nanos) -> Iterator[Action]:
        asked = self._evaluations.take(report)
        if report.error:
            text = f"evaluation on rank {report.rank} raised: {report.error}"
            yield Note("evaluation", text, alert=True)
        if report.value is not None:
            yield from self._news.scored(report.epoch, report.value, living, now)
        if asked.is_final:
            self.value, self.is_scored = report.value, True

    # ---- the training -------------------------------------------------------------------------

    def begin(self, living: Living, now: Nanos) -> Iterator[Action]:
        """All ranks hold their models: spread the initial state, if anything is to be trained."""
        if self.is_over:
            return
        yield from self._epoch_fn.tell(living)
        yield from self.rounds.begin(living, now)
        epoch = self.rounds.epoch()
        if not epoch.pool.done:  # else it is under way, and its function was called before
            yield from self._epoch_fn.ask(epoch.number, living, self._fastest(living))

    def advance(
        self, living: Living, joiners: Living, now: Nanos, *, may_issue: bool
    ) -> Iterator[Action]:
        """Settle, commit and, unless the run is to end, issue what can be.

        Joiners are put on the next roster; `rounds.take_joined` says so, and nothing is issued
        then until they are among the living.
        """
        was_calibrated = self.rounds.balance.calibrated
        yield from self.rounds.settle(living)
        if self.rounds.balance.calibrated and not was_calibrated:
            self._roles.recalibrated()
        while done := self.rounds.commit_oldest():
            for action in done:
                yield action
                if isinstance(action, EpochClosed):
                    yield from self._news.closed(action, living, now)
            self._saves.committed(self.rounds.committed, now)
        if may_issue and not self.is_over:
            yield from self._issue(living, joiners, now)
        yield from self._order_due(living, now)

    def _issue(self, living: Living, joiners: Living, now: Nanos) -> Iterator[Action]:
        yield from self._epoch_fn.renew(living, self._fastest(living))
        while self._epoch_fn.caller is None:
            pause = yield from self.rounds.issue(living, joiners, now)
            if pause is Pause.JOINED:  # they train from the next round on, at everybody's rate
                yield from self._epoch_fn.tell(joiners)
            if pause is not Pause.EDGE:
                return
            ended = self.rounds.epoch().number
            if self.plan.eval_every and (ended + 1) % self.plan.eval_every == 0:
                yield from self._evaluations.order(self._edge(living))
            self._wish_checkpoint(ended)
            yield from self._order_due(living, now)
            epoch = self.rounds.open_epoch(living)
            yield from self._epoch_fn.ask(epoch.number, living, self._fastest(living))

    def _wish_checkpoint(self, ended: int) -> None:
        if self.plan.save_every and (ended + 1) % self.plan.save_every == 0:
            self._saves.wish("checkpoint")

    def _order_due(self, living: Living, now: Nanos) -> Iterator[Action]:
        edge = self._edge(living)
        yield from self._evaluations.order_due(edge)
        yield from self._saves.order(edge, now)

    def _edge(self, living: Living) -> Edge:
        return Edge(
            after=self.rounds.newest,
            epoch=self.rounds.last_epoch,
            committed=self.rounds.committed,
            living=living,
            fastest=self._fastest(living),
        )

    def _fastest(self, living: Living) -> Callable[[], Rank]:
        return lambda: self.rounds.fastest(living)

    # ---- after the last round -----------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """The run is to end before its time: what there is of it is to be saved."""
        self._saves.wish(reason)

    def wish_last_save(self) -> None:
        """The last round is in the consensus: whatever is to be saved of it is due now."""
        if self.rounds.newest:
            self._wish_checkpoint(self.rounds.last_epoch)
            if self.plan.save_at_end:
                self._saves.wish("end")

    def evaluate(self, living: Living) -> Iterator[Action]:
        """Have the final consensus scored, by the next one if the scorer died."""
        if self._evaluations.scorer is None and not self.is_scored:
            yield from self._evaluations.order(self._edge(living), is_final=True)
            self.is_scored = self._evaluations.scorer is None  # nobody can

    def save(self, living: Living, now: Nanos) -> Iterator[Action]:
        """Order the saves that are still due: no round will be issued any more."""
        yield from self._saves.order(self._edge(living), now, is_last=True)

    def let_go(self) -> None:
        """Ranks finish: what scripts still ask for comes too late."""
        self._saves.close()

    def publish(self, now: Nanos) -> Iterator[Action]:
        """Publish what is complete, give up what takes too long."""
        yield from self._saves.advance(now)
