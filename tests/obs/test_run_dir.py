from __future__ import annotations

import json

import pytest

from flodl_shm.errors import HostUnfit
from flodl_shm.obs import run_dir
from flodl_shm.obs.run_dir import RunDir, write_json


def test_a_run_has_its_directory_with_one_for_each_rank(tmp_path):
    run = RunDir.create(tmp_path / "my runs", ranks=2, name="trial")
    assert run.path.name == run.run_id
    assert run.run_id.endswith("-trial")
    assert run.rank(0).is_dir()
    assert run.rank(1).is_dir()
    assert not run.rank(2).exists()
    assert run.error_file(1) == run.path / "ranks" / "rank1" / "error.json"
    assert (run.journal.name, run.metrics.name) == ("journal.jsonl", "metrics.jsonl")


def test_latest_points_to_the_newest(tmp_path):
    runs = [RunDir.create(tmp_path, ranks=1, name=name) for name in "ab"]
    assert (tmp_path / "latest").resolve() == runs[1].path.resolve()
    assert (tmp_path / "latest").readlink().name == runs[1].run_id  # survives a moved root
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["latest", *(run.run_id for run in runs)]
    )


def test_runs_of_one_name_in_one_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20260101-000000")
    names = [RunDir.create(tmp_path, ranks=1, name="x").run_id for _ in range(3)]
    assert names == ["20260101-000000-x", "20260101-000000-x-2", "20260101-000000-x-3"]
    monkeypatch.setattr(run_dir, "TRIES", 3)
    with pytest.raises(HostUnfit, match="cannot write the run directory"):
        RunDir.create(tmp_path, ranks=1, name="x")


def test_a_name_is_made_up_when_none_is_given(tmp_path):
    assert len(RunDir.create(tmp_path, ranks=1).run_id.split("-")) == 4


def test_a_root_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostUnfit, match=r"cannot write the run directory under .*file.*: ") as told:
        RunDir.create(tmp_path / "file" / "runs", ranks=1)
    assert "--run-dir" in told.value.hint


def test_pid_and_settings_appear_whole(tmp_path):
    run = RunDir.create(tmp_path, ranks=1)
    run.write_pid(0, 4711, incarnation=1)
    run.write_pid(0, 4712, incarnation=2)
    assert (run.rank(0) / "pid").read_text() == "4712 2\n"
    run.write_settings({"argv": ["a b"], "path": tmp_path})
    told = json.loads(run.settings.read_text())
    assert told == {"schema": 1, "run_id": run.run_id, "argv": ["a b"], "path": str(tmp_path)}
    assert not list(run.path.rglob("*.partial"))


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(HostUnfit, match=r"cannot write .*summary.json"):
        write_json(tmp_path / "summary.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
