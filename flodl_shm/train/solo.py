"""Training in this very process: one rank, no launcher, no arena.

The real coordinator deals the picks and ends the epochs, so a script behaves here as it does on
many ranks; only its messages do not travel and its rounds have nobody to meet.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING

import torch

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import (
    AdjustRate,
    Attach,
    CallEpochFn,
    End,
    EpochMetrics,
    Evaluate,
    Finish,
    Grant,
    Note,
    Save,
    Tick,
)
from flodl_shm.control.options import CALLBACK_TIMEOUT_S, Wishes
from flodl_shm.errors import WeBroke, of_exit_code
from flodl_shm.ids import Nanos, Rank, Row
from flodl_shm.train.gpu_worker import GpuWorker
from flodl_shm.train.lone_meeting import LoneMeeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flodl_shm.control.messages import Action, Event, Order, Report
    from flodl_shm.train.job import Job
    from flodl_shm.train.session import Meeting, SlowDown
    from flodl_shm.train.state import TrainedState

# There is nobody to meet, so windows are only the grain in which losses are counted. Short ones
# would cost: a round's bookkeeping takes as long as ten steps of a tiny model.
FLAGS = Wishes(policy="cadence", anchor=100, max_anchor=100)


class LocalLink:
    """Calls the coordinator where other ranks send to it; its orders wait in a queue."""

    def __init__(
        self, coordinator: Coordinator, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._orders: deque[Order] = deque()
        self._end: End | None = None
        self._lock = threading.Lock()  # a script may ask for the end while its worker reports

    def send(self, report: Report) -> None:
        """Hand a report over; what the coordinator decides is done before this returns."""
        self._feed(report)

    def receive(self, *, wait_for: str) -> Order:
        """The next order. Raises what the coordinator ended the run with, if it failed."""
        if not self._orders and self._end is None:
            self._feed(Tick())
        if self._end is not None and self._end.status == "failed":
            raise of_exit_code(self._end.exit_code, self._end.reason)
        if not self._orders:
            raise WeBroke(f"the coordinator gives no order to a rank that waits for {wait_for}")
        return self._orders.popleft()

    def poll(self) -> Order | None:
        """What waits in the queue."""
        return self._orders.popleft() if self._orders else None

    def _feed(self, event: Event) -> None:
        with self._lock:
            self._carry_out(self._coordinator.step(event, Nanos(self._clock())))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case (
                    Attach()
                    | Grant()
                    | CallEpochFn()
                    | AdjustRate()
                    | Save()
                    | Evaluate()
                    | EpochMetrics()
                    | Finish()
                ):
                    self._orders.append(action)
                case End():
                    self._end = action
                case Note(alert=True):
                    warnings.warn(action.text, RuntimeWarning, stacklevel=2)
                case _:
                    pass  # for a journal or a launcher; here are neither


class LoneSession:
    """The only rank of a run without a launcher."""

    rank = Rank(0)
    row = Row(0)
    world_size = 1
    seed: int | None = None
    slow: tuple[SlowDown, ...] = ()
    free_run_s = 0.0
    callback_timeout_s = CALLBACK_TIMEOUT_S
    run_id = ""
    save_stem = ""
    loans = ""

    def __init__(self, device: str) -> None:
        self.device = device
        self.link = LocalLink(Coordinator(FLAGS, world_size=1))

    def note_errand(self, since: int) -> None:
        """Nobody watches."""

    def attach(self, order: Attach) -> tuple[Meeting, Tensor | None]:
        """No arena: the replica stays where the user's model put it."""
        return LoneMeeting(), None


def run_alone(job: Job) -> TrainedState:
    """Train on one device of this process: the first GPU if there is one, else the CPU."""
    return GpuWorker(job, alone()).run()


def alone() -> LoneSession:
    """A session on that device."""
    return LoneSession("cuda:0" if torch.cuda.is_available() else "cpu")
