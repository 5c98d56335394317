"""What a simulated rig is made of: ranks with speeds and troubles, all drawn from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl_shm.ids import Nanos, Rank

if TYPE_CHECKING:
    import random

MS = 1_000_000

# Where a rank can die, in the order it passes them in a window.
DEATH_POINTS = (
    "building",
    "attaching",
    "waiting",
    "training",
    "before arrival",
    "published",  # the arrival is in the cells, its report was never sent
    "arrived",
    "reducing",
    "left",  # out of the round, before its report of that
    "epoch function",
    "lending",
    "saving",  # the order is read, nothing is copied yet
    "writing",  # in the background: a part of a save is half a file
    "evaluating",
    "finishing",
)


@dataclass(frozen=True, slots=True)
class Death:
    """Die at `point` of the `nth` time the rank passes it; maybe of an exception of the script."""

    point: str
    nth: int = 1
    raises: bool = False


@dataclass(frozen=True, slots=True)
class SimRank:
    """One rank: its batch time and what goes wrong with it."""

    rank: Rank
    batch_ms: float
    jitter: float = 0.1  # sigma of a lognormal factor with mean 1
    warmup_ms: float = 0.0  # added to the first batch of the run
    throttle_at_ms: float = math.inf
    throttle: float = 1.0  # batch time factor from then on
    stall_every: int = 0  # every n-th batch takes `stall_ms` more
    stall_ms: float = 0.0
    death: Death | None = None
    later: tuple[Death | None, ...] = ()  # of the incarnations after the first

    def death_of(self, incarnation: int) -> Death | None:
        """How that incarnation ends, if it does."""
        return ((self.death, *self.later)[incarnation:] or (None,))[0]

    def batch_ns(self, now: Nanos, nth: int, rng: random.Random) -> int:
        """How long the rank's `nth` batch takes if it starts now."""
        factor = math.exp(rng.gauss(-(self.jitter**2) / 2, self.jitter)) if self.jitter else 1.0
        ms = self.batch_ms * factor
        if now >= self.throttle_at_ms * MS:
            ms *= self.throttle
        if nth == 1:
            ms += self.warmup_ms
        if self.stall_every and nth % self.stall_every == 0:
            ms += self.stall_ms
        return max(1, int(ms * MS))


@dataclass(frozen=True, slots=True)
class Errands:
    """What ranks and the launcher do besides training, and how often it goes wrong (0 to 1)."""

    epoch_fn_ms: float = 3.0
    write_ms: float = 20.0  # of a part of a save, mean
    part_fails: float = 0.0
    part_hangs: float = 0.0  # its report never comes
    publish_ms: float = 10.0
    publish_fails: float = 0.0
    publish_hangs: float = 0.0
    requests: float = 0.0  # scripts ask for a checkpoint or an evaluation after a batch
    save_at_ms: float = math.inf  # somebody outside asks for one
    leaves: float = 0.0  # a script leaves its window before it is over
    refuses: float = 0.0  # a trained replica is not finite


@dataclass(frozen=True, slots=True)
class Rig:
    """A host as the simulator imagines it."""

    ranks: tuple[SimRank, ...]
    reduce_ms: float = 2.0
    message_ms: float = 0.1  # a report or an order on its way, mean
    late_every: int = 0  # every n-th message is `late_ms` late
    late_ms: float = 0.0
    death_notice_ms: float = 5.0
    stop_at_ms: float = math.inf
    start_ms: float = 100.0  # of a new process, mean
    spawn_fails: float = 0.0  # the launcher cannot fork
    errands: Errands = Errands()


def random_rig(rng: random.Random) -> Rig:
    """Any rig: 1 to 5 ranks, speeds up to 1:20, and some of the troubles at random."""
    size = rng.randint(1, 5)
    ranks = tuple(_random_rank(Rank(rank), rng) for rank in range(size))
    return Rig(
        ranks=ranks,
        reduce_ms=rng.choice((0.05, 2.0, 30.0)),
        message_ms=rng.choice((0.02, 0.1, 3.0)),
        late_every=rng.choice((0, 0, 7)),
        late_ms=rng.choice((20.0, 400.0)),
        death_notice_ms=rng.choice((1.0, 5.0, 80.0)),
        stop_at_ms=rng.uniform(0, 5000) if rng.random() < 0.1 else math.inf,
        start_ms=rng.choice((1.0, 100.0, 100.0, 3000.0)),
        spawn_fails=rng.choice((0.0, 0.0, 0.0, 0.3)),
        errands=_random_errands(rng),
    )


def _random_errands(rng: random.Random) -> Errands:
    return Errands(
        epoch_fn_ms=rng.choice((0.0, 3.0, 500.0)),
        write_ms=rng.choice((0.1, 20.0, 20.0, 3000.0)),
        part_fails=rng.choice((0.0, 0.0, 0.2, 1.0)),
        part_hangs=rng.choice((0.0, 0.0, 0.0, 0.1)),
        publish_ms=rng.choice((1.0, 500.0)),
        publish_fails=rng.choice((0.0, 0.0, 0.3)),
        publish_hangs=rng.choice((0.0, 0.0, 0.0, 0.2)),
        requests=rng.choice((0.0, 0.0, 0.02)),
        save_at_ms=rng.uniform(0, 3000) if rng.random() < 0.2 else math.inf,
        leaves=rng.choice((0.0, 0.0, 0.0, 0.1)),
        refuses=rng.choice((0.0, 0.0, 0.0, 0.02, 0.2)),
    )


def _random_rank(rank: Rank, rng: random.Random) -> SimRank:
    later = tuple(_random_death(rng, 0.4) for _ in range(rng.randrange(6)))
    return SimRank(
        rank=rank,
        batch_ms=rng.choice((1.0, 20.0, 20.0, 40.0, rng.uniform(1, 20))),
        jitter=rng.choice((0.0, 0.1, 0.3)),
        warmup_ms=rng.choice((0.0, 0.0, 5000.0)),
        throttle_at_ms=rng.uniform(0, 4000) if rng.random() < 0.2 else math.inf,
        throttle=rng.choice((2.0, 5.0)),
        stall_every=rng.choice((0, 0, 0, 17)),
        stall_ms=rng.uniform(10, 2000),
        death=_random_death(rng, 0.35),
        later=later,
    )


def _random_death(rng: random.Random, chance: float) -> Death | None:
    if rng.random() >= chance:
        return None
    nth = rng.choice((1, 1, 2, 3, 8))
    return Death(rng.choice(DEATH_POINTS), nth, raises=rng.random() < 0.05)
