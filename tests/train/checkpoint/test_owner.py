"""Sweeping: what dead runs were making goes; living runs' work and strangers' files stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkpoint_rig import RUN, parts, publish_one

from flodl_shm.errors import HostUnfit
from flodl_shm.train.checkpoint.names import owner_file, work_folder
from flodl_shm.train.checkpoint.owner import Owner, sweep


def names(stem):
    return sorted(path.name for path in stem.parent.iterdir())


def test_a_place_that_is_not_there_needs_no_sweeping(stem):
    assert sweep(stem) == []


def test_a_stale_work_folder_goes_and_is_named(stem):
    work = work_folder(stem, RUN, 3)
    parts(work)
    (work / ".optimizer-rank1.json.7.partial").write_text("half")
    owner_file(stem, RUN).write_text("")
    assert sweep(stem) == [f"{work} removed: the run that was making it is gone"]
    assert names(stem) == []


def test_a_living_runs_work_stays_until_it_lets_go(stem):
    stem.parent.mkdir()
    owner = Owner(stem, RUN)
    work = work_folder(stem, RUN, 1)
    parts(work)
    assert sweep(stem) == []
    assert owner.work_folders() == [work]
    owner.release()
    owner.release()
    assert not owner_file(stem, RUN).exists()
    assert len(sweep(stem)) == 1


def test_checkpoints_and_what_only_looks_like_work_stay(stem):
    made = publish_one(stem, 1)
    for name in ("model.tmp", "model.x.tmp", "model2.run.1.tmp", "model.run.1.tmp.bak"):
        (stem.parent / name).mkdir()
    (stem.parent / "model.mine.7.tmp").mkdir()
    (stem.parent / "model.mine.7.tmp" / "thesis.tex").write_text("")
    assert sweep(stem) == [f"{stem.parent}/model.mine.7.tmp was left as it is: it holds thesis.tex"]
    assert made.name in names(stem)
    assert len(names(stem)) == 6


def test_a_link_of_a_work_folders_name_is_not_followed(stem, tmp_path):
    stem.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "meta.json").write_text("")
    work_folder(stem, RUN, 1).symlink_to(tmp_path / "elsewhere")
    assert "was left as it is" in sweep(stem)[0]
    assert (tmp_path / "elsewhere" / "meta.json").exists()


def test_a_run_of_a_longer_name_is_no_owner_of_a_shorter_ones_work(stem):
    stem.parent.mkdir()
    living = Owner(stem, "run.1")
    for run in ("run", "run.1", "run.1.2"):
        parts(work_folder(stem, run, 5))
    done = sweep(stem)
    assert [work_folder(stem, run, 5).exists() for run in ("run", "run.1", "run.1.2")] == [
        False,
        True,
        False,
    ]
    assert len(done) == 2
    living.release()


def test_a_run_id_of_several_components_is_one_name(stem):
    assert work_folder(stem, "x-finch/run-2", 1).parent == stem.parent
    assert owner_file(stem, "x-finch/run-2").parent == stem.parent


def test_two_owners_of_one_run_cannot_be(stem):
    stem.parent.mkdir()
    owner = Owner(stem, RUN)
    with pytest.raises(HostUnfit, match="is held by another process"):
        Owner(stem, RUN)
    owner.release()
    Owner(stem, RUN).release()


def test_an_owner_in_no_folder_is_refused(stem):
    with pytest.raises(HostUnfit, match=r"cannot save checkpoints: .*No such file"):
        Owner(stem, RUN)


def test_what_cannot_be_removed_is_said_and_hinders_nobody(stem, monkeypatch):
    parts(work_folder(stem, RUN, 1))

    def refuse(path, *_more, **_kinds):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert "could not be removed" in sweep(stem)[0]


DIES = """
import os, signal, sys
from pathlib import Path
from flodl_shm.train.checkpoint.owner import Owner
Owner(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.procs
def test_a_killed_owner_owns_nothing_any_more(stem):
    stem.parent.mkdir()
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", DIES, stem, RUN], stdin=pipe, stdout=pipe)
    with child:
        assert child.stdout.readline() == b"held\n"
        parts(work_folder(stem, RUN, 1))
        assert sweep(stem) == []
        child.communicate(b"\n")
    assert len(sweep(stem)) == 1
    assert names(stem) == []
