"""Shared memory in whole runs: a small /dev/shm, onlookers, views that stay, names."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.procs

# Replaces itself with a run that sees a /dev/shm of its own; the machine's is not touched.
IN_A_SMALL_MOUNT = """\
import os, sys
mount = "mount -t tmpfs -o size=$1 tmpfs /dev/shm && head -c $2 /dev/zero >/dev/shm/other"
words = ["sh", "-c", mount + ' && shift 2 && exec "$@"', "sh", *sys.argv[1:3]]
run = [sys.executable, "-m", "flodl_shm.run", *sys.argv[3:]]
os.execvp("unshare", ["unshare", "--mount", *words, *run])
"""  # fmt: skip

# 5,000,000 floats: 40 MB for the replicas of two ranks.
LARGE = """\
from base import *
from torch.utils.data import DataLoader, Dataset

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5_000_000))

    def forward(self, x):
        return x.sum() * self.weight[0]

class Pictures(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.ones(MIB << 18)

class Loaded:
    def __len__(self):
        return 16

    def get_batch(self, indices):
        assert not [name for name in os.listdir("/dev/shm") if "flodl" in name]
        loader = DataLoader(Pictures(), sampler=indices, batch_size=2, num_workers=2)
        return torch.cat(list(loader))

MIB = int(sys.argv[1])
train(model=Large, train_step=lambda model, x: model(x), dataset=Loaded(), epochs=1)
"""

WATCHED = """\
import subprocess
from pathlib import Path
from base import *

LOOK = '''
import mmap, os, sys
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
print(len(memory), memory[:8], flush=True)
sys.stdin.readline()
'''

def onlooker(path):
    pipe = subprocess.PIPE
    one = subprocess.Popen([sys.executable, "-c", LOOK, path], stdin=pipe, stdout=pipe)
    assert one.stdout.readline()
    return one

def look():
    for path in Path(f"/proc/{os.getpid()}/fd").iterdir():
        if path.is_symlink() and "/flodl-" in os.readlink(path):  # one is the look itself, and gone
            one, other = onlooker(path), onlooker(path)
            one.communicate(b"end")
            other.kill()
            other.communicate()
            print("looked at", os.readlink(path))

steps = 0

def step(model, batch):
    global steps
    steps += 1
    if RANK == 0 and steps == 3:
        look()
    return mse(model, batch)

train(train_step=step)
"""

HELD = """\
from base import *
held = []

def step(model, batch):
    held.append(memoryview(model.weight.detach().numpy()))
    if len(held) == 3:
        raise ValueError("the step fails")
    return mse(model, batch)

train(train_step=step)
"""


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        bool(unshare)
        and not subprocess.run(
            [unshare, "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True
        ).returncode
    )


needs_mount = pytest.mark.skipif(
    not may_mount(), reason="no mount namespace may be made here (needs root and unshare)"
)


@pytest.fixture(scope="module")
def ends(launches):
    """Starts all of them, waits for one."""
    started = {
        name: launches.submit(name, "--ranks", "2", "train.py", files={"train.py": text})
        for name, text in (("watched", WATCHED), ("held", HELD))
    }
    return lambda name: started[name].result()


def in_a_small_mount(launches, name: str, *, size: str, taken: str, mib: int):
    files = {"small.py": IN_A_SMALL_MOUNT, "train.py": LARGE}
    words = ("small.py", size, taken, "--ranks", "2", "train.py", str(mib))
    return launches.submit(name, *words, files=files, plain=True).result()


@needs_mount
def test_a_tight_mount_is_left_to_loaders_and_whoever_has_files_there(launches):
    """48 MB would hold the 40 MB of the arena, or what loaders send; a third of it is taken."""
    end = in_a_small_mount(launches, "tight", size="48m", taken="16M", mib=1)
    assert end.code == 0, str(end)
    assert re.search(r"/dev/shm has no room for \d{8} bytes: the arena is a memfd instead", end.out)
    assert end.left == []


@needs_mount
def test_a_loader_that_fills_the_mount_is_named_with_its_rank(launches):
    end = in_a_small_mount(launches, "full", size="16m", taken="4M", mib=8)
    assert end.code == 1, str(end)
    assert re.search(r"rank \d \(cpu\) failed first", end.err)
    # Newer versions of torch reserve before they write; older ones are killed by SIGBUS.
    last = end.err.splitlines()[-1]
    assert re.search(r"unable to allocate shared memory.* No space left|\(SIGBUS\)", last), str(end)
    assert end.left == []


def test_an_onlooker_may_come_and_go_or_be_killed(ends):
    end = ends("watched")
    assert end.code == 0, str(end)
    assert end.out.count("looked at") >= 1, str(end)
    for rank in range(2):
        assert (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text() == ""


def test_views_that_are_held_do_not_hide_the_users_error(ends):
    end = ends("held")
    assert end.code == 1
    assert end.err.splitlines()[-1] == "ValueError: the step fails", str(end)
    assert "BufferError" not in end.err
    for rank in range(2):
        log = (end.run_dir / "ranks" / f"rank{rank}" / "stderr.log").read_text()
        assert "BufferError" not in log
