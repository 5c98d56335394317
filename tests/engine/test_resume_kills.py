"""kill -9 of a whole run, launcher and ranks, at any moment: what was saved is gone on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("resume_kills.py")
KILLS = 8  # of two trainings; scripts/soak resume has as many as wanted

pytestmark = pytest.mark.procs


def test_killed_anywhere_and_resumed_a_training_ends_as_if_nothing_had_been(tmp_path):
    """Coverage exact, parameters equal under sync, else the loss that of other seeds.

    What is checked after each kill stands in the program: no checkpoint but whole ones is seen.
    """
    before = {name for name in os.listdir("/dev/shm") if "flodl" in name}
    seed = 20
    out = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), "--kills", str(KILLS), "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert out.returncode == 0, f"{out.stdout[-3000:]}\n{out.stderr[-4000:]}"
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    kills = [line for line in lines if line.get("hit")]
    assert len(kills) >= KILLS // 2, lines
    assert any(line["steps"] for line in kills), lines
    assert {name for name in os.listdir("/dev/shm") if "flodl" in name} <= before
