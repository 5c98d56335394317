"""The run's one mind: events in, actions out, time as an argument.

    forming     ranks build their models and report Ready; they must agree on the layout
    attaching   the arena is handed out; each rank reports Attached
    training    rounds are issued, settled and committed, epoch after epoch
    evaluating  one rank scores the consensus; if it dies, another does
    saving      ranks write what is still due of checkpoints, and hold the consensus for a retry
    finishing   ranks copy their state out and report the hash of their parameters; checkpoints
                become visible
    done        an End action has been given; nothing follows

Rules. After any event the one policy function `_advance` runs; no handler acts on its own. A
round is named with its roster before any rank can reach it. A rank is lost only by a Died event.
A pick is done when a round whose arrivals cover it has committed. A save never costs the
training. The same events at the same times give the same actions, so a journal replays.

Not known here: processes, memory, the clock, how a mean is computed, what a model is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl_shm.control import plan
from flodl_shm.control.floor import Breach, breach_of
from flodl_shm.control.formation import Formation, check_same
from flodl_shm.control.ledger import Ledger
from flodl_shm.control.messages import (
    Action,
    Attached,
    BuildArena,
    Died,
    End,
    Event,
    Finish,
    Finished,
    Lent,
    Note,
    Present,
    Published,
    Quit,
    Ready,
    Rejoined,
    SaveRequest,
    Stop,
    StopRequest,
    Tick,
)
from flodl_shm.control.options import Survival
from flodl_shm.control.reduce_cycle import seats_of
from flodl_shm.control.rejoin import Returns
from flodl_shm.control.resume import attachments, check, take_up
from flodl_shm.control.training import Training
from flodl_shm.errors import FlodlError, PeerBroke, PeersLost, WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row

if TYPE_CHECKING:
    from flodl_shm.control.options import Settled, Wishes
    from flodl_shm.control.resume import Resume

BEFORE_THE_END = ("forming", "attaching", "training", "evaluating")


class Coordinator:
    """Drives one run of `world_size` ranks; `flags` is what was settled outside of the script."""

    def __init__(self, flags: Wishes, world_size: int, resume: Resume | None = None) -> None:
        self.flags = flags
        self.survival = flags.survival or Survival()
        self.world_size = world_size
        self.resume = resume
        self.phase = "forming"
        self.ledger = Ledger(world_size, max_failures=self.survival.max_failures)
        self._returns = Returns(world_size, self.survival)
        self._formation = Formation(world_size)
        self._training: Training | None = None
        self._finished: dict[Rank, Finished] = {}
        self._stop: Stop | None = None
        self._breach: Breach | None = None  # too many ranks are missing
        self._outcome = ("failed", "")  # status and reason, once the end is near
        self._out: list[Action] = []
        self._now = Nanos(0)

    @property
    def living(self) -> dict[Rank, Row]:
        """Rows of the ranks that live and have not finished."""
        return self.ledger.living

    @property
    def next_at(self) -> Nanos | None:
        """When something is due, whatever happens until then: a Tick should come."""
        grace_ends = None if self._breach is None else self._breach.until
        half_time = self._training.rounds.half_time.next_at if self._training else None
        if half_time is not None and half_time <= self._now:  # nothing is dealt any more
            half_time = None
        due = (self._returns.next_at, grace_ends, half_time)
        return min((at for at in due if at), default=None)

    @property
    def settled_plan(self) -> Settled | None:
        """What every rank follows; None before formation is complete."""
        return self._training.plan if self._training else None

    @property
    def value(self) -> float | None:
        """Of the final evaluation; None before it, and without one."""
        return self._training.value if self._training else None

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
        """Living ranks something waits for, and what for: they must make progress.

        Parts of a save are not among it: a long save is no hang, and has a limit of its own.
        """
        if self.phase == "finishing":
            return dict.fromkeys(self.living, "its state")
        if self._training is None or self.phase == "saving":
            return {}
        late = self._training.rounds.awaited(self.living) or self.in_callback()
        return {**late, **dict.fromkeys(self._returns.attaching, "its return")}

    def forgives(self, death: Died) -> bool:
        """Whether a failure costs only its rank, which may be started again or was not back yet."""
        is_last = len(self.living) < 2 or not self.ledger.is_living(death.rank, death.row)
        can = self._may_return and not is_last and self._returns.may_return(death.rank)
        return self._returns.is_outside(death.row) or (can and death.exit_code == 1)

    @property
    def _may_return(self) -> bool:
        return self._stop is None and self.phase in ("forming", "attaching", "training")

    def in_callback(self) -> dict[Rank, str]:
        """Those of `awaited` that are in a function of the user, which has a limit of its own."""
        if self._training is None or self.phase not in ("training", "evaluating"):
            return {}
        return self._training.in_callback(self.living)

    # ---- events -----------------------------------------------------------------------------

    def _absorb(self, event: Event) -> None:
        match event:
            case Died():
                self._bury(event)
            case Present():
                self._admit(event.rank, event.row)
            case Stop():
                self._stop = event
                self._save_before_the_end()
            case Tick():
                pass
            case SaveRequest() | Published():
                if self._training is not None:
                    self._out.extend(self._training.absorb(event, self._told(), self._now))
            case Ready() | Attached() | Quit() if self._returns.find(event.rank, event.row):
                self._returns.guide(event)
                if self.phase == "forming" and isinstance(event, Ready):  # in time to begin
                    self._admit(event.rank, event.row)
                    self._absorb(event)
            case _ if not self.ledger.is_living(event.rank, event.row):
                self._say("stale", f"{type(event).__name__} of rank {event.rank}, already lost")
            case Ready():
                self._formation.ready(event)
            case Attached():
                self._formation.attached(event)
            case StopRequest():
                why = f"rank {event.rank}: {event.why}"
                self._stop = self._stop or Stop(level=1, why=why)
                self._save_before_the_end()
            case Lent():
                self._out.extend(self._returns.lent(event))
            case Quit():
                self._returns.bar(event.rank)
                self._say("quit", f"rank {event.rank} left the training: {event.why}")
            case Finished():
                self._finished[event.rank] = event
                self.ledger.finish(event.rank, event.row)
                self._say("finished", f"rank {event.rank} has copied its state out")
            case _:
                if self._training is None:
                    raise PeerBroke(f"{type(event).__name__} came before the run has begun")
                self._out.extend(self._training.absorb(event, self._told(), self._now))

    def _told(self) -> dict[Rank, Row]:
        """Ranks that still read orders."""
        return {} if self.phase == "finishing" else self.living

    def _save_before_the_end(self) -> None:
        if self._training is not None and self.phase in ("training", "evaluating"):
            self._training.stop("max_failure_exceeded" if self._breach else "graceful_shutdown")

    def _bury(self, death: Died) -> None:
        """One death, counted once: what it delivered stays, what it held goes back."""
        if self._returns.is_outside(death.row):
            self._out.extend(self._returns.bury(death.rank, death.row, death.cause, self._now))
            return
        is_living = self.ledger.is_living(death.rank, death.row)
        is_fatal = death.user_error and not self.forgives(death)
        # A script may leave its training with an exception that then ends its process, too.
        if is_fatal and (is_living or death.rank not in self._finished):
            self._end("failed", death.exit_code, f"rank {death.rank} failed: {death.cause}")
        if is_fatal or not is_living:
            return
        back, said, contributed = 0, list[Action](), False
        if self._training is not None:
            back, said = self._training.bury(death, self.living, self._now)
            contributed = self._training.rounds.has_contributed(death.row)
        _, told = self.ledger.bury(death.rank, death.row, cause=death.cause, at=self._now)
        told += f"; {back} picks go back to the pool"
        if self._may_return:
            planned = self._returns.mourn(death.rank, self._now, contributed=contributed)
            told += f"; {planned}" if planned else ""
        self._say("death", told, alert=True)
        self._out.extend(said)
        self._look_at_the_floor()

    def _look_at_the_floor(self) -> None:
        """End the run, with what can be saved, if the user wants no run with so few."""
        if self._stop is not None or self.phase not in BEFORE_THE_END:
            return
        self._breach = breach_of(self.ledger, self.survival, self._returns.returning, self._now)
        if self._breach is not None and self._training is None:
            raise PeersLost(self._breach.reason)
        if self._breach is not None:
            self._stop = Stop(level=1, why=self._breach.reason)
            self._say("floor", f"{self._breach.reason}: the run ends", alert=True)
            self._save_before_the_end()

    def _admit(self, rank: Rank, row: Row) -> None:
        text = self.ledger.admit(rank, row)
        self._returns.admit(rank)
        number = self._training.rounds.newest if self._training is not None else Round(0)
        self._out.append(Rejoined(rank, row, self.ledger.incarnation(rank), number, text))

    # ---- the one policy function --------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase == "done":
            return
        if self._breach is not None and self._now >= self._breach.until:
            raise PeersLost(self._breach.reason)
        if self.living:
            self._move_on()
        self._bring_back()
        if self._training is not None and self.phase != "done":
            self._out.extend(self._training.publish(self._now))
            # Publishing may fail a save, which makes it due again: the order is given now.
            if self.living and self.phase in ("evaluating", "saving"):
                self._save()
        if not self.living and self.phase != "done":
            self._end_without_living()

    def _move_on(self) -> None:
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

    def _bring_back(self) -> None:
        """Start who is due, and lead in who is on the way; when the run ends, nobody."""
        returns = self._returns
        if self.phase == "done":
            return
        if not (self._may_return and self.living):
            self._out.extend(returns.close("the run is ending"))
            return
        self._out.extend(returns.start_due(self._now))
        if self.phase == "training":
            rounds, difference = self._course().rounds, self._formation.difference
            self._out.extend(returns.lead_in(self.living, rounds, difference))

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
        if self.resume is not None:
            check(self.resume, first, settled)
        if settled.save_every and not settled.can_save:
            text = f"save_every {settled.save_every} has no effect in a plain python process"
            self._say("save", f"{text}; start the script with flodl-shm run", alert=True)
        self._training = Training(settled, reports, self.resume)
        if self.resume is not None:
            self._out.extend(take_up(self.resume, self._training.rounds))
        self._out.append(BuildArena(params=first.params, buffers=first.buffers, plan=settled))
        self._out.extend(attachments(self.resume, settled, seats_of(self.living)))
        self.phase = "attaching"

    def _begin(self) -> None:
        if self._formation.all_attached(self.living):
            self.phase = "training"
            self._out.extend(self._course().begin(self.living, self._now))

    def _train(self) -> None:
        course, may_issue = self._course(), self._stop is None
        course.rounds.holds_a_place = self._returns.is_near(self._now)
        joined: object = True
        while joined:
            joiners = self._returns.attached if may_issue else {}
            said = course.advance(self.living, joiners, self._now, may_issue=may_issue)
            self._out.extend(said)
            for rank, row in (joined := course.rounds.take_joined()).items():
                self._admit(rank, row)
        if not course.rounds.is_held(self.living):
            raise PeersLost("every rank that held the model is lost")
        # Ranks that still leave the last round read what comes now after it: orders are in order.
        if course.is_over:
            course.wish_last_save()
            self.phase = "evaluating"
        elif self._stop is not None and course.rounds.idle:
            self._wind_down("stopped", self._stop.why)

    def _evaluate(self) -> None:
        course = self._course()
        if self._stop is not None:
            self._wind_down("stopped", self._stop.why)
            return
        self._out.extend(course.save(self.living, self._now))
        self._out.extend(course.evaluate(self.living))
        if course.is_scored:
            self._wind_down("ok", "all epochs done")

    def _wind_down(self, status: str, reason: str) -> None:
        self._outcome = (status, reason) if self._breach is None else ("failed", reason)
        self.phase = "saving"

    def _save(self) -> None:
        course = self._course()
        self._out.extend(course.save(self.living, self._now))
        if self.phase != "saving" or course.is_saving:
            return
        if self._breach is None:
            self._finish(*self._outcome)
        elif not course.is_publishing:  # nobody's script goes on from here
            raise PeersLost(self._breach.reason)

    def _finish(self, status: str, reason: str) -> None:
        self._outcome = (status, reason)
        self.phase = "finishing"
        if self._training is not None:
            self._training.let_go()
        for rank in self.living:
            self._out.append(Finish(rank=rank, status=status, reason=reason))

    def _course(self) -> Training:
        if self._training is None:
            raise WeBroke(f"there is no training in phase {self.phase}")
        return self._training

    # ---- the end ------------------------------------------------------------------------------

    def _end_without_living(self) -> None:
        """Every rank has finished or is dead."""
        if self._breach is not None and not self._finished:
            raise PeersLost(self._breach.reason)
        elif self._finished:
            if self._training is not None and self._training.is_publishing:
                return  # the training is over, but a checkpoint is on its way
            self._wind_up()
        else:
            self._formation.check_came(death.cause for death in self.ledger.deaths)
            raise PeersLost(f"all {self.world_size} ranks are lost: {self.ledger.obituary()}")

    def _wind_up(self) -> None:
        if self._training is not None:  # without it nobody has trained
            check_same(self._finished.values())
        status, reason = self._outcome
        self._end(status, 0, reason)

    def _end(self, status: str, exit_code: int, reason: str) -> None:
        self._out.append(End(status=status, exit_code=exit_code, reason=reason))
        self.phase = "done"

    def _say(self, topic: str, text: str, *, alert: bool = False) -> None:
        self._out.append(Note(topic=topic, text=text, alert=alert))
