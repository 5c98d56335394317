"""What answers at once must not import what takes a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "sklearn", "scipy")
LIGHT = [
    "import flodl_shm",
    "import flodl_shm.cli.main, flodl_shm.run, flodl_shm.__main__, flodl_net.cli",
    "import flodl_shm.control.coordinator, flodl_shm.workloads",
    "import flodl_shm.engine.launch",  # a launcher computes nothing and takes no device
    "import flodl_shm.obs.progress, flodl_shm.obs.summary, flodl_shm.obs.run_dir",
    "from flodl_shm.cli.main import main_run; main_run(['--dry-run', '--json'])",
    "from flodl_shm.cli.main import main; main(['run', '--help'])",
    "from flodl_shm.cli.main import main; main(['clean'])",
    "from flodl_shm.cli.main import main; main(['selftest', '--help'])",
    "from flodl_shm.cli.main import main; main(['status', 'no']); main(['replay', 'no'])",
    "import flodl_shm.obs.run_state, flodl_shm.obs.replay, flodl_shm.engine.view",
]


@pytest.mark.procs
def test_light_commands_import_nothing_heavy():
    """One process for all of them: each adds to the same sys.modules."""
    lines = [f"{code}\nassert not heavy(), ({code!r}, heavy())" for code in LIGHT]
    head = f"import sys\nheavy = lambda: [m for m in {HEAVY} if m in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([head, *lines])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
