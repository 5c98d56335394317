"""Saves that go wrong, in whatever part and process: they cost a checkpoint, never the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder there

from saving_rig import SYNC, TRACED, Desk, checkpoints, is_exact, meta, only

from flodl_shm.train.checkpoint.manifest import verify

pytestmark = pytest.mark.procs

# Words: fault=KIND:RANK:FILE:SAVES fails a file whose name begins so, of these saves, on a rank,
# on `any`, or in the launching process (-1). KIND is an errno's name, or kill.
FAULTY = (
    TRACED
    + """
import errno
from pathlib import Path

kind, who, part, saves = words["fault"].split(":")


def hit(path):
    path = Path(path)
    save = path.parent.name.removesuffix(".tmp").rpartition(".")[2]
    return path.name.lstrip(".").startswith(part) and save in saves


def failing(real):
    def call(path, *more, **kinds):
        if hit(path):
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)), str(path))
        return real(path, *more, **kinds)
    return call


def killed(fd, chunk):
    if hit(os.readlink(f"/proc/self/fd/{fd}")):
        write(fd, chunk[: len(chunk) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, chunk)


if who == "any" or RANK == int(who):
    write = os.write
    if kind == "kill":
        os.write = killed
    else:
        os.open = failing(os.open)
        os.rename = failing(os.rename)
go()
"""
)

# Fills the disk between two saves, and makes room again.
FULL = (
    TRACED
    + """
from pathlib import Path

stem = Path(words["stem"])
ballast = stem.parent / "ballast"


def epoch_fn(epoch, worker):
    if epoch == 1:
        while not list(stem.parent.glob("model-*")):
            time.sleep(0.005)
        disk = os.statvfs(stem.parent)
        ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 100_000))
    if epoch == 3:
        ballast.unlink()

