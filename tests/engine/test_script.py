"""A script under the launcher lives as it would under plain python, and its output is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flodl_shm.proc.environment import usable_cores

pytestmark = pytest.mark.procs

# Writes what it sees of its world to facts-RANK.json, in the directory it was started in.
FACTS = '''
import atexit, json, pickle, threading, time
from base import *
import near
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), index / 32), torch.tensor([index / 32])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x)


def main():
    state = train(model=Model, dataset=Squares())
    facts = {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "path": sys.path[0],
        "main": [__name__, __file__, __spec__, __package__, sys.modules["__main__"].__file__],
        "executable": sys.executable,
        "near": near.WHO,
        "stdin": sys.stdin.read() if RANK >= 0 else "",
        "threads": torch.get_num_threads(),
        "pickled": type(pickle.loads(pickle.dumps(Model()))) is Model,
        "environment": {name: os.environ.get(name) for name in NAMES},
        "sum": state.params["inner.weight"].shape,
    }
    with open(f"facts-{RANK}.json", "w") as file:
        json.dump(facts, file)
    if RANK == 0:
        batches = list(DataLoader(Squares(), batch_size=8, num_workers=1))
        print(len(batches), "batches by a worker")
    atexit.register(print, "at exit", flush=True)
    threading.Timer(0.2, lambda: print("late", __name__)).start()


NAMES = """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
    FLODL_RUN_ID FLODL_RUN_DIR OMP_NUM_THREADS MINE""".split()

if __name__ == "__main__":
    main()
'''
FILES = {"sub/train.py": FACTS, "sub/near.py": "WHO = __name__"}
ARGUMENTS = ("sub/train.py", "a", "b c", "--epochs", "9", "-q")

PRINTS = """
from base import *
import subprocess, time

print("one line of rank", RANK)
sys.stdout.write("half a ")
sys.stdout.flush()
time.sleep(0.1)
print("line")
print("oops", file=sys.stderr)
os.write(1, b"raw \\xff\\n")
subprocess.run(["echo", "from a child"])
train(epochs=1)
print("no end", end="")
"""
PRINTED = ["one line of rank {}", "half a line", "raw \\xff", "from a child", "no end"]


@pytest.fixture(scope="module")
def ends(launches):
    """All runs of this file, by name."""
    mine = {"MINE": "7"}
    started = {
        "plain": launches.submit("plain", *ARGUMENTS, files=FILES, env=mine, plain=True),
        "ranks": launches.submit("ranks", "--ranks", "2", *ARGUMENTS, files=FILES, env=mine),
        "threads": launches.submit(
            "threads", "--ranks", "2", *ARGUMENTS, files=FILES, env={"OMP_NUM_THREADS": "3"}
        ),
    }
    for shown in ("0", "all", "errors"):
        words = ("--ranks", "2", "--show-ranks", shown, "train.py")
        started[shown] = launches.submit(f"show-{shown}", *words, files={"train.py": PRINTS})
    return lambda name: started[name].result()


def facts(end, rank):
    assert end.code == 0, str(end)
    return json.loads((end.place / f"facts-{rank}.json").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_sees_what_the_script_sees_under_python(ends, rank):
    plain, end = ends("plain"), ends("ranks")
    here = facts(plain, -1)
    there = facts(end, rank)
    assert here["argv"] == list(ARGUMENTS)
    for name in ("argv", "executable", "near", "pickled", "stdin"):
        assert there[name] == here[name], name
    for name in ("cwd", "path", "main"):
        assert there[name] == json.loads(
            json.dumps(here[name]).replace(str(plain.place), str(end.place))
        ), name


def test_the_environment_of_a_rank_is_the_launchers_and_what_other_launchers_set(ends):
    end = ends("ranks")
    told = [facts(end, rank)["environment"] for rank in (0, 1)]
    for rank, found in enumerate(told):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert found["GROUP_RANK"] == "0"
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(found["MASTER_PORT"]) < 65536
        assert found["FLODL_RUN_ID"] == end.run_dir.name
        assert Path(found["FLODL_RUN_DIR"]) == end.run_dir
        assert found["MINE"] == "7"
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]


def test_cores_are_shared_out_unless_the_user_has_said_how_many_threads(ends):
    share = max(1, usable_cores() // 2)
    shared = facts(ends("ranks"), 1)
    assert (shared["threads"], shared["environment"]["OMP_NUM_THREADS"]) == (share, str(share))
    said = facts(ends("threads"), 1)
    assert (said["threads"], said["environment"]["OMP_NUM_THREADS"]) == (3, "3")


def test_threads_exit_handlers_and_loader_workers_of_a_script_come_to_their_end(ends):
    log = (ends("ranks").run_dir / "ranks" / "rank0" / "stdout.log").read_text()
    assert log.splitlines() == ["4 batches by a worker", "late __main__", "at exit"]
    assert ends("ranks").left == []


def shown_by(end):
    """What the ranks said on the screen, by rank: each on the stream it was said on."""
    assert end.code == 0, str(end)
    said = {"0": [], "1": []}
    assert "oops" not in end.out
    for line in end.out.splitlines() + end.err.splitlines():
        match = re.fullmatch(r"\[r(\d)\] (.*)", line)
        if match:
            said[match[1]].append(match[2])
        else:
            assert "[r" not in line, "a rank's line begins inside another"
    return said


def of_rank(rank):
    return [line.format(rank) for line in PRINTED]


@pytest.mark.parametrize("shown", ["0", "all", "errors"])
def test_the_screen_shows_whole_lines_of_the_ranks_asked_for(ends, shown):
    said = shown_by(ends(shown))
    for rank, lines in said.items():
        out = [line for line in lines if line != "oops"]
        assert out == (of_rank(rank) if shown == "all" or (shown, rank) == ("0", "0") else [])
        assert ("oops" in lines) == (shown != "0" or rank == "0")


@pytest.mark.parametrize("shown", ["0", "all", "errors"])
def test_the_files_keep_every_byte_whatever_is_shown(ends, shown):
    for rank in (0, 1):
        place = ends(shown).run_dir / "ranks" / f"rank{rank}"
        kept = "\n".join(of_rank(rank)).encode().replace(b"\\xff", b"\xff")
        assert (place / "stdout.log").read_bytes() == kept
        assert (place / "stderr.log").read_bytes() == b"oops\n"
