"""A traceback as the screen shows it: the user's lines, ours in between only counted.

Error files and logs keep the whole. Where the last calls are ours they stay: that is where it
broke, and may be our bug.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import flodl_shm

_ROOT: Final = str(Path(flodl_shm.__file__).parent)
_FRAME: Final = re.compile(r'  File "(.+?)", line \d+')


def without_ours(trace: str, *, root: str = _ROOT) -> str:
    """The text with each run of calls in files below `root` made one line, but for the last."""
    kept: list[str] = []
    ours: list[str] = []  # lines of such calls, not written yet
    calls = 0
    for line in trace.splitlines():
        frame = _FRAME.match(line)
        if frame is not None and frame[1].startswith(f"{root}/"):
            calls += 1
        elif frame is not None:
            if calls:
                kept.append(f"  ... {calls} call{'s' * (calls > 1)} inside flodl_shm")
            ours, calls = [], 0
        elif not line.startswith("    "):  # the error itself, or a new traceback
            kept += ours
            ours, calls = [], 0
        (ours if calls else kept).append(line)
    return "\n".join(kept + ours)
