"""The machine a benchmark ran on, for the head of its JSON file."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, object]:
    """CPU, cores this process may use, memory in bytes, kernel and versions."""
    return {
        "cpu": _first_field(Path("/proc/cpuinfo"), "model name"),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "posix_ipc")},
    }


def _first_field(path: Path, key: str) -> str:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"
