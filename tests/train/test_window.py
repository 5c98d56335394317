"""A window ends where its rule says, and its times add up."""

from __future__ import annotations

import pytest
import torch

from flodl_shm.control.messages import Grant, Seat
from flodl_shm.ids import Nanos, Rank, Round, Row, Slot
from flodl_shm.train.data.permutation import permutation
from flodl_shm.train.data.sampler import PickQueue
from flodl_shm.train.pacing import Pacer
from flodl_shm.train.session import SlowDown
from flodl_shm.train.window import WindowRunner

MS = 1_000_000
FETCH, STEP = 2 * MS, 10 * MS


class Clock:
    """Time that passes only when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.slept: list[float] = []

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += round(seconds * 1e9)


class Work:
    """Source, stepper and learning rate in one: each takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.batches: list[list[int]] = []
        self.positions: list[int] = []

    def __len__(self) -> int:
        return 1000

    def fetch(self, indices):
        self.clock.now += FETCH
        return indices.tolist()

    def move_to(self, position: int) -> None:
        self.positions.append(position)

    def step(self, batch) -> None:
        self.clock.now += STEP
        self.batches.append(batch)

    def catch_up(self) -> None:
        pass


class Peers:
    """A meeting whose anchor rank does steps of `pace` ns from `start` on."""

    def __init__(self, clock: Clock, *, start: int = 0, pace: int = 0, number: int = 2) -> None:
        self.clock, self.start, self.pace, self.number = clock, start, pace, number
        self.dead = False
        self.published: list[tuple[int, int, int, int]] = []

    def alive(self, row) -> bool:
        return not self.dead

    def publish_step(self, number, done, now, pace_ns) -> None:
        self.published.append((number, done, now, pace_ns))

    def pace_of(self, row):
        done = (self.clock.now - self.start) // self.pace if self.pace else 0
        return Round(self.number), done, Nanos(self.start + done * self.pace), self.pace


def runner(clock, meeting, *, work=None, pacer=None):
    work = work or Work(clock)
    return WindowRunner(
        rank=Rank(0),
        batch_size=4,
        source=work,
        stepper=work,
        rate=work,
        pacer=pacer or Pacer(),
        meeting=meeting,
        device=torch.device("cpu"),
        clock=clock,
        sleep=clock.sleep,
    )


def grant(*, planned=3, ceiling=10, anchor=1, anchor_steps=5, epoch=0):
    return Grant(
        rank=Rank(0),
        round=Round(2),
        epoch=epoch,
        roster=tuple(Seat(Rank(r), Row(r), Slot(r)) for r in range(2)),
        anchor_rank=Rank(anchor),
        anchor_steps=anchor_steps,
        planned=planned,
        ceiling=ceiling,
    )


def picks(count=1000):
    return PickQueue([(0, count)], permutation(1000, seed=0, epoch=0))


def test_an_exact_window_does_exactly_what_was_planned():
    clock = Clock()
    tally = runner(clock, Peers(clock)).run(grant(planned=7, ceiling=7), picks(), position=0)
    assert (tally.batches, tally.picks) == (7, 28)


def test_the_anchor_rank_does_its_steps():
    clock = Clock()
    run = runner(clock, Peers(clock))
    assert run.run(grant(anchor=0, anchor_steps=5), picks(), position=0).batches == 5


def test_others_stop_at_the_boundary_nearest_to_the_anchor_ranks_end():
    """The anchor rank ends after 100 ms; eight batches of 12 ms end at 96, a ninth at 108."""
    clock = Clock()
    run = runner(clock, Peers(clock, start=clock.now, pace=20 * MS))
    assert run.run(grant(anchor_steps=5, ceiling=50), picks(), position=0).batches == 8


def test_nobody_passes_the_ceiling():
    clock = Clock()
    run = runner(clock, Peers(clock, start=clock.now, pace=20 * MS))
    assert run.run(grant(anchor_steps=5, ceiling=6), picks(), position=0).batches == 6


def test_without_its_anchor_rank_a_window_ends_as_planned():
    clock = Clock()
    peers = Peers(clock, start=clock.now, pace=20 * MS)
    peers.dead = True
    assert runner(clock, peers).run(grant(planned=3), picks(), position=0).batches == 3


def test_an_anchor_rank_that_meets_elsewhere_cannot_be_followed():
    clock = Clock()
    assert runner(clock, Peers(clock)).run(grant(anchor=5), picks(), position=0).batches == 3


def test_cells_of_an_older_round_mean_that_nothing_is_done_yet():
    """Else five steps of the round before would end this window at once."""
    clock = Clock()
    peers = Peers(clock, start=clock.now - 1000 * MS, pace=20 * MS, number=1)
    assert runner(clock, peers).run(grant(ceiling=9), picks(), position=0).batches == 9


