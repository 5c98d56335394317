"""A stem in a folder of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is durable after a power cut cannot be tested here, only waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def stem(tmp_path):
    return tmp_path / "ckpt" / "model"


@pytest.fixture
def mounted(tmp_path):
    """A file system of 2 MiB of its own; skipped where none may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here (needs root)")
    yield place
    subprocess.run(["umount", "-l", place], check=True)
