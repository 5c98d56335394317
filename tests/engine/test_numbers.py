"""Numbers that lie, in real runs: NaN on one rank, on all, in buffers; replicas written into."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from saving_rig import is_exact

pytestmark = pytest.mark.procs

# breaks(rank, step) says what a rank's n-th step does; each rank writes down where it ended.
COMMON = """
import math
from base import *
steps = 0

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

def adam(params):
    global optimizer
    optimizer = torch.optim.Adam(params, lr=0.01)
    return optimizer

def step(model, batch):
    global steps
    steps += 1
    x, y = batch
    loss = nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
    return breaks(model, loss, steps)

def end(state, **more):
    sound = all(bool(t.isfinite().all()) for t in (state.params | state.buffers).values())
    kept = all(
        bool(t.isfinite().all()) for s in optimizer.state.values() for t in s.values()
    )
    told = {"finite": sound, "optimizer": kept, "steps": steps, **more}
    with open(f"end-{RANK}", "w") as file:
        file.write(__import__("json").dumps(told))

def go(model=net, **more):
    more = {"batch_size": 4, "epochs": 2, "dataset": data(480), **more}
    return fl.Trainer(model, adam, step, **more).run()
"""

ONCE = """
def breaks(model, loss, n):
    return loss * math.nan if RANK == 1 and n == 3 else loss
end(go())
"""

ALWAYS = """
def breaks(model, loss, n):
    return loss * math.nan if RANK == 1 else loss
end(go())
"""

EVERYWHERE = """
def breaks(model, loss, n):
    return loss * math.nan if n >= 5 else loss
end(go(save_every=1, epochs=3))
"""

# An epoch is saved and published before.
LATE = """
import time

def breaks(model, loss, n):
    if n <= 24:
        return loss
    deadline = time.monotonic() + 20
    while '"Published"' not in open("runs/latest/journal.jsonl").read():
        assert time.monotonic() < deadline, "nothing is published"
        time.sleep(0.01)
    return loss * math.nan

end(go(save_every=1, epochs=3, dataset=data(96)))
"""

# A running variance of infinity: parameters and losses stay finite all the while.
BUFFER = """
def breaks(model, loss, n):
    if RANK == 0 and n == 2:
        model[1].running_var.data.fill_(math.inf)
    return loss
end(go())
"""

# 65504 is the largest number of float16, 3.39e38 of bfloat16.
HALF = """
def breaks(model, loss, n):
    if RANK == 1 and n == 2:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1e30).mul_(1e30)
    return loss
end(go(lambda: nn.Linear(4, 1).to(torch.DTYPE)))
"""

# Their sum is far beyond float32.
HUGE = """
def breaks(model, loss, n):
    with torch.no_grad():
        model.big.fill_(3e38)
    return loss

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("big", torch.full((1000,), 3e38))

    def forward(self, x):
        return self.out(x)

end(go(Big))
"""

# A mask of -inf has no mean: it stays each rank's own.
MASK = """
def breaks(model, loss, n):
    return loss

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x):
        return self.out(x)

state = go(Masked)
ok = torch.equal(state.buffers["mask"], torch.full((3, 3), -math.inf).triu(1))
del state.buffers["mask"]
end(state, mask=ok)
"""

UNBORN = """
def breaks(model, loss, n):
    return loss

def broken():
    model = net()
    model[0].weight.data[1, 2] = math.nan
    return model

end(go(broken))
"""

# As a script that unscales gradients and skips the step itself: losses say nothing.
SKIPS = """
def breaks(model, loss, n):
    if RANK == 1 and n < 12:
        return (sum((p * 0).sum() for p in model.parameters()) + 1) * 1 + torch.tensor(math.inf)
    return loss
end(go())
"""

# Right after the mean has come, before the rank says what it holds.
SCRIBBLES = """
def breaks(model, loss, n):
    return loss

from flodl_shm.train.reduce import Reducer
whole = Reducer._leave

def leave(self, roster, assembly):
    whole(self, roster, assembly)
    if RANK == 1 and assembly.number == 4:
        self._arena.slot(self._slot)[:] += 1e-3

