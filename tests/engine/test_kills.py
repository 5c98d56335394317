"""kill -9 anywhere: real processes, real signals, short paced runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KILLS = 10  # a batch; five batches run
pytestmark = pytest.mark.procs


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "flodl" in name}


def processes_of(mark: str) -> list[int]:
    """Processes whose environment names the directory `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if mark.encode() in environ and state != "Z":
                found.append(int(entry.name))
    return found


def many_runs(tmp_path: Path, seed: int, runs: int) -> list[dict[str, Any]]:
    out = subprocess.run(
        [sys.executable, str(HERE / "many_runs.py"), str(tmp_path), str(seed), str(runs)],
        capture_output=True,
        text=True,
        timeout=60 + 10 * runs,
        env={**os.environ, "TEST_MARK": str(tmp_path)},
    )
    assert out.returncode == 0, out.stderr[-4000:]
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def check(run: dict[str, Any]) -> None:
    summary = json.loads(Path(run["summary"]).read_text())
    said = str(run)
    assert run["exit"] == 0, said
    assert summary["status"] == "ok", said
    for epoch in summary["coverage"]:
        assert epoch["done_once"] == epoch["picks"] == 80, said
        assert epoch["duplicated"] == epoch["missing"] == 0, said
    assert len(summary["coverage"]) == 2, said
    assert summary["params_sha256"], said
    assert summary["survivors"] == run["ranks"] - len(summary["deaths"]), said


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3, 4))]
)
def test_a_rank_killed_at_any_moment_costs_only_itself(tmp_path: Path, seed: int) -> None:
    before = shm_names()
    runs = many_runs(tmp_path, seed, KILLS)
    assert len(runs) == KILLS
    for run in runs:
        check(run)
    deaths = [len(json.loads(Path(run["summary"]).read_text())["deaths"]) for run in runs]
    assert sum(deaths) >= KILLS // 3, f"too few kills hit a training rank: {deaths}"
    assert shm_names() == before
    assert processes_of(str(tmp_path)) == []


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flodl_shm.run", "--run-dir", str(tmp_path / "runs"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TEST_MARK": str(tmp_path)},
        start_new_session=True,
    )


PACED = ("--workload", "paced", "--ranks", "2", "--step-ms", "5,10")


def await_file(root: Path, pattern: str, timeout_s: float = 60.0) -> Path:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = sorted(root.glob(pattern))
        if found:
            return found[0]
        time.sleep(0.005)
    raise AssertionError(f"no {pattern} under {root} within {timeout_s} s")


def await_commit(root: Path) -> None:
    journal = await_file(root, "runs/2*/journal.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if b'"Committed"' in journal.read_bytes():
            return
        time.sleep(0.02)
    raise AssertionError("no commit within 60 s")


def assert_nothing_left(tmp_path: Path, before: set[str], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not processes_of(str(tmp_path)) and shm_names() <= before:
            return
        time.sleep(0.02)
    raise AssertionError(f"left: {processes_of(str(tmp_path))} {shm_names() - before}")


MOMENTS = (0.05, 0.3, 0.8, "pid", "pid+", "pid++", "commit", "commit+", "commit++", "commit+++")


@pytest.mark.parametrize("after_s", MOMENTS)
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, after_s: float | str) -> None:
    before = shm_names()
    process = start(tmp_path, *PACED, "--picks", "100000")
    try:
        if isinstance(after_s, float):
            time.sleep(after_s)  # a moment of the start, which has no mark to wait for
        elif after_s.startswith("pid"):
            await_file(tmp_path, "runs/2*/ranks/rank1/pid")
        else:
            await_commit(tmp_path)
        time.sleep(0.37 * str(after_s).count("+"))
        process.kill()
        process.wait(10)
        assert_nothing_left(tmp_path, before)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_window_and_dies_of_it(tmp_path: Path, signum: int) -> None:
    before = shm_names()
    process = start(tmp_path, *PACED, "--picks", "100000", "--summary", "s.json")
    try:
        await_commit(tmp_path)
        process.send_signal(signum)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signum, out + err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["params_sha256"]
    assert_nothing_left(tmp_path, before)


def test_two_signals_end_it_now(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "--workload",
        "paced",
        "--step-ms",
        "20000,20000",
        "--ranks",
        "2",
        "--picks",
        "100",
    )
    try:
        await_file(tmp_path, "runs/2*/ranks/rank1/pid")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two signals of one number in one instant are one signal
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT


def test_a_stopped_rank_is_given_up_and_a_short_stop_is_not(tmp_path: Path) -> None:
    process = start(tmp_path, *PACED, "--picks", "700", "--dead-after", "2", "--summary", "s.json")
    try:
        await_commit(tmp_path)
        pid = int(await_file(tmp_path, "runs/2*/ranks/rank1/pid").read_text().split()[0])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.7)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert [death["rank"] for death in summary["deaths"]] == [1]
    assert summary["coverage"][0]["done_once"] == 700