def test_a_window_ends_with_its_picks_the_last_batch_may_be_short():
    clock = Clock()
    work = Work(clock)
    tally = runner(clock, Peers(clock), work=work).run(grant(ceiling=9), picks(10), position=0)
    assert (tally.batches, tally.picks) == (3, 10)
    assert [len(batch) for batch in work.batches] == [4, 4, 2]
    flat = [index for batch in work.batches for index in batch]
    assert flat == permutation(1000, seed=0, epoch=0)[:10].tolist()


def test_times_are_kept_apart():
    clock = Clock()
    began = clock.now
    tally = runner(clock, Peers(clock)).run(grant(planned=4, ceiling=4), picks(), position=0)
    assert tally.began_at == began + FETCH
    assert tally.first_ns == FETCH + STEP
    assert tally.rest_ns == 3 * (FETCH + STEP)
    assert tally.data_ns == 4 * FETCH
    assert tally.busy_ns == 4 * STEP


def test_an_empty_window_has_no_times():
    clock = Clock()
    tally = runner(clock, Peers(clock)).run(grant(planned=0, ceiling=0), picks(), position=0)
    assert (tally.batches, tally.first_ns, tally.began_at) == (0, 0, 0)


def test_the_position_is_the_last_reduces_plus_own_steps():
    clock = Clock()
    work = Work(clock)
    runner(clock, Peers(clock), work=work).run(grant(planned=3, ceiling=3), picks(), position=40)
    assert work.positions == [40, 41, 42]


def test_peers_see_the_windows_start_and_every_batch():
    clock = Clock()
    peers = Peers(clock)
    start = clock.now
    runner(clock, peers).run(grant(planned=2, ceiling=2), picks(), position=0)
    batch = FETCH + STEP
    assert peers.published == [
        (2, 0, start, 0),
        (2, 1, start + batch, batch),
        (2, 2, start + 2 * batch, batch),
    ]


def test_waits_are_part_of_the_timed_step():
    clock = Clock()
    run = runner(clock, Peers(clock), pacer=Pacer(slow=[SlowDown(2.5)]))
    tally = run.run(grant(planned=2, ceiling=2), picks(), position=0)
    assert clock.slept == pytest.approx([0.015, 0.015])
    assert tally.busy_ns == 2 * 25 * MS


def test_a_slow_down_waits_for_its_epoch():
    clock = Clock()
    run = runner(clock, Peers(clock), pacer=Pacer(slow=[SlowDown(2.0, from_epoch=1)]))
    run.run(grant(planned=1, ceiling=1), picks(), position=0)
    assert clock.slept == []
    run.run(grant(planned=1, ceiling=1, epoch=1), picks(), position=0)
    assert clock.slept == pytest.approx([0.01])


# ---- batch by batch, as a loop of somebody else's asks for them --------------------------------


def test_a_window_can_be_gone_through_batch_by_batch():
    clock = Clock()
    work = Work(clock)
    run = runner(clock, Peers(clock), work=work)
    assert run.open(grant(planned=2, ceiling=2), picks(), position=40)
    for more in (True, False):
        work.step(run.fetch())
        run.took()
        assert run.wants is more
    tally = run.close()
    assert (tally.batches, tally.picks, tally.busy_ns) == (2, 8, 2 * STEP)
    assert work.positions == [40, 41]


def test_a_batch_that_was_fetched_and_not_trained_does_not_count():
    clock = Clock()
    work = Work(clock)
    peers = Peers(clock)
    run = runner(clock, peers, work=work)
    run.open(grant(planned=3, ceiling=3), picks(), position=0)
    work.step(run.fetch())
    run.took()
    run.fetch()
    tally = run.close()
    assert (tally.batches, tally.picks, tally.data_ns) == (1, 4, FETCH)
    assert [done for _, done, _, _ in peers.published] == [0, 1]
    assert not run.wants


def test_what_passes_between_two_batches_is_part_of_the_seconds_step():
    clock = Clock()
    work = Work(clock)
    run = runner(clock, Peers(clock), work=work)
    run.open(grant(planned=2, ceiling=2), picks(), position=0)
    clock.now += 7 * MS  # before the first one: nobody's step
    for _ in range(2):
        work.step(run.fetch())
        run.took()
        clock.now += 3 * MS
    tally = run.close()
    assert (tally.first_ns, tally.rest_ns) == (FETCH + STEP, FETCH + STEP + 3 * MS)
    assert (tally.busy_ns, tally.data_ns) == (2 * STEP + 3 * MS, 2 * FETCH)
