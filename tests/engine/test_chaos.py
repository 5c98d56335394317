"""Chaos for a short while, and what its soak would notice; scripts/soak chaos lasts longer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEED = 11


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("chaos_soak", HERE / "chaos_soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos_soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["chaos_soak"]


def test_a_seed_is_a_schedule(soak):
    assert soak.plan_of(5, 3) == soak.plan_of(5, 3)
    plans = [soak.plan_of(5, number) for number in range(50)]
    assert len(set(plans)) == 50
    assert {plan.policy for plan in plans} == {"cadence", "sync"}
    assert {plan.ranks for plan in plans} == {2, 3, 4}
    assert {blow.do for plan in plans for blow in plan.blows} == {"kill", "stop", "pause"}


def test_what_is_wrong_with_a_run_is_said(soak):
    epoch = {
        "epoch": 0, "picks": soak.PICKS, "done_once": soak.PICKS, "duplicated": 0, "missing": 0,
    }  # fmt: skip
    good = {"coverage": [epoch], "params_sha256": "x"}
    assert soak.faults_of(good) == []
    assert "not exact" in soak.faults_of(good | {"coverage": [epoch | {"duplicated": 1}]})[0]
    assert "no epoch was closed" in soak.faults_of(good | {"coverage": []})[0]
    assert "same parameters" in soak.faults_of(good | {"params_sha256": None})[0]


def test_a_run_that_stands_still_is_noticed(soak):
    assert soak.late([0.0, 0.1, 0.2, 0.3]) == []
    assert "9.0 s without a commit" in soak.late([0.0, 0.1, 0.2, 9.2])[0]
    assert soak.late([1.0]) == ["no two commits"]


def test_growth_is_told_when_there_is_enough_to_tell_it_from(soak):
    rising = [(float(minute), 100.0 + 2.0 * minute) for minute in range(8)]
    assert soak.growth(rising) == pytest.approx(2.0)
    assert soak.growth(rising[:4]) is None


@pytest.mark.soak
@pytest.mark.procs
def test_chaos_leaves_the_training_whole():
    done = subprocess.run(
        [sys.executable, HERE / "chaos_soak.py", "--minutes", "0.25", "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "'kill'" in done.stdout
    assert "'rejoins'" in done.stdout
