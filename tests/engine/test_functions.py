"""The user's functions in a real run: where they run, what they reach, what their failures cost."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from saving_rig import SYNC, TRACED, Desk, is_exact, of_step, trace

pytestmark = pytest.mark.procs

# Each call is a line of `calls`: what, on which rank, with what.
CALLS = """
def note(*line):
    with open("calls", "a") as file:
        print(json.dumps([*line]), file=file)


def functions(**one_by_one):
    names = ("epoch_fn", "eval_fn", "checkpoint_fn", "metrics_fn")
    return {name: one_by_one.get(name, noted(name)) for name in names}


def noted(name):
    def call(first, *more):
        about = first if isinstance(first, int) else getattr(first, "epoch", None)
        note(name, RANK, about, getattr(first, "value", None))
        return 7.0
    return call


def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

RAISES = """
def raising(name):
    def call(*_):
        note(name, RANK)
        raise KeyError(name)
    return call

names = ("epoch_fn", "eval_fn", "checkpoint_fn", "metrics_fn")
go(**{name: raising(name) for name in names}, eval_dataset=[1], eval_every=1, save_every=1)
"""

HANGS = """
def hanging(name):
    def call(*_):
        note(name, RANK)
        while True:
            time.sleep(0.01)  # where it hangs
    return call

names = ("epoch_fn", "eval_fn", "checkpoint_fn", "metrics_fn")
go(**{name: hanging(name) for name in names}, eval_dataset=[1], epochs=1)
"""

# A copy of the rank comes back from each function as the rank does.
FORKS = """
def forking(name):
    def call(*_):
        os.fork()
        return 7.0
    return call

names = ("epoch_fn", "eval_fn", "checkpoint_fn", "metrics_fn")
go(**{name: forking(name) for name in names}, eval_dataset=[1], eval_every=1, save_every=1)
"""

# Whoever has the role dies of it: in the second epoch's function, then in the final evaluation.
MOVES = """
def epoch_fn(epoch, worker):
    note("epoch_fn", RANK, epoch)
    if epoch == 1 and not os.path.exists("died"):
        open("died", "w").close()
        die()

def eval_fn(model, data):
    note("eval_fn", RANK)
    if not os.path.exists("died-too"):
        open("died-too", "w").close()
        die()
    return 3.0

go(**functions(epoch_fn=epoch_fn, eval_fn=eval_fn), eval_dataset=[1])
"""

# Rank 1 has the roles by name, and dies in the second epoch.
NAMED = """
def dies(model, batch):
    if RANK == 1 and steps == 16:
        die()
    return plain(model, batch)

plain, step = step, dies
go(**functions(), eval_dataset=[1], save_every=1)
"""

# Rates, scalars, an evaluation that spoils the model; over a resume.
REACHES = """
def epoch_fn(epoch, worker):
    note("epoch_fn", RANK, epoch, worker.current_lr, worker.current_version)
    if epoch == 1:
        worker.set_lr(0.01)
    if epoch == 2:
        worker.scale_lr(0.5)

def eval_fn(model, data):
    modes = {module.training for module in model.modules()}
    note("eval_fn", RANK, sorted(modes))
    if "spoils" in words:
        torch.rand(5), random.random(), np.random.rand()
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
        model.train()
        model(torch.randn(4, 4))
    return 7.0

def told(metrics):
    note("metrics_fn", RANK, metrics.epoch, metrics.value, metrics.scalars, metrics.rank_scalars)

def scaled(model, batch):
    fl.record_scalar("rank", float(RANK))
    fl.record_scalar("odd", float("nan") if steps % 2 else float(steps))
    return plain(model, batch)

plain, step = step, scaled
more = functions(epoch_fn=epoch_fn, eval_fn=eval_fn, metrics_fn=told)
go(**more, eval_dataset=[1], eval_every=1, save_every=1)
"""

ASKS = """
from base import *
with fl.Trainer(
    linear, sgd, mse, dataset=data(96), batch_size=4, epochs=3, seed=5,
    eval_fn=lambda model, data: 4.5, eval_dataset=[1],
).worker() as w:
    values = []
    for plan in w.plans():
        if plan.round == 5 and RANK == 1:
            w.request_eval()
        for batch in w.batches():
            loss = mse(w.model, batch)
            loss.backward()
            w.step(loss)
        values += [(one.epoch, one.value) for one in w.poll_eval()]
    values += [(one.epoch, one.value) for one in w.poll_eval()]
    print("values", values)
"""


