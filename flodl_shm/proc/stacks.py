"""Stacks of another process on request, also while it holds its GIL, and without attaching to it.

    rank       register: on SIGNAL, faulthandler writes the stacks of all threads to a file
    launcher   is_listening, then SIGNAL, then StackCall.poll until the text is whole or time is up

faulthandler's handler runs no Python, so a thread that is stuck in C answers as well as one that
waits for a lock. A stopped process answers when it goes on: too late. What a stack means is not
known here.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flodl_shm.ids import Nanos

# Nobody else's: glibc keeps the first two real-time signals, profilers take the last ones.
SIGNAL: Final = signal.SIGRTMIN + 5
WAIT_NS: Final = 500_000_000  # for an answer, which takes a millisecond where there is one
QUIET_NS: Final = 10_000_000  # the file has not grown for so long: the answer is whole
MOST_BYTES: Final = 1 << 20  # of an answer; faulthandler stops at 100 threads of 100 frames

_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_kept: list[int] = []  # the descriptor belongs to the handler


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's calls, the innermost first."""

    thread: str  # as the kernel's library numbers it, in hex
    frames: tuple[Frame, ...]

    def text(self) -> str:
        """As Python prints one: innermost call last."""
        lines = [f'  File "{f.file}", line {f.line}, in {f.function}' for f in self.frames[::-1]]
        return "\n".join(lines) + "\n"


def register(path: Path) -> str:
    """Answer SIGNAL from now on, into `path`. Returns why that cannot be, or nothing."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        return f"{path}: {error.strerror}"
    faulthandler.register(SIGNAL, file=fd, all_threads=True)
    _kept.append(fd)
    return ""


def is_listening(pid: int) -> bool:
    """Whether the process would answer; one that would not is ended by the signal instead."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


class StackCall:
    """One request: made right before the signal is sent, polled until it is answered."""

    def __init__(self, path: Path, now: Nanos) -> None:
        self._path = path
        self._from = self._size = _size(path)
        self._grew_at, self._until = now, now + WAIT_NS

    def poll(self, now: Nanos) -> str | None:
        """The answer, as faulthandler wrote it; empty: none came in time; None: not yet."""
        size = _size(self._path)
        if size != self._size:
            self._size, self._grew_at = size, now
        is_whole = size > self._from and now - self._grew_at >= QUIET_NS
        if not is_whole and now < self._until:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(self._from)
                return file.read(MOST_BYTES).decode(errors="backslashreplace")
        except OSError:
            return ""


def parse(text: str) -> tuple[Stack, ...]:
    """The stacks of an answer, each thread's last one; what is none is passed over."""
    stacks: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            frames = stacks[head[1]] = []
        elif call := _FRAME.fullmatch(line):
            frames.append(Frame(call[1], int(call[2]), call[3]))
    return tuple(Stack(thread, tuple(calls)) for thread, calls in stacks.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
