"""A script's own loop in ranks of the launcher: as good as run(), and never in the others' way."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.procs

SYNC = ("--ranks", "2", "--policy", "sync", "--progress", "none")
CADENCE = ("--ranks", "2", "--policy", "cadence", "--progress", "none")

SETUP = """
import json, time
from pathlib import Path
from base import *

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

def adam(params):
    return torch.optim.Adam(params, lr=0.01)

def score(model, dataset):
    return 7.0

def trainer(dataset=None, **more):
    dataset = data(96) if dataset is None else dataset
    more = {"batch_size": 4, "epochs": 3, "seed": 11, "max_grad_norm": 0.5, **more}
    return fl.Trainer(model, adam, mse, dataset=dataset, **more)
"""

MANAGED = SETUP + "trainer().run()\n"

LOOP = (
    SETUP
    + """
with trainer(eval_fn=score, eval_dataset=[1]).worker() as w:
    for plan in w.plans():
        for batch in w.batches():
            loss = mse(w.model, batch)
            loss.backward()
            if w.step(loss).shutdown:
                break
    told = {
        "metrics": [one.epoch for one in w.poll_metrics() if one.value is None],
        "values": [one.value for one in w.poll_eval()],
        "latest": w.epoch_metrics.epoch,
    }
told["status"] = w.state.status
told["evaluation"] = w.state.evaluation
Path(f"told-{RANK}.json").write_text(json.dumps(told))
state = trainer(epochs=1).run()  # another one may follow
Path(f"second-{RANK}").write_text(state.status)
"""
)

# Leaves every third plan with a batch at hand; rank 1 is the slower one.
LEAVES = (
    SETUP
    + """
w = trainer(data(240), epochs=2).worker()
count = 0
while (plan := w.next_plan()) is not None:
    count += 1
    done = 0
    while (batch := w.next_batch()) is not None:
        if count % 3 == 0 and done >= plan.batches // 2:
            break
        loss = mse(w.model, batch)
        loss.backward()
        if RANK == 1:
            time.sleep(0.002)
        w.step(loss)
        done += 1
print("finished", w.finish().status)
"""
)

# Rank 1 goes, in its own way, in the second epoch.
QUITS = (
    SETUP
    + """
def go(way):
    if way == "raises":
        raise KeyError("label")
    if way == "exits":
        raise SystemExit(0)
    raise StopIteration

way = sys.argv[1]
with trainer(epochs=100_000 if way == "raises" else 4).worker() as w:
    for plan in w.plans():
        if RANK == 1 and plan.epoch == 1:
            if way == "breaks":
                break
            go(way)
        for batch in w.batches():
            loss = mse(w.model, batch)
            loss.backward()
            w.step(loss)
"""
)

# All ranks go, in the same way.
ALL_QUIT = (
    SETUP
    + """
try:
    with trainer(epochs=100_000).worker() as w:
        for plan in w.plans():
            for batch in w.batches():
                loss = mse(w.model, batch)
                loss.backward()
                w.step(loss)
            if plan.epoch == 1:
                raise KeyError("label")
except KeyError:
    if sys.argv[1] == "all-raise":
        raise
"""
)


# Asks for a checkpoint in the middle of the second epoch, or goes on from one.
SAVES = (
    SETUP
    + """
from torch.optim.lr_scheduler import StepLR

def epoch_fn(epoch, worker):
    if epoch == 1:
        worker.scale_lr(0.5)

more = {"epoch_fn": epoch_fn, "scheduler": lambda optimizer, world_size: StepLR(optimizer, 7)}
with trainer(**more).worker() as w:
    for plan in w.plans():
        if plan.round == 18 and sys.argv[1] == "saves" and RANK == 1:
            w.request_checkpoint()
        for batch in w.batches():
            loss = mse(w.model, batch)
            loss.backward()
            w.step(loss)