def calls(end, name):
    """What the function has noted, in order."""
    lines = map(json.loads, (end.place / "calls").read_text().splitlines())
    return [line[1:] for line in lines if line[0] == name]


def run(desk, name, body, *words, env=None, plain=False):
    return desk.run(name, *words, text=TRACED + CALLS + body, env=env, plain=plain)


def reaches(desk):
    """With and without an evaluation that spoils what it can; then two epochs more."""
    stem = desk.stem("reaches")
    words = (*SYNC, "--save", str(stem))
    ends = [run(desk, "reaches", REACHES, *words, "train.py", "spoils=1")]
    ends.append(run(desk, "reaches-not", REACHES, *SYNC, "train.py"))
    ends.append(
        run(desk, "reaches-on", REACHES, *words, "--resume", "auto", "train.py", "epochs=5")
    )
    return ends


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory):
    """All runs of this file, by name."""
    desk = Desk(launches, tmp_path_factory.mktemp("stems"))

    def start(name, body, *words, **more):
        return desk.start(lambda desk: run(desk, name, body, *words, **more))

    def saving(name):
        return (*SYNC, "--save", str(desk.stem(name)))

    two = {"FLODL_RANKS": "2", "FLODL_POLICY": "sync"}
    started = {
        "alone": start("alone", REACHES, "train.py", env=two, plain=True),
        "raises": start("raises", RAISES, *SYNC, "train.py"),
        "hangs": start("hangs", HANGS, *saving("hangs"), "--callback-timeout", "0.5", "train.py"),
        "forks": start("forks", FORKS, *SYNC, "train.py"),
        "moves": start("moves", MOVES, "--ranks", "3", "--policy", "sync", "train.py"),
        "named": start(
            "named", NAMED, *saving("named"), "--epoch-callback-rank", "1", "train.py", "sleep=.002"
        ),
        "reaches": desk.start(reaches),
        "asks": launches.submit("asks", *SYNC, "train.py", files={"train.py": ASKS}),
    }
    yield lambda name: started[name].result()
    desk.close()


WORDS = {
    "epoch_fn": "the epoch function failed in epoch 0: ",
    "eval_fn": "evaluation on rank {} raised: ",
    "checkpoint_fn": "the checkpoint function raised on rank {}: ",
    "metrics_fn": "the metrics function raised on rank {}: ",
}


