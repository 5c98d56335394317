"""bench-reduce: rows are medians of ratios, ranks agree with each other and with torch."""

from __future__ import annotations

import json
import sys

import pytest
from torch import nn

from flodl_shm.bench import reduce, reduce_model, reduce_mpi
from flodl_shm.bench.reduce import FULL, QUICK, Case, line_of, main, row_of, run_case
from flodl_shm.errors import HostUnfit

KEYS = {
    "mib",
    "ranks",
    "arena_ms",
    "gloo_ms",
    "copy_ms",
    "x_gloo",
    "x_copy",
    "p90_p50",
    "identical",
    "first_x",
}


def whole(case, *, first_x=1.5, identical=True):
    row = row_of(case, [0.001, 0.002], [0.01, 0.01], [0.002, 0.002])
    return {**row, "identical": identical, "first_x": first_x}


def test_a_row_has_medians_and_medians_of_the_reps_ratios():
    row = row_of(Case(16, 2, 3), [0.001, 0.002, 0.005], [0.01, 0.01, 0.01], [0.002, 0.002, 0.002])
    assert row == {
        "mib": 16,
        "ranks": 2,
        "arena_ms": pytest.approx(2.0),
        "gloo_ms": pytest.approx(10.0),
        "copy_ms": pytest.approx(2.0),
        "x_gloo": pytest.approx(5.0),
        "x_copy": pytest.approx(1.0),
        "p90_p50": pytest.approx(2.5),
    }


def test_the_quick_rows_attach_once_and_the_full_ones_more_often():
    assert [(case.mib, case.ranks) for case in QUICK] == [
        *((mib, 2) for mib in (1, 16, 64, 256)),
        *((mib, 4) for mib in (1, 16, 64)),
    ]
    assert {case.attaches for case in QUICK} == {1}
    assert {(case.mib, case.ranks) for case in QUICK} < {(case.mib, case.ranks) for case in FULL}


def test_the_first_round_is_the_median_of_several_attaches(monkeypatch):
    asked, firsts = [], iter((4.0, 1.0, 2.0))

    def measured(case):
        asked.append(case.reps)
        return {"mib": case.mib}, next(firsts)

    monkeypatch.setattr(reduce, "_measure", measured)
    assert run_case(Case(1, 2, 30, attaches=3)) == {"mib": 1, "first_x": 2.0}
    assert asked == [30, reduce.TRIED_REPS, reduce.TRIED_REPS]


def test_the_file_and_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reduce, "run_case", whole)
    assert main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["schema"] == 1
    assert told["host"]["cores"] >= 1
    assert len(told["rows"]) == len(QUICK)
    assert all(set(row) == KEYS for row in told["rows"])
    assert "256 2: first_x 1.5, at most 2: held" in capsys.readouterr().out


def test_different_bits_are_a_failure_and_so_is_a_rank(monkeypatch, capsys):
    monkeypatch.setattr(reduce, "run_case", lambda case: whole(case, identical=False))
    assert main(["--quick"]) == 1
    assert "RANKS DIFFER" in capsys.readouterr().out

    def fail(case):
        raise HostUnfit("rank 1 ended with status 9")

    monkeypatch.setattr(reduce, "run_case", fail)
    assert main(["--quick"]) == HostUnfit.exit_code
    assert "rank 1 ended" in capsys.readouterr().err


def test_the_full_run_has_models_and_says_that_there_is_no_mpi(monkeypatch, capsys):
    monkeypatch.setattr(reduce, "run_case", whole)
    row = {**reduce_model.row_of("tiny", 2, [0.01], [0.09]), "identical": True}
    monkeypatch.setattr(reduce_model, "run_case", lambda case: row)
    monkeypatch.setattr(reduce_mpi, "why_not", lambda: "mpi4py is not installed")
    rows = reduce.measure_all(quick=False)
    assert len(rows) == len(FULL) + len(reduce_model.CASES)
    out = capsys.readouterr().out
    assert "mpi left out: mpi4py is not installed" in out
    assert "tiny" in out


