"""What the system refuses for want of something, told as what this machine lacks.

Files, descriptors, processes and memory are asked for all over a run, and each of these calls may
be the one that gets no more. It is the machine's fault and not ours, wherever it happens.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from flodl_shm.errors import HostUnfit

if TYPE_CHECKING:
    from collections.abc import Iterator

_DISK: Final = "Make room, for files too, not only for bytes; or write elsewhere: --run-dir DIR."
_FILES: Final = "Raise the limit of open files, ulimit -n; or use fewer ranks."
_PROCESSES: Final = "Raise ulimit -u, or the container's limit of processes."

WAYS_OUT: Final = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: "Free some memory; or use a smaller model or fewer ranks.",
}


@contextmanager
def scarcity_told() -> Iterator[None]:
    """Raise HostUnfit instead of an OSError that says that there is no more of something."""
    try:
        yield
    except OSError as error:
        hint = WAYS_OUT.get(error.errno or 0)
        if hint is None:
            raise
        place = f": {error.filename}" if error.filename is not None else ""
        raise HostUnfit(f"{error.strerror}{place}", hint=hint) from error
