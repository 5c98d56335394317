"""The one loop with a clock: waits, looks, asks the coordinator, does as it says.

One turn: deaths are declared to the survivors first, since they may be waiting; then everything
ranks have sent is taken, and only then are the deaths told to the coordinator, so that nothing a
rank sent before it died comes after its death. No policy lives here but how long to wait.
"""

from __future__ import annotations

import select
import signal
import time
from typing import TYPE_CHECKING

from flodl_shm.control.messages import (
    Action,
    AdjustRate,
    Attach,
    BuildArena,
    CallEpochFn,
    Died,
    DropSave,
    End,
    EpochMetrics,
    Evaluate,
    Finish,
    Grant,
    Kill,
    Lend,
    Publish,
    Quit,
    Ready,
    Save,
    SaveRequest,
    Spawn,
    Tick,
)
from flodl_shm.control.shutdown import StopLadder
from flodl_shm.engine.afterwards import Afterwards
from flodl_shm.engine.death_record import cause_class, write_death
from flodl_shm.engine.sampler import Sampler
from flodl_shm.engine.saving import room_told
from flodl_shm.engine.watch import ANSWER_NS, StackView, Watch, give_up
from flodl_shm.errors import FlodlError
from flodl_shm.ids import Nanos, Rank, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flodl_shm.control.coordinator import Coordinator
    from flodl_shm.control.messages import Event
    from flodl_shm.engine.host import Host
    from flodl_shm.engine.publisher import Publisher
    from flodl_shm.engine.recorder import Recorder
    from flodl_shm.proc.signals import SignalPipe

