"""How a run stands, from files alone: made-up ones here; a real run is in tests/engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flodl_shm.cli.main import main
from flodl_shm.control.messages import (
    Attached,
    BuildArena,
    Committed,
    Died,
    End,
    EpochClosed,
    Finished,
    Ready,
    Tick,
)
from flodl_shm.control.options import Settled, Wishes
from flodl_shm.ids import Nanos, Rank, Row
from flodl_shm.obs.journal import Journal
from flodl_shm.obs.run_state import read_state

S = 1_000_000_000
PLAN = Settled(
    policy="cadence", world_size=2, epochs=2, batch_sizes=(1, 1), seed=7, tail="drop", samples=30,
    anchor=10, max_anchor=1000, overhead_target=0.05, gamma=1.0, augment=1, eval_every=0,
)  # fmt: skip


class MadeUp:
    """A run directory that grows as the test says."""

    def __init__(self, root):
        self.path = root / "20260101-000000-trial"
        for rank in (0, 1):
            (self.path / "ranks" / f"rank{rank}").mkdir(parents=True)
            (self.path / "ranks" / f"rank{rank}" / "pid").write_text(f"{2**22 + 1} 0\n")
        (root / "latest").symlink_to(self.path.name)
        options = {"devices": {"value": "cpu,cpu"}, "backend": {"value": "shm"}}
        (self.path / "run.json").write_text(json.dumps({"title": "paced", "options": options}))
        self.journal = Journal(self.path / "journal.jsonl", warn=pytest.fail)
        self.journal.header(
            run_id=self.path.name,
            started="2026-01-01T00:00:00",
            at=Nanos(0),
            versions={},
            world_size=2,
            flags=Wishes(),
        )

    def form(self):
        for rank in (0, 1):
            self.say(Ready(Rank(rank), Row(rank), "d", 10, 0, 30, "cpu"), 1)
            self.say(Attached(Rank(rank), Row(rank)), 1)
        self.say(BuildArena(params=10, buffers=0, plan=PLAN), 1)
        self.commit(1, {0: 0, 1: 0}, 2)

    def commit(self, number, picks, at_s):
        told = {str(rank): count for rank, count in picks.items()}
        self.say(Tick(), at_s)
        self.say(
            Committed(
                round=number,
                epoch=0,
                contributors=tuple(picks),
                steps=told,
                picks=told,
                mass={},
                global_step=0,
                loss=0.25,
                divergence=0.0,
                reduce_ns=1,
            ),
            at_s,
        )

    def say(self, message, at_s):
        self.journal.write("event", message, Nanos(int(at_s * S)))

    def end(self, status="ok", reason="all epochs done"):
        for rank in (0, 1):
            self.say(Finished(Rank(rank), Row(rank), "ab"), 9)
        self.say(End(status=status, exit_code=0, reason=reason), 9)
        (self.path / "summary.json").write_text(json.dumps({"status": status, "wall_s": 9.5}))


@pytest.fixture
def made(tmp_path):
    made = MadeUp(tmp_path / "runs")
    yield made
    made.journal.close()


def told(capsys, *words):
    assert main(["status", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys, *words):
    assert main(["status", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def seen_from_outside(monkeypatch):
    """The lock of this very process is not in its own way: say what another one would be told."""
    from flodl_shm.obs import journal

    answer = {"pid": os.getpid()}
    monkeypatch.setattr(journal, "writer_of", lambda path: answer["pid"])
    return answer


def test_a_run_that_has_just_begun(made, capsys, seen_from_outside):
    one = told(capsys, made.path)
    assert (one["schema"], one["state"], one["epoch"], one["progress"]) == (
        1,
        "running",
        None,
        None,
    )
    assert one["launcher_pid"] == os.getpid()
    assert [rank["state"] for rank in one["ranks"]] == ["gone", "gone"]
    assert "nothing is trained yet" in "\n".join(shown(capsys, made.path))


def test_a_run_under_way(made, capsys, seen_from_outside):
    made.form()
    made.commit(2, {0: 10, 1: 5}, 4)
    (made.path / "ranks/rank1/pid").write_text("garbage\n")
    sample = {"rank": 0, "pid": 2**22 + 1, "cpu": 0.5, "rss_mib": 99.4}
    (made.path / "resources.jsonl").write_text(json.dumps({"ranks": [sample]}) + '\n{"torn')
    (made.path / "metrics.jsonl").write_text('{"he":0.5}\n{"he":0.875}\n')
    one = told(capsys, made.path)
    assert (one["epoch"], one["epochs"], one["reduce"]) == (0, 2, 2)
    assert (one["picks"], one["picks_planned"], one["progress"]) == (15, 60, 0.25)
    assert (one["picks_per_s"], one["left_s"], one["he"], one["loss"]) == (7.5, 6.0, 0.875, 0.25)
    assert one["last_commit_age_s"] > 0
    assert one["ranks_alive"] == 0
    assert one["ranks"][0] == {
        "rank": 0, "device": "cpu", "state": "gone", "alive": False, "pid": 2**22 + 1,
        "incarnation": 0, "picks": 10, "share": 0.6667, "cpu": 0.5, "rss_mib": 99.4,
    }  # fmt: skip
    assert one["ranks"][1]["pid"] is None


def test_a_rank_is_alive_only_if_it_descends_from_the_launcher(made, capsys, seen_from_outside):
    made.form()
    seen_from_outside["pid"] = os.getppid()
    (made.path / "ranks/rank0/pid").write_text(f"{os.getpid()} 0\n")
    (made.path / "ranks/rank1/pid").write_text(f"{os.getppid()} 0\n")
    one = told(capsys, made.path)
    assert [rank["state"] for rank in one["ranks"]] == ["alive", "gone"]
    assert one["ranks_alive"] == 1
    assert f"pid {os.getpid()}" in shown(capsys, made.path)[2]


def test_a_launcher_that_cannot_be_seen_from_here(made, capsys, seen_from_outside):
    made.form()
    seen_from_outside["pid"] = 0
    one = told(capsys, made.path)
    assert (one["state"], one["launcher_pid"], one["ranks_alive"]) == ("running", None, None)
    assert {rank["state"] for rank in one["ranks"]} == {"unknown"}


def test_deaths_are_told_with_their_cause(made, capsys, seen_from_outside):
    made.form()
    made.say(Died(Rank(1), Row(1), "signal 9 (SIGKILL)", last_sign_at=Nanos(3 * S)), 3.5)
    made.commit(2, {0: 10}, 4)
    one = told(capsys, made.path)
    assert one["deaths"] == [
        {"rank": 1, "incarnation": 0, "cause": "signal 9 (SIGKILL)", "at_s": 3.5}
    ]
    assert "  rank 1 was lost at 3.5 s: signal 9 (SIGKILL)" in shown(capsys, made.path)


def test_a_run_that_has_ended(made, capsys):
    made.form()
    made.commit(2, {0: 20, 1: 10}, 4)
    made.say(EpochClosed(0, 30, 30, 0, 0, 0, 0.5), 4)
    made.end(status="stopped", reason="SIGINT")
    made.journal.close()
    one = told(capsys, made.path)
    assert (one["state"], one["wall_s"], one["launcher_pid"]) == ("stopped", 9.5, None)
    assert one["left_s"] is one["last_commit_age_s"] is None
    assert {rank["state"] for rank in one["ranks"]} == {"done"}
    first = shown(capsys, made.path)[0]
    assert first == f"{made.path.name}  paced  stopped after 9.5 s: SIGINT"


def test_a_launcher_that_was_killed_leaves_neither_lock_nor_summary(made, capsys):
    made.form()
    made.journal.close()
    assert told(capsys, made.path)["state"] == "killed"
    assert "killed: no launcher" in shown(capsys, made.path)[0]


def test_the_newest_run_is_found(made, capsys, monkeypatch, tmp_path):
    made.journal.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLODL_RUN_DIR", raising=False)
    assert told(capsys)["run_id"] == made.path.name
    assert told(capsys, "runs")["run_id"] == made.path.name
    assert told(capsys, "runs/latest")["run_id"] == made.path.name
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert told(capsys, "--run-dir", "elsewhere")["run_id"] == made.path.name
    assert main(["status"]) == 2
    assert "there is no run in runs" in capsys.readouterr().err
    monkeypatch.setenv("FLODL_RUN_DIR", str(tmp_path / "elsewhere"))
    assert told(capsys)["run_id"] == made.path.name


def test_of_a_scripts_several_runs_the_last_is_shown(made, capsys, seen_from_outside):
    made.form()
    for number in (2, 10):
        place = made.path / f"run-{number}"
        place.mkdir()
        (place / "journal.jsonl").write_bytes((made.path / "journal.jsonl").read_bytes())
    (made.path / "run-11").mkdir()  # its journal is not there yet
    one = told(capsys, made.path)
    assert one["run_dir"].endswith("/run-10")
    assert one["ranks"][0]["pid"] == 2**22 + 1
    assert told(capsys, made.path / "run-2")["run_dir"].endswith("/run-2")


def test_looking_changes_nothing(made, capsys):
    made.form()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in made.path.rglob("*")}
    told(capsys, made.path)
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in made.path.rglob("*")}


@pytest.mark.parametrize("broken", ["run.json", "metrics.jsonl", "resources.jsonl", "summary.json"])
def test_a_broken_file_beside_the_journal_costs_what_it_held(made, capsys, broken):
    made.form()
    made.journal.close()
    (made.path / broken).write_text("{nonsense\n[1]\n")
    one = told(capsys, made.path)
    assert one["picks_planned"] == 60


def test_a_run_without_a_first_line_or_without_a_journal_is_refused(tmp_path, capsys):
    (tmp_path / "journal.jsonl").write_bytes(b'{"schema"')
    assert main(["status", str(tmp_path)]) == 2
    assert "the run has not begun" in capsys.readouterr().err
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "run.json").write_text("{}")
    assert main(["status", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_only_lines_that_tell_something_are_read(made):
    made.form()
    made.journal.close()
    path = made.path / "journal.jsonl"
    with path.open("ab") as file:
        file.write(
            b'{"kind":"event","at":1,"message":{"type":"Left","what":"of a later version"}}\n'
        )
    state = read_state(Path(made.path))
    assert state.tally.last_commit.round == 1
