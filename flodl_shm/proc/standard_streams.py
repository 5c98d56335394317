"""The three standard streams of a process that was started without some of them.

`command >&-` leaves descriptor 1 free, and the next file that is opened becomes it: whatever
writes to stdout then writes into that file. Python's sys.stdout is None at the same time.

And the output streams of a process that is forked, or forks, while its threads print.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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


class WholeWriter(io.FileIO):
    """Writes all it is given at once, and has no lock.

    Python's buffered writer has one. A process forked while some thread prints inherits it held,
    by a thread that is not there, and waits for it for ever at its first line: a loader's worker
    in a rank whose threads log.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, data: ReadableBuffer) -> int:
        """The number of bytes, which is all of them.

        Raises:
            BlockingIOError: The descriptor was made non-blocking and is full; says how many went.
        """
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            # None from a full descriptor that does not block, which the signature hides.
            written: int | None = super().write(left)
            if written is None:
                raise BlockingIOError(
                    errno.EAGAIN, "write would block: the descriptor is full", size - len(left)
                )
            left = left[written:]
        return size


def line_writer(fd: int) -> TextIO:
    """A line-buffered stream: a killed process loses no whole line, an odd character kills none."""
    return io.TextIOWrapper(
        WholeWriter(fd),  # as `python -u` has it: no buffer between
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
