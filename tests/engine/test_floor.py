"""Too many ranks missing: the run saves and ends with exit code 4, and says who is missing."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.procs

# A word RANK@STEP for each that is to kill itself there.
SCRIPT = """
from base import *
import signal, time

ends = dict(map(int, word.split("@")) for word in sys.argv[1:])
steps = 0


def step(model, batch):
    global steps
    steps += 1
    if steps == ends.get(RANK):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.003)
    return mse(model, batch)


train(train_step=step, dataset=data(1200), anchor=3, max_anchor=6)
print("went on", RANK, flush=True)
"""


@pytest.fixture(scope="module")
def runs(launches):
    def submit(name: str, *words: str):
        words = ("--ranks", "3", "--show-ranks", "all", *words[:-1], "run.py", *words[-1].split())
        return launches.submit(name, *words, files={"run.py": SCRIPT})

    return {
        "breach": submit("breach", "--max-failures", "1", "1@20 2@60"),
        "fraction": submit("fraction", "--max-failures", "0.7", "1@20 2@60"),
        "abort": submit("abort", "--on-death", "abort", "1@20"),
        "grace": submit("grace", "--max-failures", "0", "--grace", "0", "2@20"),
    }


def test_with_more_missing_than_that_it_saves_and_fails(runs):
    ended = runs["breach"].result()
    assert ended.code == 4, str(ended)
    sentence = "2 of 3 ranks are missing, at most 1 may be: rank 1 (signal 9 (SIGKILL)), rank 2"
    assert ended.err.rstrip().splitlines()[-1].startswith(f"error: {sentence}")
    (meta,) = ended.run_dir.glob("ckpt/*/meta.json")
    told = json.loads(meta.read_text())
    assert (told["save_reason"], told["ranks"]) == ("max_failure_exceeded", [0])
    assert ended.summary["status"] == "failed"
    assert "went on" not in ended.out
    assert ended.left == []


def test_as_many_as_that_may_be_missing(runs):
    ended = runs["fraction"].result()
    assert ended.code == 0, str(ended)
    assert len(ended.summary["deaths"]) == 2


def test_abort_ends_it_at_the_first_death(runs):
    ended = runs["abort"].result()
    assert ended.code == 4, str(ended)
    last = ended.err.rstrip().splitlines()[-1]
    assert last == "error: rank 1 (signal 9 (SIGKILL)) lost, and --on-death is abort"
    assert [*ended.run_dir.glob("ckpt/*/meta.json")]


def test_without_grace_it_ends_at_once(runs):
    ended = runs["grace"].result()
    assert ended.code == 4, str(ended)
    assert "rank 2 (signal 9 (SIGKILL))" in ended.err
