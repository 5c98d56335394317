"""selftest: what each check says of a run that is well and of one that is not; one for real."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flodl_shm.cli import selftest as module
from flodl_shm.cli.main import main
from flodl_shm.cli.selftest import (
    EPOCHS,
    PICKS,
    Check,
    came_back,
    covered,
    ended,
    equal_at_the_end,
    equal_in_each_round,
    killed,
    no_memory_left,
    no_process_left,
)
from flodl_shm.control.messages import Left
from flodl_shm.control.options import Wishes
from flodl_shm.errors import HostUnfit
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.journal import Journal


def epoch(number, **odd):
    whole = {"epoch": number, "picks": PICKS, "done_once": PICKS, "duplicated": 0, "missing": 0}
    return whole | odd


GOOD = {
    "status": "ok",
    "deaths": [{"rank": 1, "cause": "signal 9", "next_commit_ms": 80.0}],
    "rejoins": [{"rank": 1, "committed_ms": 90.0}],
    "coverage": [epoch(number) for number in range(EPOCHS)],
    "params_sha256": "abc",
    "survivors": 2,
}


def outcome(code=0):
    return SimpleNamespace(end=SimpleNamespace(exit_code=code, reason="all epochs done"))


def test_a_run_that_is_well_passes_every_check():
    checks = [
        ended(outcome(), GOOD),
        killed(GOOD, 1),
        came_back(GOOD),
        covered(GOOD),
        equal_at_the_end(GOOD),
    ]
    assert all(check.ok for check in checks)
    assert "next commit 80 ms" in checks[1].text
    assert f"{EPOCHS * PICKS} of {EPOCHS * PICKS} picks" in checks[3].text


@pytest.mark.parametrize(
    "check",
    [
        ended(outcome(4), GOOD),
        ended(outcome(), GOOD | {"status": "failed"}),
        killed(GOOD, 0),
        killed(GOOD | {"deaths": []}, 1),
        killed(GOOD | {"deaths": [GOOD["deaths"][0] | {"next_commit_ms": None}]}, 1),
        came_back(GOOD | {"rejoins": []}),
        came_back(GOOD | {"rejoins": [{"rank": 1, "committed_ms": None}]}),
        covered(GOOD | {"coverage": GOOD["coverage"][1:]}),
        covered(GOOD | {"coverage": [*GOOD["coverage"][1:], epoch(9, duplicated=1)]}),
        covered(GOOD | {"coverage": [*GOOD["coverage"][1:], epoch(9, missing=1)]}),
        equal_at_the_end(GOOD | {"params_sha256": None}),
        equal_at_the_end(GOOD | {"survivors": 1}),
    ],
    ids=str,
)
def test_what_is_not_well_fails_its_check(check):
    assert not check.ok


@pytest.mark.parametrize(("digests", "fine"), [((7, 7), True), ((7, 8), False), ((), False)])
def test_ranks_must_hold_the_same_after_each_round(tmp_path, digests, fine):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, warn=pytest.fail)
    journal.header(run_id="x", started="", at=Nanos(0), versions={}, world_size=2, flags=Wishes())
    for rank, digest in enumerate(digests):
        left = Left(Rank(rank), Row(rank), Round(3), (Rank(0), Rank(1)), digest=digest)
        journal.write("event", left, Nanos(1))
    journal.close()
    assert equal_in_each_round(path).ok is fine


def test_leftovers_are_named(monkeypatch):
    from flodl_shm.shm import janitor

    monkeypatch.setattr(janitor, "sweep", lambda: ["flodl-0-x"])
    assert no_memory_left() == Check("memory", False, "left in /dev/shm: flodl-0-x")
    monkeypatch.setattr(module, "AFTERWARDS_S", 0.0)
    monkeypatch.setattr(module, "processes_of", lambda run_id: [17])
    assert no_process_left("run") == Check("processes", False, "still there: [17]")


def test_exit_codes_and_the_json(monkeypatch, capsys):
    told = [Check("run", True, "done"), Check("end", False, "ranks differ")]
    monkeypatch.setattr(module, "examine", lambda root: iter(told))
    assert main(["selftest"]) == 70
    assert "FAILED  end: ranks differ" in capsys.readouterr().out
    assert main(["selftest", "--json"]) == 70
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["ok"], len(said["checks"])) == (1, False, 2)
    monkeypatch.setattr(module, "examine", lambda root: iter(told[:1]))
    assert main(["selftest"]) == 0

    def unfit(root):
        raise HostUnfit("no memory")

    monkeypatch.setattr(module, "examine", unfit)
    assert main(["selftest"]) == 3
    assert "error: no memory" in capsys.readouterr().err


@pytest.mark.procs
def test_for_real_it_holds_on_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "flodl_shm", "selftest", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert [check["name"] for check in told["checks"]] == [
        "run", "death", "rejoin", "coverage", "end", "rounds", "memory", "processes",
    ]  # fmt: skip