Reducer._leave = leave
end(go())
"""

SYNC = ("--ranks", "2", "--policy", "sync")
CADENCE = ("--ranks", "2", "--policy", "cadence", "--anchor", "3", "--max-anchor", "4")
RUNS = {
    "once sync": (ONCE, SYNC),
    "once": (ONCE, CADENCE),
    "always sync": (ALWAYS, ("--ranks", "3", "--policy", "sync")),
    "always": (ALWAYS, CADENCE),
    "everywhere sync": (EVERYWHERE, SYNC),
    "everywhere": (EVERYWHERE, (*CADENCE, "--speed-hint", "1:1")),
    "one rank": (EVERYWHERE, ("--ranks", "1")),
    "alone": (EVERYWHERE, None),
    "late": (LATE, ("--ranks", "1", "--policy", "sync")),
    "buffer": (BUFFER, CADENCE),
    "bfloat16": (HALF.replace("DTYPE", "bfloat16"), CADENCE),
    "float16": (HALF.replace("DTYPE", "float16"), SYNC),
    "huge": (HUGE, CADENCE),
    "mask": (MASK, SYNC),
    "unborn": (UNBORN, SYNC),
    "skips": (SKIPS, SYNC),
    "scribbles": (SCRIBBLES, CADENCE),
}


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    started = {}
    for name, (text, words) in RUNS.items():
        place = name.replace(" ", "-")
        started[name] = launches.submit(
            place,
            *(words or ()),
            "train.py",
            files={"train.py": COMMON + text},
            plain=words is None,
        )
    return lambda name: started[name].result()


def told(end, rank):
    return json.loads((end.place / f"end-{rank}").read_text())


def said(end, word):
    """Alerts of the run about numbers that have this in them."""
    lines = (end.run_dir / "journal.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in lines if '"numbers"' in line]
    texts = [text for note in notes if word in (text := json.dumps(note))]
    return texts


def is_sound(end, *, ranks=(0, 1)):
    assert end.code == 0, str(end)
    assert end.summary["status"] == "ok"
    assert end.summary["params_sha256"]
    is_exact(end.summary, 2)
    for rank in ranks:
        assert told(end, rank)["finite"], str(end)
        assert told(end, rank)["optimizer"], str(end)


def test_one_nan_loss_costs_one_window(ends):
    for name in ("once sync", "once"):
        end = ends(name)
        is_sound(end)
        assert len(said(end, "is refused")) == 1
        assert said(end, "rank 1's part of round")
        assert said(end, "parameter 0.weight is nan")
        assert said(end, "without the optimizer state of 6 parameters")
        assert [rank["refused"] for rank in end.summary["per_rank"]] == [0, 1]
        assert end.summary["deaths"] == []
        assert "is refused" in end.out, "the screen says so too"


def test_a_rank_that_is_always_nan_is_dropped_after_three(ends):
    for name, ranks in (("always sync", (0, 2)), ("always", (0,))):
        end = ends(name)
        is_sound(end, ranks=ranks)
        (death,) = end.summary["deaths"]
        assert death["rank"] == 1
        assert "3 rounds in a row" in death["cause"]
        # The third is known when all have arrived: the rank may be a window further by then.
        assert 3 <= end.summary["per_rank"][1]["refused"] <= 5


@pytest.mark.parametrize("name", ["everywhere sync", "everywhere", "one rank"])
def test_nan_everywhere_ends_the_run_in_a_sentence(ends, name):
    end = ends(name)
    assert end.code == 1, str(end)
    assert end.summary["status"] == "failed"
    assert "the training has diverged: after round" in end.err
    assert "no rank's parameters are finite (rank" in end.err
    assert ": parameter 0.weight is nan, loss not finite since round" in end.err
    assert "max_grad_norm" in end.err
    assert end.seconds < 30


def test_the_newest_checkpoint_is_named(ends):
    end = ends("late")
    assert end.code == 1, str(end)
    (folder,) = (end.run_dir / "ckpt").glob("model-*")
    assert f"the newest checkpoint is {folder}" in " ".join(end.err.split())
    assert "there is no checkpoint to go on from" in ends("one rank").err


def test_alone_the_sentence_is_an_exception(ends):
    end = ends("alone")
    assert end.code == 1, str(end)
    last = end.err.strip().splitlines()[-1]
    assert last.startswith("flodl_shm.errors.RankFailed: the training has diverged: after round")


def test_an_infinite_running_variance_is_refused(ends):
    end = ends("buffer")
    is_sound(end)
    assert said(end, "buffer 1.running_var is infinite")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_model_of_half_precision_that_overflows_is_refused(ends, name):
    end = ends(name)
    is_sound(end)
    assert len(said(end, "is refused")) == 1
    assert end.summary["per_rank"][1]["refused"] == 1


def test_huge_numbers_are_numbers(ends):
    end = ends("huge")
    is_sound(end)
    assert said(end, "") == []


def test_a_mask_of_infinity_stays_as_it_is(ends):
    end = ends("mask")
    is_sound(end)
    assert said(end, "") == []
    assert told(end, 0)["mask"]
    assert told(end, 1)["mask"]


def test_a_model_that_is_broken_from_the_start_is_a_setting_that_cannot_be(ends):
    end = ends("unborn")
    assert end.code == 2, str(end)
    assert "parameter 0.weight is nan before anything is trained" in end.err


def test_losses_that_are_no_numbers_are_told_once_an_epoch(ends):
    end = ends("skips")
    is_sound(end)
    assert len(said(end, "is finite, though its parameters are")) == 1
    assert [rank["refused"] for rank in end.summary["per_rank"]] == [0, 0]


def test_a_replica_that_is_written_into_after_the_mean_is_found_at_once(ends):
    end = ends("scribbles")
    assert end.code == 70, str(end)
    assert end.summary["status"] == "failed"
    assert "after round 4 rank" in end.err
    assert "hold different parameters: checksums" in end.err
