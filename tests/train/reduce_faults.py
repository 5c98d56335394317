"""What goes wrong in a trial: deaths at a named point, waits, sleeps, kills from outside."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

HOLD_S = 5.0  # a hold that lasts longer is a mistake in the test

# points that leave half an action behind, and the protocol point they begin from
MID = {"mid compute": "compute", "mid copy": "valid", "mid second copy": "valid"}


class Faults:
    """What goes wrong in one rank: called at every protocol point. This one: nothing."""

    round = 0

    def __call__(self, point, worker, shard, block, task):
        """Do the harm that belongs to this point, if any."""


@dataclass
class Die(Faults):
    """SIGKILL oneself at a point of a round; `mid...` leaves half an action behind first."""

    point: str
    shard: int
    block: int | None = None
    at_round: int = 2

    def __call__(self, point, worker, shard, block, task):
        if self.round != self.at_round or point != MID.get(self.point, self.point):
            return
        if shard != self.shard or self.block not in (None, block):
            return
        if self.point == "mid compute" and task.redo is not None:
            task.redo[: task.redo.numel() // 2 + 3] = float("nan")
        if self.point.endswith("copy"):
            half = len(task.result) // 2 + 5
            done = 0 if self.point == "mid copy" else 1
            for target in task.targets[:done]:
                target[:] = task.result
            for target in task.targets[done : done + 1]:
                target[:half] = task.result[:half]
        die()


@dataclass
class Hold(Faults):
    """Wait at a point of a round until something is true (bounded)."""

    point: str
    until: object
    at_round: int = 2
    then_die: bool = False

    def __call__(self, point, worker, shard, block, task):
        if point == self.point and self.round == self.at_round:
            end = time.monotonic() + HOLD_S
            while not self.until():
                if time.monotonic() > end:
                    raise TimeoutError(f"held at {point} for ever")
            if self.then_die:
                die()


@dataclass
class Dawdle(Faults):
    """Sleep at random points, so that deaths and arrivals meet in every order; then `other`."""

    rng: object
    other: Faults = field(default_factory=Faults)

    def __call__(self, point, worker, shard, block, task):
        often = 0.02 if task is not None else 0.3
        if self.rng.random() < often:
            time.sleep(self.rng.choice((self.rng.uniform(0, 0.012), self.rng.uniform(0, 2e-4))))
        self.other.round = self.round
        self.other(point, worker, shard, block, task)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is on its way
        signal.pause()


@dataclass
class Kill:
    """An external kill: when `when()` is true, `delay_s` later. `victim` may be a callable."""

    victim: object
    when: object
    delay_s: float = 0.0
