"""The efficiency of a rig from its journal, worked out by hand; the rows and the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flodl_shm.bench import rig
from flodl_shm.bench.rig import main, row_of
from flodl_shm.bench.rig_cases import (
    FULL,
    PARTS,
    POLICIES,
    QUICK,
    QUICK_POLICIES,
    RIGS,
    changed_at,
    config_of,
    slowed_s,
)
from flodl_shm.bench.rig_figures import RigFigures, measure
from flodl_shm.control.messages import Arrived, Attached, Committed, Issued, Note
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.journal import Header, Record

KEYS = ("rig", "policy", "he", "he_whole", "vs_fastest", "sync_bound", "gain", "picks_per_s")
S = 1_000_000_000


class Journal:
    """Two ranks; everything that matters is said in seconds."""

    def __init__(self, rates=(10.0, 5.0)) -> None:
        self.records = [Header(1, "a-run", "now", Nanos(0), {})]
        for rank, rate in enumerate(rates):
            attached = Attached(Rank(rank), Row(rank), free_picks_per_s=rate)
            self.say(0, attached, kind="event")

    def say(self, at_s, message, kind="action"):
        self.records.append(Record(kind, Nanos(round(at_s * S)), message))

    def issue(self, at_s, number, *, steps=1):
        planned = dict.fromkeys(("0", "1"), steps)
        self.say(at_s, Issued(Round(number), 0, Rank(1), steps, planned, "because"))

    def arrive(self, at_s, number, *, began_s=(0, 0)):
        for rank, began in enumerate(began_s):
            report = Arrived(
                Rank(rank), Row(rank), Round(number), 1, 1, 1, began_at=Nanos(round(began * S))
            )
            self.say(at_s, report, kind="event")

    def commit(self, at_s, number, picks, *, epoch=0):
        told = {str(rank): count for rank, count in enumerate(picks)}
        ranks = (Rank(0), Rank(1))
        self.say(
            at_s, Committed(Round(number), epoch, ranks, told, told, {}, 0, None, 0.0, 1_000_000)
        )


def steady(*, epoch_of_last=0, issued_ahead=False):
    """A round that spreads the state, a probe until 3.0 s, windows until 4.0, 5.0 and 6.0 s."""
    journal = Journal()
    journal.issue(1.0, 1, steps=0)
    journal.arrive(1.1, 1)
    journal.issue(1.1, 2, steps=4)
    journal.commit(1.2, 1, (0, 0))
    if issued_ahead:
        journal.issue(1.2, 3, steps=4)
    journal.arrive(2.9, 2, began_s=(1.9, 2.0))
    if not issued_ahead:
        journal.issue(2.9, 3, steps=4)
    journal.commit(3.0, 2, (4, 3))
    journal.arrive(3.9, 3, began_s=(3.0, 3.0))
    journal.issue(3.9, 4, steps=4)
    journal.commit(4.0, 3, (9, 5))
    journal.commit(5.0, 4, (10, 4))
    journal.commit(6.0, 5, (9, 5), epoch=epoch_of_last)
    journal.say(9.0, Note("the", "end"))
    return journal


def no_slowness(rank, epoch):
    return 0.0


def halved_in_epoch_one(rank, epoch):
    """Rank 0 needs 0.2 s instead of 0.1 s there: of both, 10 picks a second are possible."""
    return 0.1 if (rank, epoch) == (0, 1) else 0.0


def test_he_counts_from_the_end_of_the_uncalibrated_window():
    told = measure(steady().records, no_slowness)
    assert told.windows == 3
    assert told.picks == 42
    assert told.picks_per_s == pytest.approx(14.0)
    assert told.he == pytest.approx(14 / 15)
    assert told.rates == (10.0, 5.0)


def test_he_whole_counts_from_the_last_ranks_first_step():
    told = measure(steady().records, no_slowness)
    assert told.he_whole == pytest.approx((7 + 42) / 4 / 15)


def test_the_fastest_alone_and_the_bound_of_sync():
    told = measure(steady().records, no_slowness)
    assert told.vs_fastest == pytest.approx(14 / 10)
    assert told.sync_bound == pytest.approx(2 * 5 / 15)


def test_rounds_issued_before_the_probe_has_ended_are_not_calibrated():
    assert measure(steady(issued_ahead=True).records, no_slowness).windows == 2


def test_a_rank_that_is_slowed_in_an_epoch_is_measured_by_what_it_can_do_there():
    """Rank 0 at half its rate in the last second: 15 + 15 + 10 picks were possible, 42 done."""

    told = measure(steady(epoch_of_last=1).records, halved_in_epoch_one)
    assert told.he == pytest.approx(42 / 40)
    assert told.vs_fastest == pytest.approx(42 / 25)
    assert told.sync_bound == pytest.approx(2 * 15 / 40)


@pytest.mark.parametrize(
    ("after", "recovered"), [((9, 9), 1), ((5, 9), 2), ((5, 8, 8.5), 3), ((5, 5), 3)]
)
def test_recovery_is_the_first_window_that_is_nearly_as_good_as_before(after, recovered):
    """Before the change 42 of 45 picks were done, 0.933; nine tenths of that is 0.84."""
    journal = steady()
    for number, picks in enumerate(after):
        journal.commit(7.0 + number, 6 + number, (picks, 0), epoch=1)
    told = measure(journal.records, halved_in_epoch_one, changed_at=1)
    assert told.windows_to_recover == recovered


def test_a_change_needs_windows_on_both_sides():
    with pytest.raises(WeBroke, match="both sides of the change in epoch 1"):
        measure(steady().records, no_slowness, changed_at=1)
    assert measure(steady().records, no_slowness).windows_to_recover is None


def test_what_cannot_be_measured_is_said():
    with pytest.raises(WeBroke, match="no free run"):
        measure(Journal(rates=(10.0, 0.0)).records, no_slowness)
    with pytest.raises(WeBroke, match="no free run"):
        measure([], no_slowness)
    with pytest.raises(WeBroke, match="no calibrated window"):
        measure(Journal().records, no_slowness)
    journal = steady()
    journal.records = [r for r in journal.records if isinstance(r, Header) or r.at <= 3 * S]
    with pytest.raises(WeBroke, match="nothing was committed"):
        measure(journal.records, no_slowness)


# ---- rigs and rows ---------------------------------------------------------------------------


def named(name):
    return next(one for one in RIGS if one.name == name)


def test_a_row_gets_the_picks_its_ranks_train_in_its_time(tmp_path):
    one = named("1:2:4")
    config = config_of(one, "cadence", QUICK, seed=3, root=tmp_path)
    picks = config.workload_options["picks"] * config.wishes.epochs
    assert picks == pytest.approx(one.quick_s * 87.5, abs=2)
    assert config.free_run_s == QUICK.free_run_s
    assert (config.wishes.seed, config.wishes.policy) == (3, "cadence")
    assert config.wishes.anchor is None, "measured as shipped"
    sync = config_of(one, "sync", FULL, seed=3, root=tmp_path)
    assert sync.workload_options["picks"] < config.workload_options["picks"]


@pytest.mark.parametrize("effort", [QUICK, FULL], ids=["quick", "full"])
@pytest.mark.parametrize("one", RIGS, ids=lambda one: one.name)
def test_every_row_has_twenty_windows_after_calibration(one, effort, tmp_path):
    config = config_of(one, "cadence", effort, seed=0, root=tmp_path)
    picks = config.workload_options["picks"] * config.wishes.epochs
    window = sum(10 * max(one.step_ms) / ms for ms in one.step_ms)
    assert picks / window - 1 >= 20


def test_the_stale_rig_changes_its_speed_at_every_epoch(tmp_path):
    config = config_of(named("stale"), "cadence", QUICK, seed=0, root=tmp_path)
    assert {one.rank for one in config.slow} == {1}
    assert [one.factor for one in config.slow] == [1.0, 1.3] * 4 + [1.0]
    assert [one.from_epoch for one in config.slow] == list(range(9))
    assert [slowed_s(config, Rank(1), epoch) for epoch in (0, 1, 2)] == pytest.approx([0, 0.012, 0])
    assert slowed_s(config, Rank(0), 1) == 0
    assert changed_at(named("stale"), config) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_the_throttled_rank_is_slower_from_the_middle_on(policy, tmp_path):
    config = config_of(named("throttle"), policy, FULL, seed=0, root=tmp_path)
    middle = config.wishes.epochs // 2
    assert [str(one) for one in config.slow] == [f"0:2@{middle}"]
    assert changed_at(named("throttle"), config) == middle > 0
    assert [slowed_s(config, Rank(0), epoch) for epoch in (middle - 1, middle)] == [0, 0.02]


def test_equal_shares_are_windows_of_the_slowest(tmp_path):
    config = config_of(named("8x4"), "equal", FULL, seed=0, root=tmp_path)
    assert config.wishes.policy == "cadence"
    assert config.wishes.partition_ratios == (1 / 8,) * 8
    picks = config.workload_options["picks"] * config.wishes.epochs
    assert picks == pytest.approx(8 * 12.5 * 48 * PARTS["equal"], rel=0.01)


def test_ddp_has_the_picks_of_sync(tmp_path):
    sync, ddp = (
        config_of(named("1:2:4"), policy, FULL, seed=1, root=tmp_path) for policy in ("sync", "ddp")
    )
    assert ddp == sync


def test_quick_rows_are_the_named_ones_and_short():
    quick = [one for one in RIGS if one.in_quick]
    assert [one.name for one in quick] == ["1:2:4", "1:1:1"]
    spent = sum(
        one.quick_s * PARTS[policy] + QUICK.free_run_s + 1
        for one in quick
        for policy in QUICK_POLICIES
    )
    assert spent < 55


def figures(he, windows=24, **more):
    return RigFigures(
        he=he,
        he_whole=he - 0.01,
        vs_fastest=2 * he,
        sync_bound=0.5,
        picks_per_s=100 * he,
        windows=windows,
        picks=1000,
        rates=(50.0, 25.0),
        **more,
    )


def test_a_row_is_the_median_of_its_repeats():
    row = row_of("1:2:4", "cadence", [figures(0.9), figures(0.96, windows=22), figures(0.95)])
    assert tuple(row)[: len(KEYS)] == KEYS
    assert row["he"] == 0.95
    assert row["gain"] == pytest.approx(1.9)
    assert row["rates"] == [50.0, 25.0]
    assert row["windows"] == 22
    assert "windows_to_recover" not in row


def test_a_throttled_row_says_how_fast_it_recovered():
    runs = [figures(0.9, windows_to_recover=windows) for windows in (1, 5, 2)]
    assert row_of("throttle", "cadence", runs)["windows_to_recover"] == 2


def test_the_file_and_its_rows(tmp_path, monkeypatch, capsys):
    asked = []

    def run_row(one, policy, effort, seed):
        asked.append((seed, one.name, policy))
        return figures(0.9 if policy == "cadence" else 0.4)

    monkeypatch.setattr(rig, "run_row", run_row)
    monkeypatch.setattr(rig, "preload", lambda: None)
    target = tmp_path / "rig.json"
    assert main(["--json", str(target), "--rig", "1:2:4", "--seed", "7"]) == 0
    told = json.loads(target.read_text())
    assert told["schema"] == 1
    assert told["host"]["cores"] >= 1
    policies = ("sync", "equal", "cadence", "ddp")
    assert [(row["rig"], row["policy"]) for row in told["rows"]] == [
        ("1:2:4", policy) for policy in policies
    ]
    for row in told["rows"]:
        assert set(KEYS) <= set(row)
    assert told["rows"][2]["x_sync"] == pytest.approx(2.25)
    assert [row.get("x_ddp") for row in told["rows"]] == [None, None, pytest.approx(2.25), None]
    # Interleaved, and the policies of one repeat share its seed.
    assert asked == [(seed, "1:2:4", policy) for seed in (7, 8, 9) for policy in policies]
    out = capsys.readouterr().out
    assert "   7 1:2:4  sync" in out
    assert "1:2:4 cadence: x_ddp 2.25, at least 2.2: held" in out


def test_quick_rows_are_those_without_filters(monkeypatch):
    asked = []

    def run_row(one, policy, effort, seed):
        asked.append((one.name, policy))
        return figures(0.9)

    monkeypatch.setattr(rig, "run_row", run_row)
    monkeypatch.setattr(rig, "preload", lambda: None)
    assert main(["--quick"]) == 0
    assert asked == [(name, how) for name in ("1:2:4", "1:1:1") for how in ("sync", "cadence")]
    asked.clear()
    assert main(["--quick", "--rig", "8x4", "--policy", "ddp", "--repeats", "2"]) == 0
    assert asked == [("8x4", "ddp")] * 2


def test_a_run_that_fails_ends_the_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(rig, "preload", lambda: None)
    monkeypatch.setattr(rig, "launch", lambda config: 4)
    assert main(["--quick"]) == 3
    assert "1:2:4 under sync ended with exit code 4" in capsys.readouterr().err


# ---- for real --------------------------------------------------------------------------------

SCRIPT = """
import json, sys, tempfile
from dataclasses import replace
from pathlib import Path

