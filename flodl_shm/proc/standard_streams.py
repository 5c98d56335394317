"""The three standard streams of a process that was started without some of them.

`command >&-` leaves descriptor 1 free, and the next file that is opened becomes it: whatever
writes to stdout then writes into that file. Python's sys.stdout is None at the same time.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_NAMES: Final = ("stdin", "stdout", "stderr")


def fill_standard_streams() -> None:
    """Put /dev/null where there is nothing; what is there stays."""
    for fd, name in enumerate(_NAMES):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this very one
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            stream = open(fd, "w" if fd else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
