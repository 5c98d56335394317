"""One window of one rank: batches from a grant until the rank's own rule says stop.

The rule itself is control/window_turn.py, which the simulator asks too; here it is given what the
anchor rank's cells say. A rank also stops when its picks are used up. Whose loop it is that asks
for the batches, the engine's or the user's, makes no difference. Reduces and messages are not known
here. `fetch` and `took` are what each batch costs on top of the user's own code.
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
    picks: int = 0  # of batches that were trained
    first_ns: int = 0  # first batch, data wait included
    rest_ns: int = 0  # the other batches, data waits included
    busy_ns: int = 0  # timed steps
    data_ns: int = 0
    began_at: int = 0


@dataclass(slots=True, kw_only=True)
class WindowRunner:
    """Everything a window needs that stays the same, and the window that is open.

    `open` it; while it asks for another batch, `fetch` one, have it trained, and say `took`;
    `close` it. `train` does the middle with the user's train_step, `run` all of it.
    """

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
    wants: bool = field(default=False, init=False)  # another batch in the open window
    _grant: Grant = field(init=False)
    _queue: PickQueue = field(init=False)
    _goes: Goes = field(init=False)
    _tally: WindowTally = field(init=False)
    _position: int = field(default=0, init=False)  # global step of the next batch
    _on_host: bool = field(default=True, init=False)  # batches stay where the source makes them
    _begun: int = field(default=0, init=False)  # when the batch under way was asked for
    _fetched: int = field(default=0, init=False)  # when it was there
    _last: int = field(default=0, init=False)  # end of the last batch, or beginning of the window

    def run(self, grant: Grant, queue: PickQueue, *, position: int) -> WindowTally:
        """Train until the window is over. `position` is the global step of the last reduce."""
        self.open(grant, queue, position=position)
        self.train()
        return self.close()

    def open(self, grant: Grant, queue: PickQueue, *, position: int) -> bool:
        """Begin a window and say whether it has a batch for this rank."""
        self._grant, self._queue, self._position = grant, queue, position
        self._tally = WindowTally()
        self._goes = self._rule(grant)
        self._on_host = self.device.type == "cpu"
        self._last = last = Nanos(self.clock())
        self.meeting.publish_step(grant.round, 0, last, self.pace.mean_ns)
        self.wants = queue.left > 0 and self._goes(0, last)
        return self.wants

    def train(self) -> None:
        """Give the user's train_step every batch the open window wants."""
        fetch, step, took = self.fetch, self.stepper.step, self.took
        while self.wants:
            step(fetch())
            took()

    def fetch(self) -> Any:
        """The next batch, with the learning rate set for it. Call only while `wants`."""
        self._begun = self.clock()
        batch = self.source.fetch(self._queue.take(self.batch_size))
        if not self._on_host:
            batch = to_device(batch, self.device)
        self._fetched = self.clock()
        self.rate.move_to(self._position)
        return batch

    def took(self) -> None:
        """The batch fetched last has been trained: time it, let peers see it, ask for more.

        What passes between two batches is the user's own loop, and part of the second's step.
        """
        tally, queue = self._tally, self._queue
        if self.pacer.active:
            self._wait(self._fetched, self._grant.epoch)
        done = tally.batches + 1
        end, last = Nanos(self.clock()), self._last
        data_ns = self._fetched - self._begun
        if tally.began_at:
            whole_ns = end - last
            tally.rest_ns += whole_ns
        else:
            tally.began_at = self._fetched
            tally.first_ns = whole_ns = end - self._begun
        tally.data_ns += data_ns
        tally.busy_ns += whole_ns - data_ns
        tally.batches, tally.picks = done, queue.taken
        self.steps += 1
        self._position += 1
        self._last = end
        pace = self.pace
        pace.add(whole_ns)
        self.meeting.publish_step(self._grant.round, done, end, pace.mean_ns)
        self.wants = queue.left > 0 and self._goes(done, end)

    def close(self) -> WindowTally:
        """What was done. A batch that was fetched and not trained does not count."""
        self.wants = False
        return self._tally

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
