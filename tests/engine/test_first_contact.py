"""What somebody meets who has only a script: readable screens, no guard, no surprise afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.procs

FAILS = """
from base import *

steps = 0
def step(model, batch):
    global steps
    steps += 1
    if RANK == 2 and steps == 3:
        raise KeyError("label")
    return mse(model, batch)

train(train_step=step, epochs=1000)
"""

# A progress bar as others draw it, in every rank, and ten thousand steps beneath it.
BAR = """
from base import *

steps = 0
def step(model, batch):
    global steps
    steps += 1
    sys.stderr.write(f"\\rrank {RANK} step {steps}")
    sys.stderr.flush()
    return mse(model, batch)

train(train_step=step, dataset=data(4000), batch_size=1, epochs=3)
"""

# Trainings in one process, the last but one of which fails; what it holds after each of them.
LOOP = """
import json, threading
from base import *

def bad(model, batch):
    raise KeyError("on purpose")

def held():
    fds = len(os.listdir("/proc/self/fd"))
    segments = [name for name in os.listdir("/dev/shm") if "flodl" in name]
    return [fds, threading.active_count(), len(segments), sorted(os.environ)]

told = []
count = int(sys.argv[1])
for number in range(count):
    try:
        state = train(train_step=bad if number == count - 2 else mse)
        ended = [state.status, state.global_step]
    except Exception as error:
        ended = [type(error).__name__]
    told.append([ended, held()])
if RANK < 0:
    with open("told.json", "w") as file:
        json.dump(told, file)
"""

# Typed at a prompt: there is no file that ranks could run.
PROMPT = """
import warnings
warnings.simplefilter("always")
exec(open("base.py").read())
print(train(epochs=1).status)
print(train(epochs=1).status, "again")
"""


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    own = {"FLODL_RANKS": "2"}
    started = {
        "fails": launches.submit("fails", "--ranks", "4", "train.py", files={"train.py": FAILS}),
        "bar": launches.submit("bar", "--ranks", "4", "train.py", files={"train.py": BAR}),
        "ranks": launches.submit(
            "ranks", "train.py", "3", files={"train.py": LOOP}, env=own, plain=True
        ),
        "alone": launches.submit("alone", "train.py", "5", files={"train.py": LOOP}, plain=True),
        "prompt": launches.submit("prompt", "-c", PROMPT, env=own, plain=True),
    }
    return lambda name: started[name].result()


def test_the_last_lines_hold_rank_error_file_and_line_of_the_first_failure(ends):
    end = ends("fails")
    assert end.code == 1, str(end)
    lines = (end.out + end.err).splitlines()
    assert len(lines) < 60
    last = "\n".join(lines[-20:])
    assert lines[-1] == "KeyError: 'label'"
    assert "rank 2 (cpu) failed first" in last
    assert re.search(r'File ".*/train\.py", line 9, in step\n +raise KeyError\("label"\)', last)


def test_bars_of_four_ranks_and_thousands_of_steps_make_a_short_plain_log(ends):
    end = ends("bar")
    assert end.code == 0, str(end)
    assert end.summary["picks_total"] == 12_000
    said = end.out + end.err
    assert len(said) < 100_000
    assert "\r" not in said
    assert not re.search(r"rank [123] step", said)
    assert "rank 0 step" in said


@pytest.mark.parametrize("name", ["ranks", "alone"])
def test_runs_follow_each_other_in_one_process_also_after_a_failed_one(ends, name):
    """Whether it launches ranks or trains by itself, nothing piles up in it."""
    end = ends(name)
    assert end.code == 0, str(end)
    ended, held = zip(*json.loads((end.place / "told.json").read_text()), strict=True)
    bad = ended[-2]
    assert len(bad) == 1, str(ended)
    assert [one for one in ended if one is not bad] == [["ok", 32]] * (len(ended) - 1)
    fds, threads, segments, names = zip(*held, strict=True)
    assert fds[-1] <= fds[0]
    assert threads[-1] <= threads[0]
    assert set(segments) == {0} or name == "alone"  # others' runs may be under way
    assert names[-1] == names[0]


def test_at_a_prompt_it_says_how_to_get_ranks_and_trains_in_the_process(ends):
    end = ends("prompt")
    assert end.code == 0, str(end)
    assert end.out.split() == ["ok", "ok", "again"]
    assert "2 ranks need a script to start again" in end.err


BARE = """
import sys
sys.modules["posix_ipc"] = None
from flodl_shm.cli.main import main
import flodl_shm
codes = [main(words.split()) for words in ("--help", "--version", "run --help", "run --dry-run")]
print(codes)
sys.exit(main(["run", "--workload", "paced"]))
"""


def test_without_posix_ipc_help_works_and_a_run_is_refused_in_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BARE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "[0, 0, 0, 0]" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: posix_ipc cannot be imported: ")
    assert "Linux" in line
