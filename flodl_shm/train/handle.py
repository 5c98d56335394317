"""A training in the background: what `Trainer.start()` gives.

The worker runs in a thread of its own, as it would run in the caller's; the script may look at
its figures meanwhile, ask it to stop, and must in the end wait for it. In a rank the others go on
with it: what one asks for ends the run for all.
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from flodl_shm.control.messages import EpochMetrics
    from flodl_shm.train.gpu_worker import GpuWorker
    from flodl_shm.train.state import TrainedState

_open: list[Handle] = []  # started, and nobody has waited for their end


class Handle:
    """One training under way. For use by one thread at a time."""

    def __init__(self, worker: GpuWorker, train: Callable[[], TrainedState]) -> None:
        """Start it: `train` runs the worker. A script that ends without `join` waits for it."""
        self._worker, self._train = worker, train
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flodl-train")
        if not _open:
            atexit.unregister(_show_unheard)
            atexit.register(_show_unheard)
        _open.append(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once `join` would return, or raise, at once."""
        return not self._thread.is_alive()

    def poll_metrics(self) -> list[EpochMetrics]:
        """Epochs that have closed since the last call, in order. Never blocks.

        An epoch that is evaluated comes a second time, then with its value.
        """
        came = []
        while self._worker.metrics:
            came.append(self._worker.metrics.popleft())
        return came

    def abort(self) -> None:
        """Ask for the end after the window under way. On all ranks; returns at once."""
        if not self.done:
            self._worker.ask_to_stop("abort() was called")

    def join(self, timeout_s: float | None = None) -> TrainedState:
        """The state when the training is over; `status` is "stopped" if it was cut short.

        Raises what the training raised, and TimeoutError if it still runs after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if not self.done:
            raise TimeoutError(f"the training still runs after {timeout_s:g} s")
        if self in _open:
            _open.remove(self)
        if self._error is not None:
            raise self._error
        assert self._state is not None
        return self._state

    def _run(self) -> None:
        try:
            self._state = self._train()
        except BaseException as error:  # for whoever joins: a thread has nobody above it
            self._error = error


def join_all() -> None:
    """At a script's end: wait for what it has not waited for. Raises what that raised."""
    while _open:
        _open[0].join()


def _show_unheard() -> None:
    """A failure that nobody has asked about must not pass in silence."""
    for handle in _open:
        if handle._error is not None:
            print("a training started with start() has failed:", file=sys.stderr)
            traceback.print_exception(handle._error)