"""
)
THEN = """
"$@" --save ck/model {words} train.py saves || exit 10
rm -r "$(ls -d ck/model-* | tail -n 1)"  # that of the end
"$@" --resume ck/model {words} train.py goes-on || exit 11
"""


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""

    def start(name, text, *words, policy=SYNC):
        return launches.submit(name, *policy, "train.py", *words, files={"train.py": text})

    started = {
        "managed": start("managed", MANAGED),
        "loop": start("loop", LOOP),
        "loop-cadence": start("loop-cadence", LOOP, policy=CADENCE),
        "leaves": start("leaves", LEAVES, policy=CADENCE),
        "leaves-sync": start("leaves-sync", LEAVES),
        "saves": launches.shell(
            "saves", THEN.format(words=" ".join(SYNC)), files={"train.py": SAVES}
        ),
        **{way: start(way, ALL_QUIT, way) for way in ("all-raise", "all-catch")},
        **{way: start(way, QUITS, way) for way in ("raises", "exits", "breaks")},
    }
    return lambda name: started[name].result()


def first(end):
    """The summary of the script's first run."""
    own = end.run_dir / "run-1" / "summary.json"
    return json.loads(own.read_text()) if own.exists() else end.summary


def is_exact(summary, epochs):
    assert [epoch["epoch"] for epoch in summary["coverage"]] == list(range(epochs))
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] > 0
        assert epoch["duplicated"] == epoch["missing"] == 0


def test_it_gives_the_same_parameters_as_run(ends):
    assert ends("managed").code == ends("loop").code == 0, str(ends("loop"))
    assert first(ends("loop"))["params_sha256"] == first(ends("managed"))["params_sha256"]
    assert first(ends("loop"))["loss"] == first(ends("managed"))["loss"]


@pytest.mark.parametrize("name", ["loop", "loop-cadence"])
@pytest.mark.parametrize("rank", [0, 1])
def test_news_reach_the_loop_on_every_rank(ends, name, rank):
    end = ends(name)
    assert end.code == 0, str(end)
    told = json.loads((end.place / f"told-{rank}.json").read_text())
    assert told["metrics"] == [0, 1, 2]
    assert told["values"] == [7.0]
    assert told["latest"] == 2
    assert told["status"] == "ok"
    assert (end.place / f"second-{rank}").read_text() == "ok"
    is_exact(first(end), epochs=3)


@pytest.mark.parametrize("name", ["leaves", "leaves-sync"])
def test_a_plan_left_early_costs_nobody_a_sample(ends, name):
    end = ends(name)
    assert end.code == 0, str(end)
    is_exact(end.summary, epochs=2)


def test_what_the_loop_raises_ends_the_run_at_once(ends):
    end = ends("raises")
    assert end.code == 1, str(end)
    assert end.err.splitlines()[-1] == "KeyError: 'label'"
    assert end.seconds < 30


def test_what_all_loops_raise_is_the_cause_of_the_end(ends):
    """Each has left its training before its process fails: the run is not merely lost."""
    end = ends("all-raise")
    assert end.code == 1, str(end)
    assert end.err.splitlines()[-1] == "KeyError: 'label'"


def test_loops_that_all_catch_what_they_raise_leave_a_lost_run_that_says_why(ends):
    end = ends("all-catch")
    assert end.code == 4, str(end)
    why = "left the training: KeyError: 'label'"
    last = f"error: all 2 ranks are lost: rank 0 ({why}), rank 1 ({why})"
    assert end.err.splitlines()[-1] == last


@pytest.mark.parametrize("way", ["exits", "breaks"])
def test_the_others_go_on_without_one_that_leaves(ends, way):
    end = ends(way)
    assert end.code == 0, str(end)
    assert len(end.summary["deaths"]) == 1
    assert end.summary["survivors"] == 1
    is_exact(end.summary, epochs=4)


def test_a_checkpoint_asked_for_by_the_loop_leads_to_the_same_parameters(ends):
    """Model, optimizer, random and scheduler state, rate and the epoch under way: all go on."""
    end = ends("saves")
    assert end.code == 0, str(end)
    whole, resumed = (
        json.loads((path / "summary.json").read_text())
        for path in sorted((end.place / "runs").iterdir())
        if not path.is_symlink()
    )
    (folder,) = (end.place / "ck").glob("model-*")
    assert folder.name > "model-000000000024"  # in the second epoch
    assert folder.name < "model-000000000048"
    assert resumed["params_sha256"] == whole["params_sha256"]
    is_exact(resumed, epochs=3)
