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

from typing import TYPE_CHECKING

from flodl_shm.control import plan
from flodl_shm.control.formation import Formation
from flodl_shm.control.ledger import Ledger
from flodl_shm.control.messages import (
    Action,
    Arrived,
    Attach,
    Attached,
    BuildArena,
    Died,
    End,
    EpochClosed,
    EpochMetrics,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Finished,
    Left,
    Note,
    Published,
    Ready,
    SaveRequest,
    Stop,
    StopRequest,
    Tick,
)
from flodl_shm.control.reduce_cycle import ReduceCycle, seats_of
from flodl_shm.errors import BadConfig, FlodlError, PeerBroke, PeersLost, WeBroke
from flodl_shm.ids import Nanos, Rank, Row

if TYPE_CHECKING:
    from flodl_shm.control.options import Settled, Wishes


class Coordinator:
    """Drives one run of `world_size` ranks; `flags` is what was settled outside of the script."""

    def __init__(self, flags: Wishes, world_size: int) -> None:
        self.flags = flags
        self.world_size = world_size
        self.phase = "forming"
        self.ledger = Ledger(world_size)
        self.value: float | None = None  # of the final evaluation
        self._formation = Formation(world_size)
        self._cycle: ReduceCycle | None = None
        self._finished: dict[Rank, Finished] = {}
        self._stop: Stop | None = None
        self._scorer: Rank | None = None
        self._closed: dict[int, EpochClosed] = {}
        self._outcome = ("failed", "")  # status and reason, once the end is near
        self._out: list[Action] = []
        self._now = Nanos(0)

    @property
    def living(self) -> dict[Rank, Row]:
        """Rows of the ranks that live and have not finished."""
        return self.ledger.living

    @property
    def settled_plan(self) -> Settled | None:
        """What every rank follows; None before formation is complete."""
        return self._cycle.plan if self._cycle else None

    def step(self, event: Event, now: Nanos) -> list[Action]:
        """Take one event and say what to do. `now` is monotonic and never goes back."""
        self._out, self._now = [], now
        if self.phase == "done":
            return self._out
        try:
            self._absorb(event)
            self._advance()
        except FlodlError as error:  # a plan that cannot hold, a rank that broke the protocol
            self._end("failed", error.exit_code, str(error))
        return self._out

    def awaited(self) -> dict[Rank, str]:
        """Living ranks something waits for, and what for: they must make progress."""
        if self.phase == "evaluating" and self._scorer is not None:
            return {self._scorer: "the evaluation"}
        if self.phase == "finishing":
            return dict.fromkeys(self.living, "its state")
        return self._cycle.awaited(self.living) if self._cycle else {}

    # ---- events -----------------------------------------------------------------------------

    def _absorb(self, event: Event) -> None:
        match event:
            case Died():
                self._bury(event)
            case Stop():
                self._stop = event
            case SaveRequest() | Published() | Tick():
                pass
            case _ if not self.ledger.is_living(event.rank, event.row):
                self._say("stale", f"{type(event).__name__} of rank {event.rank}, already lost")
            case Ready():
                self._formation.ready(event)
            case Attached():
                self._formation.attached(event)
            case Arrived():
                self._rounds().arrive(event)
            case Left():
                self._rounds().leave(event)
            case Evaluated():
                self._score(event)
            case StopRequest():
                why = f"rank {event.rank}: {event.why}"
                self._stop = self._stop or Stop(level=1, why=why)
            case Finished():
                self._finished[event.rank] = event
                self.ledger.finish(event.rank, event.row)
                self._say("finished", f"rank {event.rank} has copied its state out")

    def _bury(self, death: Died) -> None:
        """One death, counted once: what it delivered stays, what it held goes back."""
        if not self.ledger.is_living(death.rank, death.row):
            return
        if death.user_error:
            self._end("failed", death.exit_code, f"rank {death.rank} failed: {death.cause}")
            return
        back = self._cycle.bury(death, self.living) if self._cycle else 0
        _, told = self.ledger.bury(death.rank, death.row, cause=death.cause, at=self._now)
        self._say("death", f"{told}; {back} picks go back to the pool", alert=True)

    def _score(self, report: Evaluated) -> None:
        if report.error:
            text = f"evaluation on rank {report.rank} raised: {report.error}"
            self._say("evaluation", text, alert=True)
        closed = self._closed.get(report.epoch)
        if closed is not None and report.value is not None:
            self._tell(closed, report.value)
        if self.phase == "evaluating":
            self.value = report.value
            self._finish("ok", "all epochs done")
        elif self.phase != "training":
            raise PeerBroke(f"rank {report.rank} evaluated without being asked")

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

    def _form(self) -> None:
        if self._stop is not None:
            self._finish("stopped", self._stop.why)
            return
        reports = self._formation.agreed(self.living)
        if reports is None:
            return
        first = reports[0]
        settled = plan.settle(
            self.flags, first.wishes, world_size=self.world_size, samples=first.samples
        )
        self._out.append(BuildArena(params=first.params, buffers=first.buffers, plan=settled))
        seats = seats_of(self.living)
        for seat in seats:
            self._out.append(Attach(rank=seat.rank, plan=settled, slot=seat.slot, seats=seats))
        self._cycle = ReduceCycle(settled)
        self.phase = "attaching"

    def _begin(self) -> None:
        if self._formation.all_attached(self.living):
            self.phase = "training"
            self._out.extend(self._rounds().begin(self.living))

    def _train(self) -> None:
        rounds = self._rounds()
        for action in rounds.advance(self.living):
            self._out.append(action)
            if isinstance(action, EpochClosed):
                self._closed[action.epoch] = action
                self._tell(action, None)
        if self._stop is None:
            self._out.extend(rounds.issue(self.living))
        if not rounds.idle:
            return
        # Ranks that still leave the last round read what comes now after it: orders are in order.
        if self._stop is not None:
            self._finish("stopped", self._stop.why)
        elif rounds.schedule.finished:
            self.phase = "evaluating"

    def _evaluate(self) -> None:
        if self._stop is not None:
            self._finish("stopped", self._stop.why)
        elif self._scorer not in self.living:
            self._scorer = self._rounds().fastest(self.living)
            epoch = self._rounds().plan.epochs - 1
            self._out.append(Evaluate(rank=self._scorer, epoch=epoch))

    def _finish(self, status: str, reason: str) -> None:
        self._outcome = (status, reason)
        self.phase = "finishing"
        for rank in self.living:
            self._out.append(Finish(rank=rank, status=status, reason=reason))

    def _tell(self, closed: EpochClosed, value: float | None) -> None:
        """Let the script on every rank know how an epoch went."""
        for rank in self.living:
            told = EpochMetrics(rank, closed.epoch, closed.loss, closed.picks, value)
            self._out.append(told)

    def _rounds(self) -> ReduceCycle:
        if self._cycle is None:
            raise PeerBroke("a rank reports a round before the run has begun")
        return self._cycle

    # ---- the end ------------------------------------------------------------------------------

    def _end_without_living(self) -> None:
        """Every rank has finished or is dead."""
        if self._finished:
            self._wind_up()
        elif self._formation.nobody_came and {d.cause for d in self.ledger.deaths} == {"exit 0"}:
            raise BadConfig(
                "every rank ended without training", hint="The script must call Trainer(...).run()."
            )
        else:
            raise PeersLost(f"all {self.world_size} ranks are lost")

    def _wind_up(self) -> None:
        hashes = {report.params_sha256 for report in self._finished.values()}
        if len(hashes) > 1 and self._cycle is not None:  # without it nobody has trained
            by_rank = {rank: report.params_sha256[:12] for rank, report in self._finished.items()}
            raise WeBroke(f"ranks end with different parameters: {by_rank}")
        status, reason = self._outcome
        self._end(status, 0, reason)

    def _end(self, status: str, exit_code: int, reason: str) -> None:
        self._out.append(End(status=status, exit_code=exit_code, reason=reason))
        self.phase = "done"

    def _say(self, topic: str, text: str, *, alert: bool = False) -> None:
        self._out.append(Note(topic=topic, text=text, alert=alert))
