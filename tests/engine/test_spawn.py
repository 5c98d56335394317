"""--start spawn and -m MODULE: fresh interpreters live, see and die as forked ranks do."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.procs

# Rank 1 is killed in the training, after it has written down what it sees.
FACTS = """
import json, signal
from base import *
import near

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if RANK == 1 and steps == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return mse(model, batch)


def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


facts = {
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path[0],
    "main": [__name__, __file__, __package__, sys.modules["__main__"].__file__],
    "flags": [sys.flags.optimize, sys.flags.dev_mode, sys.executable],
    "near": near.WHO,
    "stdin": sys.stdin.read() if RANK >= 0 else "",
    "pgid": os.getpgid(0) == os.getpid(),
    "inheritable": [fd for fd in range(3, 64) if is_open(fd) and os.get_inheritable(fd)],
    "mine": os.environ["MINE"],
}
with open(f"facts-{RANK}.json", "w") as file:
    json.dump(facts, file)
print("half a ", end="", flush=True)
print("line", RANK)
if RANK >= 0:
    train(train_step=step, policy="sync", epochs=4)
    print("trained", RANK)
"""

KILLS_LAUNCHER = """
import signal, time
from base import *
from pathlib import Path

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 6:
        server = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(server.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(0.01)
    return mse(model, batch)

train(train_step=step, epochs=10_000)
"""

FAILS = """
from base import *

def step(model, batch):
    raise KeyError(sys.argv[1:], __name__)

train(train_step=step)
"""
MODULE = {"pkg/__init__.py": "", "pkg/train.py": FAILS.replace("from base", "from pkg.base")}
ARGUMENTS = ("sub/train.py", "a", "b c", "--epochs", "9", "-q")
FILES = {"sub/train.py": FACTS, "sub/near.py": "WHO = __name__"}
SPAWN = ("--ranks", "2", "--start", "spawn")


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    mine = {"MINE": "7"}
    words = (*SPAWN, "--show-ranks", "all", *ARGUMENTS)
    started = {
        "facts": launches.submit("facts", *words, files=FILES, env=mine),
        "killed": launches.submit("killed", *SPAWN, "train.py", files={"train.py": KILLS_LAUNCHER}),
        "module": launches.submit(
            "module", *SPAWN, "-m", "pkg.train", "--epochs", "9", files=MODULE
        ),
        "forked": launches.submit(
            "forked", "--ranks", "2", "-m", "pkg.train", "--epochs", "9", files=MODULE
        ),
        "nowhere": launches.submit("nowhere", "--ranks", "2", "-m", "pkg.other", files=MODULE),
        "plain": launches.submit("plain", *ARGUMENTS, files=FILES, env=mine, plain=True),
    }
    return lambda name: started[name].result()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spawned_rank_sees_what_the_script_sees_under_python(ends, rank):
    plain, end = ends("plain"), ends("facts")
    assert end.code == 0, str(end)
    here = json.loads((plain.place / "facts--1.json").read_text())
    there = json.loads((end.place / f"facts-{rank}.json").read_text())
    assert here.pop("pgid") in (True, False)
    assert there.pop("pgid")  # a session of its own, so what it starts can be found
    assert json.loads(json.dumps(here).replace(str(plain.place), str(end.place))) == there


def test_a_killed_spawned_rank_costs_only_itself(ends):
    end = ends("facts")
    summary = end.summary
    assert [(death["rank"], death["cause"]) for death in summary["deaths"]] == [
        (1, "signal 9 (SIGKILL)")
    ]
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] == 64
    assert end.left == []


def test_what_spawned_ranks_print_comes_in_whole_lines(ends):
    lines = ends("facts").out.splitlines()
    assert {"[r0] half a line 0", "[r1] half a line 1", "[r0] trained 0"} <= set(lines)


def test_spawned_ranks_end_with_a_killed_launcher(ends):
    end = ends("killed")
    assert end.code == -9, str(end)
    assert end.left == []


@pytest.mark.parametrize("name", ["module", "forked"])
def test_a_module_is_run_and_its_traceback_begins_in_it(ends, name):
    end = ends(name)
    assert end.code == 1, str(end)
    last = end.err.splitlines()[-1]
    assert last == "KeyError: (['--epochs', '9'], '__main__')", str(end)
    assert re.search(r'last\):\n  File ".*/pkg/train\.py", line 7, in <module>\n', end.err)
    assert end.summary["workload"] == "pkg.train"


def test_a_module_that_is_not_there(ends):
    end = ends("nowhere")
    assert end.code == 2
    assert re.fullmatch(r"error: there is no module pkg\.other to run.* \(rank \d\)\n", end.err)
