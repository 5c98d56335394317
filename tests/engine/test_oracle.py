"""Kills at any moment, compared with one process that repeats the record; scripts/soak has more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KILLS = 12
pytestmark = pytest.mark.procs


def test_after_a_kill_the_survivors_hold_what_one_process_would_have_trained(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "oracle_kills.py", tmp_path, "--kills", str(KILLS), "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    total = json.loads(done.stdout.splitlines()[-1])
    assert total["kills"] >= KILLS
    assert total["inside"] >= 1, "a kill that never falls inside of a reduce proves less"
    assert total["deaths"] >= KILLS // 2
    assert total["apart"] <= 1e-6
