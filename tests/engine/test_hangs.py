"""Slow is not dead, and what hangs is removed with its reason: real processes, small limits."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from flodl_shm.train.checkpoint.find import newest
from flodl_shm.train.checkpoint.manifest import verify

pytestmark = pytest.mark.procs

# What goes wrong, and where, is the first argument. Rank 1 is the one it happens to.
SCRIPT = """\
import ctypes, itertools, signal, subprocess, threading, time
from base import *

WHAT = sys.argv[1]
C = ctypes.PyDLL(None)  # calls keep the GIL

def launcher():
    server = open(f"/proc/{os.getppid()}/stat").read()
    return int(server.rpartition(")")[2].split()[1])

def for_ever():
    while True:
        time.sleep(1000)  # for ever

def shell(line):
    subprocess.Popen(["/bin/sh", "-c", line], start_new_session=True)

def in_the_step():
    if WHAT == "step":
        for_ever()
    if WHAT == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # a lock
    if WHAT == "gil":
        all(itertools.repeat(1))  # a call that keeps the GIL
    if WHAT == "slow-step":
        time.sleep(1.5)
    if WHAT == "long-gil":
        C.usleep(1_500_000)
    if WHAT in ("short-stop", "long-stop"):
        seconds = 0.5 if WHAT == "short-stop" else 30
        shell(f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}")
        time.sleep(0.1)
    if WHAT == "launcher-stops":
        shell(f"kill -STOP {launcher()}; sleep 2.5; kill -CONT {launcher()}")
        time.sleep(0.1)
    if WHAT == "look":
        os.kill(launcher(), signal.SIGUSR2)
        stacks = os.path.join(os.environ["FLODL_RUN_DIR"], "ranks", "rank1", "stacks.txt")
        while not os.path.getsize(stacks): time.sleep(0.01)  # looked at
    if WHAT == "exit":
        sys.exit(0)

steps = 0

def step(model, batch):
    global steps
    steps += 1
    time.sleep(0.003)
    if RANK == 1 and steps == 5:
        in_the_step()
    if WHAT == "crash" and steps == 5 and RANK:
        if RANK == 1:
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGABRT if RANK == 2 else signal.SIGBUS)
    return mse(model, batch)

class Data:
    def __init__(self):
        self.inner = data(96)
        self.asked = 0

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        self.asked += 1
        if RANK == 1 and self.asked == 20:
            for_ever()
        return self.inner[i]

def epoch_fn(epoch, handle):
    print("epoch function of", epoch, "on rank", RANK, flush=True)
    if epoch == 1 and not os.path.exists("called"):  # whoever is called first
        open("called", "w").close()
        if WHAT == "epoch":
            for_ever()
        if WHAT == "epoch-in-c":
            all(itertools.repeat(1))  # no signal is heard

def metrics_fn(metrics):
    if WHAT == "slow-metrics":
        time.sleep(2.5)

more = {"dataset": Data() if WHAT == "data" else data(96), "seed": 3, "epochs": 3}
if WHAT.startswith("epoch"):
    more["epoch_fn"] = epoch_fn
if WHAT == "slow-metrics":
    more["metrics_fn"] = metrics_fn
if WHAT == "thread":
    def step(model, batch):
        time.sleep(0.003)
        if RANK == 1 and threading.current_thread() is not threading.main_thread():
            for_ever()
        return mse(model, batch)
    handle = fl.Trainer(linear, sgd, step, batch_size=4, **more).start()
    handle.join()
elif WHAT == "loop":
    with fl.Trainer(linear, sgd, mse, batch_size=4, **more).worker() as w:
        for plan in w.plans():
            for batch in w.batches():
                loss = mse(w.model, batch)
                loss.backward()
                w.step(loss)
                steps += 1
                if RANK == 1 and steps == 3:
                    for_ever()
else:
    train(train_step=step, **more)
    if WHAT == "works-on":
        until = time.monotonic() + 3 * (1 - RANK)
        while time.monotonic() < until:
            pass
        print("plotted on", RANK)
    if WHAT == "rests":
        for_ever()
