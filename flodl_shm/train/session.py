"""What a rank is given by whoever started it: its seat, its link, its arena.

Protocols only. In a rank of the launcher the engine provides them, in-process training brings
its own (train/solo.py), tests bring fakes. `CURRENT` and `ONE_RUN` are set by the engine before
user code runs; `CURRENT` is None in a plain Python process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flodl_shm.control.messages import Attach, Order, Report, Seat
    from flodl_shm.ids import Nanos, Rank, Round, Row
    from flodl_shm.train.reduce import Outcome
    from flodl_shm.train.state import TrainedState
    from flodl_shm.train.turnstile import Turnstile


@dataclass(frozen=True, slots=True)
class SlowDown:
    """From `from_epoch` on every step of this rank lasts `factor` times as long."""

    factor: float
    from_epoch: int = 0


class Link(Protocol):
    """A rank's end of the control plane."""

    def send(self, report: Report) -> None:
        """Hand a report over; delivered once and in order, also if the rank ends right after.

        Of any thread; `receive` is one thread's alone.
        """

    def receive(self, *, wait_for: str) -> Order:
        """The next order, in sequence. Parks bounded; `wait_for` names what is waited for."""

    def poll(self) -> Order | None:
        """The next order if it is there already: never waits. For the thread that receives."""


class Meeting(Protocol):
    """What a worker needs of a reducer."""

    def arrive(
        self, number: Round, roster: Sequence[Seat], /, *, steps: int, mass: float, picks: int
    ) -> None:
        """Publish this rank's contribution to a round; returns at once."""

    def complete(self) -> Outcome:
        """Wait for the others, reduce, and say what the round brought."""

    def alive(self, row: Row) -> bool:
        """False once the launcher has declared the row dead."""

    def publish_step(self, number: Round, done: int, now: Nanos, pace_ns: int, /) -> None:
        """Let peers see how far this rank is in the window of a round."""

    def pace_of(self, row: Row) -> tuple[Round, int, Nanos, int]:
        """(round, done, end of the last step, ns per step) as that rank published them last."""


class Session(Protocol):
    """One incarnation of a rank, from its first report to its last."""

    @property
    def rank(self) -> Rank: ...

    @property
    def row(self) -> Row: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> str:
        """A torch device: "cpu", "cuda:0"."""

    @property
    def seed(self) -> int | None:
        """The seed as settled outside of the script; None: the script's word counts."""

    @property
    def slow(self) -> tuple[SlowDown, ...]:
        """Artificial slowness of this rank; empty: none."""

    @property
    def free_run_s(self) -> float:
        """How long to measure this rank's own rate before the training; 0: not at all."""

    @property
    def callback_timeout_s(self) -> float:
        """How long a function of the user beside train_step may take before it is abandoned."""

    @property
    def run_id(self) -> str:
        """Of the run: what tells its unfinished checkpoints from another's. Empty: no launcher."""

    @property
    def save_stem(self) -> str:
        """Path prefix of checkpoint folders; empty: nothing can be saved here."""

    @property
    def loans(self) -> str:
        """Folder of what ranks write for those that come back; empty: nobody comes back."""

    @property
    def link(self) -> Link: ...

    def note_errand(self, since: int) -> None:
        """Let whoever watches this rank know since when it is in an errand; 0: it is not."""

    def attach(self, order: Attach) -> tuple[Meeting, Tensor | None]:
        """Map the arena. The slot is a 1-D float32 tensor; None: a lone rank needs no arena."""


class OneRun(Protocol):
    """In a rank that exists for one run() of the script alone, whichever it is."""

    def answer(self) -> TrainedState | None:
        """What an earlier run() brought; None: this is the one to train."""

    def leave(self, state: TrainedState) -> NoReturn:
        """It is trained: end the script."""


CURRENT: Turnstile | None = None
ONE_RUN: OneRun | None = None