@pytest.mark.parametrize("name", WORDS)
def test_one_that_raises_is_an_alert_and_a_traceback_and_the_training_ends_well(ends, name):
    end = ends("raises")
    assert end.code == 0, str(end)
    rank = calls(end, name)[0][0]
    said = f"{WORDS[name].format(rank)}KeyError: {name!r} (train.py"
    assert said in end.out.replace(f"{end.place}/", ""), str(end)
    log = (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text()
    assert f"{name} failed; the training goes on:\nTraceback (most recent call last)" in log
    assert f"KeyError: {name!r}" in log
    is_exact(end.summary, epochs=3)


@pytest.mark.parametrize("name", WORDS)
def test_one_that_hangs_is_abandoned_and_the_place_shown(ends, name):
    end = ends("hangs")
    assert end.code == 0, str(end)
    assert end.seconds < 30
    rank = calls(end, name)[0][0]
    assert f"{WORDS[name].format(rank)}abandoned after 0.5 s" in end.out, str(end)
    log = (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text()
    assert "# where it hangs" in log
    is_exact(end.summary, epochs=1)


def test_a_forked_copy_of_a_rank_that_comes_back_from_one_ends_and_costs_nothing(ends):
    end = ends("forks")
    assert end.code == 0, str(end)
    assert end.summary["survivors"] == 2
    is_exact(end.summary, epochs=3)
    logs = "".join(log.read_text() for log in end.run_dir.glob("ranks/rank*/stderr.log"))
    assert "came back into the training and is ended" in logs


def test_a_role_goes_on_with_another_rank_when_its_holder_dies(ends):
    end = ends("moves")
    assert end.code == 0, str(end)
    first, *others = calls(end, "epoch_fn")
    assert [epoch for _, epoch in (first, *others)] == [0, 1, 1, 2]
    died, heir = others[0][0], others[1][0]
    assert heir == others[2][0] != died
    scored = [rank for (rank,) in calls(end, "eval_fn")]
    assert len(set(scored)) == 2
    assert died not in scored
    assert end.summary["eval"] == [{"epoch": 2, "value": 3.0}]
    assert {death["rank"] for death in end.summary["deaths"]} == {died, scored[0]}
    is_exact(end.summary, epochs=3)


def test_a_role_given_by_number_ends_with_its_rank_but_for_checkpoints(ends):
    end = ends("named")
    assert end.code == 0, str(end)
    assert [line[:2] for line in calls(end, "epoch_fn")] == [[1, 0], [1, 1]]
    assert calls(end, "eval_fn") == []
    said = "rank 1 is dead, and the epoch role was given to it alone: it ends"
    assert end.out.count(said) == 1, str(end)
    assert [line[0] for line in calls(end, "checkpoint_fn")] == [1, 0, 0]
    assert {line[0] for line in calls(end, "metrics_fn")} == {0}
    is_exact(end.summary, epochs=3)


def test_the_rate_an_epoch_function_sets_is_every_ranks_from_the_first_step_on(ends):
    end = ends("reaches")[0]
    assert end.code == 0, str(end)
    for rank in (0, 1):
        rates = [line[1] for line in trace(end, rank)]
        assert rates[:12] == pytest.approx([of_step(2 * n) for n in range(12)])
        assert rates[12:24] == [0.01] * 12
        assert rates[24:] == [0.005] * 12


def test_a_rate_that_was_set_holds_after_a_resume(ends):
    end = ends("reaches")[2]
    assert end.code == 0, str(end)
    for rank in (0, 1):
        assert [line[1] for line in trace(end, rank)] == [0.005] * 24


def test_an_epoch_function_is_called_once_an_epoch_also_over_a_resume(ends):
    before, _, after = ends("reaches")
    assert [line[1] for line in calls(before, "epoch_fn")] == [0, 1, 2]
    assert [line[1] for line in calls(after, "epoch_fn")] == [3, 4]


def test_an_evaluation_sees_eval_mode_and_leaves_no_trace(ends):
    spoilt, plain, _ = ends("reaches")
    assert [line[1:] for line in calls(spoilt, "eval_fn")] == [[[False]]] * 3
    assert spoilt.summary["params_sha256"] == plain.summary["params_sha256"]
    assert [one["value"] for one in spoilt.summary["eval"]] == [7.0] * 3
    assert trace(spoilt, 0) == trace(plain, 0)
    assert trace(spoilt, 1) == trace(plain, 1)


def test_scalars_are_means_by_rank_and_weighted_by_batches(ends):
    end = ends("reaches")[0]
    lines = [json.loads(line) for line in (end.run_dir / "metrics.jsonl").read_text().splitlines()]
    for epoch, line in enumerate(line for line in lines if not line["evaluated"]):
        odd = sum(range(12 * epoch, 12 * epoch + 12, 2)) / 6  # every other one is nan
        assert line["scalars"] == {"rank": 0.5, "odd": pytest.approx(odd)}
        assert [one["rank"] for one in line["rank_scalars"]] == [0.0, 1.0]


@pytest.mark.parametrize(("name", "rank"), [("reaches", 0), ("alone", -1)])
def test_metrics_are_told_once_an_epoch_in_one_process(ends, name, rank):
    """Under the launcher in a rank; in a script that launches its own ranks, in the script."""
    end = ends(name)
    end = end[0] if name == "reaches" else end
    assert end.code == 0, str(end)
    told = calls(end, "metrics_fn")
    assert {line[0] for line in told} == {rank}
    assert sorted(line[1] for line in told if line[2] is None) == [0, 1, 2]
    assert sorted(line[1:3] for line in told if line[2] is not None) == [[n, 7.0] for n in range(3)]
    assert told[0][3]["rank"] == 0.5


def test_epochs_that_metrics_tell_of_only_grow_also_over_a_resume(ends):
    before, _, after = ends("reaches")
    told = [line[1] for end in (before, after) for line in calls(end, "metrics_fn")]
    assert all(first <= second for first, second in pairwise(told))
    assert sorted(set(told)) == [0, 1, 2, 3, 4]


def test_an_evaluation_asked_for_by_the_loop_is_heard_by_every_rank(ends):
    end = ends("asks")
    assert end.code == 0, str(end)
    for rank in (0, 1):
        log = (end.run_dir / "ranks" / f"rank{rank}" / "stdout.log").read_text()
        assert "values [(0, 4.5), (2, 4.5)]" in log
