"""Makes checkpoints visible, in a thread of the launcher: the loop must not wait for a disk.

Publishing and dropping happen in the order asked for; what came of a publishing is an event to be
taken by the loop, which `wake` calls. A failure is told and never raised. It does not know when a
save is complete: the coordinator does.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from flodl_shm.control.messages import DropSave, Publish, Published
from flodl_shm.errors import FlodlError
from flodl_shm.train.checkpoint import folder
from flodl_shm.train.checkpoint.durable import why
from flodl_shm.train.checkpoint.names import work_folder
from flodl_shm.train.checkpoint.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Publisher:
    """One run's checkpoints under `stem` (absolute); all but the newest `keep` are removed.

    `keep` None: all stay. Raises HostUnfit when the place cannot be written.
    """

    def __init__(self, stem: Path, run_id: str, keep: int | None, wake: Callable[[], None]) -> None:
        self.stem = stem
        self._run_id, self._keep, self._wake = run_id, keep, wake
        self._owner = Owner(stem, run_id)
        self._work: deque[Publish | DropSave] = deque()
        self._done: deque[Published] = deque()
        self._changed = threading.Condition()
        self._is_busy = False  # there is a thread, and it has not seen an empty queue yet

    def folder_of(self, save: int) -> Path:
        """Where ranks put their parts of a save; they make it themselves."""
        return work_folder(self.stem, self._run_id, save)

    def publish(self, order: Publish) -> None:
        """Have it done; a Published event will say how it went."""
        self._enqueue(order)

    def drop(self, order: DropSave) -> None:
        """Have it removed; nothing is said of it."""
        self._enqueue(order)

    def take(self) -> list[Published]:
        """What has been done since the last call, in order."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
        return done

    def close(self, timeout_s: float) -> bool:
        """Finish what was asked for, remove what was not, let go of the place. Idempotent.

        The ranks must be gone. False when the disk takes longer than `timeout_s`: the place stays
        this run's until the process ends, and the next run tidies up.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy, timeout_s):
                return False
        try:
            for work in self._owner.work_folders():
                folder.drop(work)
        except OSError:
            pass  # the next run that saves here says so
        self._owner.release()
        return True

    def _enqueue(self, order: Publish | DropSave) -> None:
        with self._changed:
            self._work.append(order)
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="flodl-publish", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                order = self._work.popleft()
            if isinstance(order, DropSave):
                self._drop(order.save)
                continue
            told = self._publish(order)
            with self._changed:
                self._done.append(told)
            self._wake()

    def _publish(self, order: Publish) -> Published:
        work = self.folder_of(order.save)
        try:
            made = folder.publish(self.stem, work, order.meta, order.files)
        except Exception as error:  # the coordinator waits for an answer, whatever it is
            self._drop(order.save)
            return Published(save=order.save, error=f"the checkpoint was not made: {_words(error)}")
        text = ""
        if self._keep is not None:
            try:
                folder.prune(self.stem, work, self._keep, besides=made)
            except Exception as error:
                text = (
                    f"{made.name} is there, but an older one could not be removed: {_words(error)}"
                )
        return Published(save=order.save, folder=str(made), error=text)

    def _drop(self, save: int) -> None:
        try:
            folder.drop(self.folder_of(save))
        except OSError:
            pass  # invisible in any case; `close` tries again, then the next run


def _words(error: Exception) -> str:
    return error.what if isinstance(error, FlodlError) else why(error)