from flodl_shm.bench.rig import run_row
from flodl_shm.bench.rig_cases import Effort, Rig, config_of
from flodl_shm.engine.launch import launch
from flodl_shm.engine.rank_main import preload

preload()
rig = Rig("tiny", (4.0, 8.0), quick_s=0.8, full_s=1.0, epoch_s=0.4)
effort = Effort(quick=True, repeats=1, free_run_s=0.05)
hashes = []
for free_run_s in (0.0, 0.05):
    root = Path(sys.argv[1]) / str(free_run_s)
    config = config_of(rig, "sync", effort, seed=3, root=root)
    assert launch(replace(config, free_run_s=free_run_s)) == 0
    hashes.append(json.loads((root / "latest" / "summary.json").read_text())["params_sha256"])
run = run_row(rig, "cadence", effort, 3)
print(json.dumps({"hashes": hashes, "he": run.he, "rates": run.rates, "windows": run.windows}))
"""


@pytest.mark.slow
@pytest.mark.procs
def test_real_runs_are_the_same_after_a_free_run_and_can_be_measured(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout.splitlines()[-1])
    without, with_it = told["hashes"]
    assert with_it == without
    # Only that they are of this world: a shared machine may make anything late.
    assert 0.2 < told["he"] < 2
    assert told["rates"][0] > told["rates"][1] > 0
    assert told["windows"] >= 1
    assert not list(tmp_path.glob("bench-rig-*")), "the run directory is gone"
