from __future__ import annotations

import pytest

from flodl_shm.ids import Nanos, Rank
from flodl_shm.obs.profile import profile, profile_lines
from flodl_shm.obs.resources import RankUse, Resources
from flodl_shm.obs.summary import summary

S = 1_000_000_000


def test_a_process_that_is_followed_by_another_goes_on_in_the_same_sums():
    use = RankUse()
    assert use.sample(7, cpu_s=3.0, rss_mib=100.0, now=Nanos(1 * S)) is None
    assert use.cpu_share is None
    assert use.sample(7, cpu_s=4.0, rss_mib=300.0, now=Nanos(3 * S)) == 0.5
    assert use.sample(7, cpu_s=9.0, rss_mib=300.0, now=Nanos(3 * S)) is None  # no time has passed
    assert use.sample(8, cpu_s=0.0, rss_mib=50.0, now=Nanos(9 * S)) is None
    assert use.sample(8, cpu_s=2.0, rss_mib=60.0, now=Nanos(11 * S)) == 1.0
    assert use.cpu_share == pytest.approx(3 / 4)
    assert (use.rss_mib, use.rss_peak_mib) == (60.0, 300.0)


def test_the_summary_holds_what_was_seen_where_a_rank_said_nothing(feed):
    feed.form()
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20})
    feed.kill(1, arrived=2, last_sign_ms_ago=1)
    feed.finish(ranks=(0,))
    used = Resources()
    for rank in (0, 1):
        use = used.ranks[Rank(rank)]
        use.sample(rank, cpu_s=1.0, rss_mib=90.0, now=Nanos(S))
        use.sample(rank, cpu_s=2.0, rss_mib=140.0, now=Nanos(3 * S))
        use.sample(rank, cpu_s=3.0, rss_mib=120.0, now=Nanos(5 * S))
        use.pss_mib, use.private_mib = 80.04, 30.0
    first, second = summary(feed.tally, now=Nanos(feed.now), resources=used)["per_rank"]
    keys = ("rss_mib", "rss_peak_mib", "pss_mib", "private_mib", "cpu_share")
    assert [first[key] for key in keys] == [100.0, 140.0, 50.1, 30.0, 0.5]
    assert [second[key] for key in keys] == [120.0, 140.0, 80.0, 30.0, 0.5]


def test_a_run_without_samples_has_the_ranks_own_words(feed):
    feed.form()
    feed.finish(ranks=(0,))
    first, second = summary(feed.tally, now=Nanos(feed.now))["per_rank"]
    assert (first["rss_mib"], first["rss_peak_mib"], first["cpu_share"]) == (100.0, 100.0, None)
    assert (second["rss_mib"], second["rss_peak_mib"], second["pss_mib"]) == (None, None, None)


def test_the_parts_of_a_profile_add_up(feed):
    feed.form()
    for _ in range(3):
        feed.window({0: 10, 1: 5}, {0: 10, 1: 16}, wait_ms=3, data_ms=4, reduce_ms=2)
    told = profile(feed.tally.ranks[Rank(1)])
    assert told == {
        "run_s": 0.324,
        "compute_s": 0.24,
        "data_s": 0.012,
        "barrier_s": 0.06,
        "dispatch_s": 0.006,
        "reduce_s": 0.006,
        "callback_s": 0.0,
        "other_s": 0.0,
        "windows": 3,
        "reports": 8,
        "orders": 0,
    }


def test_a_rank_that_never_trained_has_a_profile_of_zeros(feed):
    told = profile(feed.tally.ranks[Rank(0)])
    assert set(told.values()) == {0}


def test_the_profile_for_people(feed):
    feed.form()
    feed.window({0: 10, 1: 5}, {0: 10, 1: 16})
    feed.finish(ranks=(0,))
    used = Resources()
    used.ranks[Rank(0)].sample(1, cpu_s=0.0, rss_mib=90.0, now=Nanos(S))
    used.ranks[Rank(0)].sample(1, cpu_s=0.9, rss_mib=140.0, now=Nanos(2 * S))
    assert profile_lines(summary(feed.tally, now=Nanos(feed.now), resources=used)["per_rank"]) == [
        "  rank 0  run 0.1 s  compute 98.0%  data 0.0%  barrier 0.0%  dispatch 0.0%  reduce 2.0%  "
        "callback 0.0%  other 0.0%",
        "          1 windows, 6 reports, 0 orders   rss 100 peak 140 pss 50 MiB   cpu 90%",
        "  rank 1  run 0.1 s  compute 78.4%  data 0.0%  barrier 19.6%  dispatch 0.0%  reduce 2.0%  "
        "callback 0.0%  other 0.0%",
        "          1 windows, 4 reports, 0 orders",
    ]