"""

HANG = ("--ranks", "2", "--stall-timeout", "1", "--dead-after", "0.5")
# what -> options, cause class, the user's line and function
HANGS = {
    "data": (HANG, "data", "time.sleep(1000)  # for ever", "for_ever"),
    "step": (HANG, "step", "time.sleep(1000)  # for ever", "for_ever"),
    "lock": ((*HANG, "--policy", "sync"), "step", "lock.acquire()  # a lock", "in_the_step"),
    "gil": (HANG, "step", "all(itertools.repeat(1))  # a call that keeps the GIL", "in_the_step"),
    "thread": (HANG, "step", "time.sleep(1000)  # for ever", "for_ever"),
    "loop": ((*HANG, "--policy", "sync"), "step", "time.sleep(1000)  # for ever", "for_ever"),
}
PATIENT = ("--ranks", "2", "--policy", "sync", "--stall-timeout", "10", "--dead-after", "0.5")
STOPS = ("--ranks", "2", "--policy", "sync", "--dead-after", "1.5")
SPARED = {
    "calm": PATIENT,
    "slow-step": PATIENT,
    "long-gil": PATIENT,
    "short-stop": STOPS,
    "launcher-stops": PATIENT,
    "look": PATIENT,
}
OTHERS = {
    "long-stop": ("--ranks", "3", "--dead-after", "0.5"),
    "epoch": (*HANG, "--callback-timeout", "1", "--show-ranks", "all"),
    "epoch-in-c": (*HANG, "--callback-timeout", "0.5", "--show-ranks", "all"),
    "slow-metrics": (*HANG, "--policy", "sync"),
    "crash": ("--ranks", "4"),
    "exit": ("--ranks", "2"),
    "works-on": ("--ranks", "2", "--stall-timeout", "1", "--show-ranks", "all"),
    "rests": ("--ranks", "2", "--stall-timeout", "1"),
}


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by what happens in them."""
    hangs = {what: options for what, (options, *_) in HANGS.items()}
    files = {"train.py": SCRIPT}
    started = {
        what: launches.submit(what, *options, "train.py", what, files=files)
        for what, options in {**hangs, **SPARED, **OTHERS}.items()
    }

    def ended(what):
        end = started[what].result()
        assert end.left == [], str(end)
        assert end.code == 0, str(end)
        assert [c["done_once"] for c in end.summary["coverage"]] == [96] * 3, str(end)
        assert end.summary["params_sha256"]
        return end

    return ended


def error_of(end, rank=1):
    return json.loads((end.run_dir / "ranks" / f"rank{rank}" / "error.json").read_text())


@pytest.mark.parametrize("what", HANGS)
def test_what_hangs_is_removed_and_says_in_which_line(ends, what):
    _, cause, text, function = HANGS[what]
    end = ends(what)
    line = next(n for n, code in enumerate(SCRIPT.splitlines(), 1) if code.strip() == text)
    (death,) = end.summary["deaths"]
    assert death["rank"] == 1
    words = f"no progress for 1 s in {cause} (train.py:{line} in {function})"
    assert words in death["cause"], str(end)
    assert "in round" in death["cause"]
    told = error_of(end)
    assert (told["kind"], told["cause"], told["line"]) == ("Stalled", cause, line)
    assert Path(told["file"]).name == "train.py"
    (training, stack), *_ = told["stacks"].items()
    assert training.startswith("training thread")
    assert f"line {line}, in {function}" in stack.splitlines()[-1] + stack
    assert words in end.out + end.err
    record = json.loads((end.run_dir / "ckpt" / "model.rank1.death.json").read_text())
    assert record["cause"] == "hang"
    assert end.seconds < 20


@pytest.mark.parametrize("what", SPARED)
def test_who_is_slow_or_held_up_is_never_removed_and_nothing_differs(ends, what):
    end = ends(what)
    assert end.summary["deaths"] == [], str(end)
    assert end.summary["params_sha256"] == ends("calm").summary["params_sha256"]


