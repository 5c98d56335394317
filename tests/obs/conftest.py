"""A made-up run as the messages tell it: two ranks, no process, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flodl_shm.control.messages import (
    Arrived,
    BuildArena,
    Committed,
    Died,
    End,
    EpochClosed,
    Evaluated,
    Finished,
    Left,
    Ready,
)
from flodl_shm.control.options import Settled
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.tally import RunFacts, Tally

MS = 1_000_000
STARTED = Nanos(1_000 * MS)


def settled(**changes):
    plan = {
        "policy": "cadence",
        "world_size": 2,
        "epochs": 1,
        "batch_sizes": (1, 1),
        "seed": 7,
        "tail": "drop",
        "samples": 30,
        "anchor": 10,
        "max_anchor": 1000,
        "overhead_target": 0.05,
        "gamma": 1.0,
        "augment": 1,
        "eval_every": 0,
    }
    return Settled(**{**plan, **changes})


@dataclass
class Feed:
    """Writes the messages of windows in which every rank is busy, then waits for the slowest."""

    tally: Tally
    heard: list = field(default_factory=list)
    now: int = STARTED
    round: int = 1
    picks: dict = field(default_factory=dict)
    dead: set = field(default_factory=set)

    def say(self, message, now=None):
        now = Nanos(self.now if now is None else now)
        self.heard.append((message, now))
        self.tally.feed(message, now)

    def form(self, after_ms=500):
        self.now += after_ms * MS
        for rank in range(self.tally.facts.world_size):
            self.say(Ready(Rank(rank), Row(rank), "d", 10, 0, 30, "cpu"))
            self.picks[rank] = 0
        self.say(BuildArena(params=10, buffers=0, plan=settled()))
        self._meet(dict.fromkeys(self.picks, 0), {}, reduce_ms=4)

    def window(
        self, counts, step_ms, *, reduce_ms=2, wait_ms=0, data_ms=0, loss=1.0, called=(), held=()
    ):
        """Rank r takes counts[r] steps of step_ms[r]; all meet when the slowest is through.

        `called`: (rank, ms) in a function of the user before it; `held`: for the window itself.
        """
        called, held = dict([called] if called else ()), dict([held] if held else ())
        late = {rank: called.get(rank, 0) + held.get(rank, 0) for rank in counts}
        began = self.now + (wait_ms if self.round > 2 else 0) * MS
        busy = {rank: counts[rank] * step_ms[rank] for rank in counts}
        length = max(busy[rank] + late[rank] for rank in counts) + data_ms
        for rank in counts:
            self.picks[rank] += counts[rank]
            self.say(
                Arrived(
                    Rank(rank),
                    Row(rank),
                    Round(self.round),
                    steps=counts[rank],
                    batches=counts[rank],
                    picks=self.picks[rank],
                    busy_ns=busy[rank] * MS,
                    data_ns=data_ms * MS,
                    wait_ns=(wait_ms + held.get(rank, 0)) * MS if self.round > 2 else 999 * MS,
                    loss_sum=loss * counts[rank],
                    loss_count=counts[rank],
                    began_at=Nanos(began + late[rank] * MS),
                    callback_ns=called.get(rank, 0) * MS,
                ),
                began + (late[rank] + busy[rank] + data_ms) * MS,
            )
        self.now = began + length * MS
        waits = {rank: length - data_ms - busy[rank] - late[rank] for rank in counts}
        self._meet(counts, waits, reduce_ms=reduce_ms, loss=loss)

    def _meet(self, counts, waits, *, reduce_ms, loss=None):
        ranks = tuple(Rank(rank) for rank in counts)
        self.now += reduce_ms * MS
        for rank in ranks:
            self.say(
                Left(
                    rank,
                    Row(rank),
                    Round(self.round),
                    ranks,
                    barrier_ns=waits.get(rank, 0) * MS,
                    reduce_ns=reduce_ms * MS,
                    left_at=Nanos(self.now),
                )
            )
        self.say(
            Committed(
                round=Round(self.round),
                epoch=0,
                contributors=ranks,
                steps={str(rank): counts[rank] for rank in ranks},
                picks={str(rank): counts[rank] for rank in ranks},
                mass={},
                global_step=0,
                loss=loss,
                divergence=0.0,
                reduce_ns=reduce_ms * MS,
            )
        )
        self.round += 1

    def kill(self, rank, *, arrived, last_sign_ms_ago, cause="signal 9"):
        self.say(
            Died(
                Rank(rank),
                Row(rank),
                cause,
                arrived=Round(arrived),
                last_sign_at=Nanos(self.now - last_sign_ms_ago * MS),
            )
        )

    def close(self, *, picks, loss=1.0):
        self.say(EpochClosed(0, picks, picks, 0, 0, 1, loss))

    def finish(self, ranks=(0, 1), sha="ab", status="ok"):
        self.say(Evaluated(Rank(0), Row(0), epoch=1, value=0.5, elapsed_ns=50 * MS))
        for rank in ranks:
            self.say(Finished(Rank(rank), Row(rank), sha, rss_mib=100.04, pss_mib=50.06))
            self.tally.exited(Rank(rank), "exit 0")
        self.say(End(status=status, exit_code=0, reason="all epochs done"))


@pytest.fixture(scope="session")
def make_feed():
    """A new run at every call: also for a property, which runs many in one test."""
    return lambda: Feed(Tally(RunFacts("paced", "shm", 2, ("cpu", "cpu"), STARTED)))


@pytest.fixture
def feed(make_feed):
    return make_feed()