TICK_NS = 500_000_000
KILL_LIMIT_NS = 5_000_000_000  # from SIGKILL to the last process's end
HEAR_OUT_NS = 5_000_000_000  # from the end to that of a script whose loop may have raised
STOPPERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class HostLoop:
    """Runs one run on one host, from the birth of its ranks to the end of the last."""

    def __init__(
        self,
        host: Host,
        coordinator: Coordinator,
        recorder: Recorder,
        signals: SignalPipe,
        publisher: Publisher,
    ) -> None:
        self.host, self.coordinator = host, coordinator
        self.recorder, self.signals = recorder, signals
        self.publisher = publisher
        self.end: End | None = None
        self.stopped_by = 0  # the first signal that asked for the end
        self.failed: Died | None = None  # the first rank that failed, maybe after its work was done
        self.left: dict[Rank, str] = {}  # ranks whose script left its training unfinished, and why
        self.wanted: list[Ready] = []  # reports of ranks that ask for another run
        self._came: set[tuple[Rank, Row]] = set()  # who was ready for this one
        self._ladder = StopLadder()
        self._sampler = Sampler(host, recorder)
        config = host.config
        self._watch = Watch(config.dead_after_s, config.stall_timeout_s, config.callback_timeout_s)
        self._stacks = StackView()
        self._grace_until: Nanos | None = None
        self._unborn: list[Died] = []  # ranks that could not be started again
        self._tick_at = Nanos(0)

    def run(self, first: Sequence[Event] = ()) -> End:
        """Drive the run to its end. Afterwards every process is gone, or `wanted` says who not.

        `first` is what the coordinator is told to begin with. Brings the ranks into being, unless
        they are there from a run before.
        """
        if not self.host.members:
            for number in range(self.host.config.ranks):
                self.host.spawn(Rank(number), Row(number))
        try:
            for event in first:
                self._take(event, Nanos(time.monotonic_ns()))
            while self.end is None:
                self._turn()
            self._let_go(self.end)
        finally:
            self._sampler.close()
        return self.end

    # ---- one turn -----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._wait()
        now = Nanos(time.monotonic_ns())
        self.host.block.wakeup.drain()  # before the rings are read: see shm/eventfd.py
        self._hear_signals(now)
        self.host.bury(now)
        for report in self.host.reports(now):
            self._take(report, now)
        for death in self.host.deaths():
            self.recorder.exited(death)
            if death.user_error and self.end is None and self.coordinator.forgives(death):
                self.host.forgive(death)
            elif death.user_error:
                self.failed = self.failed or death
            self._die(death, now)
        for told in self.publisher.take():
            self._step(told, now)
        while self._unborn:
            self._step(self._unborn.pop(), now)
        if (due := self.coordinator.next_at) is not None and now >= due:
            self._step(Tick(), now)
        for fault in self.host.faults:
            self.recorder.say(fault)
        self.host.faults.clear()
        self.recorder.show(self.host.output_lines())
        self.recorder.tick(now)
        self._sampler.tick(self.host.supervisor.living(), now)
        if now >= self._tick_at:
            self._tick_at = Nanos(now + TICK_NS)
            self._tick(now)
            self._give_up(now)
        elif now >= self._watch.due:
            self._give_up(now)
        for line in self._stacks.lines(now):
            self.recorder.say(line)

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self.host.block.wakeup.fd, self.signals.fd, *self.host.poll_fds()):
            poll.register(fd, select.POLLIN)
        left_ns = min(self._tick_at, self._watch.due) - time.monotonic_ns()
        if (due := self.coordinator.next_at) is not None and self.end is None:
            left_ns = min(left_ns, due - time.monotonic_ns())
        if self._stacks.is_open:
            left_ns = min(left_ns, ANSWER_NS)
        poll.poll(max(0, left_ns // 1_000_000 + 1))

    def _tick(self, now: Nanos) -> None:
        self._step(Tick(), now)
        if self._grace_until is not None and now >= self._grace_until:
            self._grace_until = None
            self._press(f"the grace of {self.host.config.grace_s:g} s is over", now)

    def _give_up(self, now: Nanos) -> None:
        for lost in self._watch.look(self.host, self.coordinator.awaited(), now):
            self.recorder.say(f"rank {lost.rank} is killed: {lost.why}")
            fault = give_up(self.host, lost, now)
            if fault:
                self.recorder.say(fault)

    def _hear_signals(self, now: Nanos) -> None:
        for number in self.signals.read():
            if number in STOPPERS:
                self.stopped_by = self.stopped_by or number
                self._press(signal.Signals(number).name, now)
            elif number == signal.SIGUSR2:
                for line in self.host.who_waits(self.coordinator.awaited(), now):
                    self.recorder.say(line)
                self._stacks.ask(self.host, now)
            elif self.end is None:
                self.recorder.say("SIGUSR1: a checkpoint is made at the next window's edge")
                self._step(SaveRequest(why="SIGUSR1"), now)

    def _press(self, why: str, now: Nanos) -> None:
        event, sentence = self._ladder.press(why)
        self.recorder.say(sentence)
        if event.level == 1:
            self._grace_until = Nanos(now + int(self.host.config.grace_s * 1e9))
        if self.end is None:
            self._step(event, now)

    # ---- the coordinator ------------------------------------------------------------------------

    def _take(self, event: Event, now: Nanos) -> None:
        """Tell the coordinator, unless it is of the script's next run."""
        if isinstance(event, Ready):
            if (event.rank, event.row) in self._came:
                self.wanted.append(event)
                return
            self._came.add((event.rank, event.row))
        self._step(event, now)
        if isinstance(event, Quit):
            self.left[event.rank] = event.why
            self._die(self.host.quit(event), now)

    def _die(self, death: Died, now: Nanos) -> None:
        """Tell the coordinator; leave a record where others look for checkpoints."""
        if self.end is None and self.coordinator.ledger.is_living(death.rank, death.row):
            why = write_death(
                self.publisher.stem,
                rank=death.rank,
                world_size=self.host.config.ranks,
                error=death.cause,
                cause=cause_class(death),
                unix_time_s=time.time(),
            )
            if why:
                self.recorder.say(f"the record of rank {death.rank}'s death: {why}")
        self._step(death, now)

    def _step(self, event: Event, now: Nanos) -> None:
        if self.end is not None:
            return
        self.recorder.event(event, now)
        for action in self.coordinator.step(event, now):
            self.recorder.action(action, now)
            self._carry_out(action, now)

    def _carry_out(self, action: Action, now: Nanos) -> None:
        if self.end is not None:
            return
        match action:
            case BuildArena():
                try:
                    told = self.host.build_arena(action)
                except FlodlError as error:  # no memory: said before any rank trains
                    self._fail(error, now)
                    return
                for sentence in filter(None, (told, room_told(self.publisher.stem, action))):
                    self.recorder.say(sentence)
            case Attach():
                self.host.hand_over_arena(action.rank)
                self.host.send(action)
            case (
                Grant()
                | CallEpochFn()
                | AdjustRate()
                | Save()
                | Evaluate()
                | Lend()
                | EpochMetrics()
                | Finish()
            ):
                self.host.send(action)
            case Publish():
                self.publisher.publish(action)
            case DropSave():
                self.publisher.drop(action)
            case Kill():
                self.host.supervisor.kill(action.rank, action.reason)
            case Spawn():
                self._spawn(action)
            case End():
                self.end = action
            case _:
                pass  # said for the record

    def _spawn(self, order: Spawn) -> None:
        """Bring a rank back; where that cannot be, it has died at once."""
        try:
            self.host.spawn(order.rank, order.row)
        except FlodlError as error:
            self._unborn.append(Died(order.rank, order.row, f"not started: {error.what}"))

    def _fail(self, error: FlodlError, now: Nanos) -> None:
        self.end = End(status="failed", exit_code=error.exit_code, reason=error.sentence())
        self.recorder.remark(self.end, now)

    # ---- the end ------------------------------------------------------------------------------

    def _let_go(self, end: End) -> None:
        """See every process out: by themselves after a good end, by force after another.

        Returns early when ranks want another run after a good end.
        """
        if end.status == "failed":
            self._hear_out()
        graceful = end.status == "ok" or (end.status == "stopped" and self._ladder.pressed <= 1)
        limit_s = self.host.config.stall_timeout_s if graceful else 0.0
        afterwards = Afterwards(limit_s, Nanos(time.monotonic_ns()))
        while self.host.alive() or self.host.is_owed_a_cause():
            now = Nanos(time.monotonic_ns())
            is_over = afterwards.is_over(self.host, now)
            if is_over or self._ladder.pressed > 1 or self.failed is not None:
                if graceful and is_over:
                    late = ", ".join(f"rank {rank}" for rank in self.host.alive())
                    self.recorder.say(
                        f"the run has ended, and {late} did nothing for {limit_s:g} s: killed"
                    )
                self._kill_all(now)
                return
            if self.wanted and not self.stopped_by:
                return
            for report in self.wanted:
                self.host.supervisor.kill(report.rank, "the script has another run, but is stopped")
            self.wanted.clear()
            self._turn_late()

    def _hear_out(self) -> None:
        """Wait for scripts that left their training: an exception may be on its way out of them."""
        deadline = time.monotonic_ns() + HEAR_OUT_NS
        while self.left and self.failed is None and self._ladder.pressed <= 1:
            running = self.host.is_owed_a_cause() or self.left.keys() & set(self.host.alive())
            if not running or time.monotonic_ns() >= deadline:
                break
            self._turn_late()

    def _turn_late(self) -> None:
        """A turn after the end: scripts may still print, end with an error, be interrupted."""
        before = self._ladder.pressed
        self._turn()
        if self._ladder.pressed > before:
            self._ladder.skip_to(2)  # no window is left to finish

    def _kill_all(self, now: Nanos) -> None:
        for rank in self.host.alive():
            self.host.supervisor.kill(rank, "the run has ended")
        deadline = now + KILL_LIMIT_NS
        while self.host.alive() or self.host.is_owed_a_cause():
            if time.monotonic_ns() >= deadline:
                break
            self._turn()
        for rank in self.host.alive():
            self.recorder.say(
                f"rank {rank} did not end within {KILL_LIMIT_NS / 1e9:g} s of SIGKILL; "
                "it is left behind"
            )
