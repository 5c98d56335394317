"""What user code notes about a window with `record_scalar`: a mean for each name.

Noting is one append to a queue, under a microsecond, from any thread. Sums are made when the
window ends and the worker takes them: a number on a CUDA device is copied there when it is noted
and read only then, all of them in one go, so no batch waits for the device.

    start()   a training begins in this process: what was noted before counts for nothing
    take()    the sums since the last call
    stop()    it is over: record_scalar does nothing until the next one

Trainings of one process share the names. A forked child (a loader's worker) starts closed: what
it notes would reach nobody. Who is told of the means is not known here.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_NAMES: Final = 1000
LONGEST_NAME: Final = 128
MOST_WAITING: Final = 65_536  # notes of a window before they are summed up: a few MiB

Note = tuple[str, "float | torch.Tensor"]


class Scalars:
    """The notes of one process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._open = 0  # trainings under way
        self._names: dict[str, int] = {}  # all of this training: values left out, by name
        self._notes: deque[Note] = deque()
        self._sums: dict[str, tuple[float, int]] = {}
        self._adding = threading.Lock()  # two threads may sum up at once; noting takes no lock

    def start(self) -> None:
        """A training begins; the first one that is open forgets what there was."""
        if not self._open:
            self._reset()
        self._open += 1

    def stop(self) -> None:
        """A training is over; after the last one nothing is noted any more."""
        self._open = max(0, self._open - 1)
        if not self._open:
            self._reset()

    def record(self, name: str, value: float | torch.Tensor) -> None:
        """See `record_scalar`."""
        if not self._open:
            return
        if type(value) is not float:
            value = _checked(name, value)
        if type(name) is not str or name not in self._names:
            self._admit(name)
        self._notes.append((name, value))
        # In the middle of a window the lock may be somebody's, who then sums this up as well.
        if len(self._notes) > MOST_WAITING and self._adding.acquire(blocking=False):
            try:
                self._sum_up()
            finally:
                self._adding.release()

    def take(self) -> dict[str, tuple[float, int]]:
        """(sum, count) by name of the finite values since the last call."""
        with self._adding:
            self._sum_up()
            taken, self._sums = self._sums, {}
        return taken

    @property
    def left_out(self) -> dict[str, int]:
        """How many values of each name were not finite and are in no sum; only those with any."""
        return {name: count for name, count in self._names.items() if count}

    def _admit(self, name: object) -> None:
        if not isinstance(name, str) or not name:
            raise BadConfig(
                f"record_scalar got the name {name!r}", hint="Give some text, as 'accuracy'."
            )
        if len(name) > LONGEST_NAME:
            raise BadConfig(
                f"record_scalar got a name of {len(name)} characters: {name[:40]!r}...",
                hint=f"{LONGEST_NAME} at most.",
            )
        if name not in self._names and len(self._names) >= MOST_NAMES:
            raise BadConfig(
                f"record_scalar got more than {MOST_NAMES} names, {name!r} is one too many",
                hint="A name is a quantity; a step or a sample has no place in it.",
            )
        self._names.setdefault(name, 0)

    def _sum_up(self) -> None:
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        for name, value in _on_the_host(notes):
            total, count = self._sums.get(name, (0.0, 0))
            if math.isfinite(value) and math.isfinite(total + value):
                self._sums[name] = (total + value, count + 1)
            else:
                self._leave_out(name, value)

    def _leave_out(self, name: str, value: float) -> None:
        first = not self._names.get(name)
        self._names[name] = self._names.get(name, 0) + 1
        if first:
            text = f"record_scalar got {value} for {name!r}: such values are in no mean"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _checked(name: object, value: object) -> float | torch.Tensor:
    """A number as a float; one on another device as a copy of its own there. Raises BadConfig."""
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex():
            raise BadConfig(
                f"record_scalar got {value.dtype} of shape {tuple(value.shape)} for {name!r}",
                hint="Give one number: its mean() or sum().",
            )
        if value.device.type == "cpu":
            return float(value.item())
        return value.detach().to(torch.float64, copy=True)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise BadConfig(
            f"record_scalar got {type(value).__name__} for {name!r}", hint="Give one number."
        ) from None


def _on_the_host(notes: list[Note]) -> Iterable[tuple[str, float]]:
    """All values as floats, in order; each device is waited for once."""
    values = [0.0 if isinstance(value, torch.Tensor) else value for _, value in notes]
    elsewhere: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for at, (_, value) in enumerate(notes):
        if isinstance(value, torch.Tensor):
            elsewhere.setdefault(value.device, []).append((at, value))
    for placed in elsewhere.values():
        read = torch.stack([value for _, value in placed]).tolist()
        for (at, _), number in zip(placed, read, strict=True):
            values[at] = number
    return zip((name for name, _ in notes), values, strict=True)


_SCALARS = Scalars()
start, take, stop = _SCALARS.start, _SCALARS.take, _SCALARS.stop
os.register_at_fork(after_in_child=_SCALARS._reset)


def record_scalar(name: str, value: float | torch.Tensor) -> None:
    """Note a value of the window under way: its mean goes into the epoch's metrics.

    `value` is a number or a 0-dim tensor on any device; nothing waits for it. Of any thread of
    the training's process, so not of a loader's worker; outside of a training it does nothing.
    Values that are not finite are left out, with one warning for each name. Raises BadConfig for
    a name that is empty or over 128 characters, for the 1,001st name, and for what is no number.
    """
    _SCALARS.record(name, value)
