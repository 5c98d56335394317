"""bench-start: the commands it gives, the stamps it reads, the rows it makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flodl_shm.bench import start
from flodl_shm.bench.start import Start, line_of, our_command, row_of, torchrun_command
from flodl_shm.errors import HostUnfit

STAMPER = """
import sys, time, pathlib
here = pathlib.Path(__file__)
for rank in range(int(sys.argv[1])):
    here.with_name(f"stamp-{rank}").write_text(str(time.monotonic_ns()))
print("said", flush=True)
sys.exit(7)
"""


def test_a_row_is_medians_and_the_median_of_the_ratios():
    starts = [Start(2.0, 4.0, 1.5), Start(3.0, 10.0, 2.5), Start(1.0, 5.0, 0.5)]
    row = row_of(4, starts)
    assert row == {"ranks": 4, "ours_s": 2.0, "torchrun_s": 5.0, "ratio": 0.3, "startup_s": 1.5}
    assert line_of(row).split() == ["4", "2.00", "5.00", "0.30", "1.50"]


def test_torchrun_stays_on_the_loopback(tmp_path):
    command = torchrun_command(4, tmp_path / "train.py", 4567)
    for option, value in (
        ("--local-addr", "127.0.0.1"),
        ("--master-addr", "127.0.0.1"),
        ("--master-port", "4567"),
        ("--nproc-per-node", "4"),
    ):
        assert command[command.index(option) + 1] == value
    assert command[-2:] == [str(tmp_path / "train.py"), "torchrun"]


def test_our_run_keeps_its_files_together(tmp_path):
    command = our_command(2, tmp_path / "train.py")
    assert command[command.index("--devices") + 1] == "cpu,cpu"
    assert command[command.index("--run-dir") + 1] == str(tmp_path / "runs")
    assert command[-2:] == [str(tmp_path / "train.py"), "ours"]


@pytest.mark.procs
def test_the_last_stamp_counts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STAMPER)
    taken, code, printed = start._time([sys.executable, str(script), "3"], tmp_path, 3)
    assert 0 < taken < start.LIMIT_S
    assert (code, printed) == (7, "said\n")


@pytest.mark.procs
def test_a_rank_without_a_step_is_a_failure(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STAMPER)
    with pytest.raises(HostUnfit, match="2 of 3 ranks made a step"):
        start._time([sys.executable, str(script), "2"], tmp_path, 3)


@pytest.mark.procs
def test_a_hanging_start_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "LIMIT_S", 0.2)
    with pytest.raises(HostUnfit, match=r"no end after 0\.2 s"):
        start._time([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 1)


def test_repeats_take_turns(monkeypatch):
    told = []
    monkeypatch.setattr(start, "time_ours", lambda ranks: told.append("ours") or (1.0, 0.5))
    monkeypatch.setattr(start, "time_torchrun", lambda ranks: told.append("theirs") or 4.0)
    row = start.run_row(4, 40, seed=0)
    assert row["ratio"] == 0.25
    firsts = told[::2]
    assert told.count("ours") == told.count("theirs") == 40
    assert {"ours", "theirs"} <= set(firsts)


def test_the_script_parses():
    compile(start.SCRIPT.read_text(), str(start.SCRIPT), "exec")


def test_a_failure_is_one_sentence(monkeypatch, capsys):
    def fail(*_, **__):
        raise HostUnfit("2 of 4 ranks made a step")

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(start, "run_row", fail)
    assert start.main(["--quick"]) == HostUnfit.exit_code
    assert "error: 2 of 4 ranks made a step" in capsys.readouterr().err
