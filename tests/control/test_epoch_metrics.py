"""An epoch's figures are floDl's: by rank, scalars meaned per rank, then weighted by batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.epoch_metrics import EpochTally
from flodl_shm.control.messages import Arrived
from flodl_shm.ids import Nanos, Rank, Round, Row

MS = 1_000_000


def report(rank, batches, **changes):
    fields = {"busy_ns": batches * 3 * MS, "data_ns": batches * MS, "loss_count": batches}
    return Arrived(
        Rank(rank),
        Row(rank),
        Round(1),
        steps=batches,
        batches=batches,
        picks=10_000,  # of the incarnation: not what this window was
        **fields | changes,
    )


def build(tally):
    return tally.build(4, 0.5, 90, devices=("cpu", "cpu", "cuda:0"), at=Nanos(50 * MS))


@pytest.fixture
def tally():
    """Rank 0: 4 batches in two windows; rank 2: 12 in one; rank 1 is dead from the start."""
    told = EpochTally()
    told.issued(Nanos(10 * MS))
    told.arrived(report(0, 1, loss_sum=4.0, scalars={"acc": (0.5, 1)}), 2, Nanos(20 * MS))
    told.issued(Nanos(21 * MS))
    told.arrived(report(0, 3, loss_sum=4.0, scalars={"acc": (0.3, 1)}), 6, Nanos(30 * MS))
    told.arrived(report(2, 12, loss_count=0, scalars={"acc": (9.0, 10)}), 48, Nanos(40 * MS))
    return told


def test_what_each_rank_did(tally) -> None:
    told = build(tally)
    assert told.rank_picks == (8, 0, 48)
    assert told.rank_batches == (4, 0, 12)
    assert told.rank_share == (0.25, 0.0, 0.75)
    assert told.rank_loss == (2.0, None, None)
    assert told.rank_work_ms == (16.0, 0.0, 48.0)
    assert told.rank_compute_ms == (12.0, 0.0, 36.0)
    assert told.rank_starve_ms == (4.0, 0.0, 12.0)
    assert told.rank_throughput == (0.5, 0.0, 1.0)
    assert told.devices == ("cpu", "cpu", "cuda:0")


def test_what_the_epoch_was(tally) -> None:
    told = build(tally)
    assert (told.epoch, told.loss, told.picks, told.value) == (4, 0.5, 90, None)
    assert told.epoch_ms == 40.0
    assert not told.calls


def test_scalars_are_meaned_by_rank_then_weighted_by_batches(tally) -> None:
    told = build(tally)
    assert told.rank_scalars == ({"acc": 0.4}, {}, {"acc": 0.9})
    assert told.scalars == {"acc": pytest.approx((4 * 0.4 + 12 * 0.9) / 16)}


def test_a_scalar_counts_the_batches_of_the_ranks_that_noted_it(tally) -> None:
    tally.arrived(report(1, 100), 200, Nanos(41 * MS))
    assert build(tally).scalars == {"acc": pytest.approx((4 * 0.4 + 12 * 0.9) / 16)}


def test_without_a_batch_ranks_count_evenly() -> None:
    tally = EpochTally()
    for rank, value in ((0, 1.0), (1, 4.0)):
        tally.arrived(report(rank, 0, scalars={"x": (value, 1)}), 0, Nanos(MS))
    assert build(tally).scalars == {"x": 2.5}
    assert build(tally).rank_share == (0.0, 0.0, 0.0)


def test_a_scalar_that_no_number_can_hold_is_left_out() -> None:
    tally = EpochTally()
    for _ in range(2):
        tally.arrived(report(0, 1, scalars={"big": (1.7e308, 1), "y": (1.0, 1)}), 1, Nanos(MS))
    assert build(tally).rank_scalars[0] == {"y": 1.0}
    assert build(tally).scalars == {"y": 1.0}


def test_an_epoch_whose_first_issue_was_not_seen_begins_with_its_first_work() -> None:
    tally = EpochTally()
    assert build(tally).epoch_ms == 0.0
    tally.arrived(report(0, 2), 4, Nanos(20 * MS))
    assert build(tally).epoch_ms == 50 - (20 - 8)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9), st.floats(-9, 9), st.integers(1, 5)),
        min_size=1,
    )
)
def test_a_mean_lies_among_its_parts_and_shares_are_whole(windows) -> None:
    tally = EpochTally()
    for rank, batches, value, count in windows:
        noted = {"x": (value * count, count)}
        tally.arrived(report(rank, batches, scalars=noted), batches, Nanos(0))
    told = build(tally)
    values = [value for _, _, value, _ in windows]
    assert min(values) - 1e-6 <= told.scalars["x"] <= max(values) + 1e-6
    assert sum(told.rank_share) == pytest.approx(1.0)
    assert sum(told.rank_picks) == sum(batches for _, batches, _, _ in windows)
