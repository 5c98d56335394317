"""Into its run a rank's trainings go one at a time, and none after one that failed half-way.

The other ranks wait for what this one has begun, so a script that catches an error of its
training, or calls run() in two threads, must not make them wait for ever. In a process that
trains alone nobody waits, and there is no turnstile.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from flodl_shm.errors import BadConfig
from flodl_shm.train.gpu_worker import GpuWorker

if TYPE_CHECKING:
    from flodl_shm.train.job import Job
    from flodl_shm.train.session import Session
    from flodl_shm.train.state import TrainedState


class Turnstile:
    """`enter` it, then `train` with the worker it gives, in whichever thread.

    Who drives the worker himself says `leave` where `train` would have returned or raised.
    """

    def __init__(self, session: Session) -> None:
        """Of this process, and of no copy of it that the script forks."""
        self._session = session
        self._pid = os.getpid()
        self._free = threading.Lock()
        self._failure: BaseException | None = None

    def enter(self, job: Job) -> GpuWorker:
        """Close it behind us. Raises what an earlier training raised in its middle, if one did.

        Raises BadConfig while another one is under way, and in a forked copy of the rank.
        """
        if os.getpid() != self._pid:
            raise BadConfig(
                "a process that a rank has forked cannot train in its place",
                hint="Call run() in the rank itself.",
            )
        if self._failure is not None:
            raise self._failure
        if not self._free.acquire(blocking=False):
            raise BadConfig(
                "another training is still under way in this rank",
                hint="Wait for its end before the next one: join() does after start().",
            )
        return GpuWorker(job, self._session)

    def train(self, worker: GpuWorker) -> TrainedState:
        """Run it to its end and open again."""
        try:
            state = worker.run()
        except BaseException as error:
            self.leave(worker, error)
            raise
        self.leave(worker)
        return state

    def leave(self, worker: GpuWorker, failure: BaseException | None = None) -> None:
        """Open again. After a `failure` that others wait for, nobody passes any more."""
        if failure is not None and worker.is_awaited:
            self._failure = failure
        self._free.release()