go(epoch_fn=epoch_fn, epochs=5)
"""
)

# What fails, and what is said of it.
FAULTS = {
    "part": ("EACCES:1:optimizer-rank1:2", "rank 1 cannot write its part of save 2: nothing was"),
    "model": ("ENOSPC:0:model:2", "save 2 is dropped: rank 0 cannot write the model: nothing was"),
    "models": ("EROFS:any:model:23", "no checkpoint this time: no rank is left"),
    "killed-part": ("kill:1:optimizer-rank1:2", "rank 1 lost: signal 9"),
    "killed-model": ("kill:0:model:2", "rank 0, which wrote the model, is dead"),
    "publisher": ("EIO:-1:manifest:2", "save 2 cannot be published: the checkpoint was not made"),
}


def faulty(desk, name):
    """Saves after each epoch, of which the second fails; then from the newest one before the end.

    The failing publisher is that of a script that launches its own ranks: it is in its process.
    """
    stem, fault = desk.stem(name), FAULTS[name][0]
    given = {
        "--save": str(stem), "--save-every": "1", "--epoch-callback-rank": "0",
        "--policy": "sync", "--ranks": "2",
    }  # fmt: skip
    words = ("train.py", f"fault={fault}", "sleep=0.004")
    if name == "publisher":
        env = {f"FLODL_{key[2:].replace('-', '_').upper()}": given[key] for key in given}
        end = desk.run(name, *words, text=FAULTY, env=env, plain=True)
    else:
        flags = [word for pair in given.items() for word in pair]
        end = desk.run(name, *flags, *words, text=FAULTY)
    left = sorted(path.name for path in stem.parent.iterdir())
    return SimpleNamespace(end=end, stem=stem, left=left)


def resumed(desk, chain, name):
    """From the checkpoint before the end."""
    stem = only(chain.stem, checkpoints(chain.stem)[-2], f"{name}-saved")
    return desk.run(f"{name}-resumed", *SYNC, "--resume", str(stem), "train.py")


def mounted(desk, name, size, *options):
    """A small disk of its own; None where one may not mount."""
    place = desk.root / name
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "none"]
    done = subprocess.run([*command, str(place)], capture_output=True, check=False)
    return place / "model" if done.returncode == 0 else None


def unmount(stem):
    subprocess.run(["umount", str(stem.parent)], check=True)


def full(desk):
    """Room for one checkpoint of 2.1 MB, then not for another one, then again."""
    stem = mounted(desk, "full", "9m")
    if stem is None:
        return None
    try:
        words = (*SYNC, "--save", str(stem), "--save-every", "1")
        end = desk.run(
            "full", *words, "train.py", "width=20000", "rate=low", f"stem={stem}", text=FULL
        )
        steps = [meta(folder)["global_step"] for folder in checkpoints(stem) if verify(folder)]
        return SimpleNamespace(end=end, steps=steps, left=sorted(os.listdir(stem.parent)))
    finally:
        unmount(stem)


def tiny(desk):
    """No room for any."""
    stem = mounted(desk, "tiny", "100k")
    if stem is None:
        return None
    try:
        end = desk.run("tiny", *SYNC, "--save", str(stem), "train.py", "width=20000", "rate=low")
        return SimpleNamespace(end=end, left=os.listdir(stem.parent))
    finally:
        unmount(stem)


def read_only(desk):
    stem = mounted(desk, "read-only", "100k", "ro")
    if stem is None:
        return None
    try:
        return desk.run("read-only", *SYNC, "--save", str(stem), "train.py")
    finally:
        unmount(stem)


def in_a_file(desk):
    (desk.root / "file").write_text("")
    return desk.run("in-a-file", *SYNC, "--save", str(desk.root / "file" / "model"), "train.py")


OTHERS = {"full": full, "tiny": tiny, "read-only": read_only, "in-a-file": in_a_file}
RESUMED = ("part", "killed-part", "killed-model")


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory):
    """All chains of this file, by name."""
    desk = Desk(launches, tmp_path_factory.mktemp("stems"))
    started = {name: desk.start(faulty, name) for name in FAULTS}
    started |= {name: desk.start(chain) for name, chain in OTHERS.items()}

    def after(name):
        return desk.start(lambda desk: resumed(desk, started[name].result(), name))

    started |= {f"{name}-resumed": after(name) for name in RESUMED}

    def get(name):
        result = started[name].result()
        return result if result is not None else pytest.skip("may not mount a disk")

    yield get
    desk.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_save_that_fails_is_an_alert_and_the_training_ends_well(ends, name):
    chain = ends(name)
    assert chain.end.code == 0, str(chain.end)
    said = (chain.end.run_dir / "journal.jsonl").read_text() + chain.end.out
    assert FAULTS[name][1] in said, str(chain.end)
    is_exact(chain.end.summary, epochs=3)
    assert len(chain.end.summary["deaths"]) == name.startswith("killed")


@pytest.mark.parametrize("name", FAULTS)
def test_every_checkpoint_that_is_visible_is_whole_and_nothing_else_is_left(ends, name):
    chain = ends(name)
    steps = [meta(folder)["global_step"] for folder in checkpoints(chain.stem)]
    assert steps[0] == 24
    assert all(verify(folder) for folder in checkpoints(chain.stem))
    assert steps[-1] == 72
    assert not [one for one in chain.left if one.endswith((".tmp", ".owner", ".partial"))]


def test_without_anothers_part_a_checkpoint_is_published_and_says_whose_are_there(ends):
    for name in ("part", "killed-part"):
        folder = checkpoints(ends(name).stem)[1]
        assert meta(folder)["ranks"] == [0]
        assert meta(folder)["global_step"] == 48


def test_without_the_model_another_rank_saves_at_the_next_edge(ends):
    for name in ("model", "killed-model"):
        folder = checkpoints(ends(name).stem)[1]
        assert meta(folder)["save_reason"] == "checkpoint"
        assert 48 < meta(folder)["global_step"] < 72
        assert 1 in meta(folder)["ranks"]


def test_what_nobody_can_write_is_given_up_until_the_next_occasion(ends):
    for name in ("models", "publisher"):
        steps = [meta(folder)["global_step"] for folder in checkpoints(ends(name).stem)]
        assert steps == [24, 72]


@pytest.mark.parametrize("name", RESUMED)
def test_what_was_saved_after_a_failure_can_be_gone_on_from(ends, name):
    end = ends(f"{name}-resumed")
    assert end.code == 0, str(end)
    is_exact(end.summary, epochs=3)
    assert 0 < end.summary["picks_total"] <= 96


def test_a_dead_ranks_record_lies_beside_the_checkpoints(ends):
    record = json.loads((ends("killed-part").stem.parent / "model.rank1.death.json").read_text())
    assert record["rank"] == 1
    assert record["cause"] == "signal"


def test_a_full_disk_costs_the_saves_of_its_time_and_the_old_one_stays(ends):
    chain = ends("full")
    assert chain.end.code == 0, str(chain.end)
    assert "No space left on device" in chain.end.out
    assert chain.steps[0] == 24
    assert chain.steps[-1] == 120
    assert 48 not in chain.steps
    assert all(one.startswith("model-") for one in chain.left)
    is_exact(chain.end.summary, epochs=5)


def test_too_little_room_is_said_before_anything_is_trained(ends):
    chain = ends("tiny")
    assert chain.end.code == 0, str(chain.end)
    lines = chain.end.out.splitlines()
    said = [n for n, line in enumerate(lines) if "saves may fail, the training goes on" in line]
    assert said, str(chain.end)
    assert said[0] < next(n for n, line in enumerate(lines) if "epoch 0 done" in line)
    assert chain.left == []


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [("read-only", 3, "Read-only file system"), ("in-a-file", 2, "is not a directory")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(ends, name, code, why):
    end = ends(name)
    assert end.code == code, str(end)
    assert why in end.err
    assert end.out == ""
    assert len(end.err.splitlines()) <= 2  # a sentence and a hint
    assert not (end.place / "runs").exists()
