from __future__ import annotations

import pytest

from flodl_shm.ids import Nanos
from flodl_shm.obs.summary import percentile, summary, versions

KEYS = {
    "schema", "status", "workload", "policy", "backend", "world_size", "survivors", "epochs",
    "seed", "wall_s", "startup_s", "train_s", "picks_total", "picks_per_s", "reduces",
    "reduce_ms", "loss", "eval", "coverage", "deaths", "rejoins", "efficiency", "per_rank",
    "params_sha256", "versions",
}  # fmt: skip
RANK_KEYS = {
    "rank", "device", "batches", "picks", "share", "busy_s", "wait_s", "data_s", "reduce_s",
    "picks_per_busy_s", "rss_mib", "pss_mib", "exit",
}  # fmt: skip


@pytest.fixture
def told(feed):
    feed.form(after_ms=500)
    feed.window({0: 10, 1: 5}, {0: 10, 1: 20}, wait_ms=1)
    feed.kill(1, arrived=2, last_sign_ms_ago=4)
    feed.now += 10_000_000
    feed.window({0: 10}, {0: 10}, wait_ms=10)
    feed.close(picks=25, loss=0.5)
    feed.finish(ranks=(0,))
    return summary(feed.tally, now=Nanos(feed.now))


def test_the_keys_are_those_of_the_contract(told):
    assert set(told) == KEYS
    assert set(told["efficiency"]) == {"he", "vs_fastest", "sync_bound", "waste"}
    assert set(told["efficiency"]["waste"]) == {"barrier", "dispatch", "reduce", "data", "lost"}
    assert set(told["reduce_ms"]) == {"p50", "p99", "total"}
    more = {"rss_peak_mib", "private_mib", "cpu_share", "profile", "refused"}  # beyond the contract
    assert all(set(rank) == RANK_KEYS | more for rank in told["per_rank"])
    assert set(told["coverage"][0]) == {
        "epoch", "picks", "done_once", "duplicated", "missing", "dropped",
    }  # fmt: skip
    assert set(told["deaths"][0]) == {
        "rank", "incarnation", "cause", "at_s", "detected_ms", "next_commit_ms",
    }  # fmt: skip


def test_the_figures_are_those_of_the_run(told):
    assert (told["status"], told["survivors"], told["world_size"]) == ("ok", 1, 2)
    assert (told["picks_total"], told["reduces"], told["seed"]) == (25, 3, 7)
    assert told["startup_s"] == pytest.approx(0.504)
    assert told["reduce_ms"] == {"p50": 2.0, "p99": 4.0, "total": 8.0}
    assert told["loss"] == [0.5]
    assert told["eval"] == [{"epoch": 1, "value": 0.5}]
    assert told["params_sha256"] == "ab"


def test_a_death_says_how_long_it_took_to_see_and_to_get_over(told):
    (death,) = told["deaths"]
    assert death["detected_ms"] == 4.0
    assert death["next_commit_ms"] == pytest.approx(122.0)  # 10 + 10 idle, a window of 100, 2
    assert (death["rank"], death["incarnation"], death["cause"]) == (1, 0, "signal 9")


def test_each_rank_has_its_own_rate_and_share(told):
    first, second = told["per_rank"]
    assert (first["picks"], second["picks"]) == (20, 5)
    assert (first["share"], second["share"]) == (0.8, 0.2)
    assert first["picks_per_busy_s"] == pytest.approx(100.0)
    assert second["picks_per_busy_s"] == pytest.approx(50.0)
    assert (first["exit"], second["exit"]) == ("exit 0", None)
    assert (first["rss_mib"], first["pss_mib"], second["rss_mib"]) == (100.0, 50.1, None)


def test_a_run_that_never_formed_is_a_failed_one_with_absent_figures(feed):
    told = summary(feed.tally, now=Nanos(feed.now))
    assert set(told) == KEYS
    assert told["status"] == "failed"
    assert told["policy"] is told["startup_s"] is told["efficiency"]["he"] is None


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([7], 99, 7), ([1, 2, 3, 4], 50, 2), (list(range(1, 101)), 99, 99)],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == expected


def test_versions_name_python_and_torch():
    assert {"python", "torch", "numpy"} <= set(versions())
