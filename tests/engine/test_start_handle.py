"""Trainer.start(): the script goes on beside its training, in a rank and alone."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.procs

# Watches until the end, then starts one that rank 1 (or the only one) cuts short.
WATCHES = """
import json, time
from pathlib import Path
from base import *

def score(model, data):
    return 7.0

def slow(model, batch):
    time.sleep(0.002)
    return mse(model, batch)

def trainer(epochs, step=mse):
    more = {"batch_size": 4, "epochs": epochs, "eval_fn": score, "eval_every": 2}
    more["eval_dataset"] = data()
    return fl.Trainer(linear, sgd, step, dataset=data(), **more)

handle = trainer(3).start()
seen = []
while not handle.done:
    seen += handle.poll_metrics()
    time.sleep(0.001)
state = handle.join()
seen += handle.poll_metrics()
told = {
    "seen": [(one.epoch, one.loss is not None, one.picks, one.value) for one in seen],
    "first": [state.status, state.global_step > 0],
    "again": handle.join() is state,
}
handle.abort()

second = trainer(10_000, slow).start()
if RANK >= 0:
    try:
        trainer(1).run()
    except fl.FlodlError as error:
        told["refused"] = str(error)
try:
    second.join(0.05)
except TimeoutError as late:
    told["late"] = str(late)
while not second.poll_metrics():
    time.sleep(0.001)
if RANK != 0:
    second.abort()
state = second.join(timeout_s=60)
told["second"] = [state.status, state.global_step > 0]
Path(f"told-{RANK}.json").write_text(json.dumps(told))
third = trainer(1).run()
Path(f"third-{RANK}").write_text(third.status)
"""

FAILS = """
from base import *

def step(model, batch):
    raise KeyError("in the background")

fl.Trainer(linear, sgd, step, dataset=data(), batch_size=4).start()
"""

EARLY = """
import time
from base import *

class Slow(nn.Linear):
    def __init__(self):
        time.sleep(1.0 if RANK == 1 else 0.0)
        super().__init__(4, 1)

handle = fl.Trainer(Slow, sgd, mse, dataset=data(), batch_size=4).start()
if RANK != 1:
    handle.abort()
print(handle.join().status, handle.join().global_step)
"""


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    scripts = {"watches": WATCHES, "fails": FAILS, "early": EARLY}
    started = {}
    for name, text in scripts.items():
        files = {"train.py": text}
        ranks = ("--ranks", "2", "--show-ranks", "all", "train.py")
        started[f"{name}-ranks"] = launches.submit(f"{name}-ranks", *ranks, files=files)
        if name != "early":
            started[f"{name}-alone"] = launches.submit(
                f"{name}-alone", "train.py", files=files, plain=True
            )
    return lambda name: started[name].result()


@pytest.mark.parametrize(
    ("name", "rank"), [("watches-ranks", 0), ("watches-ranks", 1), ("watches-alone", -1)]
)
def test_a_script_sees_epochs_and_values_as_they_come(ends, name, rank):
    end = ends(name)
    assert end.code == 0, str(end)
    told = json.loads((end.place / f"told-{rank}.json").read_text())
    closed = [[epoch, True, 64, None] for epoch in range(3)]
    assert [one for one in told["seen"] if one[3] is None] == closed
    assert [one for one in told["seen"] if one[3] is not None] == [
        [1, True, 64, 7.0],
        [2, True, 64, 7.0],
    ]
    assert told["first"] == ["ok", True]
    assert told["again"]


@pytest.mark.parametrize(
    ("name", "rank"), [("watches-ranks", 0), ("watches-ranks", 1), ("watches-alone", -1)]
)
def test_one_who_aborts_ends_it_for_all_and_the_script_trains_again(ends, name, rank):
    place = ends(name).place
    told = json.loads((place / f"told-{rank}.json").read_text())
    assert told["second"] == ["stopped", True]
    assert told["late"] == "the training still runs after 0.05 s"
    assert ("refused" in told) == (rank >= 0)
    assert (place / f"third-{rank}").read_text() == "ok"


def test_the_launcher_tells_who_wanted_the_end(ends):
    end = ends("watches-ranks")
    assert json.loads((end.run_dir / "run-2" / "summary.json").read_text())["status"] == "stopped"
    assert "stopped: rank 1: abort() was called" in end.out
    assert end.code == 0


def test_a_failure_that_nobody_joins_is_one_all_the_same(ends):
    end = ends("fails-ranks")
    assert end.code == 1, str(end)
    assert end.err.splitlines()[-1] == "KeyError: 'in the background'"
    alone = ends("fails-alone")
    assert alone.err.splitlines()[-1] == "KeyError: 'in the background'", str(alone)


def test_an_abort_before_anything_was_trained(ends):
    end = ends("early-ranks")
    assert end.code == 0, str(end)
    assert {"[r0] stopped 0", "[r1] stopped 0"} <= set(end.out.splitlines()), str(end)
    assert end.summary["status"] == "stopped"
