"""Ranks that wait for a slow or stopped one: what it costs, what is told, who does how much."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.procs

ITS_LAUNCHER = """\
from pathlib import Path

def launcher():
    server = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(server.rpartition(")")[2].split()[1])
"""

# Rank 1 takes a second for each step, rank 0 nothing; every step ends with a meeting.
IDLE = f"""\
import json, time
from base import *
{ITS_LAUNCHER}
def cpu_s(pid):
    words = Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

marks = []

def step(model, batch):
    if RANK == 1:
        time.sleep(1.0)
    else:
        marks.append((time.monotonic(), cpu_s(os.getpid()), cpu_s(launcher())))
    return mse(model, batch)

train(train_step=step, policy="sync", dataset=data(40), epochs=1)
if RANK == 0:
    Path("marks.json").write_text(json.dumps(marks))
"""

# Rank 0 stops rank 1 and asks who waits for whom, as somebody at another terminal would. It asks
# from a thread, so that its own part is done by then and only rank 1 is waited for.
STOPPED = f"""\
import signal, threading, time
from base import *
{ITS_LAUNCHER}
steps = 0

def ask(pid):
    time.sleep(1.2)
    os.kill(launcher(), signal.SIGUSR2)
    time.sleep(0.8)  # the launcher waits half a second for its stacks
    os.kill(pid, signal.SIGCONT)

def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 5:
        pid = int(Path(os.environ["FLODL_RUN_DIR"], "ranks/rank1/pid").read_text().split()[0])
        os.kill(pid, signal.SIGSTOP)
        threading.Thread(target=ask, args=(pid,)).start()
    return mse(model, batch)

train(train_step=step, policy="sync")
"""

LAST_WORDS = """\
from base import *
train()
for number in range(50_000):
    print(f"{number:07}", "x" * 91)
"""

PICKS = 160
# 10 ms a step; first rank 1 takes four times as long, from epoch 2 on rank 0 does.
SWAPPED = (
    *("--workload", "paced", "--ranks", "2", "--step-ms", "10,10", "--picks", str(PICKS)),
    *("--epochs", "4", "--slow", "1:4", "--slow", "1:1@2", "--slow", "0:4@2"),
)


@pytest.fixture(scope="module")
def ends(launches):
    """Starts all of them, waits for one."""
    scripts = (("idle", 2, IDLE), ("stopped", 2, STOPPED), ("last-words", 4, LAST_WORDS))
    started = {"swapped": launches.submit("swapped", *SWAPPED)} | {
        name: launches.submit(name, "--ranks", str(ranks), "train.py", files={"train.py": text})
        for name, ranks, text in scripts
    }
    return lambda name: started[name].result()


def test_waiting_costs_less_than_a_twentieth_of_a_core(ends):
    end = ends("idle")
    assert end.code == 0, str(end)
    marks = json.loads((end.place / "marks.json").read_text())
    (first, *before), (last, *after) = marks[0], marks[-1]
    assert last - first > 3
    for cpu_before, cpu_after in zip(before, after, strict=True):  # the rank, the launcher
        assert (cpu_after - cpu_before) / (last - first) < 0.05


def test_who_waits_for_a_stopped_rank_is_told_and_the_run_goes_on(ends):
    end = ends("stopped")
    assert end.code == 0, str(end)
    told = re.search(r"rank 1 .*last sign 1\.\d s ago; waited for: .*", end.out)
    assert told, str(end)
    assert "memory" not in told[0]
    assert "rank 0, training thread (0x" in end.out
    assert "rank 1 gave no stacks: it is stopped, or has not begun" in end.out
    assert end.summary["deaths"] == []


def test_megabytes_printed_as_the_last_act_arrive_whole(ends):
    end = ends("last-words")
    assert end.code == 0, str(end)
    assert end.seconds < 30
    lines = "".join(f"{number:07} {'x' * 91}\n" for number in range(50_000))
    for rank in range(4):
        assert (end.run_dir / "ranks" / f"rank{rank}" / "stdout.log").read_text() == lines


def steps_by_epoch(journal: Path) -> list[Counter]:
    """Steps of each rank, for each epoch."""
    epoch_of, done = {}, []
    for line in journal.read_text().splitlines()[1:]:
        message = json.loads(line)["message"]
        if message["type"] == "Grant":
            epoch_of[message["round"]] = message["epoch"]
        elif message["type"] == "Arrived":
            epoch = epoch_of[message["round"]]
            done += [Counter() for _ in range(epoch + 1 - len(done))]
            done[epoch][message["rank"]] += message["steps"]
    return done


def test_shares_follow_the_speeds_also_when_they_are_swapped(ends):
    end = ends("swapped")
    assert end.code == 0, str(end)
    before, after = (steps_by_epoch(end.run_dir / "journal.jsonl")[epoch] for epoch in (1, 3))
    assert 2.8 < before[0] / before[1] < 5.2
    assert 2.8 < after[1] / after[0] < 5.2
    lines = (end.run_dir / "metrics.jsonl").read_text().splitlines()
    closed = [json.loads(line)["at_s"] for line in lines]
    for epoch in (1, 3):
        # Together they could do 125 picks a second; in equal shares 50.
        assert PICKS / (closed[epoch] - closed[epoch - 1]) > 0.7 * 125
