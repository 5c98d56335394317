"""A script that trains more than once under the launcher: ranks, books and exit codes."""

from __future__ import annotations

import json

import pytest

from flodl_shm.obs import journal
from flodl_shm.obs.journal import Header

pytestmark = pytest.mark.procs

# Rank 1 is killed in the second of three runs.
THREE = """
import json, signal
from pathlib import Path
from base import *

run = steps = 0

def step(model, batch):
    global steps
    steps += 1
    if (RANK, run) == (1, 1) and steps == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return mse(model, batch)

told = []
for run in range(3):
    steps = 0
    state = train(train_step=step, policy="sync", epochs=run + 1, seed=run)
    maps = [line for line in open("/proc/self/maps") if "flodl" in line]
    told.append((state.status, state.params["weight"].tolist(), len(maps)))
    Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""

LEAVES = """
from base import *
for run in range(3 if RANK == 0 else 1):
    train(train_step=mse, dataset=data(64 + run))
"""

FAILS = """
from base import *

def step(model, batch):
    raise KeyError("second") if RANK == 0 else ValueError("only a consequence")

train()
train(train_step=step)
"""

STOPPED = """
import signal, time
from base import *
from pathlib import Path

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 6:
        server = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(server.rpartition(")")[2].split()[1]), signal.SIGINT)
    time.sleep(0.002)
    return mse(model, batch)

state = train(train_step=step, epochs=10_000)
Path(f"saved-{RANK}").write_text(state.status)
train()
Path("never").write_text("")
"""


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    more = {"three": ("--json", "--summary", "s.json"), "spawned": ("--start", "spawn")}
    scripts = {
        "three": THREE,
        "leaves": LEAVES,
        "fails": FAILS,
        "stopped": STOPPED,
        "spawned": LEAVES,
    }
    started = {
        name: launches.submit(
            name, "--ranks", "2", *more.get(name, ()), "train.py", files={"train.py": text}
        )
        for name, text in scripts.items()
    }
    return lambda name: started[name].result()


def summaries(end):
    """Of all runs, in order."""
    files = [end.run_dir / "summary.json", *sorted(end.run_dir.glob("run-*/summary.json"))]
    return [json.loads(file.read_text()) for file in files]


def test_each_run_has_its_own_books(ends):
    end = ends("three")
    assert end.code == 0, str(end)
    told = summaries(end)
    assert [one["status"] for one in told] == ["ok", "ok", "ok"]
    assert [(one["epochs"], one["seed"]) for one in told] == [(1, 0), (2, 1), (3, 2)]
    for number, one in enumerate(told, start=1):
        assert [epoch["done_once"] for epoch in one["coverage"]] == [64] * number
        assert one["startup_s"] < one["wall_s"] < 60
    assert sorted(file.name for file in (end.run_dir / "run-3").iterdir()) == sorted(
        file.name for file in end.run_dir.iterdir() if file.is_file()
    )
    for number in (2, 3):
        header, *records = journal.read(end.run_dir / f"run-{number}" / "journal.jsonl")
        assert isinstance(header, Header)
        assert header.run_id == f"{end.run_dir.name}/run-{number}"
        assert records


def test_a_death_is_known_to_the_runs_after_it(ends):
    first, second, third = summaries(ends("three"))
    assert [len(one["deaths"]) for one in (first, second, third)] == [0, 1, 1]
    assert [one["survivors"] for one in (first, second, third)] == [2, 1, 1]
    assert third["deaths"][0]["cause"] == "signal 9 (SIGKILL)"
    assert third["deaths"][0]["detected_ms"] is None
    assert [rank["picks"] for rank in third["per_rank"]] == [192, 0]


def test_ranks_live_through_all_runs_and_map_one_arena_at_a_time(ends):
    place = ends("three").place
    zero, one = (json.loads((place / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert one == zero[:1]
    assert [status for status, _, _ in zero] == ["ok"] * 3
    assert len({str(weights) for _, weights, _ in zero}) == 3
    assert {maps for _, _, maps in zero} == {zero[0][2]}


def test_only_the_last_summary_is_printed_and_copied(ends):
    end = ends("three")
    assert json.loads(end.out) == json.loads((end.place / "s.json").read_text())
    assert json.loads(end.out)["epochs"] == 3


@pytest.mark.parametrize("name", ["leaves", "spawned"])
def test_a_rank_may_train_fewer_times_than_another(ends, name):
    end = ends(name)
    assert end.code == 0, str(end)
    told = summaries(end)
    assert [one["survivors"] for one in told] == [2, 1, 1]
    assert [one["picks_total"] for one in told] == [128, 128, 128]
    assert [death["cause"] for death in told[2]["deaths"]] == ["exit 0"]
    assert end.left == []


def test_the_first_failure_ends_it(ends):
    end = ends("fails")
    assert end.code == 1, str(end)
    assert [one["status"] for one in summaries(end)] == ["ok", "failed"]
    assert end.err.splitlines()[-1] in ("KeyError: 'second'", "ValueError: only a consequence")


def test_a_stopped_script_is_not_trained_again(ends):
    end = ends("stopped")
    assert end.code == -2, str(end)
    assert [one["status"] for one in summaries(end)] == ["stopped"]
    assert [(end.place / f"saved-{rank}").read_text() for rank in (0, 1)] == ["stopped"] * 2
    assert not (end.place / "never").exists()
    assert end.left == []
