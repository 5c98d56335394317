"""The files of a run: what stands where, and that the journal tells all of it again."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.messages import Committed, Died, End
from flodl_shm.control.options import Wishes
from flodl_shm.obs import journal
from flodl_shm.obs.replay import written

pytestmark = pytest.mark.procs

PACED = [
    "--workload",
    "paced",
    "--ranks",
    "2",
    "--step-ms",
    "4,8",
    "--epochs",
    "2",
    "--name",
    "trial",
]

# Rank 1 goes in step WHERE; 0: before it has built anything.
DIES = """
from base import *
import time

steps = 0
def step(model, batch):
    global steps
    steps += 1
    time.sleep(0.003)
    if RANK == 1 and steps == WHERE:
        os._exit(0)
    return mse(model, batch)

if RANK == 1 and not WHERE:
    os._exit(0)
train(train_step=step, dataset=data(200), seed=3)
"""

# Rank 0 interrupts the launcher, its parent's parent, and goes on.
INTERRUPTS = """
from base import *
import signal

steps = 0
def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 20:
        stat = open(f"/proc/{os.getppid()}/stat").read()
        os.kill(int(stat.rpartition(") ")[2].split()[1]), signal.SIGINT)
    return mse(model, batch)

print("from the script")
train(train_step=step, epochs=100_000)
"""

SUMMARY = """schema status workload policy backend world_size survivors epochs seed wall_s startup_s
    train_s picks_total picks_per_s reduces reduce_ms loss eval coverage deaths rejoins efficiency
    per_rank params_sha256 versions"""
WASTE = "barrier dispatch reduce data lost"
INNER = {
    "reduce_ms": "p50 p99 total",
    "eval": "epoch value",
    "coverage": "epoch picks done_once duplicated missing dropped",
    "deaths": "rank incarnation cause at_s detected_ms next_commit_ms",
    "efficiency": "he vs_fastest sync_bound waste",
    "per_rank": """rank device batches picks share busy_s wait_s data_s reduce_s picks_per_busy_s
        rss_mib pss_mib exit rss_peak_mib private_mib cpu_share profile refused""",
}


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""

    def dies(name, where):
        script = DIES.replace("WHERE", str(where))
        return launches.submit(name, "--ranks", "3", "train.py", files={"train.py": script})

    started = {
        "paced": launches.submit(
            "paced",
            *PACED,
            "--name",
            "trial",
            "--summary",
            "copy.json",
            env={"FLODL_SEED": "5", "FLODL_PICKS": "60"},
        ),
        "early": dies("early", 0),
        "death": dies("death", 3),
        "json": launches.submit("json", *PACED, "--json", "--picks", "30"),
        "interrupted": launches.submit(
            "interrupted", "--json", "--ranks", "2", "train.py", files={"train.py": INTERRUPTS}
        ),
    }
    return lambda name: started[name].result()


def test_the_layout_of_a_run_directory(ends):
    end = ends("paced")
    assert end.code == 0, str(end)
    assert end.left == []
    runs = end.place / "runs"
    assert os.readlink(runs / "latest") == end.run_dir.name
    assert end.run_dir.name.endswith("-trial")
    found = {str(path.relative_to(end.run_dir)) for path in end.run_dir.rglob("*")}
    ranks = {
        f"ranks/rank{n}/{file}"
        for n in (0, 1)
        for file in ("pid", "stdout.log", "stderr.log", "stacks.txt")
    }
    files = {"run.json", "journal.jsonl", "metrics.jsonl", "resources.jsonl", "summary.json"}
    folders = {"ckpt", "ranks", "ranks/rank0", "ranks/rank1"}
    assert found == files | ranks | folders


def test_a_pid_file_names_process_and_incarnation(ends):
    pids = set()
    for rank in (0, 1):
        text = (ends("paced").run_dir / "ranks" / f"rank{rank}" / "pid").read_text()
        pid, incarnation = text.split()
        pids.add(int(pid))
        assert incarnation == "0"
    assert len(pids) == 2


def test_run_json_says_what_was_settled_and_by_whom(ends):
    told = json.loads((ends("paced").run_dir / "run.json").read_text())
    options = {name: (one["value"], one["source"]) for name, one in told["options"].items()}
    assert told["run_id"] == ends("paced").run_dir.name
    assert told["title"] == "paced"
    assert options["ranks"] == (2, "flag")
    assert options["epochs"] == (2, "flag")
    assert options["seed"] == (5, "environment")
    assert options["picks"] == (60, "environment")
    assert options["step-ms"] == ([4.0, 8.0], "flag")
    assert options["batch-size"] == (1, "script")
    assert options["policy"] == ("cadence", "default")
    assert options["devices"] == ("cpu,cpu", "default")
    told = json.loads((ends("death").run_dir / "run.json").read_text())
    assert told["options"]["script"] == {"value": "train.py", "source": "flag"}
    assert told["options"]["seed"] == {"value": 3, "source": "script"}


def test_metrics_are_a_line_per_epoch_and_one_per_value(ends):
    end = ends("paced")
    lines = [json.loads(line) for line in (end.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["evaluated"]) for line in lines] == [
        (0, False),
        (1, False),
        (1, True),
    ]
    assert [line["value"] for line in lines] == [None, None, end.summary["eval"][-1]["value"]]
    lines.pop()
    assert [sum(line["rank_picks"]) for line in lines] == [60, 60]
    assert [line["loss"] for line in lines] == end.summary["loss"]
    assert [line["picks_total"] for line in lines] == [60, 120]
    assert set(lines[0]) >= {"picks_per_s", "shares", "he"}


def test_the_summary_has_exactly_its_keys(ends):
    for name in ("paced", "death"):
        told = ends(name).summary
        assert list(told) == SUMMARY.split()
        for outer, keys in INNER.items():
            values = told[outer] if isinstance(told[outer], list) else [told[outer]]
            for value in values:
                assert list(value) == keys.split(), outer
        assert list(told["efficiency"]["waste"]) == [
            "barrier",
            "dispatch",
            "reduce",
            "data",
            "lost",
        ]
    assert ends("paced").summary["eval"], "at least one"
    copy = (ends("paced").place / "copy.json").read_bytes()
    assert copy == (ends("paced").run_dir / "summary.json").read_bytes()


def test_the_summary_of_a_plain_run_adds_up(ends):
    told = ends("paced").summary
    assert (told["status"], told["workload"], told["policy"]) == ("ok", "paced", "cadence")
    assert (told["world_size"], told["survivors"], told["seed"], told["epochs"]) == (2, 2, 5, 2)
    assert told["picks_total"] == sum(rank["picks"] for rank in told["per_rank"]) == 120
    assert sum(rank["share"] for rank in told["per_rank"]) == pytest.approx(1, abs=1e-3)
    assert [rank["exit"] for rank in told["per_rank"]] == ["exit 0", "exit 0"]
    assert told["wall_s"] > told["startup_s"] + told["train_s"]
    assert 0 < told["efficiency"]["he"] <= 1
    assert told["deaths"] == told["rejoins"] == []
    assert len(told["params_sha256"]) == 64


@pytest.mark.parametrize("name", ["early", "death"])
def test_an_early_exit_0_of_one_rank_is_a_death_and_the_run_goes_on(ends, name):
    end = ends(name)
    assert end.code == 0, str(end)
    told = end.summary
    assert (told["status"], told["survivors"]) == ("ok", 2)
    assert [(death["rank"], death["cause"]) for death in told["deaths"]] == [(1, "exit 0")]
    for epoch in told["coverage"]:
        assert epoch["done_once"] == epoch["picks"] == 200
        assert epoch["duplicated"] == epoch["missing"] == epoch["dropped"] == 0
    assert len(told["coverage"]) == 2
    assert told["params_sha256"]
    assert told["deaths"][0]["next_commit_ms"] >= 0  # the death itself may let the round commit


@pytest.mark.parametrize("name", ["paced", "early", "death", "interrupted"])
def test_the_journal_stepped_again_gives_the_same_actions(ends, name):
    end = ends(name)
    header, *records = journal.read(end.run_dir / "journal.jsonl")
    assert header.run_id == end.run_dir.name
    assert [record.at for record in records] == sorted(record.at for record in records)
    told = json.loads((end.run_dir / "run.json").read_text())
    coordinator = Coordinator(
        msgspec.convert(told["wishes"], Wishes), told["options"]["ranks"]["value"]
    )
    actions = []
    for record in records:
        if record.kind == "event":
            assert not actions, "the run has not done what the coordinator decides"
            actions = coordinator.step(record.message, record.at)
        else:
            assert record.kind == "action"
            assert written(actions.pop(0)) == written(record.message)
    assert not actions
    assert isinstance(records[-1].message, End)
    assert (
        sum(isinstance(record.message, Committed) for record in records) == (end.summary["reduces"])
    )
    if end.summary["deaths"]:
        assert any(isinstance(record.message, Died) for record in records)


def test_json_puts_one_object_on_stdout_and_the_view_on_stderr(ends):
    end = ends("json")
    assert end.code == 0, str(end)
    assert json.loads(end.out) == end.summary
    assert "epoch 1 done" in end.err


def test_an_interrupted_run_prints_its_summary_too_and_dies_of_the_signal(ends):
    end = ends("interrupted")
    assert end.code == -2, str(end)
    told = json.loads(end.out)
    assert told == end.summary
    assert told["status"] == "stopped"
    assert told["params_sha256"]
    assert told["picks_total"] >= 64 * len(told["coverage"])
    assert "[r0] from the script" in end.err
    assert end.left == []
