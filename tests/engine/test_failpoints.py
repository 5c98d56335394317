"""A kill at every named place of a real run: the others go on, and nothing is lost or left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flodl_shm.train.checkpoint.find import newest
from flodl_shm.train.checkpoint.manifest import verify

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from faults_rig import Faults

pytestmark = pytest.mark.procs

SCRIPT = """
import time
from base import *

def step(model, batch):
    time.sleep(0.002)
    return mse(model, batch)

def score(model, dataset):
    return -float(mse(model, dataset[:]).detach())

train(
    train_step=step,
    dataset=data(96),
    seed=3,
    save_every=1,
    epoch_fn=lambda epoch, handle: None,
    eval_fn=score,
    eval_dataset=data(),
)
"""

# place -> ranks, policy, victim, nth. The highest rank owns the only block of so small a model.
KILLS = {
    "start": (3, "sync", 1, 1),
    "attach": (2, "cadence", 1, 1),
    "mid_batch": (3, "cadence", 1, 3),
    "before_publish": (2, "sync", 0, 2),
    "at_publish": (2, "cadence", 1, 2),
    "after_publish": (3, "sync", 2, 2),
    "mid_shard": (3, "cadence", 2, 1),
    "redo_valid": (2, "sync", 1, 2),
    "after_shard": (3, "cadence", 0, 2),
    "adopt": (2, "sync", 0, 3),
    "callback": (2, "cadence", 0, 1),
    "exit": (2, "sync", 1, 1),
    "save.write": (3, "sync", 0, 1),
    "save.fsync": (2, "cadence", 1, 1),
    "save.rename": (3, "cadence", 0, 2),
}
PUBLISHING = ("save.write", "save.fsync", "save.rename", "save.manifest", "save.publish")
# other faults: ranks, policy, spec, exit code
OTHERS = {
    "stop": (2, "cadence", "mid_batch:rank=1:nth=2:do=stop", 0),
    "raise": (2, "sync", "mid_batch:rank=1:nth=2:do=raise", 1),
    "early-exit": (3, "cadence", "mid_batch:rank=1:nth=2:do=exit=0", 0),
    "enospc": (2, "sync", "save.fsync:rank=0:do=enospc", 0),
    "enospc-launcher": (2, "cadence", "save.manifest:rank=launcher:do=enospc", 0),
    "callback-raises": (2, "sync", "callback:rank=0:do=raise", 0),
    "slow-save": (2, "sync", "save.fsync:rank=0:times=0:do=delay=0.5", 0),
    "delay": (3, "sync", "after_publish:rank=1:nth=2:do=delay=0.3", 0),
}


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory):
    """All runs of this file, by name: how each ended, after its faults have struck."""
    root = tmp_path_factory.mktemp("faults")
    started = {}

    def start(name, ranks, policy, spec):
        faults = Faults(root / name, spec)
        limits = ("--dead-after", "0.5", "--stall-timeout", "1" if name == "slow-save" else "300")
        words = ("--ranks", str(ranks), "--policy", policy, *limits, "train.py")
        files = {"train.py": SCRIPT}
        started[name] = faults, launches.submit(name, *words, files=files, env=faults.env)

    for place, (ranks, policy, victim, nth) in KILLS.items():
        start(place, ranks, policy, f"{place}:rank={victim}:nth={nth}:do=kill")
    for place in PUBLISHING:
        start(f"launcher-{place}", 2, "sync", f"{place}:rank=launcher:nth=2:do=kill")
    for name, (ranks, policy, spec, _) in OTHERS.items():
        start(name, ranks, policy, spec)

    def ended(name):
        faults, future = started[name]
        end = future.result()
        faults.assert_fired()
        assert end.left == [], str(end)
        return end

    return ended


def check_whole(end):
    assert end.code == 0, str(end)
    summary = end.summary
    assert summary["status"] == "ok"
    assert len(summary["coverage"]) == 2
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] == 96, str(end)
        assert epoch["duplicated"] == epoch["missing"] == epoch["dropped"] == 0
    assert summary["params_sha256"]  # all survivors agree
    return summary


def newest_of(end):
    found = newest(end.run_dir / "ckpt" / "model")
    assert found.skipped == ()
    return found


@pytest.mark.parametrize("place", KILLS)
def test_a_rank_killed_there_costs_only_itself(ends, place):
    ranks, _, victim, _ = KILLS[place]
    end = ends(place)
    summary = check_whole(end)
    died = [] if place == "exit" else [victim]  # its work was done and its state told
    assert [death["rank"] for death in summary["deaths"]] == died
    assert summary["survivors"] == ranks - len(died)
    found = newest_of(end)
    assert verify(found.folder)
    assert sum(epoch["done_once"] for epoch in summary["coverage"]) == 2 * 96


@pytest.mark.parametrize("place", PUBLISHING)
def test_a_launcher_killed_while_it_publishes_leaves_whole_checkpoints(ends, place):
    end = ends(f"launcher-{place}")
    assert end.code == -9
    found = newest_of(end)
    assert found.folder is None or verify(found.folder)


def test_a_rank_that_stops_itself_is_given_up(ends):
    (death,) = check_whole(ends("stop"))["deaths"]
    assert "stopped, no heartbeat" in death["cause"]


def test_an_exception_ends_the_run_with_it_last_on_the_screen(ends):
    end = ends("raise")
    assert end.code == 1
    assert end.err.splitlines()[-1].endswith("Injected: injected at mid_batch"), str(end)


def test_an_early_end_with_a_clean_code_is_a_death(ends):
    (death,) = check_whole(ends("early-exit"))["deaths"]
    assert (death["rank"], death["cause"]) == (1, "exit 0")


@pytest.mark.parametrize("name", ["enospc", "enospc-launcher"])
def test_a_full_disk_costs_a_save_and_no_training(ends, name):
    end = ends(name)
    check_whole(end)
    assert "No space left" in end.out + end.err
    assert verify(newest_of(end).folder)


def test_a_callback_that_fails_is_told_and_a_late_rank_is_waited_for(ends):
    end = ends("callback-raises")
    assert check_whole(end)["deaths"] == []
    assert "Injected: injected at callback" in end.out + end.err
    assert check_whole(ends("delay"))["deaths"] == []


def test_a_save_that_lasts_longer_than_the_stall_timeout_removes_nobody(ends):
    end = ends("slow-save")
    assert check_whole(end)["deaths"] == []
    assert verify(newest_of(end).folder)
