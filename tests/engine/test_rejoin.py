"""Dead ranks that come back: real processes, killed by their own script at a chosen step.

Rank 0 goes slowly while rank 1 is away, so every run is long enough for a return, however slow
the machine is, and short where it is not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flodl_shm.cli.main import main

if TYPE_CHECKING:
    from conftest import Ended

pytestmark = pytest.mark.procs

# Words: how=kill|raise|exit, at=STEP, times=N (ends of rank 1); but for its first end: build=1: at
# the building of its model, attach=1: as it takes its place in the arena.
SCRIPT = """
from base import *
import signal, time

words = dict(word.split("=") for word in sys.argv[1:])
how, at, times = words.get("how", "kill"), int(words.get("at", 6)), int(words.get("times", 1))
steps = 0


def ends():
    for n in range(times):
        try:
            os.close(os.open(f"end-{n}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(0)
        raise ValueError(f"boom {n}")


def model():
    if RANK == 1 and "build" in words and os.path.exists("end-0"):
        ends()
    return nn.Linear(4, 1)


if RANK == 1 and "attach" in words and os.path.exists("end-0"):
    from flodl_shm.shm.segment import Segment

    Segment.prefault = lambda self: ends()


def momentum(params):
    global optimizer
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    return optimizer


def step(model, batch):
    global steps
    steps += 1
    has_moment = any("momentum_buffer" in s for s in optimizer.state.values())
    if steps == 1:
        print("first", RANK, os.getpid(), has_moment, optimizer.param_groups[0]["lr"], flush=True)
    if RANK == 1 and steps == at:
        ends()
    if RANK == 1 and steps == 3 and os.path.exists(f"end-{times - 1}"):
        open("back", "w").close()
    away = os.path.exists("end-0") and not os.path.exists("back")
    time.sleep(0.03 if away and RANK == 0 else 0.002)
    return mse(model, batch)


def epoch_fn(epoch, handle):
    handle.set_lr(0.005)
"""
RUN = """
if __name__ == "__main__":
    more = {"epoch_fn": epoch_fn} if "lr" in words else {}
    fl.Trainer(model, momentum, step, dataset=data(2400), batch_size=4, anchor=4, max_anchor=8,
               **more).run()
    print("done", RANK, flush=True)
"""
LOOP = """
with fl.Trainer(model, momentum, step, dataset=data(2400), batch_size=4, anchor=4,
                max_anchor=8).worker() as w:
    for plan in w.plans():
        for batch in w.batches():
            loss = step(w.model, batch)
            loss.backward()
            w.step(loss)
print("done", RANK, flush=True)
"""
# The second run of a script: rank 1, which came back in the first, dies in its first window.
AGAIN = """
fl.Trainer(model, momentum, step, dataset=data(2400), batch_size=4, anchor=4, max_anchor=8).run()
steps = 0


def last(model, batch):
    global steps
    steps += 1
    if RANK == 1 and steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return mse(model, batch)


train(train_step=last, dataset=data(400), epochs=1)
"""
CASES = {
    "cadence": ("--restarts", "1", "run.py"),
    "sync": ("--restarts", "1", "--policy", "sync", "run.py"),
    "spawn": ("--restarts", "1", "--start", "spawn", "run.py"),
    "loop": ("--restarts", "1", "loop.py"),
    "exit": ("--restarts", "1", "run.py", "how=exit"),
    "exception": ("--restarts", "1", "run.py", "how=raise"),
}
TWO = ("--ranks", "2", "--show-ranks", "all")


@pytest.fixture(scope="module")
def runs(launches):
    files = {"run.py": SCRIPT + RUN, "loop.py": SCRIPT + LOOP, "again.py": SCRIPT + AGAIN}

    def submit(name: str, *words: str, **more):
        return launches.submit(name, *TWO, *words, files=files, **more)

    started = {name: submit(name, *words) for name, words in CASES.items()}
    started["twice"] = submit("twice", "--restarts", "1", "run.py", "times=2", "at=4")
    started["always"] = submit("always", "--restarts", "1", "run.py", "times=9", "how=raise")
    started["flaps"] = submit(
        "flaps", "--restarts", "4", "run.py", "times=4", "at=6", "build=1", "how=raise"
    )
    started["attach"] = submit("attach", "--restarts", "2", "run.py", "times=2", "attach=1")
    started["fresh"] = submit("fresh", "--restarts", "1", "run.py", "lr=1")
    started["peer"] = submit("peer", "--restarts", "1", "--rejoin-optimizer", "peer", "run.py")
    started["saves"] = submit(
        "saves", "--restarts", "1", "--save-every", "1", "--epochs", "3", "run.py"
    )
    started["again"] = submit("again", "--restarts", "2", "again.py")
    started["plain"] = launches.submit(
        "plain", "run.py", files=files, plain=True, env={"FLODL_RANKS": "2", "FLODL_RESTARTS": "1"}
    )
    return started


def journal(ended: Ended) -> list[dict]:
    lines = (ended.run_dir / "journal.jsonl").read_text().splitlines()
    return [json.loads(line)["message"] for line in lines[1:]]


def check_back(ended: Ended, rejoins: int = 1) -> None:
    """It ended well, all hold the same, every pick is in it once, and the return has paid."""
    assert ended.code == 0, str(ended)
    summary = ended.summary
    assert (summary["status"], summary["survivors"]) == ("ok", 2), str(ended)
    assert summary["params_sha256"]
    for cover in summary["coverage"]:
        assert cover["done_once"] == cover["picks"] == 2400
        assert cover["duplicated"] == cover["missing"] == 0
    assert [back["rank"] for back in summary["rejoins"]] == [1] * rejoins
    assert all(back["committed_ms"] is not None for back in summary["rejoins"])
    assert ended.left == []


@pytest.mark.parametrize("name", CASES)
def test_a_dead_rank_comes_back_and_contributes(runs, name):
    ended = runs[name].result()
    check_back(ended)
    summary = ended.summary
    (death,) = summary["deaths"]
    (back,) = summary["rejoins"]
    assert (death["rank"], death["incarnation"], back["incarnation"]) == (1, 0, 1)
    assert (ended.run_dir / "ranks/rank1/pid").read_text().split()[1] == "1"
    assert "rank 1 is back as incarnation 1 in row 2" in ended.out
    assert "restart 1 of 1" in ended.out
    assert "done 1" in ended.out


@pytest.mark.parametrize("name", ["cadence", "sync"])
def test_its_journal_replays(runs, name, capsys):
    ended = runs[name].result()
    assert main(["replay", str(ended.run_dir)]) == 0
    assert "same" in capsys.readouterr().out


def test_an_exception_is_told_and_its_traceback_kept(runs):
    ended = runs["exception"].result()
    assert "rank 1 lost: ValueError: boom 0 (" in ended.out
    assert "ValueError: boom 0" in (ended.run_dir / "ranks/rank1/stderr.log").read_text()
    assert "Traceback" not in ended.err


def test_a_rank_that_is_killed_again_stays_dead(runs):
    ended = runs["twice"].result()
    assert ended.code == 0, str(ended)
    summary = ended.summary
    assert [d["incarnation"] for d in summary["deaths"]] == [0, 1]
    assert [b["incarnation"] for b in summary["rejoins"]] == [1]
    assert (summary["survivors"], summary["coverage"][0]["done_once"]) == (1, 2400)
    assert "it stays dead" in ended.out


def test_an_exception_with_no_restart_left_ends_the_run(runs):
    ended = runs["always"].result()
    assert ended.code == 1, str(ended)
    assert ended.err.rstrip().splitlines()[-1].startswith("ValueError: boom 1")


def test_a_rank_that_flaps_is_held_off(runs):
    ended = runs["flaps"].result()
    check_back(ended)
    pauses = [
        m["text"].partition("started again in ")[2].split()[0]
        for m in journal(ended)
        if m["type"] == "Note" and "started again" in m["text"]
    ]
    assert pauses[-3:] == ["0.2", "0.4", "0.8"]
    assert len(ended.summary["deaths"]) == 1  # those on their way cost nothing


def test_one_that_is_killed_as_it_attaches_costs_nothing(runs):
    ended = runs["attach"].result()
    check_back(ended)
    summary = ended.summary
    assert (len(summary["deaths"]), summary["rejoins"][0]["incarnation"]) == (1, 1)
    assert "rank 1 was lost before it was back: signal 9 (SIGKILL)" in ended.out


def first_steps(ended: Ended) -> list[list[str]]:
    """(had a momentum, learning rate) of each process of rank 1 at its first step."""
    lines = [line.split() for line in ended.out.splitlines() if " first 1 " in line]
    return [line[-2:] for line in lines]


def test_a_fresh_optimizer_has_the_rate_that_is_in_force(runs):
    ended = runs["fresh"].result()
    check_back(ended)
    assert first_steps(ended) == [["False", "0.005"], ["False", "0.005"]]


def test_a_peers_optimizer_is_copied(runs):
    ended = runs["peer"].result()
    check_back(ended)
    assert first_steps(ended) == [["False", "0.01"], ["True", "0.01"]]
    assert not (ended.run_dir / "loans").exists()


def test_checkpoints_before_and_after_are_whole(runs):
    ended = runs["saves"].result()
    check_back(ended)
    metas = [json.loads(p.read_text()) for p in sorted(ended.run_dir.glob("ckpt/*/meta.json"))]
    assert len(metas) == 3
    assert metas[-1]["ranks"] == [0, 1]


def test_in_the_scripts_next_run_it_takes_part_and_stays_dead(runs):
    ended = runs["again"].result()
    check_back(ended)
    second = json.loads((ended.run_dir / "run-2/summary.json").read_text())
    assert [death["incarnation"] for death in second["deaths"]] == [0, 1]
    assert (second["survivors"], second["coverage"][0]["done_once"]) == (1, 400)


def test_a_script_that_launches_its_own_ranks(runs):
    check_back(runs["plain"].result())
