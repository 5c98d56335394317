"""The disk under the run directory is full: logs and journal end with one warning, nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.procs

# Becomes a run whose run directory is a file system of 300 KiB; nobody else sees it.
IN_A_SMALL_MOUNT = """\
import os, sys
mount = "mkdir runs && mount -t tmpfs -o size=300k tmpfs runs"
words = ["sh", "-c", mount + ' && exec "$@"', "sh"]
run = [sys.executable, "-m", "flodl_shm.run", *sys.argv[1:]]
os.execvp("unshare", ["unshare", "--mount", *words, *run])
"""
SCRIPT = """\
import time
from base import *

steps = 0

def step(model, batch):
    global steps
    steps += 1
    time.sleep(0.002)
    if RANK == 0 and steps == 5:
        try:
            with open(os.path.join(os.environ["FLODL_RUN_DIR"], "filler"), "wb") as filler:
                while True:
                    filler.write(bytes(4096))
        except OSError:
            pass
    print(RANK, steps, "x" * 10_000)
    return mse(model, batch)

train(train_step=step, dataset=data(160), epochs=3, policy="sync")
"""


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        bool(unshare)
        and not subprocess.run(
            [unshare, "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True
        ).returncode
    )


@pytest.mark.skipif(
    not may_mount(), reason="no mount namespace may be made here (needs root and unshare)"
)
def test_training_goes_on_to_its_end_with_one_warning_per_file(launches):
    files = {"small.py": IN_A_SMALL_MOUNT, "train.py": SCRIPT}
    words = ("small.py", "--ranks", "2", "--summary", "copy.json", "--save-every", "1", "train.py")
    end = launches.submit("full", *words, files=files, plain=True).result()
    assert end.code == 0, str(end)
    assert end.left == []
    told = json.loads((end.place / "copy.json").read_text())
    assert told["status"] == "ok"
    assert [c["done_once"] for c in told["coverage"]] == [160] * 3
    assert told["deaths"] == []
    lines = (end.out + end.err).splitlines()
    for file, words in (
        ("rank0/stdout.log", "lacks output"),
        ("rank1/stdout.log", "lacks output"),
        ("journal.jsonl", "the training goes on without it"),
        ("metrics.jsonl", "the training goes on"),
    ):
        assert sum(file in line and words in line for line in lines) == 1, "\n".join(lines)
