"""One window of one rank: batches from a grant until the rank's own rule says stop.

The rule itself is control/window_turn.py, which the simulator asks too; here it is given what the
anchor rank's cells say. A rank also stops when its picks are used up. Reduces and messages are
not known here. The loop is what each batch costs on top of the user's own code: it keeps nothing
that lives longer than the batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flodl_shm.control.pace import Pace
from flodl_shm.control.window_turn import AnchorView, takes_another
from flodl_shm.ids import Nanos
from flodl_shm.train.data.source import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from flodl_shm.control.messages import Grant
    from flodl_shm.ids import Rank, Row
    from flodl_shm.train.data.picks import PickSource
    from flodl_shm.train.data.sampler import PickQueue
    from flodl_shm.train.lr import LearningRate
    from flodl_shm.train.pacing import Pacer
    from flodl_shm.train.session import Meeting
    from flodl_shm.train.step import Stepper

    Goes = Callable[[int, Nanos], bool]  # (batches done, now) -> start another?


@dataclass(slots=True)
class WindowTally:
    """What a window was made of; durations in nanoseconds."""

    batches: int = 0
    picks: int = 0
    first_ns: int = 0  # first batch, data wait included
    rest_ns: int = 0  # the other batches, data waits included
    busy_ns: int = 0  # timed steps
    data_ns: int = 0
    began_at: int = 0


@dataclass(slots=True, kw_only=True)
class WindowRunner:
    """Everything a window needs that stays the same from one to the next."""

    rank: Rank
    batch_size: int
    source: PickSource
    stepper: Stepper
    rate: LearningRate
    pacer: Pacer
    meeting: Meeting
    device: torch.device
    clock: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep
    pace: Pace = field(default_factory=Pace)  # of this rank's batches, data waits included
    steps: int = 0  # of this incarnation, all windows together

    def run(self, grant: Grant, queue: PickQueue, *, position: int) -> WindowTally:
        """Train until the window is over. `position` is the global step of the last reduce."""
        tally = WindowTally()
        goes, publish, pace = self._rule(grant), self.meeting.publish_step, self.pace
        last = Nanos(self.clock())
        publish(grant.round, 0, last, pace.mean_ns)
        done = 0
        while queue.left and goes(done, last):
            begun = last
            last = self._batch(tally, queue, position + done, grant.epoch)
            pace.add(last - begun)
            done += 1
            publish(grant.round, done, last, pace.mean_ns)
        tally.batches = done
        tally.picks = queue.taken
        return tally

    def _batch(self, tally: WindowTally, queue: PickQueue, position: int, epoch: int) -> Nanos:
        """One batch, timed; returns the time of its end."""
        clock = self.clock
        begin = clock()
        batch = self._fetch(queue)
        fetched = clock()
        self.rate.move_to(position)
        self.stepper.step(batch)
        if self.pacer.active:
            self._wait(fetched, epoch)
        self.steps += 1
        end = clock()
        tally.data_ns += fetched - begin
        tally.busy_ns += end - fetched
        if tally.began_at:
            tally.rest_ns += end - begin
        else:
            tally.began_at = fetched
            tally.first_ns = end - begin
        return Nanos(end)

    def _fetch(self, queue: PickQueue) -> Any:
        batch = self.source.fetch(queue.take(self.batch_size))
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def _wait(self, began: int, epoch: int) -> None:
        self.stepper.catch_up()  # a device's own time counts as part of the step
        wait_ns = self.pacer.pad(self.clock() - began, self.steps, epoch)
        if wait_ns > 0:
            self.sleep(wait_ns / 1e9)

    # ---- when to stop --------------------------------------------------------------------------

    def _rule(self, grant: Grant) -> Goes:
        """May another batch be started, given (batches done, now)?"""
        row = next((s.row for s in grant.roster if s.rank == grant.anchor_rank), None)
        if grant.planned == grant.ceiling or row is None:
            planned = grant.planned  # exact; or the anchor rank does not meet: nothing to follow
            return lambda done, now: done < planned
        if grant.anchor_rank == self.rank:
            return lambda done, now: takes_another(
                grant, done=done, now=now, own_ns=0, anchor_view=None
            )
        return self._elastic(grant, row)

    def _elastic(self, grant: Grant, row: Row) -> Goes:
        alive, pace_of, pace = self.meeting.alive, self.meeting.pace_of, self.pace

        def goes(done: int, now: Nanos) -> bool:
            k, theirs, last, pace_ns = pace_of(row)
            if k != grant.round:  # it has not begun this window: all of its steps are to come
                theirs, last = 0, now
            view = AnchorView(alive=alive(row), done=theirs, last=Nanos(last), pace_ns=pace_ns)
            return takes_another(grant, done=done, now=now, own_ns=pace.mean_ns, anchor_view=view)

        return goes
