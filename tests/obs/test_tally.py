from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl_shm.control.messages import Attached, CallbackRan, Evaluated, Rejoined
from flodl_shm.ids import Rank, Round, Row

SMALL = st.integers(0, 5)
WINDOW = st.tuples(st.integers(1, 9), st.integers(1, 9), SMALL, SMALL, SMALL)
SPEED = st.integers(1, 40)


def sum_of_parts(tally):
    efficiency = tally.efficiency()
    return efficiency.he + sum(efficiency.waste.values())


def test_equal_ranks_that_never_wait_reach_one(feed):
    feed.form()
    feed.window({0: 5, 1: 5}, {0: 10, 1: 10}, reduce_ms=0)
    efficiency = feed.tally.efficiency()
    assert efficiency.he == pytest.approx(1.0)
    assert efficiency.vs_fastest == pytest.approx(2.0)
    assert efficiency.sync_bound == pytest.approx(1.0)
    assert sum(efficiency.waste.values()) == 0


def test_a_barrier_after_every_batch_reaches_the_sync_bound(feed):
    feed.form()
    for _ in range(20):
        feed.window({0: 1, 1: 1}, {0: 10, 1: 30}, reduce_ms=0)
    efficiency = feed.tally.efficiency()
    assert efficiency.he == pytest.approx(0.5)
    assert efficiency.he == pytest.approx(efficiency.sync_bound)
    assert efficiency.waste["barrier"] == pytest.approx(0.5)


@given(windows=st.lists(WINDOW, min_size=1, max_size=12), speeds=st.tuples(SPEED, SPEED))
def test_he_and_the_waste_add_up_to_one(make_feed, windows, speeds):
    feed = make_feed()
    feed.form()
    for first, second, reduce_ms, wait_ms, data_ms in windows:
        feed.window(
            {0: first, 1: second},
            dict(enumerate(speeds)),
            reduce_ms=reduce_ms,
            wait_ms=wait_ms,
            data_ms=data_ms,
        )
    assert sum_of_parts(feed.tally) == pytest.approx(1.0)


def test_start_up_is_no_waste(feed):
    feed.form(after_ms=60_000)
    feed.window({0: 5, 1: 5}, {0: 10, 1: 10})
    feed.window({0: 5, 1: 5}, {0: 10, 1: 10})
    tally = feed.tally
    assert tally.efficiency().waste["dispatch"] == 0  # the 999 ms of the first window
    assert tally.train_ns == 104_000_000
    assert sum_of_parts(tally) == pytest.approx(1.0)


def test_work_of_a_dead_rank_after_its_last_reduce_is_lost(feed):
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0)
    feed.now += 50_000_000  # rank 1 trains on for 50 ms, then dies
    feed.kill(1, arrived=2, last_sign_ms_ago=0)
    feed.now -= 50_000_000
    feed.window({0: 10}, {0: 10}, reduce_ms=0)
    efficiency = feed.tally.efficiency()
    # ideal: 20 picks of rank 0 and 15 of rank 1, which lived for three quarters of the time
    assert efficiency.waste["lost"] == pytest.approx(5 / 35)
    assert efficiency.he == pytest.approx(30 / 35)
    assert sum_of_parts(feed.tally) == pytest.approx(1.0)


def test_a_rank_that_died_in_the_reduce_loses_nothing(feed):
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0)
    feed.now += 100_000_000
    feed.kill(1, arrived=3, last_sign_ms_ago=0)
    assert feed.tally.ranks[1].lost_ns == 0


def test_work_that_never_committed_is_lost(feed):
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0)
    feed.tally.ranks[1].committed -= 4
    assert feed.tally.efficiency().waste["lost"] == pytest.approx(4 / 20)
    assert sum_of_parts(feed.tally) == pytest.approx(1.0)


@pytest.mark.parametrize("waits_for_the_grant", [True, False])
def test_functions_of_the_user_between_windows_are_outside_the_training(feed, waits_for_the_grant):
    """Whether the others wait with their window, for an epoch function, or at its end."""
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0)
    if waits_for_the_grant:
        feed.say(CallbackRan(Rank(0), Row(0), role="epoch", epoch=1, elapsed_ns=50_000_000))
        waited = {"called": (0, 50), "held": (1, 50)}
    else:
        feed.say(Evaluated(Rank(0), Row(0), epoch=1, value=0.5, elapsed_ns=50_000_000))
        waited = {"called": (0, 50)}
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0, **waited)
    assert feed.tally.train_ns == 200_000_000
    efficiency = feed.tally.efficiency()
    assert efficiency.he == pytest.approx(1.0)
    assert sum(efficiency.waste.values()) == pytest.approx(0.0)
    assert feed.tally.ranks[0].callback_ns == 50_000_000


def test_what_is_called_before_the_first_step_is_start_up(feed):
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10}, reduce_ms=0, called=(1, 5000), held=(0, 5000))
    assert feed.tally.train_ns == 100_000_000
    assert feed.tally.efficiency().he == pytest.approx(1.0)


def test_the_evaluation_after_the_last_commit_changes_no_rate(feed):
    feed.form()
    feed.window({0: 10, 1: 10}, {0: 10, 1: 10})
    before = feed.tally.picks_per_s
    feed.finish()
    assert feed.tally.picks_per_s == before


def test_a_death_is_counted_once_and_an_end_after_finish_is_none(feed):
    feed.form()
    feed.window({0: 1, 1: 1}, {0: 10, 1: 10})
    feed.kill(1, arrived=2, last_sign_ms_ago=3)
    feed.kill(1, arrived=2, last_sign_ms_ago=3)
    feed.finish(ranks=(0,))
    feed.kill(0, arrived=2, last_sign_ms_ago=0, cause="exit 0")
    assert [death.rank for death in feed.tally.deaths] == [1]
    assert feed.tally.survivors == [0]


def test_a_rank_that_returns_is_a_rejoin_with_the_next_incarnation(feed):
    feed.form()
    feed.window({0: 1, 1: 1}, {0: 10, 1: 10})
    feed.kill(1, arrived=2, last_sign_ms_ago=0)
    feed.now += 30_000_000
    feed.say(Attached(Rank(1), Row(2)))
    assert feed.tally.survivors == [0]
    feed.say(Rejoined(Rank(1), Row(2), 1, Round(3), "rank 1 is back"))
    feed.window({0: 1, 1: 1}, {0: 10, 1: 10})
    (back,) = feed.tally.rejoins
    assert (back.rank, back.incarnation) == (1, 1)
    assert back.committed_at is not None
    assert feed.tally.survivors == [0, 1]


def test_no_message_gives_no_figures_and_no_error(feed):
    tally = feed.tally
    assert tally.efficiency().he is None
    assert (tally.picks, tally.train_ns, tally.picks_per_s) == (0, 0, None)
    assert tally.params_sha256() is None


def test_ranks_that_disagree_have_no_common_hash(feed):
    feed.form()
    feed.finish(ranks=(0,), sha="aa")
    feed.finish(ranks=(1,), sha="bb")
    assert feed.tally.params_sha256() is None
