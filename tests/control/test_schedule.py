"""Epochs open and close in order; what is left over is said."""

from __future__ import annotations

import pytest

from flodl_shm.control.options import Wishes
from flodl_shm.control.plan import settle
from flodl_shm.control.schedule import Schedule
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Rank, Round


def schedule(epochs: int = 2) -> Schedule:
    wishes = Wishes(epochs=epochs, batch_size=4)
    return Schedule(settle(wishes, Wishes(), world_size=1, samples=10))


def do_all(run: Schedule, number: int) -> None:
    pool = run.epochs[number].pool
    pool.take_next(Rank(0), 8)
    pool.consume(Rank(0), 8, round=Round(number + 2))
    pool.commit(Round(number + 2))


def test_an_epoch_is_closed_once_its_picks_are_committed() -> None:
    run = schedule()
    run.open_next()
    assert run.close_finished() == []
    run.epochs[0].loss_sum, run.epochs[0].loss_count = 6.0, 4
    do_all(run, 0)
    (closed,) = run.close_finished()
    assert (closed.epoch, closed.picks, closed.done_once, closed.dropped) == (0, 8, 8, 2)
    assert closed.loss == 1.5
    assert not run.finished


def test_epochs_close_in_ascending_order() -> None:
    run = schedule()
    run.open_next()
    run.open_next()
    do_all(run, 1)
    assert run.close_finished() == []
    do_all(run, 0)
    assert [closed.epoch for closed in run.close_finished()] == [0, 1]
    assert run.finished


def test_an_epoch_without_losses_has_none() -> None:
    assert schedule().open_next().loss is None


def test_there_is_no_epoch_after_the_last() -> None:
    run = schedule(epochs=1)
    run.open_next()
    assert not run.has_next()
    with pytest.raises(WeBroke, match="no epoch 1: the run has 1"):
        run.open_next()
