"""A real run looked at from outside: under way, after a kill of a rank, and of its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flodl_shm.cli.main import main

pytestmark = pytest.mark.procs
LIMIT_S = 60.0


def status_once(capsys, place, holds):
    """What `status --json` says, once `holds` of it."""
    deadline, told = time.monotonic() + LIMIT_S, None
    while time.monotonic() < deadline:
        capsys.readouterr()
        if main(["status", "--json", "--run-dir", str(place / "runs")]) == 0:
            told = json.loads(capsys.readouterr().out)
            if holds(told):
                return told
        time.sleep(0.05)  # the run goes on meanwhile; there is nothing to wait on from outside
    raise AssertionError(f"never came true: {told}")


def test_a_run_is_seen_as_it_is_and_its_journal_replays(launches, tmp_path, capsys):
    words = "--workload paced --ranks 3 --step-ms 5,10,5 --picks 100000 --progress none"
    run = subprocess.Popen(
        [sys.executable, "-m", "flodl_shm.run", *words.split()],
        cwd=tmp_path,
        env=launches.environment(tmp_path),
    )
    try:
        told = status_once(capsys, tmp_path, lambda told: told["picks"] > 50)
        assert (told["state"], told["launcher_pid"], told["ranks_alive"]) == ("running", run.pid, 3)
        assert told["last_commit_age_s"] < 30
        assert told["epoch"] == 0
        assert 0 < told["progress"] < 1
        os.kill(told["ranks"][2]["pid"], signal.SIGKILL)
        told = status_once(capsys, tmp_path, lambda told: told["deaths"])
        assert [rank["state"] for rank in told["ranks"]] == ["alive", "alive", "lost"]
        assert told["deaths"][0]["cause"].startswith("signal 9")
        picks = told["picks"]
        told = status_once(capsys, tmp_path, lambda told: told["picks"] > picks + 50)
        assert told["ranks"][0]["rss_mib"] > 10
    finally:
        run.kill()
        run.wait(LIMIT_S)
    told = status_once(capsys, tmp_path, lambda told: told["state"] == "killed")
    assert told["ranks_alive"] == 0
    assert main(["replay", "--json", str(tmp_path / "runs")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"]
    assert not told["complete"]
    assert told["actions"] > 50


def test_a_run_to_its_end_replays_too(launches, capsys):
    end = launches.submit(
        "replayed", "--workload", "paced", "--ranks", "2", "--step-ms", "2,4", "--picks", "60"
    ).result()
    assert end.code == 0, str(end)
    assert main(["replay", "--json", str(end.run_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["complete"]
    path = end.run_dir / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"type":"Committed"' in line)
    lines[place] = lines[place].replace(b'"global_step":', b'"global_step":1')
    path.write_bytes(b"".join(lines))
    assert main(["replay", str(end.run_dir)]) == 1
    assert f"(line {place + 1})" in capsys.readouterr().out
