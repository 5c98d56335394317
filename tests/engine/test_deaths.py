"""Who dies when: all at once, the rank that sets the pace, the one with every role."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from faults_rig import Faults

pytestmark = pytest.mark.procs

ALL = """\
import signal
from base import *

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return mse(model, batch)

train(train_step=step, policy="sync", epochs=5)
"""
PACED = (
    *("--workload", "paced", "--ranks", "3", "--step-ms", "4,8,16", "--picks", "120"),
    *("--epochs", "3", "--save-every", "1", "--anchor", "3"),
)
FOREIGN = ("flodl-notours", "flodl.txt", "someone-elses")


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    started = {
        "all": (None, launches.submit("all", "--ranks", "3", "train.py", files={"train.py": ALL}))
    }
    for name, victim in (("slowest", 2), ("fastest", 0)):
        faults = Faults(root / name, f"mid_batch:rank={victim}:nth=12:do=kill")
        started[name] = faults, launches.submit(name, *PACED, env=faults.env)

    def ended(name):
        faults, future = started[name]
        end = future.result()
        if faults is not None:
            faults.assert_fired()
        assert end.left == [], str(end)
        return end

    return ended


def test_all_at_once_is_the_end_with_a_record_of_each(ends):
    end = ends("all")
    assert end.code == 4, str(end)
    assert end.err.splitlines()[-1].startswith("error: all 3 ranks are lost")
    assert {(d["rank"], d["cause"]) for d in end.summary["deaths"]} == {
        (rank, "signal 9 (SIGKILL)") for rank in range(3)
    }
    records = sorted(path.name for path in (end.run_dir / "ckpt").glob("*.death.json"))
    assert records == [f"model.rank{rank}.death.json" for rank in range(3)]


@pytest.mark.parametrize(("name", "victim"), [("slowest", 2), ("fastest", 0)])
def test_whoever_it_is_the_others_go_on_at_their_pace(ends, name, victim):
    end = ends(name)
    assert end.code == 0, str(end)
    summary = end.summary
    (death,) = summary["deaths"]
    assert death["rank"] == victim
    assert death["detected_ms"] < 500
    assert death["next_commit_ms"] is not None
    assert [c["done_once"] for c in summary["coverage"]] == [120] * 3
    shares = {rank["rank"]: rank["picks"] for rank in summary["per_rank"] if rank["rank"] != victim}
    slower, faster = sorted(shares.values())
    assert faster > 1.2 * slower  # the elastic windows go on without the dead one
    assert len(list((end.run_dir / "ckpt").glob("model-????????????"))) == 3


def test_files_of_others_in_dev_shm_stay(launches):
    paths = [Path("/dev/shm") / name for name in FOREIGN]
    try:
        for path in paths:
            path.write_text("not yours")
        words = ("--workload", "paced", "--ranks", "2", "--step-ms", "1,1", "--picks", "8")
        end = launches.submit("foreign", *words).result()
        assert end.code == 0, str(end)
        assert [path.read_text() for path in paths] == ["not yours"] * len(paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
