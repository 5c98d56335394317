"""A training killed again and again, launcher and ranks at once, and gone on with each time.

    python tests/engine/resume_kills.py DIR [--kills N] [--seed S] [--each K]

Every other training is under sync: killed or not it must end with the same parameters. The others
are compared in their final loss with five uninterrupted ones. Prints a JSON line per kill and one
at the end; fails if something is wrong with a checkpoint, the coverage or where a training ends.
The tests have a few kills, scripts/soak resume as many as wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from flodl_shm.control.options import Wishes
from flodl_shm.engine.config import RunConfig
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload
from flodl_shm.proc.prctl import adopt_orphans
from flodl_shm.proc.procfs import children_of
from flodl_shm.train.checkpoint.find import candidates, newest
from flodl_shm.train.checkpoint.manifest import verify

EPOCHS = 24
SEEDS = 5  # uninterrupted ones: what the final loss is compared with
LIMIT_S = 60.0
# Five give three standard deviations only roughly. A training that has lost its model or its
# place in the schedule ends far beyond this part of the loss: the rate falls to a 300th.
LEAST = 0.01

# Noisy targets: the loss has a floor that is not nought.
SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import flodl_shm as fl

made = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=made)
y = x @ torch.randn(8, 1, generator=made) + torch.randn(96, 1, generator=made)

def step(model, batch):
    time.sleep(0.001)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def score(model, data):
    return float(nn.functional.mse_loss(model(x), y))

def momentum(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)

def of_step(position):
    return 0.02 * 0.99**position

def model():
    return nn.Linear(8, 1)

fl.Trainer(
    model, momentum, step, dataset=TensorDataset(x, y), batch_size=4, anchor=3, max_anchor=6,
    eval_fn=score, eval_dataset=[1], scheduler=of_step,
).run()
"""


def config_of(place: Path, seed: int, policy: str) -> RunConfig:
    """The training in `place`, from its newest checkpoint on."""
    return RunConfig(
        ranks=2,
        devices=("cpu", "cpu"),
        script=place / "train.py",
        wishes=Wishes(policy=policy, epochs=EPOCHS, seed=seed, save_every=1),
        run_root=place / "runs",
        save=place / "model",
        keep=3,
        resume="auto",
        progress="none",
        summary=place / "summary.json",
    )


def fork_run(place: Path, seed: int, policy: str) -> int:
    """Have it run in a child; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(place)
        code = launch(config_of(place, seed, policy))
    finally:
        os._exit(code)


def all_of(pid: int) -> list[int]:
    """The process and everything below it."""
    return [pid, *(below for child in children_of(pid) for below in all_of(child))]


def kill_all(pid: int) -> None:
    """In one instant: stopped first, so that nobody sees another one go."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for one in all_of(pid):
            os.kill(one, number)


def wait_until(condition: Any, limit_s: float, what: str) -> None:
    """Look again every 2 ms."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.002)


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def run_to_its_end(place: Path, seed: int, policy: str) -> dict[str, Any]:
    """What the summary says then."""
    pid = fork_run(place, seed, policy)
    wait_until(lambda: has_ended(pid), LIMIT_S, "the end of a run")
    code = reap(pid)
    assert code == 0, f"exit {code}: {(place / 'log').read_text()[-3000:]}"
    return json.loads((place / "summary.json").read_text())


def check_checkpoints(place: Path) -> list[int]:
    """Steps of those that are visible; each of them must be whole."""
    found = [folder for folder, _ in candidates(place / "model")]
    for folder in found:
        verify(folder)
    assert not newest(place / "model").skipped
    return [int(folder.name.rpartition("-")[2]) for folder in found]


def work_in(place: Path) -> set[str]:
    """Checkpoints under way, or left by a run that was killed."""
    return {path.name for path in place.glob("model.*.tmp")}


def kill_once(
    place: Path, seed: int, policy: str, *, moment: str, delay_s: float
) -> dict[str, Any]:
    """Kill everything `delay_s` after a moment of the run: its start, or its first save's."""
    before, stale = check_checkpoints(place), work_in(place)
    pid = fork_run(place, seed, policy)
    if moment == "saves":
        wait_until(lambda: has_ended(pid) or work_in(place) - stale, LIMIT_S, "work on a save")
    time.sleep(delay_s)
    hit = not has_ended(pid)
    if hit:
        kill_all(pid)
    code = reap(pid)
    assert code == (-signal.SIGKILL if hit else 0), (place / "log").read_text()[-3000:]
    steps = check_checkpoints(place)
    assert not before or max(steps) >= max(before), f"{before} before, {steps} after a kill"
    return {
        "policy": policy,
        "seed": seed,
        "moment": moment,
        "delay_s": delay_s,
        "hit": hit,
        "steps": steps[:1],
    }


def chain(root: Path, seed: int, policy: str, kills: int) -> list[dict[str, Any]]:
    """One training, killed so often, then let run to its end; a new one begins when one ends."""
    rng = random.Random(seed)
    place = new_place(root, f"killed-{seed}")
    done: list[dict[str, Any]] = []
    for count in range(kills):
        moment = rng.choice(("start", "saves", "saves"))
        delay_s = rng.uniform(0.0, 0.9) if moment == "start" else rng.uniform(0.0, 0.08)
        done.append(kill_once(place, seed, policy, moment=moment, delay_s=delay_s))
        if not done[-1]["hit"] and count < kills - 1:
            shutil.rmtree(place)
            place = new_place(root, f"killed-{seed}")
    told = run_to_its_end(place, seed, policy)
    check_coverage(told)
    left = work_in(place) | {path.name for path in place.glob("model.*.owner")}
    assert not left, f"left of killed runs: {left}"
    if policy == "sync":
        whole = run_to_its_end(new_place(root, f"whole-of-{seed}"), seed, policy)
        assert told["params_sha256"] == whole["params_sha256"], f"seed {seed} ends elsewhere"
    return [*done, {"value": told["eval"][-1]["value"], "policy": policy, "seed": seed}]


def check_coverage(told: dict[str, Any]) -> None:
    """Each pick of each epoch of the whole training is in the consensus exactly once."""
    assert [one["epoch"] for one in told["coverage"]] == list(range(EPOCHS))
    for one in told["coverage"]:
        assert one["done_once"] == one["picks"] == 96, str(one)
        assert one["duplicated"] == one["missing"] == 0, str(one)


def new_place(root: Path, name: str) -> Path:
    """A directory with the script in it."""
    place = root / name
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    return place


def bounds_of(values: list[float]) -> tuple[float, float]:
    """Of an honest final loss."""
    mean = statistics.fmean(values)
    spread = max(3 * statistics.stdev(values), LEAST * mean)
    return mean - spread, mean + spread


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--each", type=int, default=4, help="kills of one training")
    given = parser.parse_args()
    print(json.dumps({"seed": given.seed}), flush=True)
    preload()
    adopt_orphans()
    values = []
    for seed in range(SEEDS):
        told = run_to_its_end(new_place(given.root, f"whole-{seed}"), seed, "cadence")
        values.append(told["eval"][-1]["value"])
    ends = []
    for number in range(-(-given.kills // given.each)):
        kills = min(given.each, given.kills - number * given.each)
        policy = ("cadence", "sync")[number % 2]
        lines = chain(given.root, given.seed + number, policy, kills)
        ends.append(lines[-1]["value"])
        for line in lines:
            print(json.dumps(line), flush=True)
    low, high = bounds_of(values)
    print(json.dumps({"whole": values, "killed": ends, "low": low, "high": high}), flush=True)
    sys.exit(not all(low <= value <= high for value in ends))


if __name__ == "__main__":
    main()