@pytest.mark.procs
def test_a_case_is_measured():
    row = run_case(Case(1, 2, 2))
    assert set(row) == KEYS
    assert row["identical"]
    assert all(row[key] > 0 for key in KEYS)
    assert line_of(row).split()[:2] == ["2", "1"]


# ---- against torch's averager ------------------------------------------------------------------


def test_the_model_is_the_named_one():
    sizes = [param.numel() for param in reduce_model.make_model().parameters()]
    assert len(sizes) == 121
    assert sum(sizes) * 4 == pytest.approx(63e6, rel=0.01)


def test_a_model_row_is_the_median_of_the_reps_ratios():
    row = reduce_model.row_of("tiny", 2, [0.001, 0.002, 0.002], [0.01, 0.01, 0.04])
    assert row == {
        "model": "tiny",
        "ranks": 2,
        "ours_ms": pytest.approx(2.0),
        "pma_ms": pytest.approx(10.0),
        "x_pma": pytest.approx(10.0),
    }


@pytest.mark.procs
def test_our_mean_of_a_model_is_torchs():
    row = reduce_model.run_case(
        reduce_model.Case(ranks=2, reps=2), make=lambda: nn.Linear(30, 20), name="tiny"
    )
    assert row["identical"]
    assert row["x_pma"] > 0


@pytest.mark.procs
def test_a_mean_that_is_not_torchs_is_found(monkeypatch, capfd):
    monkeypatch.setattr(reduce_model, "TOLERANCE", -1.0)
    with pytest.raises(HostUnfit, match="ended with status"):
        reduce_model.run_case(reduce_model.Case(2, 1), make=lambda: nn.Linear(3, 2))
    assert "differs from torch's" in capfd.readouterr().err


# ---- against MPI -------------------------------------------------------------------------------


def test_an_mpi_row_is_the_median_of_the_turns_ratios():
    assert reduce_mpi.row_of(16, 2, [(4.0, 1.0), (6.0, 2.0), (6.0, 3.0)]) == {
        "mib": 16,
        "ranks": 2,
        "arena_ms": 2.0,
        "mpi_ms": 6.0,
        "x_mpi": 3.0,
    }


def test_what_is_missing_for_mpi_is_said(monkeypatch):
    monkeypatch.setattr(reduce_mpi.importlib.util, "find_spec", lambda name: None)
    assert reduce_mpi.why_not() == "mpi4py is not installed"
    monkeypatch.setattr(reduce_mpi.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(reduce_mpi.shutil, "which", lambda name, path=None: None)
    assert reduce_mpi.why_not() == "there is no mpiexec"
    monkeypatch.setattr(reduce_mpi.shutil, "which", lambda name, path=None: sys.executable)
    assert reduce_mpi.why_not() == ""


def test_runs_of_both_take_turns(monkeypatch):
    told = []
    monkeypatch.setattr(reduce_mpi, "why_not", lambda: "")
    monkeypatch.setattr(reduce_mpi, "CASES", ((16, 2),))
    monkeypatch.setattr(reduce_mpi, "_mpi_ms", lambda mib, ranks: told.append("mpi") or 8.0)
    ours = reduce_mpi.measure_all(lambda mib, ranks: told.append("ours") or {"arena_ms": 2.0})
    assert told == ["mpi", "ours"] * reduce_mpi.TURNS
    assert ours[0]["x_mpi"] == 4.0


@pytest.mark.procs
def test_an_mpi_that_does_not_run_is_named_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(reduce_mpi, "why_not", lambda: "")
    monkeypatch.setattr(reduce_mpi, "_mpiexec", lambda: "false")
    assert reduce_mpi.measure_all(lambda mib, ranks: {"arena_ms": 1.0}) == []
    assert "mpi left out: mpiexec ended with 1" in capsys.readouterr().out
