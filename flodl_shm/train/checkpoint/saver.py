"""A rank's part of every save: a copy at once, the files by a thread of its own.

Training goes on as soon as the copies are made. Whatever goes wrong, on the disk or in a state
that no file can hold, is reported and never raised: a save must not cost the training.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flodl_shm.control.messages import PartSaved
from flodl_shm.errors import BadConfig
from flodl_shm.train.checkpoint.durable import make_folder, why, write_durably
from flodl_shm.train.checkpoint.names import MODEL, optimizer_json, optimizer_tensors
from flodl_shm.train.checkpoint.snapshot import copy_model, copy_own
from flodl_shm.train.checkpoint.tensors import write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from flodl_shm.control.checkpoint_meta import SavedFile
    from flodl_shm.control.messages import Save
    from flodl_shm.ids import Rank, Row
    from flodl_shm.train.checkpoint.snapshot import ModelCopy, OwnCopy

MOST_WAITING: Final = 2  # copies of the state cost memory, and older ones are worth less


@dataclass(frozen=True, slots=True)
class _Part:
    """One save's copies, waiting to be written."""

    save: int
    row: Row
    began_at: int
    own: OwnCopy
    model: ModelCopy | None


class Saver:
    """Writes one rank's parts, one after the other. `send` is called by its thread, too."""

    def __init__(
        self,
        folder_of: Callable[[int], Path],
        rank: Rank,
        send: Callable[[PartSaved], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._folder_of, self._rank, self._send, self._clock = folder_of, rank, send, clock
        self._waiting: deque[_Part] = deque()
        self._changed = threading.Condition()
        self._is_writing = False  # there is a thread, and it has not seen an empty queue yet

    def save(
        self,
        order: Save,
        *,
        model: nn.Module | None,
        optimizer: Optimizer,
        scheduler_state: dict[str, Any] | None,
        row: Row,
    ) -> None:
        """Copy the state now and have it written; every save is answered with one PartSaved.

        `model` is also needed where `order.has_model` is not set: its integer buffers and extra
        state are the rank's own. With more than two waiting the oldest is given up.
        """
        began_at = self._clock()
        try:
            part = self._copy(order, model, optimizer, scheduler_state, row=row, began_at=began_at)
        except Exception as error:  # a state no file can hold, no memory for the copies
            self._answer(order.save, row, began_at, error=f"nothing was saved: {_words(error)}")
            return
        with self._changed:
            self._waiting.append(part)
            late = self._waiting.popleft() if len(self._waiting) > MOST_WAITING else None
            if not self._is_writing:
                self._is_writing = True
                name = f"flodl-save-rank{self._rank}"
                threading.Thread(target=self._write_all, name=name, daemon=True).start()
        if late is not None:
            text = f"the disk is too slow: {MOST_WAITING} newer saves are waiting already"
            self._answer(late.save, late.row, late.began_at, error=text)

    def join(self, timeout_s: float) -> bool:
        """Wait until everything is written and reported; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing, timeout_s)

    def _copy(
        self,
        order: Save,
        model: nn.Module | None,
        optimizer: Optimizer,
        scheduler_state: dict[str, Any] | None,
        *,
        row: Row,
        began_at: int,
    ) -> _Part:
        if order.has_model and model is None:
            raise BadConfig("there is no model at hand")
        return _Part(
            save=order.save,
            row=row,
            began_at=began_at,
            own=copy_own(model, optimizer, scheduler_state),
            model=copy_model(model) if order.has_model and model is not None else None,
        )

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                part = self._waiting.popleft()
            files: tuple[SavedFile, ...] = ()
            text = ""
            try:
                files = self._write(part)
            except Exception as error:  # no room, no permission, the folder has gone
                text = f"nothing was saved: {_words(error)}"
            try:
                self._answer(part.save, part.row, part.began_at, files=files, error=text)
            except Exception:
                # Nobody is there to be told: the launcher is gone, and the next order, which the
                # training waits for, says so with its own words.
                pass
            del part

    def _write(self, part: _Part) -> tuple[SavedFile, ...]:
        folder = self._folder_of(part.save)
        make_folder(folder)
        files = []
        if part.model is not None:
            told = {"format": "pt"}
            if part.model.aliases:
                told["aliases"] = json.dumps(part.model.aliases)
            files.append(write_tensors(folder, MODEL, part.model.tensors, told))
        told = {"format": "pt"}
        files.append(write_tensors(folder, optimizer_tensors(self._rank), part.own.tensors, told))
        plain = {**part.own.plain, "rank": self._rank}
        body = json.dumps(plain, allow_nan=False, indent=0).encode()
        files.append(write_durably(folder, optimizer_json(self._rank), [body]))
        return tuple(files)

    def _answer(
        self,
        save: int,
        row: Row,
        began_at: int,
        *,
        files: tuple[SavedFile, ...] = (),
        error: str = "",
    ) -> None:
        self._send(
            PartSaved(
                rank=self._rank,
                row=row,
                save=save,
                files=files,
                elapsed_ns=self._clock() - began_at,
                error=error,
            )
        )


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot write {why(error)}"
    return error.what if isinstance(error, BadConfig) else why(error)
