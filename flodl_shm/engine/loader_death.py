"""How a DataLoader's worker ended, for a rank that failed because of it.

torch says that a worker "exited unexpectedly"; which signal it was stands somewhere above, for
forked workers only. Here the worker is asked itself: the loader's iterator is still in a frame of
the traceback, and holds its processes.
"""

from __future__ import annotations

import signal
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from flodl_shm.proc.exit_status import ExitStatus
from flodl_shm.shm.free_memory import survey

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADERS = "torch.utils.data"


def note_dead_workers(error: BaseException) -> None:
    """Add a note to the error for each loader worker that did not end well; it is shown last."""
    for number, worker in enumerate(_workers_behind(error)):
        code = worker.exitcode
        if code:
            who = f"DataLoader worker {number} (pid {worker.pid})"
            error.add_note(f"{who} ended with {_words(code)}")


def _workers_behind(error: BaseException) -> Iterator[Any]:
    """Processes of the loader that was asked for a batch when the error came, in their order."""
    for frame, _ in walk_tb(error.__traceback__):
        iterator: Any = frame.f_locals.get("self")
        if type(iterator).__module__.startswith(LOADERS) and hasattr(iterator, "_workers"):
            yield from iterator._workers
            return


def _words(code: int) -> str:
    """Of an exit code as multiprocessing has it: negative for a signal."""
    if code > 0:
        return f"exit {code}; why, it said in the rank's stderr.log"
    words = ExitStatus(-code, by_signal=True).words()
    if -code == signal.SIGBUS:
        free = survey().shm
        return (
            f"{words}: most likely shared memory is full ({free} bytes are free in /dev/shm now). "
            "Raise --shm-size, or use fewer workers, a smaller prefetch_factor or smaller batches"
        )
    if -code == signal.SIGKILL:
        return f"{words}: somebody killed it, or the kernel did for want of memory"
    return words
