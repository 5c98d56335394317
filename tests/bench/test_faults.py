"""bench-faults: from a journal to figures, its rows, who is struck when, and one for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from flodl_shm.bench import faults
from flodl_shm.bench.faults import main, row_of
from flodl_shm.bench.faults_cases import CASES, FULL, MIB, QUICK, blows_of, config_of
from flodl_shm.bench.faults_figures import Aftermath, FaultFigures, measure
from flodl_shm.bench.run_follower import RunFollower
from flodl_shm.bench.striker import Struck, note
from flodl_shm.bench.striker import blows_of as struck_in
from flodl_shm.control.messages import (
    Arrived,
    Attached,
    Committed,
    Died,
    End,
    Issued,
    Left,
    Ready,
    Rejoined,
    Spawn,
)
from flodl_shm.errors import WeBroke
from flodl_shm.ids import Nanos, Rank, Round, Row
from flodl_shm.obs.journal import Record

MS = 1_000_000
S = 1000 * MS
KEYS = (
    "fault", "detected_ms_p50", "detected_ms_p99", "out_ms_p99", "next_commit_windows",
    "rejoin_windows", "work_lost_picks", "he_after", "goodput",
)  # fmt: skip


class Journal:
    """Records of ranks of 10 picks a second each that meet every second."""

    def __init__(self, ranks=3):
        self.records = []
        for rank in range(ranks):
            self.add(0, Ready(Rank(rank), Row(rank), "d", 8, 0, 9, "cpu"))
            self.add(0, Attached(Rank(rank), Row(rank), free_picks_per_s=10.0))

    def add(self, at, message):
        self.records.append(Record("event", Nanos(int(at)), message))

    def window(self, number, at, rows, picks=10):
        """All of `rows` (rank -> row) arrive, and are out of the reduce a millisecond later."""
        who = tuple(Rank(rank) for rank in rows)
        for rank, row in rows.items():
            self.add(at, Arrived(Rank(rank), Row(row), Round(number), picks, picks, 0))
        for rank, row in rows.items():
            left = Left(Rank(rank), Row(row), Round(number), who, left_at=Nanos(int(at + MS)))
            self.add(at + MS, left)
        each = {str(rank): picks for rank in rows}
        self.add(
            at + MS,
            Committed(
                Round(number), 0, who, each, each, {r: float(n) for r, n in each.items()},
                0, None, 0.0, 0,
            ),
        )  # fmt: skip

    def steady(self, first, last, rows):
        for number in range(first, last + 1):
            self.window(number, number * S, rows)

    def died(self, at, rank, row, arrived=0):
        self.add(at, Died(Rank(rank), Row(row), "signal 9", arrived=Round(arrived)))


ALL = {0: 0, 1: 1, 2: 2}


def kill(at, rank, do="kill", gone_at=None):
    return Struck(do, Rank(rank), Nanos(int(at)), gone_at)


def test_a_kill_is_measured_on_one_clock():
    journal = Journal()
    journal.steady(1, 8, ALL)
    journal.died(8.51 * S, 2, 2, arrived=8)
    journal.steady(9, 16, {0: 0, 1: 1})
    blow = kill(8.5 * S, 2, gone_at=Nanos(int(8.504 * S)))
    told = measure(journal.records, [blow])
    (after,) = told.aftermaths
    assert after.detected_ns == pytest.approx(10 * MS)
    assert after.gone_ns == pytest.approx(4 * MS)
    assert after.next_commit_windows == pytest.approx(0.501)
    assert after.lost_picks == pytest.approx(4.99), "half a window less the reduce"
    assert (after.out_ns, after.rejoin_windows, after.start_ns) == (None, None, None)
    assert after.picks_later / after.ideal_later == pytest.approx(1.0)
    # Lost: what the dead rank had trained, and what it could not train counts for nobody.
    assert told.goodput == pytest.approx((4 * 30 + 8 * 20) / (4.499 * 30 + 7.501 * 20), rel=1e-3)


def test_a_kill_inside_a_reduce_costs_nothing_and_says_how_long_the_others_took():
    journal = Journal()
    journal.steady(1, 8, ALL)
    journal.window(9, 9 * S, ALL)
    journal.died(9 * S + 5 * MS, 1, 1, arrived=9)
    journal.steady(10, 13, {0: 0, 2: 2})
    (after,) = measure(journal.records, [kill(9 * S + MS // 2, 1)]).aftermaths
    assert after.out_ns == MS // 2
    assert after.lost_picks == pytest.approx(0.0, abs=0.01)


def test_a_return_is_over_with_the_first_commit_of_the_new_incarnation():
    journal = Journal()
    journal.steady(1, 8, ALL)
    journal.died(8.6 * S, 2, 2, arrived=8)
    journal.add(8.7 * S, Spawn(Rank(2), Row(3)))
    journal.add(8.8 * S, Ready(Rank(2), Row(3), "d", 8, 0, 9, "cpu"))
    journal.window(9, 9 * S, {0: 0, 1: 1})
    journal.add(9 * S, Rejoined(Rank(2), Row(3), 1, Round(10), ""))
    journal.window(10, 9.2 * S, {0: 0, 1: 1}, picks=2)
    journal.window(11, 10.2 * S, {0: 0, 1: 1, 2: 3})
    (after,) = measure(journal.records, [kill(8.5 * S, 2)]).aftermaths
    assert after.rejoin_windows == pytest.approx(1.701)
    assert after.start_ns == pytest.approx(100 * MS)


def test_a_rank_whose_numbers_were_refused_lives():
    journal = Journal()
    journal.steady(1, 8, ALL)
    refused = Arrived(Rank(1), Row(1), Round(9), 0, 10, 0, refused=True)
    journal.add(9 * S, refused)
    journal.steady(9, 12, ALL)
    (after,) = measure(journal.records, [kill(8.5 * S, 1, do="nan")]).aftermaths
    assert after.detected_ns == 0.5 * S
    assert after.lost_picks is None


def test_what_cannot_be_measured_is_said():
    journal = Journal()
    journal.steady(1, 4, ALL)
    with pytest.raises(WeBroke, match="too few"):
        measure(journal.records, [])
    with pytest.raises(WeBroke, match="no free run"):
        measure([], [])


# ---- rows ------------------------------------------------------------------------------------


def figures(*after):
    return FaultFigures(after, goodput=0.95, rates=(1.0,))


def test_a_row_is_over_all_blows_of_its_runs_and_leaves_out_what_there_is_not():
    runs = [
        figures(Aftermath(detected_ns=4 * MS, next_commit_windows=0.5, lost_picks=2.0)),
        figures(
            Aftermath(detected_ns=8 * MS, out_ns=30 * MS, next_commit_windows=1.25, lost_picks=0.0)
        ),
    ]
    row = row_of("sigkill", runs)
    assert tuple(row)[: len(KEYS)] == KEYS
    assert (row["detected_ms_p50"], row["detected_ms_p99"]) == (4.0, 8.0)
    assert (row["out_ms_p99"], row["next_commit_windows"]) == (30.0, 1.25)
    assert (row["work_lost_picks"], row["rejoin_windows"], row["he_after"]) == (1.0, None, None)
    assert (row["blows"], row["blows_in_reduce"], row["runs"]) == (2, 1, 2)


def test_the_file_its_rows_and_the_gates(tmp_path, monkeypatch, capsys):
    asked = []

    def run_once(case, effort, seed):
        asked.append((case.fault, effort.quick, seed))
        return figures(Aftermath(detected_ns=30 * MS, next_commit_windows=1.0))

    monkeypatch.setattr(faults, "run_once", run_once)
    monkeypatch.setattr(faults, "preload", lambda: None)
    target = tmp_path / "faults.json"
    assert main(["--quick", "--json", str(target), "--seed", "7"]) == 0
    assert asked == [(fault, True, 7) for fault in ("sigkill", "sigstop", "rejoin", "mtbf")]
    told = json.loads(target.read_text())
    assert told["schema"] == 1
    assert all(set(KEYS) <= set(row) for row in told["rows"])
    out = capsys.readouterr().out
    assert "sigkill: detected_ms_p99 30, at most 20: MISSED" in out
    assert "mtbf: goodput 0.95, at least 0.9: held" in out
    assert "he_after" not in out, "there is no verdict on a figure that there is none of"
    asked.clear()
    assert main(["--fault", "nan", "--repeats", "2"]) == 0
    assert asked == [("nan", False, 0), ("nan", False, 1)]


def test_cases_are_the_named_ones(tmp_path):
    assert [case.fault for case in CASES] == [
        "sigkill", "sigkill_256mib", "sigstop", "exception", "nan", "rejoin", "mtbf",
    ]  # fmt: skip
    for case in CASES:
        for effort in (QUICK, FULL):
            config = config_of(case, effort, seed=1, root=tmp_path)
            assert config.survival.restarts == case.restarts
            floats = int(config.script_args[1])
            assert floats * 4 == case.replica_mib * MIB
        assert blows_of(case, FULL)
    # One after the other until one is left.
    assert len(CASES[0].full) == len(CASES[0].step_ms) - 1


# ---- who is struck when ------------------------------------------------------------------------


def test_a_run_is_followed_through_its_journal(tmp_path):
    follower = RunFollower(tmp_path)
    follower.look()
    assert follower.place is None
    place = tmp_path / "20260101-000000-x"
    (place / "ranks" / "rank1").mkdir(parents=True)
    (place / "ranks" / "rank1" / "pid").write_text("4711 0\n")
    journal = Journal(ranks=2)
    journal.steady(1, 2, {0: 0, 1: 1})
    journal.add(3 * S, Issued(Round(3), 0, Rank(0), 10, {}, ""))
    journal.add(3 * S, Arrived(Rank(0), Row(0), Round(3), 1, 1, 1))
    body = b"\n".join([b"{}", *map(msgspec.json.encode, journal.records)])
    (place / "journal.jsonl").write_bytes(body[:-7])
    follower.look()
    (place / "journal.jsonl").write_bytes(body + b"\n")
    follower.look()
    assert (follower.training, follower.window_s) == ([0, 1], 1.0)
    assert follower.pid(Rank(1)) == 4711
    assert not follower.in_reduce
    late = Journal(ranks=0)
    late.add(3 * S, Arrived(Rank(1), Row(1), Round(3), 1, 1, 1))
    late.died(4 * S, 1, 1)
    with (place / "journal.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(late.records[0]) + b"\n")
        file.flush()
        follower.look()
        assert follower.in_reduce
        file.write(msgspec.json.encode(late.records[1]) + b"\n")
        file.write(msgspec.json.encode(Record("action", Nanos(5 * S), End("ok", 0, ""))) + b"\n")
    follower.look()
    assert (follower.training, follower.ended) == ([0], True)


def test_blows_are_written_down_in_order(tmp_path):
    assert struck_in(tmp_path) == []
    for at in (5, 3):
        note(tmp_path, kill(at, 1))
    assert [struck.at for struck in struck_in(tmp_path)] == [3, 5]


# ---- for real --------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.procs
def test_a_real_row_is_measured(tmp_path):
    target = tmp_path / "faults.json"
    words = ("--quick", "--fault", "rejoin", "--fault", "exception", "--json", str(target))
    done = subprocess.run(
        [sys.executable, "-m", "flodl_shm.bench.faults", *words],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    raised, rejoin = json.loads(target.read_text())["rows"]
    # Only that they are of this world: a shared machine may make anything late.
    for row in (raised, rejoin):
        assert row["blows"] >= 3
        assert 0 < row["detected_ms_p99"] < 5000
        assert row["next_commit_windows"] > 0
        assert 1 < row["rejoin_windows"] < 20
    assert not list(tmp_path.glob("bench-faults-*")), "the run directories are gone"
