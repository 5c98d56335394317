"""Start and stop again and again in one process: nothing grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

WARM = 5  # runs until caches of the interpreter are filled
RSS_KIB = 40  # per cycle at most: allocators keep a little, a leaked ring alone is 128


@pytest.mark.soak
def test_descriptors_threads_segments_and_memory_do_not_grow(tmp_path, request):
    count = request.config.getoption("--cycles")
    out = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cycles.py")), str(tmp_path), str(count)],
        capture_output=True,
        text=True,
        timeout=60 + 10 * count,
    )
    assert out.returncode == 0, out.stderr[-4000:]
    cycles = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    assert len(cycles) == count
    assert {cycle["code"] for cycle in cycles} == {0}
    for what in ("fds", "threads", "python_threads", "segments", "children"):
        assert len({cycle[what] for cycle in cycles[WARM:]}) == 1, [c[what] for c in cycles]
    assert cycles[-1]["names"] == cycles[0]["names"]
    grown = cycles[-1]["rss_kib"] - cycles[WARM]["rss_kib"]
    assert grown < RSS_KIB * (count - WARM), [cycle["rss_kib"] for cycle in cycles]