def test_a_long_stop_is_a_death_within_the_limit_and_a_heartbeat(ends):
    end = ends("long-stop")
    (death,) = end.summary["deaths"]
    assert re.search(r"stopped, no heartbeat for 0\.[56] s", death["cause"]), death
    assert death["detected_ms"] < 500 + 100 + 500, death  # the rest: a busy machine
    assert not (end.run_dir / "ranks" / "rank1" / "error.json").exists()


def test_a_callback_that_hangs_is_left_by_its_own_limit(ends):
    end = ends("epoch")
    assert end.summary["deaths"] == [], str(end)
    assert "abandoned after 1 s" in end.out + end.err


def test_one_that_cannot_be_left_costs_its_rank_and_the_role_moves(ends):
    end = ends("epoch-in-c")
    (death,) = end.summary["deaths"]
    words = r"for 1\.\d+ s in callback \(train.py:\d+ in epoch_fn\)"
    assert re.search(words, death["cause"]), death
    assert error_of(end, rank=death["rank"])["cause"] == "callback"
    other = 1 - death["rank"]
    for epoch in (1, 2):
        assert f"epoch function of {epoch} on rank {other}" in end.out, str(end)


def test_a_callback_beside_the_training_has_its_own_limit(ends):
    assert ends("slow-metrics").summary["deaths"] == []


def test_crashes_are_named_by_their_signals(ends):
    causes = {death["rank"]: death["cause"] for death in ends("crash").summary["deaths"]}
    assert causes == {
        1: "signal 11 (SIGSEGV)",
        2: "signal 6 (SIGABRT)",
        3: "signal 7 (SIGBUS)",
    }
    log = ends("crash").run_dir / "ranks" / "rank1" / "stderr.log"
    assert "Segmentation fault" in log.read_text()


def test_an_early_exit_with_zero_is_a_death(ends):
    (death,) = ends("exit").summary["deaths"]
    assert (death["rank"], death["cause"]) == (1, "exit 0")


def test_who_looks_on_sees_the_stacks_of_every_rank(ends):
    end = ends("look")
    lines = end.out.splitlines()
    for rank in range(2):
        assert any(f"rank {rank} alive, last sign" in line for line in lines), str(end)
        assert any(f"rank {rank}, training thread (0x" in line for line in lines), str(end)
    line = next(n for n, code in enumerate(SCRIPT.splitlines(), 1) if "# looked at" in code)
    assert any(f"line {line}, in in_the_step" in text for text in lines)
    assert "rank_session.py" not in "".join(t for t in lines if "_run" in t)


def test_a_killed_launcher_takes_its_ranks_within_a_second_and_checkpoints_stay(launches, tmp_path):
    line = 'exec "$@" --ranks 2 --save-every 1 --save ck/m train.py calm'
    script = SCRIPT.replace('"epochs": 3', '"epochs": 100000')
    killed = launches.shell("killed", f"{line} & echo $! >pid; wait", files={"train.py": script})
    place = Path(launches._root) / "killed"
    limit = time.monotonic() + 60
    while not list(place.glob("ck/m-????????????")):
        assert time.monotonic() < limit, "no checkpoint"
        time.sleep(0.02)
    ranks = [int(p.read_text().split()[0]) for p in place.glob("runs/2*/ranks/rank*/pid")]
    assert len(ranks) == 2
    os.kill(int((place / "pid").read_text()), signal.SIGKILL)
    limit = time.monotonic() + 1.0
    while left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < limit, left
        time.sleep(0.005)
    assert killed.result().left == []
    found = newest(place / "ck" / "m")
    assert verify(found.folder)
    assert found.skipped == ()


def test_a_script_may_work_as_long_as_it_likes_after_its_training(ends):
    end = ends("works-on")
    assert "plotted on 0" in end.out, str(end)
    assert [rank["exit"] for rank in end.summary["per_rank"]] == ["exit 0"] * 2


def test_one_that_only_rests_is_ended(ends):
    end = ends("rests")
    assert re.search(r"has ended, and rank 0, rank 1 did nothing for 1 s: killed", end.out), str(
        end
    )
